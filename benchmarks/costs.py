"""What tiled MLPs cost in a training step with activation checkpointing.

``--only costs`` counts FLOPs and bytes of a Llama and of a mixture of experts. ``--only step_time`` times steps of a
Llama, also with other settings of lt_tiled, and without the comparison of recomputes. ``--only host`` times one
tile of an MLP so small that its arithmetic takes next to nothing: on a GPU small tiles wait for the host.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

from benchmarks import harness
from benchmarks.harness import Options, Size, Table, attempt, compared, draw, interleaved, llama, marked, step_of
from benchmarks.peers import Tile, tiles
from lt_tiled import ActivationCheckpointing, Tiling, prepare
from lt_tiled.planner.ledger import Ledger
from lt_tiled.recompute import blocks
from lt_tiled.tiling import run
from tests.models import GatedMLP

BASE = "without tiling"
UNCOMPARED = "lt_tiled, without the comparison"
SETTINGS = {
    UNCOMPARED: ActivationCheckpointing(),
    'lt_tiled, `keep="attention"`': ActivationCheckpointing(keep="attention"),
    "lt_tiled, block inputs in CPU memory": ActivationCheckpointing(offload="cpu"),
}


@contextmanager
def with_checkpointing(model: nn.Module, name: str, tile: Tile | None, shards: int) -> Iterator[Any]:
    """Copy the model with activation checkpointing, and with the MLPs tiled by a package."""
    model = copy.deepcopy(model)
    tiling = None
    if name.startswith("lt_tiled"):
        tiling = Tiling(num_shards=shards)
    elif tile is not None:
        for layer in model.model.layers:  # type: ignore[union-attr]
            tile(layer.mlp, shards)
    policy = SETTINGS.get(name, ActivationCheckpointing())
    with prepare(model, tiling=tiling, activation_checkpointing=policy):
        yield model


def costs(options: Options) -> list[Table]:
    """One row for each package."""
    size = options.size(Size(1024, 128, 512, 2, 8), *2 * [Size(2048, 256, 1024, 4, 16)])
    title = f"Exact costs of a step: {size.layers} layers, {size.tokens} tokens, MLPs in {size.shards} tiles"
    table = Table(title, ["", "FLOPs", "peak memory"])
    table.note = "Relative to the step without tiling. Bytes are those that the step allocates, without weights."
    ids = draw(size)
    for kind, model in (("Llama", llama(size)), ("Mixtral", mixtral(size))):
        base = counted(model, BASE, None, size.shards, ids)
        for name, tile in tiles().items():
            found = attempt(counted, model, name, tile, size.shards, ids)
            if isinstance(found, str):
                table.add(f"{kind}, {name}", harness.judged(found, 0.0), "")
                continue
            flops, peak = found[0] / base[0], found[1] / base[1]
            table.add(f"{kind}, {name}", marked(f"{flops:.2f}", flops < 1.005), f"{peak:.2f}")
    return [table]


def mixtral(size: Size) -> nn.Module:
    """Return a Mixtral of which a token uses 2 of 8 experts."""
    fields = llama(size).config.to_dict() | {"model_type": "mixtral", "architectures": None, "num_local_experts": 8}
    config = MixtralConfig(**fields)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    return MixtralForCausalLM(config)


def counted(model: nn.Module, name: str, tile: Tile | None, shards: int, ids: Tensor) -> tuple[int, int]:
    """Return FLOPs and peak bytes of a step."""
    with with_checkpointing(model, name, tile, shards) as tiled:
        step = step_of(tiled, ids)
        step()  # the first step checks the tiles
        with Ledger() as meter:
            step()
    return int(meter.work.total()), meter.peak


def step_time(options: Options) -> list[Table]:
    """One row for each package, and for each setting."""
    device = options.device
    size = options.size(Size(2048, 256, 1024, 2, 2), Size(4096, 512, 1536, 2, 4), Size(32768, 4096, 14336, 2, 8))
    dtype = options.size(torch.float32, torch.float32, torch.bfloat16)
    title = f"Step time: {size.layers} layers of {size.hidden}, {size.tokens} tokens, MLPs in {size.shards} tiles"
    table = Table(title, ["", "median [s]", "relative to without tiling", "range", "peak memory [GiB]"])
    table.note = f"{options.rounds} interleaved rounds, {str(dtype)[6:]}, {harness.machine(device)}."
    model, ids = llama(size, device, dtype), draw(size, device)
    variants: dict[str, Tile | None] = {BASE: None, **tiles(), **dict.fromkeys(SETTINGS)}
    with ExitStack() as stack:
        steps: dict[str, Callable[[], None]] = {}
        for name, tile in variants.items():
            tiled = stack.enter_context(with_checkpointing(model, name, tile, size.shards))
            steps[name] = step_of(tiled, ids)
        steps[UNCOMPARED] = partial(uncompared, steps[UNCOMPARED])
        times = interleaved(steps, options.rounds, partial(harness.seconds_of, device=device))
        for name, step in steps.items():
            relative, spread = compared(times, name, BASE)
            peak = f"{harness.peak_of(step, device) / 2**30:.2f}"
            table.add(name, f"{statistics.median(times[name]):.3f}", f"{relative:.2f}", spread, peak)
    return [table]


def uncompared(step: Callable[[], None]) -> None:
    """Run a step without the comparison."""
    with patch.object(blocks, "COMPARED", "none"), patch.object(run, "is_real", lambda tensor: False):
        step()


def host(options: Options) -> list[Table]:
    """One row for each package."""
    few, many, rounds = 64, 256, 3 * options.rounds  # the slope leaves out what is done once for each call
    table = Table("Host time of one tile more", ["", "forward and backward [µs]", "relative to lt_tiled"])
    table.note = f"Process time, medians of {rounds} rounds, 4 tokens a tile, {harness.machine(options.device)}."
    steps: dict[str, Callable[[], None]] = {}
    for name, tile in tiles().items():
        for count in (few, many):
            steps[f"{name} {count}"] = tiled_step(tile, count, options.device)
    times = interleaved(steps, rounds, harness.host_seconds_of)
    own = 0.0
    for name in tiles():
        slope = statistics.median(times[f"{name} {many}"]) - statistics.median(times[f"{name} {few}"])
        more = slope / (many - few) * 1e6
        own = own or more
        table.add(name, f"{more:.0f}", f"{more / own:.2f}")
    return [table]


def tiled_step(tile: Tile, count: int, device: torch.device) -> Callable[[], None]:
    """Return a function that runs one forward and backward pass of an MLP in so many tiles of 4 tokens."""
    mlp = GatedMLP(16, 48).to(device)
    tile(mlp, count)
    x = torch.randn(1, 4 * count, 16, device=device, requires_grad=True)

    def step() -> None:
        mlp.zero_grad(set_to_none=True)
        mlp(x).sum().backward()

    return step
