"""Activation-checkpointed blocks: which ones, what of their input is kept for the recompute, and where."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import checkpoint

from lt_tiled._arguments import split_arguments
from lt_tiled._log import inform_once, warn
from lt_tiled.errors import NothingFoundError
from lt_tiled.modules.find import find_blocks, find_named, walk
from lt_tiled.modules.patch import Mark, remove_mark, set_mark
from lt_tiled.offload.offloaded_tensor import OffloadedTensor
from lt_tiled.offload.offloader import Offloader
from lt_tiled.policies import Checkpointing


class BlockMark(Mark):
    """What a checkpointed block carries."""

    attribute = "_lt_tiled_checkpointing"

    def __init__(self, offload: BlockOffload | None = None) -> None:
        self.offload = offload


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Runs in place of a checkpointed block's forward. Its name is what pickle looks up on the class."""
    mark = self.__dict__[BlockMark.attribute]
    if not mark.active or not torch.is_grad_enabled() or _checkpoints_itself(self):
        return mark.inner(self, *args, **kwargs)
    return run_checkpointed(mark.inner, self, args, _without_cache(self, kwargs), mark.offload)


def mark_block(module: nn.Module, offload: BlockOffload | None = None) -> None:
    """Checkpoint the block from now on, and offload its inputs if ``offload`` says where to."""
    set_mark(module, BlockMark(offload), forward)


def unmark_block(module: nn.Module) -> None:
    """Undo :func:`mark_block`."""
    remove_mark(module, BlockMark, forward)


def find_checkpointable(model: nn.Module, policy: Checkpointing) -> list[tuple[str, nn.Module]]:
    """The blocks that the policy names, or with ``"auto"`` the model's repeated layers.

    Raises:
        ValueError: If a target matches nothing, or ``"auto"`` finds nothing.
    """
    if policy.targets != "auto":
        return find_named(model, policy.targets, "Checkpointing")
    found = find_blocks(model)
    if not found:
        raise NothingFoundError(
            f"Checkpointing found no blocks in {type(model).__name__} (repeated children of a ModuleList or Sequential): name them, as in"
            " Checkpointing(targets=['MyBlock']), or turn checkpointing off with checkpointing=False."
        )
    return found


class OwnCheckpointingOff:
    """Turns a model's own gradient checkpointing off where our blocks take over, so that nothing is recomputed
    twice.
    """

    def __init__(self, model: nn.Module) -> None:
        self.switched = [m for _, m in [("", model), *walk(model)] if _checkpoints_itself(m)]
        for module in self.switched:
            module.gradient_checkpointing = False  # type: ignore[assignment]
        if self.switched:
            warn(
                f"{type(model).__name__} checkpoints its own layers (gradient_checkpointing_enable): that is off while lt_tiled checkpoints"
                " them. Turn off either one to be rid of this message."
            )

    def undo(self) -> None:
        for module in self.switched:
            module.gradient_checkpointing = True  # type: ignore[assignment]


def _checkpoints_itself(module: nn.Module) -> bool:
    return getattr(module, "gradient_checkpointing", False) is True


_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")
"""The names that Hugging Face's layers have for their key-value cache."""


def _without_cache(module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Leave an empty key-value cache out, as Hugging Face does: the recompute would append to it a second time.

    Raises:
        ValueError: If the cache holds something, which the block would then miss.
    """
    held = (
        []
        if getattr(module, "_can_checkpoint_with_cache", False)
        else [n for n in _CACHES if kwargs.get(n) is not None]
    )
    if not held and not kwargs.get("use_cache"):
        return kwargs
    kind = type(module).__name__
    for name in held:
        cache = kwargs[name]
        tokens = cache.get_seq_length() if hasattr(cache, "get_seq_length") else len(cache)
        if tokens:
            raise ValueError(
                f"{kind} is checkpointed and was given {name} with {tokens} cached entries: the recompute would append to it again. Run"
                " without a cache, or under torch.no_grad(), or with checkpointing=False."
            )
    inform_once(f"cache {kind}", f"{kind} is checkpointed, so it runs without a key-value cache while gradients are on")
    return {**kwargs, **dict.fromkeys(held), **({"use_cache": False} if "use_cache" in kwargs else {})}


# Running a block

Run = Callable[..., Any]


@dataclass(frozen=True)
class BlockOffload:
    """How one block offloads."""

    offloader: Offloader
    block: str
    """What errors call the block."""
    model: nn.Module
    """Whose weights never move."""
    select: str | Sequence[str | int]
    everything: bool
    """Offload what the block saves instead of recomputing it."""


def run_checkpointed(
    run: Run, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], offload: BlockOffload | None
) -> Any:
    """Run a block so that only the tensors among its arguments are kept, and its inside is recomputed in the backward.

    Every tensor goes to torch's checkpoint by position, those in keywords and tuples too: torch saves positional
    tensors through the saved-tensor hooks and holds all others in a closure.

    Args:
        run: The block's own forward, called with the module.
        module: The block.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        offload: Where the kept tensors go; ``None`` leaves them where they are.
    """
    if offload is not None and offload.everything:
        with _everything(module, offload):
            return run(module, *args, **kwargs)
    tensors, arguments = split_arguments(args, kwargs)

    def block(*given: Tensor) -> Any:
        inner_args, inner_kwargs = arguments.call_with(given)
        return run(module, *inner_args, **inner_kwargs)

    if offload is None:
        return checkpoint(block, *tensors, use_reentrant=False)
    # Inside the block torch's own hooks stand before these, so they see the block's inputs and nothing else.
    chosen = _hidden_states(tensors) if offload.select == "auto" else _named(module, args, kwargs, offload.select)
    with _inputs(_without_weights(chosen, offload.model), offload):
        return checkpoint(block, *tensors, use_reentrant=False)


def _inputs(chosen: Sequence[Tensor], offload: BlockOffload) -> torch.autograd.graph.saved_tensors_hooks:
    views = [_view(t) for t in chosen]  # the hooks get the tensors anew, as other Python objects

    def pack(tensor: Tensor) -> Tensor | OffloadedTensor:
        return offload.offloader.pack(tensor, offload.block) if _view(tensor) in views else tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, offload.offloader.unpack)


def _everything(module: nn.Module, offload: BlockOffload) -> torch.autograd.graph.saved_tensors_hooks:
    weights = _storages(module)

    def pack(tensor: Tensor) -> Tensor | OffloadedTensor:
        if _is_weight(tensor, weights):
            return tensor
        return offload.offloader.pack(tensor, offload.block)

    return torch.autograd.graph.saved_tensors_hooks(pack, offload.offloader.unpack)


def _hidden_states(tensors: Sequence[Tensor]) -> list[Tensor]:
    hidden = next((t for t in tensors if t.is_floating_point() and t.dim() > 1), None)
    # A residual stream beside the hidden states is as large as they are, and as little shared with other blocks.
    return [t for t in tensors if t is hidden or (hidden is not None and t.shape == hidden.shape and t.requires_grad)]


def _named(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], select: str | Sequence[str | int]
) -> list[Tensor]:
    return [
        t for name in select for t in pytree.tree_leaves(_argument(module, args, kwargs, name)) if isinstance(t, Tensor)
    ]


def _without_weights(chosen: Sequence[Tensor], model: nn.Module) -> list[Tensor]:
    # What has no history may be a weight in disguise (detached, transposed): compare storages.
    weights = _storages(model) if any(t.grad_fn is None for t in chosen) else set()
    return [t for t in chosen if not _is_weight(t, weights)]


def _argument(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str | int) -> Any:
    if isinstance(name, int):
        if name >= len(args) or name < -len(args):
            raise ValueError(
                f"select={name}: {type(module).__name__} was called with {len(args)} positional arguments."
            )
        return args[name]
    bound = inspect.signature(type(module).forward).bind_partial(module, *args, **kwargs).arguments
    values = {**bound, **kwargs}
    if name not in inspect.signature(type(module).forward).parameters and name not in values:
        raise ValueError(
            f"select={name!r} is no argument of {type(module).__name__}: it was called with {sorted(values)[:8]}."
        )
    return values.get(name)


def _storages(model: nn.Module) -> set[int]:
    return {_storage(p) for p in model.parameters()}


def _is_weight(tensor: Tensor, weights: set[int]) -> bool:
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter) or _storage(tensor) in weights


def _storage(tensor: Tensor) -> int:
    # A wrapper (DTensor) has no storage of its own; it is never moved.
    wrapper: bool = is_traceable_wrapper_subclass(tensor)
    return id(tensor) if wrapper else tensor.untyped_storage()._cdata


def _view(tensor: Tensor) -> tuple[object, ...]:
    return _storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
