"""Plans that simulate a few blocks of each kind, against plans that simulate all."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lt_tiled import (
    ActivationCheckpointing,
    TiledDeepSpeedStrategy,
    TiledModelParallelStrategy,
    TiledSingleDeviceStrategy,
    Tiling,
)
from lt_tiled.lm import CausalLM, TextFiles
from lt_tiled.planner.job import Job, make_job
from lt_tiled.planner.repeats import EDGE
from lt_tiled.planner.simulate import Settings, Simulation, simulate
from tests.planner.runs import LLAMA, MODELS, Adapted

pytestmark = pytest.mark.slow

LAYERS = {**LLAMA, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 6}
KINDS = {**LAYERS, "model_type": "gemma3_text", "head_dim": 16, "num_hidden_layers": 10}
KINDS["layer_types"] = ["sliding_attention", "full_attention"] * 5


def job(strategy: Any, module: Any, devices: int = 1, **trainer: Any) -> Job:
    with torch.device("meta"):
        model = module()
    return make_job(
        model, TextFiles(seq_len=512), {"strategy": strategy, "devices": devices, "accelerator": "cpu", **trainer}
    )


def _moved(run: Simulation) -> tuple[int, ...]:
    moved = run.offloaded
    return () if moved is None else (moved.cpu_bytes, moved.disk_bytes, moved.over_budget_bytes, moved.from_memory)


def figures(run: Simulation) -> Any:
    return run.peak, run.parts_at(run.peak_at), run.forward_flops, run.flops, *_moved(run)


CASES: dict[str, Any] = {
    "plain, autocast": lambda: job(
        TiledSingleDeviceStrategy(tiling=None, activation_checkpointing=False),
        partial(CausalLM, LAYERS, loss=False),
        precision="bf16-mixed",
    ),
    "FSDP2, LoRA, inputs kept": lambda: job(
        TiledModelParallelStrategy(
            tiling=4, activation_checkpointing=ActivationCheckpointing(offload="cpu", keep_last=3, min_bytes=0)
        ),
        partial(Adapted, LAYERS),
        2,
    ),
    "ZeRO-3, budget": lambda: job(
        TiledDeepSpeedStrategy(
            stage=3,
            tiling=4,
            activation_checkpointing=ActivationCheckpointing(offload="cpu", cpu_budget=2 * 512 * 64 * 2, min_bytes=0),
        ),
        partial(CausalLM, LAYERS),
        2,
        precision="bf16-mixed",
    ),
    "every second block": lambda: job(
        TiledSingleDeviceStrategy(tiling=4, activation_checkpointing=ActivationCheckpointing(every=2)),
        partial(CausalLM, LAYERS | {"num_hidden_layers": 12}),
    ),
    "shared": lambda: job(TiledModelParallelStrategy(tiling=4, sequence_parallel=2), partial(CausalLM, LAYERS), 2),
    "two kinds": lambda: job(
        TiledSingleDeviceStrategy(tiling=Tiling(4, targets="mlp")),  # Gemma's many norms take most of the time
        partial(CausalLM, KINDS),
    ),
}


@pytest.mark.table("plain.*")
@pytest.mark.parametrize("name", CASES)
def test_repeated_blocks(name: str) -> None:
    """A plan that repeats blocks has the peak, parts, FLOPs and offloaded bytes of one that simulates them all, and it
    does so with fewer allocations.
    """
    base = CASES[name]()
    few, every = base.simulate(), base.simulate(whole=True)
    assert figures(few) == figures(every)
    assert len(few.allocations) < len(every.allocations)


@pytest.mark.table("qwen3")
@pytest.mark.parametrize("name", ["qwen3", "mistral", "phi", "phi3", "gpt_neox", "olmo2", "falcon"])
def test_dense_models_repeat(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A plan of a dense model, of other kinds than those above, does not fall back to simulating every block."""
    module = partial(CausalLM, {**MODELS[name], "num_hidden_layers": 2 * EDGE + 1})
    with caplog.at_level("DEBUG", "lt_tiled"):
        job(TiledSingleDeviceStrategy(tiling=None), module).simulate()
    assert "simulates every block" not in caplog.text


class Block(nn.Module):
    """A block that gives ``keep`` its intermediates."""

    def __init__(self, wide: int, keep: Any) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(32, wide), nn.Linear(wide, 32)
        self.keep = keep

    def forward(self, x: Tensor) -> Tensor:
        hidden = (self.fc1(x) + 1 + 2 + 3 + 4).relu()
        if self.keep is not None:
            self.keep(hidden)
        return x + self.fc2(hidden)


class Blocks(nn.Module):
    def __init__(self, wide: list[int], keep: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(w, keep) for w in wide)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("outlives", [False, True], ids=["one is wider", "all outlive the step"])
def test_blocks_that_do_not_repeat(outlives: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A block with another size is simulated, and if blocks keep tensors after their backward pass, all are, which is
    logged with the reason.
    """
    wide = [32, 32, 32, 32, 32 if outlives else 512, 32, 32, 32, 32]
    log: list[Tensor] = []
    model = Blocks(wide, log.append if outlives else None)

    def step() -> Tensor:
        log.clear()
        return model(torch.zeros(4, 64, 32, requires_grad=True)).sum()

    def simulated(whole: bool) -> Simulation:
        settings = Settings()
        return simulate(model, step, lambda: torch.optim.SGD(model.parameters()), settings, whole)

    with caplog.at_level("DEBUG", "lt_tiled"):
        few, every = simulated(False), simulated(True)
    assert figures(few) == figures(every)
    assert ("what a block keeps outlives its backward pass" in caplog.text) == outlives
    assert (len(few.allocations) < len(every.allocations)) != outlives
