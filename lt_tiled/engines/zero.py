"""DeepSpeed's ZeRO: leaf modules of stage 3.

NOTE [ZeRO-3 leaves]
ZeRO-3 all-gathers weights in module hooks and frees them after use. Inside a tiled module its hooks would run for every
tile, and its hooks on a norm would use the norm's output before the MLP does. So each block with tiled modules is a
leaf module: its hooks all-gather all its weights once per forward and backward pass, and the tiles run in between.

ZeRO-3 reduces the gradients of a leaf in a backward hook, which torch runs once per call. But autograd sums the
gradients of a weight over all calls before it sets them. After two calls the first hook would reduce zeros, and the
second one would reduce the weights again while ZeRO-3's bucket still holds them. So that hook runs on a token instead:

1. Each leaf has one token, a scalar that requires a gradient.
2. Each call joins it: a Function takes the call's hidden states and the token, and returns the hidden states.
3. Autograd computes the token's gradient once, after this Function's backward has run for all calls in the backward
   pass. These run last, because autograd runs first what was recorded last, so the gradients of the weights are there.
   ZeRO-3 frees the weights only afterwards: the hook needs their shapes for the gradients that are zero.
4. Gradients left over raise: those that arrive later, from outside of the leaf, and those of a call without hidden
   states.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils import _pytree as pytree
from torch.utils.weak import TensorWeakRef

from lt_tiled.modules.blocks import shared_weights
from lt_tiled.modules.find import outermost
from lt_tiled.modules.patch import Order, Patch, get_patch, is_of, remove_patch, set_patch, without_compiler
from lt_tiled.tiling.patch import tiled_patches, whole_modules
from lt_tiled.tiling.places import LEAF_HOOKS
from lt_tiled.tiling.state import EngineNeeds

_OF_DEEPSPEED = ("deepspeed.",)
_INSTEAD = "Use another strategy or stage, or do not tile it: Tiling(targets=...), or tiling=False."


# ZeRO-3


class LeafPatch(Patch):
    """On a module with tiled modules: makes it a leaf module, should ZeRO-3 wrap the model later.

    Nothing else reads the mark, and no other engine registers the hooks that this moves to a token.
    """

    order = Order.LEAF

    def __init__(self, path: str, leaf: nn.Module, needs: EngineNeeds) -> None:
        self.name, self.needs = f"{path} ({type(leaf).__name__})", needs
        self.marked = "_z3_leaf" not in vars(leaf)
        """Whether the mark is ours."""
        self.handles: list[Any] = []
        """The hooks on the leaf, which are removed with its last tiles."""
        vars(leaf)["_z3_leaf"] = True  # as deepspeed.utils.set_z3_leaf_module does, whose import takes seconds
        set_patch(leaf, self, LEAF_HOOKS)

    def __deepcopy__(self, memo: dict[int, Any]) -> Patch:
        copy = super().__deepcopy__(memo)
        assert isinstance(copy, LeafPatch)
        copy.needs, copy.handles = deepcopy(self.needs, memo), []
        return copy

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Register a hook of ZeRO-3 on a token, see NOTE [ZeRO-3 leaves], and all others as ever."""
        if not is_of(hook := args[0], _OF_DEEPSPEED):
            return self.inner(module, *args, **kwargs)
        for _, _, tiled in tiled_patches(module):
            tiled.needs.forget()
        self.needs.leaves[module] = self.name
        before = (_hidden_by_position, True), (_let_modes_see_linear, False)
        for function, with_kwargs in before:
            handle = module.register_forward_pre_hook(function, prepend=True, with_kwargs=with_kwargs)
            self.handles.append(handle)
        # The last one, so inside of what frees the weights.
        return module.register_forward_pre_hook(_AfterAllCalls(hook, self.needs))


def patch_leaves(model: nn.Module, needs: EngineNeeds, blocks: bool = True) -> None:
    """Prepare a model with patched modules for ZeRO-3: make ``blocks`` leaf modules, or patch those of a user alone."""
    whole = whole_modules(model)
    if not whole or find_spec("deepspeed") is None:
        return
    if any(is_of(hook, _OF_DEEPSPEED) for _, module in whole for hook in module._forward_pre_hooks.values()):
        check_leaves(model)
        return
    for path, leaf in outermost([*(whole if blocks else []), *_leaves_in(model)]):
        if any(tiled_patches(leaf)) and get_patch(leaf, LeafPatch, LEAF_HOOKS) is None:
            LeafPatch(path, leaf, needs)


def restore_leaves(model: nn.Module, needs: EngineNeeds) -> None:
    """Undo :func:`patch_leaves` on leaves without tiles, including those that another ``prepare`` patched.

    Marks stay if ZeRO-3 wraps the model: its engine still reads them.
    """
    for leaf in model.modules():
        patch = get_patch(leaf, LeafPatch, LEAF_HOOKS)
        if patch is not None and not any(tiled_patches(leaf)):
            remove_patch(leaf, patch)
            if patch.marked and leaf not in patch.needs.leaves:
                del vars(leaf)["_z3_leaf"]
            for handle in patch.handles:
                handle.remove()
    while needs.handles:
        needs.handles.pop().remove()


def _leaves_in(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(path, module) for path, module in model.named_modules() if getattr(module, "_z3_leaf", False)]


def adapt_to_zero3(model: nn.Module) -> bool:
    """Return whether neighbors may be deferred under ZeRO-3.

    Otherwise it would run hooks on what is deferred, and might free a neighbor's weights.
    """
    check_leaves(model)
    trained = (row for row in shared_weights(model, outermost(_leaves_in(model))) if row[2].requires_grad)
    if shared := next(trained, None):
        first, second, weight = shared
        shape = list(getattr(weight, "ds_shape", weight.shape))
        raise ValueError(
            f"{first} and {second} share a weight of shape {shape}. ZeRO-3 would reduce its gradient when the"
            f" backward pass of a block with tiles ends, and lose the rest. {_INSTEAD}"
        )
    return all(len(_leaves_of(module)) < 2 for _, module in whole_modules(model))


def check_leaves(model: nn.Module) -> None:
    """Raise ``ValueError`` if ZeRO-3 would shard weights while tiles need them."""
    for path, module, _ in tiled_patches(model):
        if None in _leaves_of(module):
            raise ValueError(
                f"{path} ({type(module).__name__}) is tiled and not inside a leaf module of ZeRO-3, which would shard"
                " its weights while its tiles run: use TiledDeepSpeedStrategy(stage=3) with zero3_leaf_modules=True, or"
                " call prepare before deepspeed.initialize, which makes its block one; a callback runs too late. Or"
                " call deepspeed.utils.set_z3_leaf_modules before, as at the end of configure_model."
            )


def _leaves_of(module: nn.Module) -> set[nn.Module | None]:
    """Return the leaf modules with which the weights of a module are all-gathered; ``None`` for those without one."""
    return {getattr(weight, "ds_z3_leaf_module", None) for weight in module.parameters()}


def _let_modes_see_linear(*_: Any) -> None:
    """Let torch function modes see the linear layers again: ZeRO-3 replaces ``F.linear`` with a custom Function.

    Tiles are given the leaves that sum their gradients by such a mode; see NOTE [Substitution].
    """
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    if F.linear is zero3_linear_wrap:
        F.linear = _linear


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    tensors = (input, weight) if bias is None else (input, weight, bias)
    if has_torch_function(tensors):
        return handle_torch_function(_linear, tensors, input, weight, bias)
    return zero3_linear_wrap(input, weight, bias)


def _hidden_by_position(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass hidden states, the first floating-point tensor, by position.

    ZeRO-3 frees the weights of a module when the gradients of such arguments are known, else after the backward pass.
    """
    if not any(map(_has_hidden, args)) and any(map(_has_hidden, kwargs.values())):
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        bound.apply_defaults()  # else what follows an argument that is left out counts as a keyword
        first = next((i for i, value in enumerate(bound.args) if _has_hidden(value)), len(args) - 1) + 1
        named = {*[*bound.arguments][:first]}
        args, kwargs = bound.args[:first], {name: value for name, value in kwargs.items() if name not in named}
    return args, kwargs


def _has_hidden(value: Any) -> bool:
    return any(map(_is_hidden, pytree.tree_leaves(value)))


def _is_hidden(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


class _AfterAllCalls:
    """Runs a backward hook once per backward pass, after all calls of the module, and checks what is left after it."""

    def __init__(self, hook: Callable[..., None], needs: EngineNeeds) -> None:
        self.hook, self.needs = hook, needs
        self.token: Tensor | None = None

    @without_compiler
    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not (torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())):
            return args
        index = next((i for i, arg in enumerate(args) if _has_hidden(arg)), None)
        if index is None:
            raise _lost(self.needs.leaves[module])
        tensors, spec = pytree.tree_flatten(args[index])
        first = next(i for i, tensor in enumerate(tensors) if _is_hidden(tensor))
        if self.token is None:
            self.token = tensors[first].new_zeros((), requires_grad=True)
            self.token.register_hook(lambda _: self._run(module))
        tensors[first] = _JoinToken.apply(tensors[first], self.token)
        return (*args[:index], pytree.tree_unflatten(tensors, spec), *args[index + 1 :])

    @without_compiler
    def _run(self, module: nn.Module) -> None:
        self.hook(module, (), ())
        needs, task = self.needs, torch._C._current_graph_task_id()
        if task != needs.task:  # once per backward pass
            needs.task, needs.in_bucket = task, {}
            torch.autograd.Variable._execution_engine.queue_callback(partial(_check_gradients, needs))
        gradients = ((weight, weight.grad) for weight in module.parameters())
        needs.in_bucket.update(
            (weight, TensorWeakRef(gradient)) for weight, gradient in gradients if gradient is not None
        )


def _check_gradients(needs: EngineNeeds) -> None:
    """Raise ``RuntimeError`` if a backward pass leaves gradients of a leaf module, which ZeRO-3 would drop.

    Those that were there when ZeRO-3 took the gradients of the module may still wait in its bucket.
    """
    for leaf, name in needs.leaves.items():
        for weight in leaf.parameters():
            waits = needs.in_bucket.get(weight)
            if weight.grad is not None and not (waits is not None and waits() is weight.grad):
                raise _lost(name)


def _lost(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name} has gradients that ZeRO-3 would lose, because it was given no hidden states or its weights were used"
        f" outside of its forward, and tiles run in it. {_INSTEAD} You can also make the tiled modules leaf modules"
        " with deepspeed.utils.set_z3_leaf_modules, before deepspeed.initialize, or in configure_model with"
        " zero3_leaf_modules=False."
    )


class _JoinToken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, token: Tensor) -> Tensor:
        return hidden.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, gradient.new_zeros(())


# ZeRO-1 and 2


def is_zero(weight: Tensor) -> bool:
    """Whether DeepSpeed takes the gradient of a weight when it arrives."""
    return any(is_of(hook, _OF_DEEPSPEED) for hook in (weight._post_accumulate_grad_hooks or {}).values())
