"""What a tile costs the host: ``python -m benchmarks --only host``.

Process time of Python, torch's dispatcher and autograd for one tile, forward and backward. The MLP is so small that its
arithmetic takes next to nothing. On a GPU the host must be ahead of the device, or small tiles wait for it. Rounds are
interleaved, and figures are medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from benchmarks.peers import Peer, tile_with
from benchmarks.sheet import Cell, Sheet, machine, reason
from benchmarks.step_time import interleaved

FEW, MANY = 64, 256
HIDDEN, TOKENS = 16, 4
"""The tile: 4 tokens of an MLP of 16 x 48."""
BARE = "nothing but tiles of three dimensions"


class _Tiles(torch.autograd.Function):
    """The least that tiles of the dimensions of the hidden states take: no skip, no checks, no engines."""

    @staticmethod
    def forward(ctx: Any, forward: Callable[[Tensor], Tensor], tiles: int, x: Tensor) -> Tensor:
        ctx.call = forward, tiles
        ctx.save_for_backward(x)
        return torch.cat([forward(tile) for tile in x.chunk(tiles, 1)], 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,), (forward, tiles) = ctx.saved_tensors, ctx.call
        of_input = torch.empty_like(x)
        parts = (tensor.chunk(tiles, 1) for tensor in (x, gradient, of_input))
        for tile, given, found in zip(*parts, strict=True):
            leaf = tile.detach().requires_grad_()
            with torch.enable_grad():
                output = forward(leaf)
            torch.autograd.backward(output, given)
            found.copy_(leaf.grad)
        return None, None, of_input


def host(peers: list[Peer], rounds: int = 25) -> list[Sheet]:
    """One row for each peer at hand."""
    title = f"host time of a tile, forward and backward: a Llama MLP of {HIDDEN} x {3 * HIDDEN}, {TOKENS} tokens a tile"
    headings = ["", f"{FEW} tiles [µs]", f"{MANY} tiles [µs]", "one tile more [µs]", "relative to lt_tiled"]
    sheet = Sheet("host", title, headings)
    names = [*(peer.name for peer in peers if peer.tile is not None), BARE]
    variants: dict[str, Callable[[], float]] = {}
    for name in names:
        try:
            steps = {f"{name} {tiles}": step_of(name, tiles) for tiles in (FEW, MANY)}
            for step in steps.values():
                step()
            variants |= steps
        except Exception as error:  # a peer may raise anything
            sheet.notes.append(f"{name}: {reason(error)}.")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = interleaved(variants, rounds)
    finally:
        torch.set_num_threads(threads)
    found = {name: per_tile(times, name) for name in names if f"{name} {FEW}" in variants}
    for name, (few, many, more) in found.items():
        others = [figures[2] for other, figures in found.items() if other not in (name, BARE)]
        least = more <= min(others) if others and name != BARE else None
        ratio = f"{more / found['lt_tiled'][2]:.2f}"
        sheet.add(name, f"{few:.0f}", f"{many:.0f}", Cell(f"{more:.0f}", least), ratio)
    sheet.notes.insert(
        0,
        f"Process time, medians of {rounds} interleaved rounds, {machine(torch.device('cpu'))}. A tile's share of a"
        " call in so many tiles, and the slope between the two, which leaves out what is done once for each call;"
        " ✓ least.",
    )
    return [sheet]


def per_tile(times: dict[str, list[float]], name: str) -> tuple[float, float, float]:
    """Return microseconds per tile of a call in few tiles and in many, and of one tile more."""
    few, many = (statistics.median(times[f"{name} {tiles}"]) * 1e6 for tiles in (FEW, MANY))
    return few / FEW, many / MANY, (many - few) / (MANY - FEW)


def step_of(name: str, tiles: int, device: torch.device | str = "cpu") -> Callable[[], float]:
    """Return a function that runs one forward and backward in so many tiles and returns its seconds."""
    torch.manual_seed(0)
    mlp = LlamaMLP(LlamaConfig(hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, num_attention_heads=1)).to(device)
    if name == BARE:
        mlp.forward = partial(_Tiles.apply, mlp.forward, tiles)  # type: ignore[method-assign]
    else:
        tile_with(name, mlp, tiles)
    x = torch.randn(1, tiles * TOKENS, HIDDEN, device=device, requires_grad=True)
    return partial(_seconds, mlp, x, torch.randn_like(x))


def _seconds(mlp: torch.nn.Module, x: Tensor, gradient: Tensor) -> float:
    mlp.zero_grad(set_to_none=True)
    x.grad = None
    if x.is_cuda:
        torch.cuda.synchronize()  # launches into a full queue would spin
    start = time.process_time()
    mlp(x).backward(gradient)
    return time.process_time() - start
