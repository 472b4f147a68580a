"""Compare the gradients of tiled MLPs with those of the untiled MLP: ``python -m benchmarks --only correctness``.

Every case runs one module whole in float64 and tiled in float32, with the same upstream gradient, and compares the
output and the gradients of the input and of all weights. A cell is the greatest relative error of these, and green
below 1e-5; ``raises`` names what was raised.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.peers import Peer, Tile
from benchmarks.sheet import Cell, Sheet

HIDDEN, INTERMEDIATE, TOKENS, SHARDS = 32, 96, 60, 4
EXACT = 1e-5


# The modules


class Activation(nn.Module):
    """SiLU that remembers the dtypes it saw, outside of the module: one that changes itself is not tiled."""

    seen: ClassVar[SimpleQueue[torch.dtype]] = SimpleQueue()  # no data, which the recompute would restore

    def forward(self, x: Tensor) -> Tensor:
        self.seen.put(x.dtype)
        return F.silu(x)


class Dropout(nn.Module):
    """Dropout that remembers the masks it drew, outside of the module, and uses given ones where it has them."""

    drawn: ClassVar[list[Tensor]] = []

    def __init__(self) -> None:
        super().__init__()
        self.given: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.given is not None:
            return x * self.given
        mask = F.dropout(torch.ones_like(x), 0.5, self.training)
        self.drawn.append(mask.detach().reshape(-1, x.shape[-1]))
        return x * mask


class MLP(nn.Module):
    """A gated MLP as transformers' models have it."""

    def __init__(self, out: int = HIDDEN, dropout: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (
            nn.Linear(HIDDEN, INTERMEDIATE, bias=False),
            nn.Linear(HIDDEN, INTERMEDIATE, bias=False),
        )
        self.act_fn = Activation()
        self.drop = Dropout() if dropout else nn.Identity()
        self.down_proj = nn.Linear(INTERMEDIATE, out, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.down_proj(self.drop(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


class Routed(MLP):
    """Returns a router's logits ``[tokens, 4]`` as well."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, 4, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(x.reshape(-1, HIDDEN))
        return super().forward(x) * logits.softmax(-1)[:, :1].view(*x.shape[:-1], 1), logits


class Scaled(MLP):
    """Takes a second tensor, one value for each token."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        out = super().forward(x)
        return out if scale is None else out * scale


class Mixing(MLP):
    """Normalises over the tokens: cannot be right in tiles."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * x.softmax(-2)


# Comparing


def trial(
    make: Callable[[], nn.Module],
    tile: Tile,
    shape: tuple[int, ...] = (1, TOKENS, HIDDEN),
    enter: Callable[[Tensor], Tensor] = lambda x: x,
    call: Callable[[nn.Module, Tensor], Any] = lambda module, x: module(x),
    change: Callable[[nn.Module], object] = lambda module: None,
    backwards: int = 1,
    needs_input_gradient: bool = True,
) -> float:
    """The greatest relative error of output and gradients, over ``backwards`` steps whose gradients add up."""
    torch.manual_seed(0)
    module = make()
    change(module)
    exact = copy.deepcopy(module).double()
    tile(module, SHARDS)
    values = [torch.randn(shape) for _ in range(backwards)]
    found, true = ([_step(m, _leaf(v, m, needs_input_gradient), enter, call) for v in values] for m in (module, exact))
    pairs = [pair for a, b in zip(found, true, strict=True) for pair in zip(a, b, strict=True)]
    return max(weights_off(module, exact), *(relative(a, b) for a, b in pairs))


def _leaf(value: Tensor, module: nn.Module, wanted: bool) -> Tensor:
    return value.to(next(module.parameters()).dtype, copy=True).requires_grad_(wanted)


def _step(
    module: nn.Module, leaf: Tensor, enter: Callable[[Tensor], Tensor], call: Callable[[nn.Module, Tensor], Any]
) -> list[Tensor | None]:
    """The outputs and the input's gradient."""
    outputs = call(module, enter(leaf))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    upstream(outputs).backward()
    return [*(out.detach() for out in outputs), leaf.grad]


def upstream(outputs: tuple[Tensor, ...]) -> Tensor:
    """A loss whose gradient by each output is random, the same in every call."""
    generator = torch.Generator().manual_seed(1)
    return torch.stack(
        [(out * torch.randn(out.shape, generator=generator).to(out.dtype)).sum() for out in outputs]
    ).sum()


def relative(found: Tensor | None, true: Tensor | None) -> float:
    """1 where a gradient is missing; 0 where none is due."""
    if true is None or not bool(true.any()):
        return 0.0 if found is None or not bool(found.any()) else 1.0
    if found is None:
        return 1.0
    return float((found.double() - true).norm() / true.norm())


def weights_off(module: nn.Module, exact: nn.Module) -> float:
    """The greatest relative error of the weights' gradients."""
    return max(relative(a.grad, b.grad) for a, b in zip(module.parameters(), exact.parameters(), strict=True))


# The cases that are more than a module and an input


def dropout(tile: Tile) -> float:
    """The reference is given the masks that the forward drew."""
    torch.manual_seed(0)
    module = MLP(dropout=True)
    exact = copy.deepcopy(module).double()
    tile(module, SHARDS)
    x = torch.randn(1, TOKENS, HIDDEN, requires_grad=True)
    module(x)  # a first call may try the module on a few tokens
    assert isinstance(module.drop, Dropout)
    assert isinstance(exact.drop, Dropout)
    module.drop.drawn.clear()
    out = module(x)
    exact.drop.given = torch.cat(module.drop.drawn).view(1, TOKENS, INTERMEDIATE).double()
    upstream((out,)).backward()
    y = x.detach().double().requires_grad_()
    upstream((exact(y),)).backward()
    return max(weights_off(module, exact), relative(x.grad, y.grad))


def autocast(tile: Tile) -> Cell:
    """Whether the backward recomputes in the dtype of the forward, which alone ran under autocast."""
    torch.manual_seed(0)
    module = MLP()
    tile(module, SHARDS)
    x = torch.randn(1, TOKENS, HIDDEN, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        module(x)
        out = module(x)
    while not module.act_fn.seen.empty():
        module.act_fn.seen.get()
    out.float().sum().backward()
    seen = {str(module.act_fn.seen.get())[6:] for _ in range(module.act_fn.seen.qsize())}
    return Cell("kept" if seen == {"bfloat16"} else f"recomputes in {', '.join(sorted(seen))}", seen == {"bfloat16"})


def by_autograd_grad(tile: Tile) -> float:
    """``torch.autograd.grad`` returns the weights' gradients and leaves ``.grad`` alone."""
    torch.manual_seed(0)
    module = MLP()
    exact = copy.deepcopy(module).double()
    tile(module, SHARDS)
    x = torch.randn(1, TOKENS, HIDDEN, requires_grad=True)
    found = torch.autograd.grad(upstream((module(x),)), list(module.parameters()), allow_unused=True)
    true = torch.autograd.grad(upstream((exact(x.detach().double()),)), list(exact.parameters()))
    left = max(relative(weight.grad, None) for weight in module.parameters())
    return max(left, *(relative(a, b) for a, b in zip(found, true, strict=True)))


def hooks(tile: Tile) -> Cell:
    """How often a weight's gradient is reported to a hook, as engines listen for it."""
    torch.manual_seed(0)
    module = MLP()
    fired: list[int] = []
    for weight in module.parameters():
        weight.register_post_accumulate_grad_hook(lambda w: fired.append(id(w)))
    tile(module, SHARDS)
    upstream((module(torch.randn(1, TOKENS, HIDDEN, requires_grad=True)),)).backward()
    times = len(fired) / 3
    return Cell("once" if times == 1 else f"{times:g} times", times == 1)


def _with_shared_weight(module: Any, x: Tensor) -> Any:
    return module(x) + F.linear(x, module.down_proj.weight.T[:HIDDEN])


CASES: dict[str, Callable[[Tile], float | Cell]] = {
    "one sequence": partial(trial, MLP),
    "batch of 3": partial(trial, MLP, shape=(3, TOKENS, HIDDEN)),
    "input [tokens, hidden]": partial(trial, MLP, shape=(TOKENS, HIDDEN)),
    "non-contiguous, batch of 3": partial(trial, MLP, shape=(TOKENS, 3, HIDDEN), enter=lambda x: x.transpose(0, 1)),
    "5 tokens, 4 tiles, two backward passes": partial(trial, MLP, shape=(1, 5, HIDDEN), backwards=2),
    "fewer tokens than tiles": partial(trial, MLP, shape=(1, 2, HIDDEN)),
    "no tokens": partial(trial, MLP, shape=(1, 0, HIDDEN)),
    "gradients of two backward passes add up": partial(trial, MLP, backwards=2),
    "output size differs from input size": partial(trial, partial(MLP, out=48)),
    "input without gradient": partial(trial, MLP, needs_input_gradient=False),
    "frozen gate": partial(trial, MLP, change=lambda module: module.gate_proj.requires_grad_(False)),
    "all weights frozen": partial(trial, MLP, change=lambda module: module.requires_grad_(False)),
    "weight shared with the outside": partial(trial, MLP, call=_with_shared_weight),
    "router logits as a second output": partial(trial, Routed),
    "second argument per token": partial(trial, Scaled, call=lambda module, x: module(x, x[..., :1].detach())),
    "dropout inside": dropout,
    "autocast in the recompute": autocast,
    "inside torch.utils.checkpoint": partial(
        trial, MLP, call=lambda module, x: checkpoint(module, x, use_reentrant=False)
    ),
    "called twice in one graph": partial(trial, MLP, call=lambda module, x: module(module(x))),
    "torch.autograd.grad": by_autograd_grad,
    "hook of a weight fires": hooks,
}


def correctness(everyone: list[Peer]) -> list[Sheet]:
    """Return a table of cases and packages. It runs on the CPU, so that only the tiles differ."""
    here = [peer for peer in everyone if peer.tile is not None]
    sheet = Sheet(
        "correctness", "tiled MLPs compared with the untiled MLP in float64", ["", *(peer.name for peer in here)]
    )
    sheet.notes = ["Largest relative error of output and gradients; ✗ above 1e-5."]
    for name, case in CASES.items():
        sheet.add(name, *(_cell(case, peer.tile) for peer in here if peer.tile is not None))
    sheet.add("a module that mixes tokens", *(_refused(peer.tile) for peer in here if peer.tile is not None))
    return [sheet]


def _cell(case: Callable[[Tile], float | Cell], tile: Tile) -> Cell:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = case(tile)
        except Exception as error:  # a peer may raise anything
            return Cell(f"raises {type(error).__name__}", False)
    if isinstance(found, Cell):
        return found
    return Cell(f"{found:.0e}" if found < EXACT else f"wrong by {found:.0%}", found < EXACT)


def _refused(tile: Tile) -> Cell:
    cell = _cell(partial(trial, Mixing), tile)
    runs_others = bool(_cell(partial(trial, MLP), tile).good)
    return Cell("refused", True) if cell.text.startswith("raises") and runs_others else cell


def rounding(everyone: list[Peer], device: torch.device, counts: tuple[int, ...] = (1, 4, 16, 64, 512)) -> list[Sheet]:
    """The error of bfloat16 weight gradients against the number of tiles."""
    sheet = Sheet("rounding", "error of bfloat16 weight gradients against float64", ["tiles", *map(str, counts)])
    sheet.notes = [
        "A gated MLP on 4096 tokens, the weight with the largest error, each package at its defaults;"
        " ✗ above 1.5 times its error in one tile."
    ]
    for peer in everyone:
        if peer.tile is not None and not _cell(partial(trial, MLP), peer.tile).good:
            sheet.add(peer.name, *(Cell("fails", False) for _ in counts))
        elif peer.tile is not None:
            found = [_bfloat16_error(partial(peer.tile, shards=count), device) for count in counts]
            sheet.add(peer.name, *(Cell(f"{error:.1e}", error < 1.5 * found[0]) for error in found))
    return [sheet]


def _bfloat16_error(tile: Callable[[nn.Module], None], device: torch.device) -> float:
    torch.manual_seed(0)
    module = MLP().bfloat16().to(device)
    exact = copy.deepcopy(module).double()
    tile(module)
    x, gradient = (torch.randn(1, 4096, HIDDEN).to(device, torch.bfloat16) for _ in range(2))
    module(x.requires_grad_()).backward(gradient)
    exact(x.detach().double()).backward(gradient.double())
    return weights_off(module, exact)
