"""Activation checkpointing of blocks: which blocks, which of their inputs are saved, and where they are offloaded.

NOTE [What a recompute finds]
A block's recompute begins with what its forward pass began with: its tensor arguments, torch's random states, autocast,
the default dtype, the kernels that attention may use, the ``carried`` variables, and buffers of up to 1 MiB. Afterwards
the previous values are restored. All other state has its value at the time of the backward pass: if the recompute then
computes different values, the backward pass raises (``compare.py``). Side effects in Python happen twice.

NOTE [What is offloaded]
A block's hidden states are offloaded: its first floating-point argument of two or more dimensions, if possible one
that requires a gradient, and others of the same shape, such as a separate residual stream. Weights and views of weights
stay on the device anyway. What a block keeps for its recompute (``keep``) goes through the same offloader.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from lt_tiled._log import inform, warn
from lt_tiled.errors import NothingFoundError
from lt_tiled.modules.blocks import find_blocks
from lt_tiled.modules.cache import by_name, has_cache, is_no_tuple
from lt_tiled.modules.find import find_named, walk
from lt_tiled.modules.patch import Order, Patch
from lt_tiled.offload.offloader import OffloadedTensor, Offloader
from lt_tiled.policies import ActivationCheckpointing
from lt_tiled.recompute.compare import Fingerprints, describe
from lt_tiled.recompute.keep import Chooses, KeepMode
from lt_tiled.recompute.mode import Buffers, Precision, carried, in_checkpoint, is_backward, is_transformed
from lt_tiled.recompute.saved import COMPARED, compared_forward


@dataclass(eq=False, repr=False)
class BlockPatch(Patch):
    """How a block with activation checkpointing runs, and its state."""

    order = Order.CHECKPOINT
    path: str
    """The block's path, for messages."""
    offloader: Offloader | None = None
    keep: Chooses | None = None
    """The operators whose outputs are kept."""
    raises: bool = True
    """Whether a recompute with other values raises, and does not only warn."""

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block; if a backward pass may follow, save its tensor arguments alone, and recompute the rest there."""
        if _is_recomputed_by_others(module) or is_transformed() or not torch.is_grad_enabled():
            return self.inner(module, *args, **kwargs)
        if has_cache(by_name(type(module).forward, args, kwargs)):
            kind = type(module).__name__
            warn(
                f"{kind} runs without activation checkpointing, whose recompute would fill its key-value cache twice:"
                " pass use_cache=False to train with less memory.",
                once=f"cache {kind}",
            )
            return self.inner(module, *args, **kwargs)
        # 1. All tensors, including those in keywords and tuples, are passed to torch's checkpoint by position: torch
        # saves positional tensors through the saved-tensors hooks, and keeps all others in a closure.
        names = tuple(kwargs)
        leaves, tree = pytree.tree_flatten((args, tuple(kwargs.values())), is_no_tuple)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        # 2. What the recompute begins with.
        call = BlockCall(self, module, tensors)

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def block(*given: Any) -> Any:
            inner_args, values = pytree.tree_unflatten(given, tree)
            return call.run(partial(self.inner, module, *inner_args, **dict(zip(names, values, strict=True))))

        # 3. Inside the block torch's own hooks are on top of the offloader's, so these see the block's inputs alone.
        with nullcontext() if self.offloader is None else offloading(self.offloader, self.path, tensors):
            output = checkpoint(block, *leaves, use_reentrant=False, determinism_check=COMPARED)
        if call.kept is not None and not call.kept.values:
            inform(f"{self.path}: nothing was kept, so all of it is recomputed", once=f"kept {type(module).__name__}")
        return output


def offloading(offloader: Offloader, block: str, tensors: Sequence[Tensor]) -> saved_tensors_hooks:
    """Return hooks that offload the hidden states among the inputs of a call: see NOTE [What is offloaded]."""
    shape: torch.Size | None = None
    # A mask in front of them has no gradient. Behind frozen embeddings they have none themselves.
    for tensor in sorted(tensors, key=lambda tensor: not tensor.requires_grad):
        is_weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        if tensor.is_floating_point() and not is_weight and tensor.dim() > 1 and shape is None:
            shape = tensor.shape

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def pack(tensor: Tensor) -> Tensor | OffloadedTensor:
        return offloader.pack(tensor, block) if tensor.shape == shape else tensor

    return saved_tensors_hooks(pack, torch.compiler.disable(offloader.unpack))


class BlockCall:
    """One forward pass of a block, and its recompute: see NOTE [What a recompute finds]. It holds no argument."""

    def __init__(self, patch: BlockPatch, module: nn.Module, tensors: Sequence[Tensor]) -> None:
        self.ran = False
        # Torch ends a recompute by an exception, as soon as it has all that the forward pass saved.
        self.stops_early = torch.utils.checkpoint._enable_checkpoint_early_stop is not False
        device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
        self.precision = Precision.now(device)
        self.carried = [(variable, variable.get()) for variable in carried]
        self.buffers = Buffers(module.modules())
        name = f"{patch.path} ({type(module).__name__})"
        self.prints = Fingerprints(name, "name other blocks in ActivationCheckpointing", patch.raises)
        self.kept: KeepMode | None = None
        if patch.keep is not None:
            self.kept = KeepMode(patch.keep, device, self.prints, patch.offloader, patch.path)

    def run(self, function: Callable[[], Any]) -> Any:
        """Run the block: its forward pass the first time, and then its recompute."""
        if self.kept is not None:
            function = partial(self.kept.run, function)
        if not self.ran:
            self.ran = True
            return compared_forward(self.prints, function)
        with ExitStack() as stack:
            for variable, value in self.carried:
                stack.callback(variable.reset, variable.set(value))
            stack.enter_context(self.buffers.in_place())
            stack.enter_context(self.precision.context())
            output = function()
        if self.stops_early:
            raise RuntimeError(f"{describe(self.prints.name, 'it saves fewer tensors')}.")
        return output


def find_checkpointable(model: nn.Module, policy: ActivationCheckpointing) -> list[tuple[str, nn.Module]]:
    """Return the paths and blocks that the policy names, or with ``"auto"`` the model's repeated layers.

    Raises:
        ValueError: If a target matches nothing.
        NothingFoundError: If ``"auto"`` finds nothing.
    """
    if policy.targets != "auto":
        return find_named(model, policy.targets, "ActivationCheckpointing")
    found = find_blocks(model)
    if not found:
        raise NothingFoundError(
            f"ActivationCheckpointing found no blocks in {type(model).__name__} (repeated children of a ModuleList or"
            " Sequential): name them, as in ActivationCheckpointing(targets=['MyBlock']), or set"
            " activation_checkpointing=False."
        )
    return found


def turn_off_own_checkpointing(model: nn.Module) -> list[nn.Module]:
    """Turn off a model's own gradient checkpointing, so that nothing is recomputed twice. Return where it was on."""
    switched = [m for _, m in walk(model) if getattr(m, "gradient_checkpointing", False) is True]
    for module in switched:
        module.gradient_checkpointing = False  # type: ignore[assignment]
    if switched:
        warn(
            f"{type(model).__name__} recomputes its own layers (gradient_checkpointing_enable): lt_tiled turns that"
            " off while it recomputes them. Turn off either one to silence this warning."
        )
    return switched


def _is_recomputed_by_others(block: nn.Module) -> bool:
    """Whether code around a block recomputes it: torch's checkpoint, or in its backward pass another Function."""
    if not (in_checkpoint() or (is_backward() and torch.is_grad_enabled())):
        return False
    kind = type(block).__name__
    inform(
        f"{kind} is left to the activation checkpointing that its model applies itself: lt_tiled neither recomputes nor"
        " offloads it. Turn the model's own off to use lt_tiled's.",
        once=f"own checkpointing {kind}",
    )
    return True
