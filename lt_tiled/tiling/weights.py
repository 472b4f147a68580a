"""The weights of a tile: leaves of its own in their place, and the sums of their gradients over the tiles.

NOTE [Substitution]
A tile's graph begins at leaves of its own, one for each weight, whose hooks sum the gradients of all tiles. They are
not put into the module, where another thread would see them and Ctrl-C could leave them. The recompute runs on shallow
copies of the modules that hold them (:class:`Copies`), made once for each backward pass, so that nothing stands
between the module's code and torch. Where code may reach its modules in other ways (closures, a ``forward`` that was
replaced by another function), a ``TorchFunctionMode``, which belongs to one thread, hands the leaves to torch's
functions in place of the weights. What still gets a weight itself, such as a custom autograd Function, which is called
past such modes, is differentiated with respect to it too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode

from lt_tiled.modules.patch import HOOKS, is_of
from lt_tiled.tiling.recompute import entry
from lt_tiled.tiling.state import Work


@dataclass
class Weight:
    """One trainable tensor and every place in the modules that holds it (tied weights have several)."""

    tensor: Tensor
    places: list[tuple[nn.Module, str]] = field(default_factory=list)

    def hooked(self) -> bool:
        """Whether a hook of a user is on its gradient."""
        hooks = (hook for tensor in self.now() for hook in (tensor._backward_hooks or {}).values())
        return not all(is_of(hook, ("torch.", "deepspeed.", "lt_tiled.")) for hook in hooks)

    def now(self) -> list[Tensor]:
        """Return what stands in the weight's places now, each tensor once: engines swap it."""
        there = {id(self.tensor): self.tensor}
        for owner, name in self.places:  # of which FSDP with use_orig_params=True fills two
            for holder in (owner._parameters, owner._buffers, owner.__dict__):
                if isinstance(tensor := entry(holder, name), Tensor):
                    there[id(tensor)] = tensor
        return list(there.values())


def trainable_weights(work: Work) -> list[Weight]:
    """Return the tensors of the work's modules that want a gradient, each once.

    Leaves in plain attributes count, and views of a parameter: FSDP with ``use_orig_params=False`` keeps its views of
    the flat weights there. Other attributes are what the module computed itself.
    """
    found: dict[int, Weight] = {}
    for owner in work.parts():
        plain = ((name, t) for name, t in owner.__dict__.items() if isinstance(t, Tensor))
        attributes = ((name, t) for name, t in plain if t.is_leaf or isinstance(t._base, nn.Parameter))
        for name, tensor in [*owner._parameters.items(), *owner._buffers.items(), *attributes]:
            if tensor is not None and tensor.requires_grad:
                places = found.setdefault(id(tensor), Weight(tensor)).places
                if (owner, name) not in places:
                    places.append((owner, name))
    return list(found.values())


class Substituted(TorchFunctionMode):
    """Lets torch's functions see other tensors in place of some, on this thread alone: see NOTE [Substitution].

    Args:
        pairs: Each tensor and what is to be seen in its place.
    """

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._pairs = {id(tensor): (tensor, instead) for tensor, instead in pairs}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*map(self._instead, args), **{key: self._instead(v) for key, v in (kwargs or {}).items()})

    def end(self) -> None:
        """Substitute nothing any more: Ctrl-C in the moment when torch leaves the mode would leave it on."""
        self._pairs = {}

    def _instead(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._pairs.get(id(value), (None, value))[1]
        return type(value)(map(self._instead, value)) if type(value) in (list, tuple) else value


@contextmanager
def substituted(
    weights: Sequence[Weight], leaves: Sequence[GradientSum | Tensor], kind: type[Substituted] = Substituted
) -> Iterator[Any]:
    """Let the modules' code compute with other leaves in place of their weights, as they are now."""
    plain = [leaf.leaf if isinstance(leaf, GradientSum) else leaf for leaf in leaves]
    pairs = zip(present(weights), plain, strict=True)
    mode = kind((there, leaf) for tensors, leaf in pairs for there in tensors)
    try:
        with mode:
            yield mode
    finally:
        mode.end()


def present(weights: Sequence[Weight]) -> list[list[Tensor]]:
    """Return what stands in the places of each weight now.

    Raises:
        RuntimeError: If a tensor stands in the places of two of them.
    """
    found = [weight.now() for weight in weights]
    if len({id(there) for tensors in found for there in tensors}) < sum(map(len, found)):
        owner, name = weights[0].places[0]
        raise RuntimeError(
            f"Weights of the tiled module with {type(owner).__name__}.{name} were exchanged or tied since its forward"
            " pass, so its backward pass cannot tell them apart. Do so after the backward pass."
        )
    return found


class Copies:
    """Copies of a work's modules, for one backward pass. The modules themselves stay as they are.

    A copy shares everything with its module but the dictionaries of its attributes, parameters and submodules. What
    its code sets is lost with it.

    Args:
        work: The work.
        weights: Its trainable weights.
        sums: Of their gradients; the copies hold their leaves.
    """

    def __init__(self, work: Work, weights: Sequence[Weight], sums: Sequence[GradientSum]) -> None:
        self._parts, self._roots = set(work.parts()), set(work.modules)
        places = [(place, total) for weight, total in zip(weights, sums, strict=True) for place in weight.places]
        with torch.enable_grad():  # code that reads the weight itself gets a view of its leaf
            seen = [total.leaf.t() if total.turned else total.leaf for total in sums]
        for weight, leaf in zip(weights, seen, strict=True):
            if type(leaf) is Tensor:  # a user's attributes, not those of engines
                users = {n: v for n, v in weight.tensor.__dict__.items() if not n.startswith(("_", "ds_"))}
                leaf.__dict__.update(users, _is_param=isinstance(weight.tensor, nn.Parameter))
        self._leaves = {place: leaf for weight, leaf in zip(weights, seen, strict=True) for place in weight.places}
        self._turned = {owner: total.leaf for (owner, _), total in places if total.turned}
        self._made: dict[nn.Module, nn.Module] = {}
        self._bound: list[tuple[nn.Module, str]] = []
        """The attributes that are methods of their copy."""
        self.function = self._on_copies(work.function)

    def of(self, module: nn.Module) -> nn.Module:
        """Return the copy of a module."""
        if module not in self._made:
            self._copy(module)
        return self._made[module]

    def _copy(self, module: nn.Module) -> None:
        cls = type(module)
        copy = self._made[module] = object.__new__(cls)
        held = copy.__dict__
        held.update(module.__dict__)
        for name in ("_parameters", "_buffers"):
            entries = dict(module.__dict__[name].items())
            found = {entry: self._leaves[module, entry] for entry in entries if (module, entry) in self._leaves}
            if found or name == "_parameters":  # a buffer that the code replaces is the module's own
                held[name] = {**entries, **found}
        children = module.__dict__["_modules"].items()
        held["_modules"] = {name: self.of(part) if part in self._parts else part for name, part in children}
        for name, value in module.__dict__.items():
            if (module, name) in self._leaves:
                held[name] = self._leaves[module, name]
            elif isinstance(value, MethodType) and value.__self__ is module:
                held[name] = MethodType(value.__func__, copy)
                self._bound.append((copy, name))
        if module in self._roots:
            held.pop("forward", None)  # the patched one, which makes the tiles
        if module in self._turned:
            forward = partial(_product, held["_parameters"], self._leaves[module, "weight"], self._turned[module])
            call_with(copy, forward, called=module not in self._roots)

    def _on_copies(self, function: Any) -> Any:
        """Return a function that reaches its modules through its arguments, on the copies."""
        if isinstance(function, partial):
            return partial(self._on_copies(function.func), *map(self._on_copies, function.args), **function.keywords)
        if isinstance(function, MethodType) and isinstance(function.__self__, nn.Module):
            copy = self.of(function.__self__)
            linear = function.__func__ is nn.Linear.forward  # which call_with may replace
            return partial(_forward, copy) if linear else MethodType(function.__func__, copy)
        return self.of(function) if isinstance(function, nn.Module) else function

    def end(self) -> None:
        """Take away what makes the copies refer to themselves."""
        for copy, name in self._bound:
            copy.__dict__.pop(name, None)


def _forward(copy: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return copy.forward(*args, **kwargs)


def call_with(copy: nn.Module, forward: Callable[[Tensor], Tensor], called: bool) -> str:
    """Let a copy run another forward, and return the attribute that is set for it.

    Without hooks it is the attribute that ``nn.Module.compile`` sets, which is called directly.

    Args:
        copy: The copy.
        forward: What it runs.
        called: Whether the copy is called, not its forward.
    """
    hooked = any(copy.__dict__[kind] for kind in HOOKS) or torch_module._has_any_global_hook()
    direct = called and not hooked and copy._compiled_call_impl is None
    place = "_compiled_call_impl" if direct else "forward"
    copy.__dict__[place] = forward
    return place


def _product(parameters: dict[str, Any], weight: Tensor, turned: Tensor, input: Tensor) -> Tensor:
    """Do what a linear module does, without transposing its weight for each tile."""
    if parameters["weight"] is weight and parameters["bias"] is None:
        return torch.matmul(input, turned)
    return F.linear(input, parameters["weight"], parameters["bias"])  # functional_call puts others there


def can_copy(work: Work) -> bool:
    """Whether the work reaches all of its modules through the arguments of its function and their submodules."""
    return _reaches_by_arguments(work.function) and all(map(_is_plain, work.parts()))


def _reaches_by_arguments(function: Any) -> bool:
    if isinstance(function, partial):
        return all(map(_reaches_by_arguments, (function.func, *function.args)))
    bound = isinstance(function, MethodType) and isinstance(function.__self__, nn.Module)
    return bound or isinstance(function, nn.Module) or is_of(function, ("lt_tiled.",))


def _is_plain(module: nn.Module) -> bool:
    """Whether an object of the same class with the same attributes does the same: not so for TorchScript and lists."""
    forward = module.__dict__.get("forward")
    bound = forward is None or (isinstance(forward, MethodType) and forward.__self__ is module)
    made = type(module).__new__ is object.__new__
    slots = any(base.__dict__.get("__slots__") for base in type(module).__mro__)
    return bound and made and not slots and not isinstance(module, torch.jit.ScriptModule)


def sum_dtype(dtype: torch.dtype, accumulate: str) -> torch.dtype:
    """Return the dtype in which gradients of a dtype are summed."""
    return torch.float32 if accumulate == "float32" and dtype in (torch.bfloat16, torch.float16) else dtype


class GradientSum:
    """Sums one tensor's gradients over the tiles while autograd produces them.

    The leaf's hook adds a tile's gradient to the sum and hands autograd a stand-in without memory, so that only one
    gradient is alive next to the sum. Sums of 16-bit gradients are kept in float32 and rounded once: summed in their
    own dtype, their error grows with the number of tiles.

    Args:
        tensor: The tensor.
        accumulate: ``"float32"`` or ``"param"``.
        turned: Whether the leaf is the transposed tensor: see :attr:`Copies.turned`.
    """

    def __init__(self, tensor: Tensor, accumulate: str, turned: bool = False) -> None:
        self.dtype = tensor.dtype
        self.sum_dtype = sum_dtype(tensor.dtype, accumulate)
        self.sum: Tensor | None = None
        self.turned = turned
        # Detached last: autocast keeps its casts of leaves that are no views.
        self.leaf = (tensor.detach().t() if turned else tensor).detach().requires_grad_()
        self._nothing = torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand_as(self.leaf)
        self._handle = self.leaf.register_hook(self.add)

    def add(self, gradient: Tensor | None) -> Tensor | None:
        """Add one tile's gradient, or a part of it; a tiled module inside has none for a weight it does not use."""
        if gradient is None:
            return None
        dense = gradient.layout is torch.strided
        if self.sum is None:
            form: Any = {"memory_format": torch.contiguous_format} if dense and not self.turned else {}
            self.sum = gradient.to(self.sum_dtype, copy=True, **form)
        else:
            self.sum.add_(gradient)
        return self._nothing if dense else gradient

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add a matrix product, in the product itself if the dtypes allow it."""
        if self.sum is not None and self.sum.dtype == left.dtype:
            torch.addmm(self.sum, left, right, out=self.sum)
        else:
            self.add(left.mm(right))

    def add_direct(self, tensor: Tensor, gradient: Tensor, module: str) -> None:
        """Add a gradient of the tensor that stands in the weight's place, which code used instead of the leaf.

        Raises:
            RuntimeError: If that is another one than the forward pass saw, or has hooks, which ran for this tile.
        """
        same = tensor.data_ptr() == self.leaf.data_ptr()
        if not same or tensor._backward_hooks:
            why = "its hooks would run for each tile" if same else "it was replaced since the forward pass"
            raise RuntimeError(
                f"{module}: a custom autograd Function uses its weight of shape {list(tensor.shape)} directly, and"
                f" {why}. Leave it as it is until the backward pass, or lt_tiled.untile() the module."
            )
        self.add(gradient.t() if self.turned else gradient)

    def take(self, zeros: bool = False) -> Tensor | None:
        """Return the sum in the tensor's own dtype; if no tile used it, ``None``, or zeros where they are wanted."""
        total, self.sum = self.sum, None
        if total is None:
            if not zeros:
                return None
            total = torch.zeros_like(self.leaf, requires_grad=False)
        return (total.t() if self.turned else total).to(self.dtype)

    def close(self) -> None:
        """Remove the hook, which keeps the leaf and this object alive."""
        self._handle.remove()


@contextmanager
def gradient_sums(
    tensors: Sequence[Tensor], accumulate: str, turned: Sequence[bool] = ()
) -> Iterator[list[GradientSum]]:
    """Return a sum for each tensor, closed at the end."""
    sums = [GradientSum(t, accumulate, turn) for t, turn in zip(tensors, turned or repeat(False), strict=False)]
    try:
        yield sums
    finally:
        for s in sums:
            s.close()
