"""Plans: what they say, what they find, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torchmetrics import MeanMetric
from transformers import BatchEncoding

from lt_tiled import ActivationCheckpointing, TiledDeepSpeedStrategy, TiledSingleDeviceStrategy, Tiling
from lt_tiled.errors import DoesNotFitError, SimulationError
from lt_tiled.lm import CausalLM, TextFiles
from lt_tiled.planner import simulate
from lt_tiled.planner.job import Job, make_job
from lt_tiled.planner.search import cheapest, longest
from lt_tiled.planner.simulate import Plan, plan
from tests.lit import LitTiny
from tests.models import TinyLM, lm_loss, tiny_llama
from tests.planner.runs import LLAMA, SMALL

pytestmark = pytest.mark.slow

MIB = 2**20
PLANNED = {**LLAMA, "num_hidden_layers": 2}


def job(strategy: Any = None, module: Any = None, **trainer: Any) -> Job:
    """A job of a small Llama."""
    with torch.device("meta"):
        module = module() if module is not None else CausalLM(PLANNED)
    data = TextFiles(seq_len=2048) if isinstance(module, CausalLM) else None
    arguments = {"strategy": strategy or TiledSingleDeviceStrategy(), "accelerator": "cpu", **trainer}
    return make_job(module, data, arguments)


@pytest.fixture(scope="module")
def found() -> Plan:
    """The plan of that job."""
    return plan(job())


def test_parts_are_the_peak(found: Plan) -> None:
    """The parts add up to the peak, which no moment exceeds. Weights and optimizer state are their exact sizes."""
    assert sum(found.parts.values()) == found.peak
    weights = sum(p.nbytes for p in tiny_llama(**{k: v for k, v in PLANNED.items() if k != "model_type"}).parameters())
    assert found.parts["weights"] == pytest.approx(weights, rel=0.01)
    assert found.parts["optimizer"] == pytest.approx(2 * weights, rel=0.01)
    rows = found.over_time
    assert max(sum(values) for values in zip(*rows.values(), strict=True)) == found.peak
    assert min(min(row) for row in rows.values()) >= 0


def test_flops_are_exact() -> None:
    """Recompute adds one forward of the blocks to the FLOPs, tiles and a tiled loss nothing."""
    base = job()
    recomputed = replace(base, tiling=None, activation_checkpointing=ActivationCheckpointing())
    plain = plan(replace(recomputed, activation_checkpointing=None), 2048).flops
    recompute = plan(recomputed, 2048).flops
    head = 3 * 2 * 2048 * LLAMA["hidden_size"] * LLAMA["vocab_size"]
    layers = PLANNED["num_hidden_layers"]
    last = layers * 2 * 2048 * LLAMA["intermediate_size"] * LLAMA["hidden_size"]  # whose value no backward needs
    attention = layers * 4 * 2048 * 2048 * LLAMA["hidden_size"] // 2
    forward = (plain - head - attention * 7 // 2) // 3
    assert recompute - plain == forward + attention - last
    assert plan(replace(recomputed, tiling=Tiling(8), loss=4), 2048).flops == recompute


def test_two_tiles_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulation of two tiles of each call has the parts and the peak of one of all, and nearly the FLOPs."""
    base = job(TiledSingleDeviceStrategy(tiling=Tiling(7)), lambda: CausalLM({**LLAMA, "num_hidden_layers": 1}))
    two = plan(base, 8291)
    monkeypatch.setattr(simulate, "first_two_tiles", lambda ledger, rows: rows)
    every = plan(base, 8291)
    assert (two.parts, two.peak) == (every.parts, every.peak)
    assert two.flops == pytest.approx(every.flops, rel=1e-3)
    assert len(two.events) < len(every.events)


LENGTHS: dict[str, tuple[dict[str, Any], int, int]] = {
    "scores of attention": ({**SMALL, "num_hidden_layers": 1, "attention_dropout": 0.1}, 4096, MIB),
    "beside large weights": ({**LLAMA, "hidden_size": 512, "intermediate_size": 4096}, 256, MIB // 4),
}
"""A model, a length whose peak is the memory, and bytes beyond it."""


@pytest.mark.full
@pytest.mark.parametrize("name", LENGTHS)
def test_longest(name: str) -> None:
    """The longest sequence that is found fits, and one that is 3 % longer does not, also where memory grows with the
    square of the length, and just above what the optimizer takes at any length.
    """
    config, tokens, beyond = LENGTHS[name]
    base = job(module=lambda: CausalLM(config))
    memory = plan(base, tokens).peak + beyond
    found = longest(base, memory)
    assert found.tokens % 256 == 0
    assert found.peak <= memory < plan(base, int(found.tokens * 1.03) + 256).peak
    with pytest.raises(DoesNotFitError, match=r"256 tokens already take .*: use more memory"):
        longest(base, MIB)


@pytest.mark.full
def test_cheapest() -> None:
    """Where memory is plenty nothing is set; as it falls the settings come in the order of what they cost; then there
    are none.
    """
    base, tokens = job(), 8192
    plain = replace(base, tiling=None, activation_checkpointing=None)
    lavish = cheapest(base, plan(plain, tokens).peak, tokens).job
    assert (lavish.tiling, lavish.activation_checkpointing) == (None, None)
    memory = plan(replace(plain, activation_checkpointing=ActivationCheckpointing()), tokens).peak * 3 // 4
    tight = cheapest(base, memory, tokens)
    assert tight.job.tiling is not None
    assert tight.job.activation_checkpointing == ActivationCheckpointing(keep="attention")
    assert tight.peak <= memory
    with pytest.raises(DoesNotFitError, match=r"8192 tokens do not fit into 1.0 MiB with any .*Give more devices"):
        cheapest(base, MIB, tokens)


class Peeking(LitTiny):
    """Looks at a value in the forward."""

    def configure_model(self) -> None:
        super().configure_model()
        self.net.blocks[1].register_forward_hook(lambda _, args, out: out if float(out.detach().sum()) > 0 else out * 2)


class Vectors(LitTiny):
    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.arange(8), batch_size=2)


class ByHand(LitTiny):
    def training_step(self, ids: Tensor, index: int) -> Any:
        return None


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Peeking, r"aten._local_scalar_dense.default needs the values"),
        (Vectors, "no tensor with two or three dimensions"),
        (ByHand, "returned NoneType and no loss"),
    ],
)
def test_what_cannot_be_simulated(module: Any, message: str) -> None:
    """A module that looks at values is refused with the operation and the place; one without sequences cannot be
    lengthened; one without a loss is refused by name.
    """
    with pytest.raises((SimulationError, ValueError), match=message):
        plan(job(module=module), 64)


@pytest.mark.parametrize(
    ("precision", "weights", "autocast"),
    [("bf16-true", 2, None), ("16-mixed", 4, torch.float16), (None, 4, None)],
)
def test_precision(precision: str | None, weights: int, autocast: torch.dtype | None) -> None:
    """Weights have the dtype of the precision, and mixed precision runs under autocast; another one is refused."""
    base = job(precision=precision)
    numbers = sum(p.numel() for p in base.module.parameters())
    assert base.autocast == autocast
    assert plan(base).parts["weights"] == pytest.approx(weights * numbers, rel=0.01)
    with pytest.raises(ValueError, match="precision='transformer-engine' cannot be planned: set it to one of 32"):
        job(precision="transformer-engine")


@pytest.mark.parametrize("stage", [2, 3])
def test_an_offloaded_optimizer_steps_on_the_cpu(stage: int) -> None:
    """With ``offload_optimizer``, neither optimizer state nor the optimizer's step take device memory."""
    run = plan(job(TiledDeepSpeedStrategy(stage=stage, offload_optimizer=True), accelerator="gpu"))
    rows = run.over_time
    before = run.phases["optimizer"]  # the last moment of the backward pass
    totals = [sum(values) for values in zip(*rows.values(), strict=True)]
    assert "optimizer" not in rows
    assert totals[before:] == sorted(totals[before:], reverse=True)


class Plain(pl.LightningModule):
    """A module as people write it: built at once, ``training_step(self, batch)``, hooks, metrics, several loaders."""

    def __init__(self) -> None:
        super().__init__()
        self.net = TinyLM()
        self.losses = MeanMetric()
        self.weights = [torch.ones(32), torch.zeros(32)]
        self.example = {"scale": torch.ones(1)}

    def train_dataloader(self) -> Any:
        return {"a": torch.utils.data.DataLoader(torch.zeros(8, 24, dtype=torch.long), batch_size=2)}

    def on_after_batch_transfer(self, batch: Any, index: int) -> Any:
        return BatchEncoding({"input_ids": batch["a"]})

    def training_step(self, batch: Any) -> Any:
        logits = self.net(batch["input_ids"]) * self.weights[0] * self.example["scale"]
        loss = lm_loss(logits, batch["input_ids"])
        self.losses.update(loss.detach())
        self.log("loss", loss)
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def test_what_people_write() -> None:
    """A module and data of the user's own are planned at their own length and at others, and stay as they were."""
    base = job(module=Plain)
    first = plan(base)
    assert first.tokens == 24
    assert plan(base, 128).peak > first.peak == plan(base).peak
    assert all(p.is_meta for p in base.module.parameters())


@pytest.mark.parametrize(("devices", "ranks"), [([0, 1, 2], 3), ("4", 4), ("auto", 1)])
def test_devices(devices: Any, ranks: int, caplog: pytest.LogCaptureFixture) -> None:
    """Ranks are counted however the Trainer takes devices; what is not known is one, which is said."""
    with caplog.at_level("WARNING", "lt_tiled"):
        assert job(TiledDeepSpeedStrategy(stage=3), devices=devices).engine.ranks == ranks
    assert ("say how many with --devices" in caplog.text) == (devices == "auto")


@pytest.mark.table("strategy1")
@pytest.mark.parametrize("strategy", [TiledDeepSpeedStrategy(stage=3), pl.strategies.FSDPStrategy()])
def test_mixed_precision_of_sharding_engines(strategy: Any) -> None:
    """DeepSpeed's and FSDP's own mixed precision gathers 16-bit weights, and steps on float32 ones."""
    mixed, true = (plan(job(strategy, devices=2, precision=p)) for p in ("bf16-mixed", "32-true"))
    assert max(mixed.over_time["gathered"]) == pytest.approx(max(true.over_time["gathered"]) / 2, rel=0.05)
    assert mixed.parts["optimizer"] == pytest.approx(true.parts["optimizer"], rel=0.05)
