"""ZeRO-3: blocks with tiles are leaf modules, whose gradients are reduced once, after all of their calls.

NOTE [ZeRO-3 leaves]
ZeRO-3 all-gathers weights in module hooks and frees them after use: inside a tiled module for every tile. So each block
with tiled modules is a leaf module: its hooks all-gather all its weights once per forward and backward pass.

ZeRO-3 reduces the gradients of a leaf in a backward hook, which torch runs once per call, but autograd sums the
gradients of a weight over all calls before it sets them. So that hook runs on a token, a scalar with a gradient:

1. Each call joins it: a Function takes the call's hidden states and the token, and returns the hidden states.
2. Autograd computes the token's gradient once, after this Function's backward has run for all calls in the backward
   pass. These run last, because autograd runs first what was recorded last, so the gradients of the weights are there.
   ZeRO-3 frees the weights only afterwards: the hook needs their shapes for the gradients that are zero.
3. A gradient that arrives later, from outside of the leaf (another leaf may share the weight), raises, and so does a
   call without hidden states.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled.loss.transformers import HeadPatch
from lt_tiled.modules.cache import is_no_tuple
from lt_tiled.modules.find import outermost, walk
from lt_tiled.modules.patch import Order, Patch, get_patch, is_of, remove_patch, set_patch
from lt_tiled.tiling.patch import tiled_patches, whole_modules

_SETS_HOOK = "register_full_backward_hook"
"""The method with which ZeRO-3 sets the hook that reduces a leaf's gradients, and no other engine sets any."""


class LeafPatch(Patch):
    """On a module with tiled modules: makes it a leaf module, should ZeRO-3 wrap the model later."""

    order = Order.LEAF
    hook: Any = None
    """The hook of ZeRO-3 that reduces the gradients."""
    token: Tensor | None = None
    """What the hook runs on: see NOTE [ZeRO-3 leaves]."""
    ran_in = -1
    """The backward pass in which the hook ran last."""

    def __init__(self, path: str, leaf: nn.Module) -> None:
        self.name = f"{path} ({type(leaf).__name__})"
        self.marked = "_z3_leaf" not in vars(leaf)
        """Whether the mark is ours."""
        vars(leaf)["_z3_leaf"] = True  # as deepspeed.utils.set_z3_leaf_module does, whose import takes seconds
        set_patch(leaf, self, _SETS_HOOK)

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let ZeRO-3's hook run on the token, and register all others as ever."""
        if not is_of(args[0], ("deepspeed.",)):
            return self.inner(module, *args, **kwargs)
        for weight in module.parameters() if self.hook is None else ():
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(self._refuse_late)
        self.hook = args[0]  # the engine of ``fit`` follows that of ``validate``
        # The last one, so inside of what frees the weights.
        return module.register_forward_pre_hook(self._join, with_kwargs=True)

    def restore(self, leaf: nn.Module) -> None:
        """Remove the patch, and the mark unless ZeRO-3 wraps the model, which reads it."""
        remove_patch(leaf, self)
        if self.marked and leaf not in _leaves_of(leaf):
            del vars(leaf)["_z3_leaf"]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _join(self, leaf: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let a call's hidden states, its first tensor with a gradient, go through a node that the token waits for."""
        if not (torch.is_grad_enabled() and any(weight.requires_grad for weight in leaf.parameters())):
            return None
        # Lists and dictionaries stay the caller's own objects, because a module may add to them.
        leaves, tree = pytree.tree_flatten((args, tuple(kwargs.values())), is_no_tuple)
        floating = [i for i, value in enumerate(leaves) if isinstance(value, Tensor) and value.is_floating_point()]
        if not floating:
            raise self._lost()
        # A mask in front of them may lead to no gradient; behind frozen embeddings they have none themselves.
        index = next((i for i in floating if leaves[i].requires_grad), floating[0])
        if self.token is None:
            self.token = leaves[index].new_zeros((), requires_grad=True)
            self.token.register_hook(partial(self._reduce, leaf))
        leaves[index] = _Join.apply(leaves[index], self.token)
        args, values = pytree.tree_unflatten(leaves, tree)
        return args, dict(zip(kwargs, values, strict=True))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _reduce(self, leaf: nn.Module, _: Tensor) -> None:
        self.hook(leaf, (), ())
        self.ran_in = torch._C._current_graph_task_id()

    def _refuse_late(self, _: Tensor) -> None:
        """Raise ``RuntimeError`` if the gradient of a weight arrives after ZeRO-3 took those of the leaf."""
        if self.ran_in == torch._C._current_graph_task_id():
            raise self._lost()

    def _lost(self) -> RuntimeError:
        return RuntimeError(
            f"{self.name} has gradients that ZeRO-3 would lose: it was given no hidden states, or its weights were used"
            " outside of its forward. Use another stage, or deepspeed.utils.set_z3_leaf_modules on the tiled modules."
        )


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, token: Tensor) -> Tensor:
        return hidden.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, gradient.new_zeros(())


def patch_leaves(model: nn.Module, undo: ExitStack) -> None:
    """Make blocks leaf modules of ZeRO-3 until ``undo`` is closed, apart from those whose tiles are in a user's."""
    whole = whole_modules(model)
    whole += [(path, module) for path, module in walk(model) if _is_adapted_head(module)]
    leaves = [(path, module) for path, module in model.named_modules() if getattr(module, "_z3_leaf", False)]
    inside = {part for _, leaf in leaves for part in leaf.modules()}
    for path, module in whole:
        tiled = [part for _, part, _ in tiled_patches(module)]
        if not inside.issuperset(tiled or [module]):
            leaves.append((path, module))
    for path, leaf in outermost(leaves):
        if any(tiled_patches(leaf)) or _is_adapted_head(leaf):
            undo.callback(LeafPatch(path, leaf).restore, leaf)


def _is_adapted_head(module: nn.Module) -> bool:
    """Whether a loss in tiles uses weights of the head's children, as of adapters, which have hooks of their own."""
    return get_patch(module, HeadPatch) is not None and any(module.children())


def adapt_to_zero3(model: nn.Module) -> bool:
    """Return whether norms may be pending; raise ``ValueError`` if ZeRO-3 would shard weights while tiles need them."""
    for _, module, tiled in tiled_patches(model):
        if None in _leaves_of(module):
            raise ValueError(
                f"{tiled.name} is tiled and not inside a leaf module of ZeRO-3, which would shard its weights"
                " between tiles: call prepare before deepspeed.initialize, or use TiledDeepSpeedStrategy(stage=3)."
            )
    # The weights of a norm must be all-gathered with those of the MLP.
    return all(len(_leaves_of(module)) < 2 for _, module in whole_modules(model))


def _leaves_of(module: nn.Module) -> set[nn.Module | None]:
    """Return the leaf modules with which the weights of a module are all-gathered; ``None`` for those without one."""
    return {getattr(weight, "ds_z3_leaf_module", None) for weight in module.parameters()}
