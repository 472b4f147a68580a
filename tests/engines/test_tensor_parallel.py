"""Tensor parallelism: tiled modules whose weights are split over ranks, by the user's own plan."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import lt_tiled
from tests.engines.cells import draw, error_of, launch, policies, train
from tests.models import TinyLM, tiny_llama
from tests.parity import MIXED, errors, near
from tests.world import World


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan = {"mlp.gate": ColwiseParallel(), "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh["tensor_parallel"], plan)
    return model


def tensor_parallel_losses(tiled: bool, directory: str) -> tuple[list[float], list[int]]:
    """Both ranks have the same batches, as a tensor-parallel group has; a function chooses what is tiled."""
    options = policies("disk" if tiled else "untiled", directory)
    if tiled:
        options["tiling"] = lt_tiled.Tiling(4, targets=lambda path, _: path.endswith("mlp"))
    chosen = lt_tiled.fabric.TiledModelParallelStrategy(
        tensor_parallel, data_parallel_size=1, tensor_parallel_size=2, **options
    )
    fabric = launch(chosen)
    model, optimizer = fabric.setup(net := TinyLM(), torch.optim.SGD(net.parameters(), 0.1, foreach=False))
    losses = train(fabric, model, optimizer, (draw((2, 24 + step), 0) for step in range(3)))
    tiles = [row.tiles for row in chosen.prepared[0].report().tiled]
    chosen.release()
    return losses, tiles


@pytest.mark.self_checks
def test_tensor_parallel_plan(world: World, tmp_path: Path) -> None:
    """A tiled MLP whose projections are split over the ranks has the losses of one that is not tiled, with its blocks
    offloaded, too.
    """
    plain, tiled = (world(tensor_parallel_losses, tiled, str(tmp_path)) for tiled in (False, True))
    assert tiled == [(near(losses), [4, 4]) for losses, _ in plain]


MLP = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
HEADS = {
    "whole": {},
    "columns": {"lm_head": ColwiseParallel(output_layouts=Replicate())},
    "columns of a DTensor": {"lm_head": ColwiseParallel(use_local_output=False)},
}


def tensor_parallel_head(head: str, mesh: DeviceMesh, model: nn.Module) -> nn.Module:
    """Split the MLPs of a Llama, and its head."""
    for block in model.model.layers:
        parallelize_module(block.mlp, mesh["tensor_parallel"], MLP)
    return parallelize_module(model, mesh["tensor_parallel"], HEADS[head])


def tensor_parallel_gradients(head: str, **options: Any) -> tuple[dict[str, Tensor], str]:
    """The gradients of one step on both ranks, and what its output has as logits."""
    chosen = lt_tiled.fabric.TiledModelParallelStrategy(
        lambda model, mesh: tensor_parallel_head(head, mesh, model), tensor_parallel_size=2, **options
    )
    fabric = launch(chosen)
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
    """With any plan for the head, ``loss=True`` has the loss and gradients of the same plan untiled: in
    tiles where the plan leaves the head whole, from full logits elsewhere.
    """
    untiled = partial(tensor_parallel_gradients, tiling=False, activation_checkpointing=False)
    tiled = partial(tensor_parallel_gradients, tiling=4, activation_checkpointing=True, loss=5)
    for (true, _), (found, logits) in zip(world(untiled, head), world(tiled, head), strict=True):
        assert max(errors(found, true).values()) <= MIXED
        assert (logits == "NoneType") is (head == "whole")


def refused(options: dict[str, Any]) -> tuple[str, str]:
    """The error at setup."""
    return error_of(lambda: launch(lt_tiled.fabric.TiledModelParallelStrategy(**options)).setup_module(TinyLM()))


WITHOUT_A_PLAN: list[tuple[dict[str, Any], str]] = [
    ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 and data_parallel_size=1"),
    ({"data_parallel_size": 1}, "tensor_parallel_size=2 and data_parallel_size=1"),
    ({"parallelize_fn": tensor_parallel}, "tensor_parallel_size=1 and data_parallel_size=2"),
]


@pytest.mark.parametrize(("options", "sizes"), WITHOUT_A_PLAN)
def test_without_a_plan(options: dict[str, Any], sizes: str, world: World) -> None:
    """Tensor-parallel ranks without a plan, and data-parallel ranks with a plan alone, are refused on each rank."""
    for kind, text in world(refused, options):
        assert kind == "ValueError"
        assert f"needs a plan for {sizes}" in text
