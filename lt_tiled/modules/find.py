"""Finding modules: by class name, by path, or by a function."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn

Target = str | Callable[[str, nn.Module], bool]
"""A class name, a path glob, or a function of a module's path and the module that chooses."""
ENGINES = ("torch.distributed.fsdp", "deepspeed", "lt_tiled")
"""Packages whose hooks gather weights alone. Those of tensor parallelism change a module's input and output."""


def has_class(module: nn.Module, names: Iterable[str]) -> bool:
    """Whether one of the module's classes has one of the names (FSDP2 swaps in a subclass, so bases count)."""
    return any(cls.__name__ in names for cls in type(module).__mro__)


def has_forward(module: nn.Module) -> bool:
    """Whether the module can be called; a ``ModuleList`` cannot."""
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside ``torch.compile(module)`` or a ``FullyShardedDataParallel`` unit."""
    children = dict(module.named_children())
    inner = children.get("_orig_mod", children.get("_fsdp_wrapped_module"))
    return module if inner is None else unwrapped(inner)


def plain_name(name: str) -> str:
    """Return a name without the wrappers of ``torch.compile``, FSDP and torch's ``checkpoint_wrapper``."""
    return re.sub(r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.", "", name)


def full_shape(weight: Tensor) -> Sequence[int]:
    """Return the shape of a weight; under ZeRO-3 an empty tensor takes its place."""
    shape: Sequence[int] = getattr(weight, "ds_shape", weight.shape)
    return shape


def children_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return a module's children with their names; those that are compiled or FSDP units without the wrapper."""
    return [(name, unwrapped(child)) for name, child in unwrapped(module).named_children()]


def walk(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and every submodule with its path; those in a compiled or sharded one under their own names."""
    yield path, unwrapped(module)
    for name, child in children_of(module):
        yield from walk(child, f"{path}.{name}".lstrip("."))


def outermost(
    modules: Iterable[tuple[str, nn.Module]], chosen: Callable[[nn.Module], bool] = lambda module: True
) -> list[tuple[str, nn.Module]]:
    """Return the modules that are chosen, without repeats and those that are part of another one chosen."""
    paths: dict[nn.Module, str] = {}
    inside: set[nn.Module] = set()
    for path, module in modules:
        if module not in paths and chosen(module):
            paths[module] = path
            for child in module.children():
                inside.update(child.modules())
    return [(path, module) for module, path in paths.items() if module not in inside]


def set_rates_to_zero(module: nn.Module, names: Iterable[str]) -> None:
    """Let a module draw no dropout, nor other numbers whose probability or size has one of these in its name."""
    for part in module.modules():
        for name, value in list(vars(part).items()):
            is_rate = any(of in name for of in names) or (name == "p" and "Drop" in type(part).__name__)
            if is_rate and isinstance(value, float):
                vars(part)[name] = 0.0


def find_named(model: nn.Module, targets: Target | Sequence[Target], what: str) -> list[tuple[str, nn.Module]]:
    """Return the outermost modules that match a class name or a path glob, or that a function chooses.

    Raises:
        ValueError: If a target matches nothing that can be called.
    """
    found: list[tuple[str, nn.Module]] = []
    for target in [targets] if isinstance(targets, str) or callable(targets) else targets:
        before = len(found)
        names: set[str] = set()
        for path, module in walk(model):
            if path and has_forward(module):
                names.add(type(module).__name__)
                if matches(target, path, module):
                    found.append((path, module))
        if len(found) == before:
            raise ValueError(
                f"{what} target {target!r} matches no module of {type(model).__name__}: pass a class name or a path"
                f" glob such as 'layers.*.mlp'. Its classes are: {', '.join(sorted(names)) or 'none'}."
            )
    return outermost(found)


def matches(target: Target, path: str, module: nn.Module) -> bool:
    """Whether a target chooses a module with this path."""
    if callable(target):
        return target(path, module)
    return has_class(module, (target,)) or fnmatchcase(path, target)
