"""A training step as a case that hypothesis can draw: module, input, mode, surroundings; and what it gives."""

from __future__ import annotations

import copy
import random
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from lt_tiled import tile
from lt_tiled.modules.patch import set_patch
from lt_tiled.recompute.blocks import BlockPatch
from tests.property.parts import MODULES, OTHER_MODULES, OTHERS, POSITION_WISE, H, build

Values = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One step. Its fields are the names of the functions and dictionaries below."""

    parts: tuple[str, ...] = ("linear",)
    lead: tuple[int, ...] = (2, 8)
    tiles: int = 4
    layout: str = "contiguous"
    wants_grad: bool = True
    training: bool = True
    extra: str = "none"
    output: str = "tensor"
    frozen: str = "nothing"
    before: str = "nothing"
    around: str = "nothing"
    backward: str = "once"
    between: str = "nothing"
    checkpointed: bool = False
    """Whether the module, tiled or not, is a block with activation checkpointing in the run that is compared."""
    again: bool = False
    """Whether a second forward pass follows what happens between the passes."""


# The module and its input


class Composed(nn.Module):
    """Parts one after another, then what the arguments and the output ask for."""

    def __init__(self, parts: tuple[str, ...], output: str) -> None:
        super().__init__()
        self.parts = nn.ModuleList(build(name) for name in parts)
        self.output = output

    def forward(self, x: Tensor, *scales: Tensor, per_token: Tensor | None = None, mask: Tensor | None = None) -> Any:
        y = x
        for part in self.parts:
            y = part(y)
        for scale in scales:
            y = y * scale
        if per_token is not None:
            y = y * per_token[..., None]
        if mask is not None:
            y = y.masked_fill(mask[..., None], 0.0)
        return OUTPUTS[self.output](y, x)


OUTPUTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tensor": lambda y, x: y,
    "tuple": lambda y, x: (y, y.sum(-1)),
    "dict": lambda y, x: {"y": y, "more": y * 2},
    "same twice": lambda y, x: (y, y),
    "views": lambda y, x: (y[..., :2], y[..., 2:]),
    "per token, flat": lambda y, x: (y, y.reshape(-1, H).sum(-1)),
    "wide": lambda y, x: torch.cat([y, y * y], -1),
    "one channel": lambda y, x: y.sum(-1),
    "indices": lambda y, x: (y, y.argmax(-1)),
    "also the input": lambda y, x: (y, x),
    "also detached": lambda y, x: (y, y.detach()),
    "detached alone": lambda y, x: y.detach(),
    "in float32": lambda y, x: y.float().double(),
    "mean": lambda y, x: (y, y.mean()),
    "transposed": lambda y, x: y.transpose(0, 1),
}
PLAIN_OUTPUTS = [*OUTPUTS][:13]
"""Outputs that are per token."""

Extra = tuple[tuple[Any, ...], dict[str, Any]]
EXTRAS: dict[str, Callable[[tuple[int, ...]], Extra]] = {
    "none": lambda lead: ((), {}),
    "mask": lambda lead: ((), {"mask": _entries(*lead) > 0.3}),
    "per token": lambda lead: ((), {"per_token": _entries(*lead)}),
    "per token, wants a gradient": lambda lead: ((), {"per_token": _entries(*lead).requires_grad_()}),
    "like the input": lambda lead: ((_entries(*lead, H).requires_grad_(),), {}),
    "column": lambda lead: ((_entries(*lead, 1).requires_grad_(),), {}),
    "channels": lambda lead: ((_entries(H).requires_grad_(),), {}),
    "scalar": lambda lead: ((_entries().requires_grad_(),), {}),
    "number": lambda lead: ((1.5,), {}),
    "per row": lambda lead: ((_entries(lead[0], *[1] * (len(lead) - 1), H),), {}),
    "per position": lambda lead: ((_entries(*[1] * (len(lead) - 1), lead[-1], 1),), {}),
    "per position, wants a gradient": lambda lead: ((_entries(lead[-1], H).requires_grad_(),), {}),
}
PLAIN_EXTRAS = [*EXTRAS][:9]
"""Arguments that tiles can be given."""

LAYOUTS: dict[str, Callable[[tuple[int, ...]], Tensor]] = {
    "contiguous": lambda lead: _entries(*lead, H),
    "transposed": lambda lead: _entries(H, *lead).movedim(0, -1),
    "swapped": lambda lead: _entries(*reversed(lead), H).permute(*reversed(range(len(lead))), len(lead)),
    "strided": lambda lead: _entries(*lead, 2 * H)[..., ::2],
    "offset": lambda lead: _entries(lead[0] + 1, *lead[1:], H)[1:],
    "expanded": lambda lead: _entries(*lead[:-1], 1, H).expand(*lead, H),
}


def _entries(*shape: int) -> Tensor:
    """Return fixed numbers of any shape."""
    size = int(torch.Size(shape).numel())
    return torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64).view(shape)


# What happens before, around and after the call


def _first_call(case: Case, **changes: Any) -> Callable[[nn.Module], None]:
    def call(module: nn.Module) -> None:
        other = replace(case, **changes)
        x, args, kwargs = _inputs(other)
        module.train(other.training)
        with torch.set_grad_enabled(other.backward != "no_grad"):
            module(x, *args, **kwargs)
        module.train(case.training)

    return call


BEFORE: dict[str, Callable[[Case], Callable[[nn.Module], None]]] = {
    "nothing": lambda case: lambda module: None,
    "a call": lambda case: _first_call(case),
    "a call in the other mode": lambda case: _first_call(case, training=not case.training),
    "a call without gradients": lambda case: _first_call(case, backward="no_grad"),
    "a call on a frozen input": lambda case: _first_call(case, wants_grad=False),
    "a call on one row": lambda case: _first_call(case, lead=(*[1] * (len(case.lead) - 1), 20)),
    "a call on other arguments": lambda case: _first_call(case, extra="channels"),
    "a call on few tokens": lambda case: _first_call(case, lead=(*[1] * (len(case.lead) - 1), 1)),
    "a call on no tokens": lambda case: _first_call(case, lead=(*case.lead[:-1], 0)),
}

FROZEN: dict[str, Callable[[nn.Module], object]] = {
    "nothing": lambda module: None,
    "everything": lambda module: module.requires_grad_(False),
    "the first": lambda module: next(module.parameters(), torch.empty(0)).requires_grad_(False),
    "biases": lambda module: [p.requires_grad_(p.dim() > 1) for p in module.parameters()],
    "matrices": lambda module: [p.requires_grad_(p.dim() < 2) for p in module.parameters()],
}

Call = Callable[..., Any]


def _outer(module: nn.Module) -> nn.Linear:
    """Return a linear layer outside of the module that has the weight of one inside, if there is one."""
    torch.manual_seed(1)
    outer = nn.Linear(H, H).double()
    inner = next((p for p in module.parameters() if p.shape == (H, H)), None)
    if isinstance(inner, nn.Parameter):
        outer.weight = inner
    return outer


def _with_hooks(module: nn.Module) -> Call:
    module.register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))
    module.register_forward_hook(lambda module, args, output: pytree.tree_map_only(Tensor, _doubled, output))
    module.register_full_backward_hook(lambda module, inputs, outputs: None)
    return module


def _doubled(t: Tensor) -> Tensor:
    return t * 2 if t.is_floating_point() else t


def _with_inner_hook(hook: Callable[[nn.Module, Any, Any], Any]) -> Callable[[nn.Module], Call]:
    def around(module: nn.Module) -> Call:
        module.parts[0].register_forward_hook(hook)
        return module

    return around


def _hooked_input(module: nn.Module) -> Call:
    def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        x = x * 1
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 3)
        return module(x, *args, **kwargs)

    return call


def _of_first(y: Any, then: Callable[[Tensor], Any]) -> Any:
    """Apply a function to the first tensor of an output."""
    leaves, tree = pytree.tree_flatten(y)
    return pytree.tree_unflatten([then(leaves[0]), *leaves[1:]], tree)


AROUND: dict[str, Callable[[nn.Module], Call]] = {
    "nothing": lambda module: module,
    "checkpoint": lambda module: lambda *a, **k: checkpoint(module, *a, use_reentrant=False, **k),
    "reentrant checkpoint": lambda module: (
        lambda x, *a, **k: checkpoint(lambda x: module(x, *a, **k), x, use_reentrant=True)
    ),
    "checkpoint of more": lambda module: (
        lambda x, *a, **k: checkpoint(
            lambda x: _of_first(module(x.tanh(), *a, **k), lambda y: y.sin()), x, use_reentrant=False
        )
    ),
    "called twice": lambda module: lambda x, *a, **k: (module(x, *a, **k), module(x * 2, *a, **k)),
    "one after the other": lambda module: lambda x, *a, **k: module(pytree.tree_leaves(module(x, *a, **k))[0], *a, **k),
    "weights used outside": lambda module: (
        lambda x, *a, **k: _of_first(module(_outer(module)(x), *a, **k), lambda y: y + _outer(module)(x).sum())
    ),
    "copied": copy.deepcopy,
    "hooks": _with_hooks,
    "inner hook": _with_inner_hook(lambda module, args, output: output * 2),
    "inner hook that mixes": _with_inner_hook(lambda module, args, output: output - output.mean(0)),
    "hook of the input": _hooked_input,
    "output changed in place": lambda module: lambda *a, **k: _of_first(module(*a, **k), lambda y: y.mul_(2)),
    "input changed afterwards": lambda module: _changing_input(module),
}


def _changing_input(module: nn.Module) -> Call:
    def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        x = x * 1
        y = module(x, *args, **kwargs)
        x.mul_(2)
        return y, x

    return call


def _each_buffer(change: Callable[[nn.Module, str, Tensor], object]) -> Callable[[nn.Module], object]:
    return lambda module: [change(m, name, b) for m in module.modules() for name, b in m._buffers.items()]


def _each_weight(change: Callable[[nn.Module, str, Any], object]) -> Callable[[nn.Module], object]:
    return lambda module: [
        change(m, name, p) for m in module.modules() for name, p in [*m._parameters.items()] if p is not None
    ]


def _each_part(name: str, value: Callable[[Any], Any]) -> Callable[[nn.Module], object]:
    return lambda module: [setattr(m, name, value(getattr(m, name))) for m in module.modules() if hasattr(m, name)]


BETWEEN: dict[str, Callable[[nn.Module], object]] = {
    "nothing": lambda module: None,
    "eval": lambda module: module.eval(),
    "train": lambda module: module.train(),
    "no gradients": lambda module: module.zero_grad(),
    "copied": copy.deepcopy,
    "frozen": lambda module: module.requires_grad_(False),
    "random numbers": lambda module: torch.rand(3),
    "state loaded": lambda module: module.load_state_dict(copy.deepcopy(module.state_dict())),
    "weights in place": _each_weight(lambda m, name, p: p.mul_(2)),
    "data of weights set": _each_weight(lambda m, name, p: setattr(p, "data", p.data * 2)),
    "weights replaced": _each_weight(lambda m, name, p: setattr(m, name, nn.Parameter(p.data * 2, p.requires_grad))),
    "buffers in place": _each_buffer(lambda m, name, b: b.mul_(2)),
    "buffers replaced": _each_buffer(lambda m, name, b: setattr(m, name, b * 2)),
    "data of buffers set": _each_buffer(lambda m, name, b: setattr(b, "data", b.data * 2)),
    "number changed": _each_part("factor", lambda value: value * 2),
    "plain tensor in place": _each_part("constant", lambda value: value.mul_(2)),
    "plain tensor replaced": _each_part("constant", lambda value: value * 2),
    "part replaced": lambda module: module.parts.__setitem__(0, build("channel scale").double()),
    "parts reversed": lambda module: setattr(module, "parts", module.parts[::-1]),
}
BENIGN = [*BETWEEN][:7]
"""What changes no result."""

BACKWARD = ("once", "twice", "input alone", "weights alone", "part of the outputs", "no_grad")


# Strategies


def leads(least: int = 0) -> st.SearchStrategy[tuple[int, ...]]:
    """Return shapes of one to three dimensions without the last one, of few tokens."""
    one = st.tuples(st.integers(least, 90))
    two = st.tuples(st.integers(least, 5), st.integers(least, 40))
    return one | two | st.tuples(st.integers(least, 3), st.integers(least, 6), st.integers(least, 8))


def _seldom(names: Any) -> st.SearchStrategy[str]:
    """Return a strategy for one of the names, half of the time the first."""
    names = list(names)
    return st.just(names[0]) | st.sampled_from(names)


POSITION_WISE_NAMES = [*POSITION_WISE, *MODULES]


def cases() -> st.SearchStrategy[Case]:
    """Return any case."""
    names = st.sampled_from([*POSITION_WISE_NAMES, *OTHERS, *OTHER_MODULES])
    return st.builds(
        Case,
        parts=st.lists(names, min_size=1, max_size=3).map(tuple),
        lead=leads(),
        tiles=st.integers(2, 9),
        layout=_seldom(LAYOUTS),
        wants_grad=st.booleans(),
        training=st.booleans(),
        extra=_seldom(EXTRAS),
        output=_seldom(OUTPUTS),
        frozen=_seldom(FROZEN),
        before=_seldom(BEFORE),
        around=_seldom(AROUND),
        backward=_seldom(BACKWARD),
        between=_seldom(BETWEEN),
        checkpointed=st.booleans(),
        again=st.booleans(),
    ).filter(lambda case: not any(known(case) for known in KNOWN.values()))


def position_wise_cases() -> st.SearchStrategy[Case]:
    """Return cases that must not be refused."""
    return st.builds(
        Case,
        parts=st.lists(st.sampled_from(POSITION_WISE_NAMES), min_size=1, max_size=4).map(tuple),
        lead=leads(1),
        tiles=st.integers(2, 9),
        layout=_seldom(LAYOUTS),
        wants_grad=st.booleans(),
        training=st.booleans(),
        extra=_seldom(PLAIN_EXTRAS),
        output=_seldom(PLAIN_OUTPUTS),
        frozen=_seldom(FROZEN),
        before=_seldom(BEFORE),
        around=_seldom(["nothing", "checkpoint", "called twice", "weights used outside", "copied", "hooks"]),
        backward=_seldom(["once", "twice", "input alone", "weights alone", "part of the outputs", "no_grad"]),
        between=_seldom(BENIGN),
        checkpointed=st.booleans(),
        again=st.booleans(),
    ).filter(lambda case: not any(known(case) for known in (*KNOWN.values(), *REFUSED.values())))


_SHARING = {"identity", "nn.Dropout"}
"""Parts that return their input."""

KNOWN: dict[str, Callable[[Case], bool]] = {
    "another weight in the recompute of a checkpoint, where torch computes its gradients with that": lambda case: (
        "checkpoint" in case.around
        and case.between in ("weights replaced", "frozen", "part replaced", "parts reversed")
    ),
    "what a forward pass changes and torch's own checkpoint changes again before it computes gradients": lambda case: (
        "checkpoint" in case.around and bool({"running mean", "counts and uses"} & {*case.parts})
    ),
    "outputs that share memory, with each other or the input, are separate tensors in tiles": lambda case: (
        (case.around == "output changed in place" and case.output in ("also detached", "same twice"))
        or ("changed" in case.around and (case.output == "also the input" or {*case.parts} <= _SHARING))
    ),
    "the input of a block that is changed before its recompute: torch's own error": lambda case: (
        case.checkpointed
        and (("input" in case.around and "changed" in case.around) or "writes into its input" in case.parts)
    ),
}
"""What is known to go wrong, and is not drawn until it is fixed."""

REFUSED: dict[str, Callable[[Case], bool]] = {
    "as many tokens as channels: an argument of channels is cut": lambda case: (
        case.lead == (H,) and (case.extra == "channels" or case.before == "a call on other arguments")
    ),
    "the hook of a weight that the output does not depend on": lambda case: (
        "hooks of a weight" in case.parts and (case.output == "detached alone" or "constant" in case.parts)
    ),
}
"""What works position by position, and is refused."""


# Running a case


def _inputs(case: Case) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    args, kwargs = EXTRAS[case.extra](case.lead)
    return LAYOUTS[case.layout](case.lead).requires_grad_(case.wants_grad), args, kwargs


def run(case: Case, tiled: bool) -> Values:
    """Return the outputs, the gradients, and what is left in the module."""
    random.seed(0)
    torch.manual_seed(0)
    module: nn.Module = Composed(case.parts, case.output).train(case.training).double()
    FROZEN[case.frozen](module)
    if tiled:
        tile(module, num_shards=case.tiles)
        if case.checkpointed:
            set_patch(module, BlockPatch("block"))
    BEFORE[case.before](case)(module)
    call = AROUND[case.around](module)
    if isinstance(call, Composed):
        module = call
    x, args, kwargs = _inputs(case)
    torch.manual_seed(0)
    with torch.set_grad_enabled(case.backward != "no_grad"):
        y = call(x, *args, **kwargs)
    leaves = pytree.tree_leaves(y)
    found: Values = {f"output {i}": t.detach().clone() if isinstance(t, Tensor) else t for i, t in enumerate(leaves)}
    with torch.no_grad():
        BETWEEN[case.between](module)
    if case.again:
        with torch.set_grad_enabled(case.backward != "no_grad"):
            more = pytree.tree_leaves(call(x, *args, **kwargs))
        found |= {f"output {i}, again": t.detach().clone() for i, t in enumerate(more) if isinstance(t, Tensor)}
        leaves += more
    wanted = {"input": x} | {f"argument {i}": t for i, t in enumerate(pytree.tree_leaves((args, kwargs)))}
    wanted |= {f"weight {name}": p for name, p in [*module.named_parameters(), *module.named_buffers()]}
    wanted = {name: t for name, t in wanted.items() if isinstance(t, Tensor) and t.requires_grad}
    found |= _gradients(case, leaves, x, wanted)
    found |= {f"state {name}": value.clone() for name, value in module.state_dict().items()}
    found["input afterwards"] = x.detach()
    return found


def _gradients(case: Case, leaves: list[Any], x: Tensor, wanted: dict[str, Tensor]) -> Values:
    chosen = [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]
    chosen = chosen[:1] if case.backward == "part of the outputs" else chosen
    if case.backward == "no_grad" or not wanted or not any(t.requires_grad for t in chosen):
        return {}
    loss: Any = sum((t * _entries(*t.shape).to(t.dtype) + t * t / 2).sum() for t in chosen)
    if case.backward in ("input alone", "weights alone"):
        names = [name for name in wanted if (name == "input") == (case.backward == "input alone")]
        gradients = torch.autograd.grad(loss, [wanted[name] for name in names], allow_unused=True) if names else ()
        return dict(zip(names, gradients, strict=True))
    loss.backward(retain_graph=case.backward == "twice")
    if case.backward == "twice":
        loss.backward()
    return {f"gradient of {name}": t.grad for name, t in wanted.items()}


# Comparing


def differences(case: Case, tiled: Values, untiled: Values) -> list[str]:
    """Return what is not equal."""
    found = {name: (tiled.get(name), untiled.get(name)) for name in tiled | untiled}
    found = {name: pair for name, pair in found.items() if not _equal(*pair)}
    if found and "checkpoint" in case.around:  # torch's own may recompute with what changed since: less right than ours
        plain = run(replace(case, around="nothing"), tiled=False)
        if all(_equal(tiled.get(name), plain.get(name)) for name in tiled | plain):
            return []
    return [f"{name}: {a} instead of {b}" for name, (a, b) in found.items()]


def _equal(a: Any, b: Any, bound: float = 1e-9) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        a, b = a.detach(), b.detach()
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if not a.is_floating_point():
            return torch.equal(a, b)
        scale = float(b.nan_to_num().abs().amax()) if b.numel() else 0.0
        return torch.allclose(a, b, rtol=bound, atol=bound * (scale + 1e-2), equal_nan=True)
    if isinstance(a, Tensor) or isinstance(b, Tensor):  # autograd gives no gradient instead of zeros where it knows
        return all(t is None or not bool(t.any()) for t in (a, b))
    return type(a) is type(b) and (a == b or type(a) is object)


_REMEDY = re.compile(
    r"Remove it from targets|Do not tile|Make the change|Return it|Register it|without, or lt_tiled.untile|"
    r"Remove the hook|Leave it as it is|[Rr]emove the module from"
)


def refused(error: BaseException) -> bool:
    """Whether an error is lt_tiled's, and names the module and a remedy."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = "/lt_tiled/" in frames[-1].filename
    named = re.search(r"Composed|Part|weight \w+\.", str(error)) is not None
    return ours and isinstance(error, ValueError | RuntimeError) and named and bool(_REMEDY.search(str(error)))
