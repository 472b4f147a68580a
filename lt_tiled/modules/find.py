"""Finding modules: by class name and by path."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn


def has_class(module: nn.Module, names: Iterable[str]) -> bool:
    """Whether one of the module's classes has one of the names (FSDP2 swaps in a subclass, so bases count)."""
    return any(cls.__name__ in names for cls in type(module).__mro__)


def kind_of(model: nn.Module) -> str:
    """Return the class of a model for messages, with that of the largest model inside of a LightningModule."""
    kind, children = type(model).__name__, list(model.children())
    if not has_class(model, ("LightningModule",)) or not children:
        return kind
    inner = max(children, key=lambda child: sum(p.numel() for p in child.parameters()))
    return f"the {type(unwrapped(inner)).__name__} of {kind}"


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside ``torch.compile(module)`` or a ``FullyShardedDataParallel`` unit."""
    children = dict(module.named_children())
    inner = children.get("_orig_mod", children.get("_fsdp_wrapped_module"))
    return module if inner is None else unwrapped(inner)


_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def plain_name(name: str) -> str:
    """Return a name without the wrappers of ``torch.compile``, FSDP and torch's ``checkpoint_wrapper``."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def has_forward(module: nn.Module) -> bool:
    """Whether the module can be called; a ``ModuleList`` cannot."""
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def walk(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield every submodule with its path; those in a compiled or sharded module under their own names."""
    for name, child in unwrapped(module).named_children():
        child = unwrapped(child)
        below = f"{path}.{name}" if path else name
        yield below, child
        yield from walk(child, below)


def walk_all(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the module itself, with an empty path, and every submodule."""
    yield "", unwrapped(model)
    yield from walk(model)


Targets = str | Sequence[str] | Callable[[str, nn.Module], bool]
"""``"auto"``, class names and path globs, or a function of a module's path and the module that chooses."""


def find_named(model: nn.Module, targets: Targets, what: str) -> list[tuple[str, nn.Module]]:
    """Return the outermost modules that match a class name or a path glob, or that a function chooses."""
    everything = list(walk(model))
    if callable(targets):
        chosen = [(path, m) for path, m in everything if has_forward(m) and targets(path, m)]
        if not chosen:
            raise ValueError(
                f"{what} targets={targets!r} chooses none of the {len(everything)} modules of {kind_of(model)}."
            )
        return outermost(chosen)
    found: list[tuple[str, nn.Module]] = []
    for target in [targets] if isinstance(targets, str) else targets:
        matches = [(path, m) for path, m in everything if has_class(m, (target,)) or fnmatchcase(path, target)]
        if not matches:
            classes = sorted({type(m).__name__ for _, m in everything})
            raise ValueError(
                f"{what} target {target!r} matches no module of {kind_of(model)}: pass a class name or a path"
                f" glob such as 'layers.*.mlp'. Its classes are: {', '.join(classes) or 'none, it has no submodules'}."
            )
        for path, m in matches:
            if not has_forward(m):
                kind = type(m).__name__
                raise ValueError(
                    f"{what} target {target!r} matches {path}, a {kind} without a forward: name its parts."
                )
        found += matches
    return outermost(found)


def outermost(found: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Drop repeats, and modules that are part of another one found."""
    unique = {id(m): (path, m) for path, m in reversed(list(found))}
    inside = {id(below) for _, m in unique.values() for below in m.modules() if below is not m}
    return [pair for key, pair in reversed(unique.items()) if key not in inside]
