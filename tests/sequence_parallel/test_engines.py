"""Every engine trains with shared sequences as one process does, in Trainer and in Fabric."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import lt_tiled
from lt_tiled import ActivationCheckpointing, SequenceParallel, Tiling
from tests.engines.cells import ENGINES, set_up, sgd, step_on, strategy
from tests.lit import trainer
from tests.parity import near, rounding
from tests.sequence_parallel.models import GPT, causal, ids
from tests.world import World, world_of

pytestmark = pytest.mark.slow

TOKENS, STEPS = 25, 3
MODELS = {"llama": lambda: causal("llama")().float(), "hand-written": lambda: seeded(GPT)}
MODES = {"trainer": ("plain", "tiled", "disk"), "fabric": ("plain", "kept", "disk")}
"""With ``kept`` attention is kept, besides tiles and activation checkpointing. The hand-written model runs in the plain
mode.
"""


def seeded(build: Any) -> nn.Module:
    torch.manual_seed(0)
    return build()


def batches(count: int = STEPS, rows: int = 2) -> list[Tensor]:
    return [ids(rows, TOKENS, seed) for seed in range(count)]


def loss_and_logits(name: str, net: Any, x: Tensor, labels: bool = True) -> Any:
    uncached = {} if "hand" in name else {"use_cache": False}
    output = net(input_ids=x, labels=x) if labels else net(input_ids=x, **uncached)
    return output if isinstance(output, Tensor) else output.loss if labels else output.logits


class Lit(pl.LightningModule):
    """Notes its losses, and the logits of a validation."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.net = MODELS[name]()  # before the strategy's contexts, because ZeRO-3 draws weights of its own
        self.losses: list[float] = []
        self.logits: Tensor | None = None

    def configure_model(self) -> None: ...

    def training_step(self, x: Tensor, index: int) -> Tensor:
        loss = loss_and_logits(self.name, self.net, x)
        self.losses.append(float(loss.detach()))
        self.log("loss", loss)
        return loss

    def validation_step(self, x: Tensor, index: int) -> None:
        self.logits = loss_and_logits(self.name, self.net, x, labels=False).clone()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.trainer.model.parameters())


def policies(mode: str, directory: str) -> dict[str, Any]:
    offload = ActivationCheckpointing(offload="disk", directory=directory, keep_last=0)
    if mode == "plain":  # with the self-check
        return {"tiling": None, "activation_checkpointing": None, "sequence_parallel": 2}
    kept = ActivationCheckpointing(keep="attention" if mode == "kept" else None)
    return {
        "tiling": Tiling(3, self_check=False),
        "activation_checkpointing": offload if mode == "disk" else kept,
        "sequence_parallel": SequenceParallel(2, self_check=False),
        "loss": True,
    }


def in_trainer(engine: str, name: str, mode: str, directory: str) -> tuple[list[float], Tensor]:
    lit = Lit(name)
    chosen = strategy(lt_tiled, engine, **policies(mode, directory))
    loader, val = (DataLoader(torch.cat(rows), batch_size=2) for rows in (batches(), batches(1)))
    options = {"num_sanity_val_steps": 0, "use_distributed_sampler": False}  # it would shuffle
    trainer(chosen, devices=2, max_epochs=1, **options).fit(lit, loader, val)
    return lit.losses, lit.logits


def in_fabric(engine: str, name: str, mode: str, directory: str) -> tuple[list[float], Tensor]:
    chosen = strategy(lt_tiled.fabric, engine, **policies(mode, directory))
    fabric = Fabric(accelerator="cpu", devices=2, strategy=chosen)
    fabric.launch()
    model, optimizer = set_up(fabric, MODELS[name](), engine)
    losses = []
    for x in fabric.setup_dataloaders(DataLoader(torch.cat(batches()), batch_size=2)):
        loss = loss_and_logits(name, model, x)
        losses.append(step_on(fabric, optimizer, loss))
    model.eval()
    with torch.no_grad():
        logits = loss_and_logits(name, model, batches(1)[0], labels=False).clone()
    fabric.strategy.release()
    return losses, logits


LOOPS = {"trainer": in_trainer, "fabric": in_fabric}


def error(found: Tensor, true: Tensor) -> float:
    return float((found - true).norm() / true.norm())


def each_model(loop: str, engine: str, mode: str, directory: str) -> dict[str, tuple[list[float], Tensor]]:
    return {name: LOOPS[loop](engine, name, mode, directory) for name in MODELS if name == "llama" or mode == "plain"}


@cache
def one_process(name: str) -> tuple[list[float], Tensor]:
    """The losses of three steps of one process, and the logits behind them."""
    net, losses = MODELS[name](), []
    optimizer = sgd(net.parameters())
    for x in batches():
        optimizer.zero_grad()
        loss = loss_and_logits(name, net, x)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        return losses, loss_and_logits(name, net, batches(1)[0], labels=False)


@pytest.mark.table("(fsdp2|zero1|zero3)-trainer-disk|(fsdp|zero2)-fabric-disk|ddp-trainer-plain|zero3-fabric-kept")
@pytest.mark.parametrize(("loop", "mode"), [(loop, mode) for loop in MODES for mode in MODES[loop]])
@pytest.mark.parametrize("engine", ENGINES)
def test_one_process(loop: str, engine: str, mode: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Two ranks that share each sequence train as one process: the same losses, and logits after three steps."""
    world = world_of(request, engine)
    for found in world(each_model, loop, engine, mode, str(tmp_path)):
        for name, (losses, logits) in found.items():
            true, true_logits = one_process(name)
            assert losses == near(true)
            assert error(logits, true_logits) < rounding()
            assert losses[0] != losses[-1]


def clipped(engine: str, size: int) -> tuple[list[float], Tensor]:
    """Three clipped steps of a Trainer on as many groups as there are data-parallel ranks."""
    lit = Lit("llama")
    policy = {"sequence_parallel": SequenceParallel(size, self_check=False), "tiling": Tiling(3, self_check=False)}
    chosen = DDPStrategy() if engine == "plain" else strategy(lt_tiled, engine, loss=True, **policy)
    loader, val = (DataLoader(torch.cat(rows), batch_size=2) for rows in (batches(2 * STEPS), batches(2)))
    options = {"devices": dist.get_world_size(), "max_epochs": 1, "num_sanity_val_steps": 0}
    trainer(chosen, gradient_clip_val=0.2, **options).fit(lit, loader, val)
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


def sharded_twice(module: nn.Module, _: Any) -> nn.Module:
    """Shard each block, and the model, over a mesh of two by two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for part in (*module.model.layers, module):
        fully_shard(part, mesh=mesh)
    return module


HYBRID = {
    "fsdp": {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)},
    "fsdp2": {"parallelize_fn": sharded_twice},
}


def hybrid(engine: str) -> list[float]:
    """The losses of three steps of four ranks on the same batches, in groups of two."""
    chosen = strategy(
        lt_tiled.fabric, engine, tiling=3, activation_checkpointing=True, sequence_parallel=2, **HYBRID[engine]
    )
    fabric = Fabric(accelerator="cpu", devices=4, strategy=chosen)
    fabric.launch()
    model, optimizer = set_up(fabric, MODELS["llama"](), engine)
    losses = []
    for x in batches():
        loss = loss_and_logits("llama", model, x)
        losses.append(step_on(fabric, optimizer, loss))
    fabric.strategy.release()
    return losses


@pytest.mark.full
@pytest.mark.parametrize("engine", HYBRID)
def test_hybrid_sharding(engine: str, four_ranks: World) -> None:
    """Weights that two ranks shard and two replicate train as one process does, whoever shares a sequence."""
    for losses in four_ranks(hybrid, engine):
        assert losses == near(one_process("llama")[0])


def refused(engine: str, size: int) -> str:
    with pytest.raises(ValueError, match="sequence_parallel") as error:
        Fabric(
            accelerator="cpu", devices=2, strategy=strategy(lt_tiled.fabric, engine, sequence_parallel=size)
        ).launch()
    return str(error.value)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero2"])
def test_size_that_does_not_divide(engine: str, request: pytest.FixtureRequest) -> None:
    """A size that does not divide the ranks is refused with those that do."""
    world = world_of(request, engine)
    for message in world(refused, engine, 3):
        assert message == "sequence_parallel=3 does not divide the 2 ranks: choose one of [1, 2]."


def test_single_device() -> None:
    """One device has no ranks that could share a sequence."""
    with pytest.raises(ValueError, match="sequence_parallel=2 needs as many ranks, and there is one: use"):
        trainer(lt_tiled.TiledSingleDeviceStrategy(sequence_parallel=2)).fit(Lit("llama"), batches())
