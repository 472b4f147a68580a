"""What tiled MLPs cost in a training step of a Llama with activation checkpointing.

``--only costs`` counts FLOPs and bytes, which are the same in every run on a CPU. ``--only step_time`` times the steps,
also those of lt_tiled with other settings, and without the comparison of each recompute with its forward pass.
``--only experts`` computes what tiles of released mixtures of experts cost.
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
from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from benchmarks import harness
from benchmarks.harness import Options, Size, Table, compared, draw, interleaved, llama, marked, step_of
from benchmarks.peers import Tile, tiles
from lt_tiled import ActivationCheckpointing, Tiling, prepare
from lt_tiled.modules.feed_forward import find_sizes
from lt_tiled.planner.ledger import Ledger
from lt_tiled.recompute import blocks
from lt_tiled.tiling import run
from lt_tiled.tiling.cut import MAX_SUMS_SHARE, SUM_TOKENS, tile_bounds

BASE = "without tiling"
UNCOMPARED = "lt_tiled, without the comparison"
SETTINGS = {
    "lt_tiled, without the comparison": ActivationCheckpointing(),
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
    model, ids = llama(size), draw(size)
    base = counted(model, BASE, None, size.shards, ids)
    for name, tile in tiles().items():
        found = counted(model, name, tile, size.shards, ids)
        flops, peak = found[0] / base[0], found[1] / base[1]
        table.add(name, marked(f"{flops:.2f}", flops < 1.005), f"{peak:.2f}")
    return [table]


def counted(model: nn.Module, name: str, tile: Tile | None, shards: int, ids: Tensor) -> tuple[int, int]:
    """Return FLOPs and peak bytes of a step."""
    with with_checkpointing(model, name, tile, shards) as tiled:
        step = step_of(tiled, ids)
        step()  # the first step checks the tiles
        with Ledger() as meter:
            step()
    return int(meter.flops), meter.peak


def experts(options: Options) -> list[Table]:
    """One row for each mixture: what its gradient sums, which each tile reads and writes, add to the arithmetic."""
    tokens = 131072
    headings = ["", "tiles", "tokens of a tile", "sums of a layer [GB]", "of the arithmetic"]
    table = Table(f"Experts on {tokens} tokens: gradient sums in a backward pass, computed", headings)
    with torch.device("meta"):
        mixtures = {
            "Mixtral 8x7B": MixtralSparseMoeBlock(MixtralConfig()),
            "Qwen3 30B A3B": Qwen3MoeSparseMoeBlock(Qwen3MoeConfig()),
            "GPT-OSS 20B": GptOssMLP(GptOssConfig(num_local_experts=32)),
        }
    for name, module in mixtures.items():
        sizes = find_sizes(module)
        assert sizes is not None
        bounds = tile_bounds(Tiling(), tokens, sizes.hidden, sizes)
        share = SUM_TOKENS / tokens * sizes.summed / sizes.used * len(bounds)
        summed = f"{8 * sizes.summed * len(bounds) / 1e9:.1f}"
        table.add(name, str(len(bounds)), str(bounds[0][1]), summed, marked(f"{share:.1%}", share <= MAX_SUMS_SHARE))
    return [table]


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
    with patch.object(blocks, "COMPARED", "none"), patch.object(run, "prints_of", lambda call: None):
        step()
