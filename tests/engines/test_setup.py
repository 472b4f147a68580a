"""What is refused at setup, what is worked around, and one device."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, wrap
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import lt_tiled
from lt_tiled import ActivationCheckpointing
from lt_tiled.callbacks import TiledMLP
from tests.engines.cells import ENGINES, draw, in_fabric, in_trainer, policies, set_up, strategy, train
from tests.engines.conftest import OnRanks
from tests.lit import LitTiny, replaced, trainer
from tests.models import Block, GatedMLP, TinyLM, lm_loss, tiny_llama
from tests.parity import MIXED, errors, near
from tests.world import World


def error_of(fn: Callable[[], Any]) -> tuple[str, str]:
    """The error that a call ends with: its type and its text."""
    try:
        fn()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "no error"


class ShardsInside(LitTiny):
    """Its ``configure_model`` makes the gate projection a unit of its own."""

    def configure_model(self) -> None:
        super().configure_model()
        for block in self.net.blocks:
            fully_shard(block.mlp.gate, mesh=self.device_mesh["data_parallel"])
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class Flat(LitTiny):
    """Holds the parts of its network itself, the blocks in a list."""

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(0)
            net = TinyLM()
            self.embed, self.blocks, self.head = net.embed, net.blocks, net.head
            self.net = self.run

    def run(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TiesBlocks(LitTiny):
    """Two blocks share a weight."""

    def configure_model(self) -> None:
        super().configure_model()
        first, second = self.net.blocks
        second.mlp.down.weight = first.mlp.down.weight


class TiesOwnLeaves(TiesBlocks):
    """Makes the MLPs that share it leaf modules of ZeRO-3."""

    def configure_model(self) -> None:
        from deepspeed.utils import set_z3_leaf_modules

        super().configure_model()
        set_z3_leaf_modules(self, [GatedMLP])


class TiesHead(LitTiny):
    """A block shares a weight with what is outside of the blocks."""

    def configure_model(self) -> None:
        super().configure_model()
        self.scale = self.net.blocks[0].norm1.weight


def fit_refused(engine: str, model: type[LitTiny], options: dict[str, Any]) -> tuple[str, str, int]:
    module = model()
    kind, text = error_of(
        lambda: trainer(strategy(lt_tiled, engine, tiling=4, **options), devices=dist.get_world_size()).fit(module)
    )
    assert module.losses == []
    return kind, text, replaced(module)


@pytest.mark.parametrize(
    ("engine", "model", "options", "message"),
    [
        (
            "fsdp",
            LitTiny,
            {"auto_wrap_policy": {nn.Linear}},
            r"net.blocks.0.mlp \(GatedMLP\) is tiled, and gate inside it is an FSDP unit",
        ),
        ("fsdp2", ShardsInside, {}, r"net.blocks.0.mlp \(GatedMLP\) is tiled, and gate inside it is an FSDP unit"),
        ("fsdp2", TiesBlocks, {}, r"net.blocks.0 and net.blocks.1 share a weight of shape \[16, 48\]"),
        ("fsdp2", TiesHead, {}, r"net.blocks.0 and the rest of TiesHead share a weight of shape \[16\]"),
        ("zero3", LitTiny, {"zero3_leaf_modules": False}, "is tiled and not inside a leaf module of ZeRO-3"),
        ("zero3", TiesBlocks, {}, r"net.blocks.0 and net.blocks.1 share a weight of shape \[16, 48\]"),
        ("zero3", TiesOwnLeaves, {"zero3_leaf_modules": False}, "net.blocks.0.mlp and net.blocks.1.mlp share a weight"),
        ("zero3", TiesHead, {}, r"net.blocks.0 and the rest of TiesHead share a weight of shape \[16\]"),
    ],
)
def test_trainer_refuses(
    engine: str, model: type[LitTiny], options: dict[str, Any], message: str, on_ranks: OnRanks
) -> None:
    """A unit inside a tiled module, by policy or by hand, and weights that two units share, raise before a step.

    The model is restored.
    """
    for kind, text, left in on_ranks(fit_refused, engine, model, options):
        assert kind == "ValueError"
        assert re.search(message, text)
        assert left == 0


def inside_by_hand(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in model.blocks:
        fully_shard(block.mlp.gate, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def fabric_refused(engine: str, options: dict[str, Any]) -> tuple[str, str, int]:
    net = TinyLM()

    def set_up_one() -> None:
        chosen = strategy(lt_tiled.fabric, engine, tiling=4, **options)
        fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=chosen)
        fabric.launch()
        fabric.setup_module(net)

    return *error_of(set_up_one), replaced(net)


@pytest.mark.parametrize(
    ("engine", "options"), [("fsdp", {"auto_wrap_policy": {nn.Linear}}), ("fsdp2", {"parallelize_fn": inside_by_hand})]
)
def test_fabric_refuses_units_inside(engine: str, options: dict[str, Any], world: World) -> None:
    """A unit inside a tiled module is refused by Fabric's strategies too, and the model is left unmarked."""
    for kind, text, left in world(fabric_refused, engine, options):
        assert kind == "ValueError"
        assert "inside it is an FSDP unit" in text
        assert "auto_wrap_policy={MyBlock}" in text
        assert left == 0


def callback_refused(engine: str) -> tuple[str, str, int]:
    module = LitTiny()
    chosen = strategy(lt_tiled, engine, tiling=None, activation_checkpointing=None)
    run = trainer(chosen, devices=dist.get_world_size(), callbacks=[TiledMLP(4)])
    return *error_of(lambda: run.fit(module)), replaced(module)


def test_callback_under_zero3(deepspeed_world: World) -> None:
    """The callback comes too late for ZeRO-3 to gather a tiled module as a whole, and says so before the first step."""
    for kind, text, left in deepspeed_world(callback_refused, "zero3"):
        assert kind == "ValueError"
        assert "which makes its block one; a callback runs too late" in text
        assert left == 0


def with_callback(engine: str, tiled: bool) -> list[float]:
    module = LitTiny()
    chosen = strategy(lt_tiled, engine, tiling=None, activation_checkpointing=None)
    trainer(chosen, devices=dist.get_world_size(), callbacks=[TiledMLP(4)] if tiled else []).fit(module)
    assert module.forwards_replaced == ({6} if tiled else {0})
    return module.losses


@pytest.mark.table("ddp|fsdp2|zero2")
@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "zero3"])
def test_callback(engine: str, on_ranks: OnRanks) -> None:
    """``TiledMLP`` tiles behind any other engine, after that has wrapped the model."""
    plain = on_ranks(with_callback, engine, False)
    assert on_ranks(with_callback, engine, True) == [near(losses) for losses in plain]


# Worked around


def fit_validate_fit(engine: str) -> tuple[list[float], list[float], int]:
    """Fit, validate and fit again, one wrapped model and one trainer."""
    module = LitTiny()
    run = trainer(
        strategy(lt_tiled, engine, tiling=4),
        devices=dist.get_world_size(),
        max_epochs=1,
        max_steps=-1,
        num_sanity_val_steps=0,
    )
    run.fit(module)
    run.validate(module, verbose=False)
    run.fit_loop.max_epochs = 2
    run.fit(module)
    return module.losses, module.val_losses, replaced(module)


@pytest.mark.parametrize("engine", ["fsdp", "fsdp2"])
def test_fit_then_validate_then_fit(engine: str, on_ranks: OnRanks) -> None:
    """One model goes through ``fit``, ``validate`` and ``fit`` as under DDP, though FSDP has wrapped it by then."""
    plain = on_ranks.once(fit_validate_fit, "ddp")
    for (losses, val_losses, _), (sharded, sharded_val, left) in zip(
        plain, on_ranks(fit_validate_fit, engine), strict=True
    ):
        assert sharded == near(losses)
        assert sharded_val == near(val_losses)
        assert left == 0


def fit_then_another(engine: str, keep: bool) -> tuple[str, str]:
    """A second strategy gets the model that the first one wrapped, while that lives or not."""
    module = LitTiny()
    first = trainer(strategy(lt_tiled, engine, tiling=4), devices=dist.get_world_size())
    first.fit(module)
    if not keep:
        del first
        module.trainer = None
        gc.collect()
    second = trainer(strategy(lt_tiled, engine, tiling=4), devices=dist.get_world_size())
    return error_of(lambda: second.validate(module, verbose=False))


def test_two_fsdp_strategies(world: World) -> None:
    """A second strategy goes on with the first one's wrapped model; once that is gone, it says what to do."""
    assert world(fit_then_another, "fsdp", True) == [("", "no error")] * 2
    for kind, text in world(fit_then_another, "fsdp", False):
        assert kind == "ValueError"
        assert "was wrapped by FSDP for a trainer that no longer exists: keep that trainer" in text


def test_parts_in_the_lightning_module(world: World) -> None:
    """A LightningModule that holds embedding, list of blocks and head itself trains under FSDP2 as under DDP."""
    plain = world(fit_losses, "ddp", Flat, {})
    assert world(fit_losses, "fsdp2", Flat, {}) == [near(losses) for losses in plain]


class WrapsByHand(LitTiny):
    """Wraps its blocks in ``configure_model``, in the context that the strategy gives."""

    def configure_model(self) -> None:
        if self.net is None:
            super().configure_model()
            self.net.blocks = nn.ModuleList(wrap(block) for block in self.net.blocks)


def fit_losses(engine: str, model: type[LitTiny], options: dict[str, Any]) -> list[float]:
    module = model()
    trainer(strategy(lt_tiled, engine, tiling=4, **options), devices=dist.get_world_size()).fit(module)
    return module.losses


@pytest.mark.table("hybrid|cpu offload|by hand")
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (LitTiny, {"auto_wrap_policy": {Block}}),
        (LitTiny, {"auto_wrap_policy": ModuleWrapPolicy({GatedMLP})}),
        (LitTiny, {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (1, 2)}),
        (LitTiny, {"sharding_strategy": "SHARD_GRAD_OP"}),
        (LitTiny, {"sharding_strategy": "NO_SHARD"}),
        (LitTiny, {"cpu_offload": True}),
        (WrapsByHand, {}),
    ],
    ids=[
        "policy of blocks",
        "policy of tiled modules",
        "hybrid",
        "gradients only",
        "no sharding",
        "cpu offload",
        "by hand",
    ],
)
def test_fsdp_arguments(model: type[LitTiny], options: dict[str, Any], world: World) -> None:
    """FSDP's own arguments, and wrapping by hand, work on the CPU and give DDP's losses."""
    plain = world(fit_losses, "ddp", LitTiny, {})
    assert world(fit_losses, "fsdp", model, options) == [near(losses) for losses in plain]


class ByKeyword(nn.Module):
    """Calls its MLP with a keyword, and with a tensor that wants no gradient beside the hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(_KeywordBlock() for _ in range(2))
        self.head = nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, mask=(ids % 3 > 0).float()[..., None])
        return self.head(x)


class _KeywordBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.mlp = _MaskedMLP()

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        return x + self.mlp(mask=mask, hidden=self.norm(x))


class _MaskedMLP(GatedMLP):
    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return super().forward(hidden) * mask


def keyword_losses(engine: str, mode: str) -> list[float]:
    fabric = Fabric(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy(lt_tiled.fabric, engine, **policies(mode, "")),
    )
    fabric.launch()
    torch.manual_seed(0)
    model, optimizer = set_up(fabric, ByKeyword(), engine)
    losses = train(fabric, model, optimizer, (draw((2, 24 + step), fabric.global_rank) for step in range(3)))
    fabric.strategy.release()
    return losses


@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_arguments_by_keyword(engine: str, on_ranks: OnRanks) -> None:
    """Hidden states passed by keyword train as untiled DDP does, also where ZeRO-3 looks at positional arguments
    alone.
    """
    plain = on_ranks.once(keyword_losses, "ddp", "untiled")
    assert on_ranks(keyword_losses, engine, "checkpointed") == [near(losses) for losses in plain]


def with_momentum(engine: str) -> list[float]:
    """The optimizer has stepped, and has state, when Fabric gets it."""
    chosen = strategy(lt_tiled.fabric, engine, tiling=4)
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=chosen)
    fabric.launch()
    torch.manual_seed(0)
    net = TinyLM()
    optimizer = torch.optim.SGD(net.parameters(), 1.0, momentum=0.9)
    ids = draw((2, 24), 0)
    lm_loss(net(ids), ids).backward()
    optimizer.step()
    optimizer.zero_grad()
    model, optimizer = fabric.setup(net, optimizer)
    losses = train(fabric, model, optimizer, (draw((2, 24 + step), fabric.global_rank) for step in range(3)))
    chosen.release()
    return losses


def test_optimizers_keep_their_state_under_fsdp2(world: World) -> None:
    """An optimizer that has stepped before ``fabric.setup`` goes on with its momentum, sharded."""
    plain = world(with_momentum, "ddp")
    assert world(with_momentum, "fsdp2") == [near(losses) for losses in plain]


# Tensor parallelism


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan = {"mlp.gate": ColwiseParallel(), "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh["tensor_parallel"], plan)
    return model


def tensor_parallel_losses(mode: str, directory: str) -> tuple[list[float], list[int]]:
    """Both ranks have the same batches, as a tensor-parallel group has."""
    chosen = lt_tiled.fabric.TiledModelParallelStrategy(
        tensor_parallel, data_parallel_size=1, tensor_parallel_size=2, **policies(mode, directory)
    )
    fabric = Fabric(accelerator="cpu", devices=2, strategy=chosen)
    fabric.launch()
    torch.manual_seed(0)
    model, optimizer = fabric.setup(net := TinyLM(), torch.optim.SGD(net.parameters(), 0.1, foreach=False))
    losses = train(fabric, model, optimizer, (draw((2, 24 + step), 0) for step in range(3)))
    tiles = [row.tiles for row in chosen.prepared[0].report().tiled]
    chosen.release()
    return losses, tiles


@pytest.mark.self_checks
@pytest.mark.table("tiled")
@pytest.mark.parametrize("mode", ["tiled", "checkpointed", "disk"])
def test_tensor_parallel_plan(mode: str, world: World, tmp_path: Path) -> None:
    """A tiled MLP whose projections are split over the ranks has the losses of one that is not tiled."""
    plain = world(tensor_parallel_losses, "untiled", str(tmp_path))
    for (losses, _), (tiled, tiles) in zip(plain, world(tensor_parallel_losses, mode, str(tmp_path)), strict=True):
        assert tiled == near(losses)
        assert tiles == [4, 4]


MLP = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
SHARD = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True)
GATHER = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
HEADS: dict[str, ParallelStyle | None] = {
    "whole": None,
    "columns": ColwiseParallel(output_layouts=Replicate()),
    "columns of a DTensor": ColwiseParallel(use_local_output=False),
    "rows": RowwiseParallel(input_layouts=Replicate()),
    "columns after a sequence": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def tensor_parallel_head(head: str, mesh: DeviceMesh, model: nn.Module) -> nn.Module:
    """Split the MLPs of a Llama, its head, and with a sequence the norms before them."""
    style, tensor, norms = HEADS[head], mesh["tensor_parallel"], "sequence" in head
    for block in model.model.layers:
        parallelize_module(block.mlp, tensor, MLP)
        if norms:
            parallelize_module(block.mlp, tensor, GATHER)
    for norm in (*(block.post_attention_layernorm for block in model.model.layers), model.model.norm) if norms else ():
        parallelize_module(norm, tensor, SHARD)
        parallelize_module(norm, tensor, SequenceParallel())
    return model if style is None else parallelize_module(model, tensor, {"lm_head": style})


def tensor_parallel_gradients(head: str, **options: Any) -> tuple[dict[str, Tensor], str]:
    """The gradients of one step on both ranks, and what its output has as logits."""
    chosen = lt_tiled.fabric.TiledModelParallelStrategy(
        lambda model, mesh: tensor_parallel_head(head, mesh, model), tensor_parallel_size=2, **options
    )
    fabric = Fabric(accelerator="cpu", devices=2, strategy=chosen)
    fabric.launch()
    torch.manual_seed(0)
    model, ids = fabric.setup_module(tiny_llama().double()), draw((2, 24), 0)
    with loss_parallel() if "DTensor" in head else nullcontext():
        output = model(input_ids=ids, labels=ids)
        output.loss.backward()
    found = {"loss": output.loss.detach(), **{name: weight.grad for name, weight in model.named_parameters()}}
    chosen.release()
    whole = {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in found.items()}
    return whole, type(output.logits).__name__


@pytest.mark.parametrize("head", HEADS)
def test_tiled_loss_of_a_tensor_parallel_plan(head: str, world: World) -> None:
    """With any plan for the head and the norms, ``loss=True`` has the loss and gradients of the same plan untiled: in
    tiles where the plan leaves the head whole, from full logits elsewhere.
    """
    untiled = partial(tensor_parallel_gradients, tiling=False, activation_checkpointing=False)
    tiled = partial(tensor_parallel_gradients, tiling=4, activation_checkpointing=True, loss=5)
    for (true, _), (found, logits) in zip(world(untiled, head), world(tiled, head), strict=True):
        assert max(errors(found, true).values()) <= MIXED
        assert (logits == "AbsentLogits") is (head == "whole")


def sizes_refused(options: dict[str, Any]) -> tuple[str, str]:
    def set_up_one() -> None:
        fabric = Fabric(accelerator="cpu", devices=2, strategy=lt_tiled.fabric.TiledModelParallelStrategy(**options))
        fabric.launch()
        fabric.setup_module(TinyLM())

    return error_of(set_up_one)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 needs a plan"),
        ({"data_parallel_size": 1}, "tensor_parallel_size=2 needs a plan"),
        (
            {"parallelize_fn": tensor_parallel},
            "no FSDP unit, so its gradients are not reduced over the 2 data-parallel ranks",
        ),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3 does not divide the 2 ranks"),
    ],
)
def test_sizes_are_refused(options: dict[str, Any], message: str, world: World) -> None:
    """Tensor-parallel ranks without a plan, and a number of them that does not fit, are refused with the remedy."""
    for kind, text in world(sizes_refused, options):
        assert kind == "ValueError"
        assert message in text


# Saving


class SlowToWrite(TorchCheckpointIO):
    """Takes a while to write."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        time.sleep(0.5)
        super().save_checkpoint(checkpoint, path, storage_options)


class Watches(LitTiny):
    """Notes, whenever a checkpoint's state is complete, how much RAM the offloader holds."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[int] = []

    def ram(self) -> int:
        return sum(prepared.offloader.cpu.size for prepared in self.trainer.strategy.prepared)

    def on_train_batch_end(self, *args: Any) -> None:
        self.held.append(self.ram())
        self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/{self.trainer.global_step}.ckpt")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.held.append(self.ram())


def save_while_training(engine: str, directory: str) -> tuple[list[int], list[bool]]:
    offload = ActivationCheckpointing(offload="cpu", cpu_budget="4MiB", min_bytes=0, keep_last=0)
    plugins = [] if engine.startswith(("zero", "fsdp2")) else [SlowToWrite()]
    run = trainer(
        strategy(lt_tiled, engine, tiling=4, activation_checkpointing=offload),
        devices=dist.get_world_size(),
        plugins=plugins,
        default_root_dir=directory,
        limit_val_batches=0,
    )
    module = Watches()
    run.fit(module)
    run.save_checkpoint(last := f"{directory}/last.ckpt")
    return module.held, [Path(path).exists() for path in (f"{directory}/1.ckpt", last)]


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "fsdp2", "zero2"])
def test_saving_frees_the_buffers_first(engine: str, on_ranks: OnRanks, tmp_path: Path) -> None:
    """Before the state is gathered for a checkpoint the offloader's RAM is given back, and taken anew by the next step.

    When ``save_checkpoint`` returns, on any rank, the checkpoint is there.
    """
    for held, exist in on_ranks(save_while_training, engine, str(tmp_path)):
        assert [size > 0 for size in held] == [True, False] * 3 + [False]  # the last after the strategy's tear-down
        assert exist == [True, True]


class BuiltAtOnce(LitTiny):
    """Has no ``configure_model``."""

    configure_model = pl.LightningModule.configure_model

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        LitTiny.configure_model(self)


@pytest.mark.table("ddp|fsdp2")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_module_without_hooks(engine: str, on_ranks: OnRanks, tmp_path: Path) -> None:
    """A LightningModule that builds its model in ``__init__`` and has no hook for engines trains under each of them."""
    untiled = on_ranks.once(partial(in_trainer, built=True), "ddp", "untiled", "")
    tiled = on_ranks(partial(in_trainer, module=BuiltAtOnce), engine, "checkpointed", str(tmp_path))
    for plain, ran in zip(untiled, tiled, strict=True):
        assert ran.losses == near(plain.losses)
        assert ran.tiles == [4, 4]


class BuiltFromAnySeed(BuiltAtOnce):
    """Has other weights and another buffer on each rank."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.register_buffer("shift", torch.full((2,), dist.get_rank(), dtype=torch.complex64), persistent=False)
        for weight in self.parameters():
            weight.data += 0.1 * dist.get_rank()

    def training_step(self, ids: Tensor, index: int) -> Tensor:
        loss = super().training_step(ids, index)
        self.losses[-1] += float(self.shift.real.sum())
        return loss


def test_ranks_that_built_other_weights(world: World) -> None:
    """FSDP2 shards the model of rank 0, with its buffers, as DDP does: losses equal DDP's on both ranks."""
    plain = world(partial(in_trainer, module=BuiltFromAnySeed), "ddp", "untiled", "")
    sharded = world(partial(in_trainer, module=BuiltFromAnySeed), "fsdp2", "tiled", "")
    for expected, found in zip(plain, sharded, strict=True):
        assert found.losses == near(expected.losses)


# One device


@pytest.fixture(scope="module")
def one_rank() -> Iterator[World]:
    world = World(1)
    yield world
    world.close()


@pytest.mark.table("ddp|fsdp2|zero3")
@pytest.mark.parametrize("engine", ENGINES)
def test_one_device(engine: str, one_rank: World, tmp_path: Path) -> None:
    """Every engine runs on one device, ZeRO-3 too, with the losses of plain training."""
    (plain,) = one_rank(partial(in_trainer, built=True), "ddp", "untiled", str(tmp_path))
    (tiled,) = one_rank(partial(in_trainer, built=True), engine, "disk", str(tmp_path))
    assert tiled.losses == near(plain.losses)
    assert tiled.disk_bytes > 0
    (plain,) = one_rank(partial(in_fabric, accumulate=False), "ddp", "untiled", str(tmp_path))
    (tiled,) = one_rank(partial(in_fabric, accumulate=False), engine, "disk", str(tmp_path))
    assert tiled.losses == near(plain.losses)
