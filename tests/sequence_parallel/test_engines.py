"""Every engine trains with shared sequences as one process does, in Trainer and in Fabric."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

import lt_tiled
from lt_tiled import ActivationCheckpointing, SequenceParallel, Tiling
from lt_tiled.lm import CausalLM, TextFiles
from tests.engines.cells import ENGINES, error_of, launch, set_up, step_on, strategy
from tests.lit import Tiny, trainer
from tests.parity import SPREADS, Reordered, near, rounding
from tests.sequence_parallel.cases import CASES
from tests.sequence_parallel.models import ids
from tests.world import World, world_of

pytestmark = pytest.mark.slow

TOKENS, STEPS = 25, 3
MODELS = ("llama", "hand-written", "LoRA", "qwen3_next", "bamba", "lfm2", "gpt_oss")
"""Each kind of layer: attention, a gated delta rule, Mamba 2, a convolution, and attention with sinks."""


def batches(count: int = STEPS) -> Tensor:
    return torch.cat([ids(2, TOKENS, seed) for seed in range(count)])


class Lit(Tiny, pl.LightningModule):
    """Notes its losses, what it read, and the logits of a validation."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.net = CASES[name].build().float()  # before the strategy's contexts, as ZeRO-3 draws weights of its own
        self.read: list[int] = []
        self.logits: Tensor | None = None

    def loss(self, x: Tensor) -> Tensor:
        output = self.net(input_ids=x, labels=x)
        return output if isinstance(output, Tensor) else output.loss

    def training_step(self, x: Tensor, index: int) -> Tensor:
        loss = self.loss(x)
        self.losses.append(float(loss.detach()))
        self.read.append(int(x.sum()))
        return loss

    def validation_step(self, x: Tensor, index: int) -> None:
        output = self.net(input_ids=x)
        self.logits = (output if isinstance(output, Tensor) else output.logits).clone()


def policies(name: str, directory: str) -> dict[str, Any]:
    """All at once: tiles, attention that is kept on the disk, and the loss in tiles."""
    offload = ActivationCheckpointing(offload="disk", directory=directory, keep_last=0, keep="attention")
    return {
        "tiling": Tiling(3, self_check=False),
        "activation_checkpointing": offload,
        "sequence_parallel": SequenceParallel(2, self_check=False),
        "loss": None if name == "hand-written" else True,
    }


def fit(chosen: Any, lit: Any, data: Any, validation: Any = None, **options: Any) -> pl.Trainer:
    options = {"max_steps": -1, "max_epochs": 1, "num_sanity_val_steps": 0} | options
    run = trainer(chosen, devices=dist.get_world_size() if dist.is_initialized() else 1, **options)
    run.fit(lit, DataLoader(data, batch_size=2), validation)
    return run


def in_trainer(engine: str, name: str, directory: str) -> tuple[list[float], Tensor]:
    lit = Lit(name)
    chosen = strategy(lt_tiled, engine, **policies(name, directory))
    validation = DataLoader(batches(1), batch_size=2)
    fit(chosen, lit, batches(), validation, use_distributed_sampler=False)  # it would shuffle
    return lit.losses, lit.logits


def in_fabric(engine: str, name: str, directory: str) -> tuple[list[float], Tensor]:
    """Without other policies, and with the self-check."""
    fabric = launch(engine, tiling=None, activation_checkpointing=None, sequence_parallel=2)
    net = CASES[name].build().float()
    model, optimizer = set_up(fabric, net, engine)
    losses = []
    for x in fabric.setup_dataloaders(DataLoader(batches(), batch_size=2)):
        losses.append(step_on(fabric, optimizer, model(input_ids=x, labels=x).loss))
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=batches(1), use_cache=False).logits.clone()
    fabric.strategy.release()
    return losses, logits


@cache
def one_process(name: str, *flipped: str) -> tuple[list[float], Tensor]:
    """The losses of three steps of one process, and the logits behind them; sums may be in another order."""
    lit = Lit(name)
    with Reordered(*flipped):
        fit("auto", lit, batches(), DataLoader(batches(1), batch_size=2))
    return lit.losses, lit.logits


def error(found: Tensor, true: Tensor) -> float:
    return float((found - true).norm() / true.norm())


LOOPS = {"trainer": in_trainer, "fabric": in_fabric}
CELLS = [("trainer", engine, name) for engine in ENGINES for name in MODELS if engine != "fsdp_flat" or name == "llama"]
CELLS += [("fabric", engine, "llama") for engine in ENGINES]


@pytest.mark.table(
    "trainer-(ddp-bamba|fsdp-lfm2|fsdp2-qwen3_next|fsdp2-LoRA|zero1-hand-written|zero2-llama|zero3-bamba|zero3-LoRA)"
    "|fabric-(ddp|fsdp|zero3)-llama"
)
@pytest.mark.parametrize(("loop", "engine", "name"), CELLS)
def test_one_process(loop: str, engine: str, name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Two ranks that share each sequence train as one process: the same losses, and logits after three steps."""
    true, true_logits = one_process(name)
    spread = error(one_process(name, "features", "tokens")[1], true_logits)
    for losses, logits in world_of(request, engine)(LOOPS[loop], engine, name, str(tmp_path)):
        assert losses == near(true)
        assert error(logits, true_logits) < max(rounding(), SPREADS * spread)
        assert losses[0] != losses[-1]


def clipped(engine: str, size: int) -> tuple[list[float], Tensor]:
    """Three clipped steps of a Trainer on as many groups as there are data-parallel ranks."""
    lit = Lit("llama")
    policy = {"sequence_parallel": SequenceParallel(size, self_check=False), "tiling": Tiling(3, self_check=False)}
    chosen = DDPStrategy() if engine == "plain" else strategy(lt_tiled, engine, loss=True, **policy)
    fit(chosen, lit, batches(2 * STEPS), DataLoader(batches(2), batch_size=2), gradient_clip_val=0.2)
    return lit.losses, lit.logits


@pytest.mark.table("ddp")
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero3"])
def test_groups(engine: str, world: World, request: pytest.FixtureRequest) -> None:
    """Two groups of two ranks with Lightning's sampler and clipped gradients train as plain DDP on two ranks."""
    four = world_of(request, engine, 4)
    true = world(clipped, "plain", 1)
    for rank, (losses, logits) in enumerate(four(clipped, engine, 2)):
        assert losses == near(true[rank // 2][0])
        assert error(logits, true[rank // 2][1]) < rounding()
    assert true[0][0] != true[1][0]


class Numbered(IterableDataset[Tensor]):
    """Rows for groups of ranks: each takes every row of its own."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy

    def __iter__(self) -> Iterator[Tensor]:
        ranks = self.strategy.distributed_sampler_kwargs
        yield from batches(4)[ranks["rank"] :: ranks["num_replicas"]]


def read(loop: str, iterable: bool) -> list[int]:
    """The sums of the batches that a rank reads."""
    if loop == "trainer":
        chosen, lit = strategy(lt_tiled, "ddp", sequence_parallel=2), Lit("llama")
        fit(chosen, lit, Numbered(chosen) if iterable else batches(4))
        return lit.read
    fabric = launch("ddp", sequence_parallel=2)
    data = Numbered(fabric.strategy) if iterable else batches(4)
    return [int(x.sum()) for x in fabric.setup_dataloaders(DataLoader(data, batch_size=2))]


@pytest.mark.parametrize("iterable", [False, True], ids=["sampler", "iterable"])
@pytest.mark.parametrize("loop", LOOPS)
def test_ranks_of_a_group_read_the_same(loop: str, iterable: bool, four_ranks: World) -> None:
    """The ranks of a group read the same batches, and the groups all rows between them."""
    first, second, third, fourth = four_ranks(read, loop, iterable)
    assert (first, third) == (second, fourth)
    assert len(first) == len(third) == 2
    assert sum(first) + sum(third) == int(batches(4).sum())


def all_stages(folder: str, chosen: Any, devices: int) -> dict[str, Any]:
    """The metrics and log-probabilities of a model of the command line."""
    os.chdir(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    lit = CausalLM({"model_type": "llama", "vocab_size": 256, **sizes}, learning_rate=1e-2, warmup_steps=0)
    Path("a.txt").write_bytes(bytes(i * i % 251 for i in range(2000)))
    data = TextFiles("a.txt", seq_len=33, batch_size=2, held_out=0.2)
    run = trainer(chosen, devices=devices, max_steps=2, limit_val_batches=2)
    run.fit(lit, data)
    found = {name: float(value) for name, value in run.callback_metrics.items()}
    found |= run.validate(lit, data, verbose=False)[0] | run.test(lit, data, verbose=False)[0]
    return found | {"predicted": torch.cat(run.predict(lit, data))}


def shared_stages(folder: str) -> dict[str, Any]:
    return all_stages(folder, strategy(lt_tiled, "fsdp2", sequence_parallel=2), 2)


def test_evaluation(world: World, tmp_path: Path) -> None:
    """Losses that are logged, perplexities of validation and test, and predicted log-probabilities are those of one
    process, on both ranks.
    """
    true = all_stages(str(tmp_path), "auto", 1)
    predicted = true.pop("predicted")
    for found in world(shared_stages, str(tmp_path)):
        assert error(found.pop("predicted"), predicted) < rounding()
        assert found == near(true)


def refused() -> tuple[str, str]:
    return error_of(lambda: launch("ddp", sequence_parallel=3).setup_module(torch.nn.Linear(2, 2)))


def test_size_that_does_not_divide(world: World) -> None:
    """A size that does not divide the ranks is refused with those that do."""
    for _, message in world(refused):
        assert message == "sequence_parallel=3 does not divide the 2 ranks: choose one of [1, 2]."


def test_single_device() -> None:
    """One device has no ranks that could share a sequence."""
    with pytest.raises(ValueError, match="sequence_parallel=2 needs as many ranks, and there is one: use"):
        fit(lt_tiled.TiledSingleDeviceStrategy(sequence_parallel=2), Lit("llama"), batches())
