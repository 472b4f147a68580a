"""DeepSpeed ZeRO-1, 2 and 3. DeepSpeed is imported only where it is used, because it is an optional dependency.

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

NOTE [ZeRO-1 and 2 need one order]
ZeRO-1 and 2 copy gradients into a bucket in the order in which they arrive, and sum the buckets of all ranks entry by
entry (``reduce_independent_p_g_buckets_and_remove_grads`` in deepspeed/runtime/zero/stage_1_and_2.py). Gradients of a
tiled module arrive in another order than those of the same module untiled, so a rank with a short input would add the
gradients of other weights. Under these stages every call of a tiled module that may be differentiated takes the same
path, with one tile if it is short, and nothing falls back to another path by what one rank alone sees: before the first
backward pass the ranks agree on what runs untiled, and on neighbors that run apart because a hook reads their output.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils import _pytree as pytree

from lt_tiled._log import warn
from lt_tiled._prepare import Prepared
from lt_tiled.modules.find import outermost
from lt_tiled.modules.patch import is_of
from lt_tiled.strategies.base import TiledFabricStrategy, TiledStrategy, TiledTrainerStrategy
from lt_tiled.strategies.blocks import shared_weights
from lt_tiled.tiling.patched import tiled_patches, whole_modules
from lt_tiled.tiling.state import EngineNeeds

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy as FabricParent
    from lightning.pytorch.strategies import DeepSpeedStrategy as TrainerParent
else:
    FabricParent = TrainerParent = object


class _DeepSpeed(TiledStrategy):
    """What DeepSpeed needs under Trainer and under Fabric.

    Args:
        zero3_leaf_modules: Make the blocks with tiled modules leaf modules of ZeRO-3, which then all-gathers their
            weights once per pass, whatever the number of tiles. Turn it off only if you make the tiled modules, or
            modules around them, leaf modules yourself.
    """

    config: Any
    parallel_devices: list[torch.device] | None
    zero_stage_3: bool

    def __init__(self, *args: Any, zero3_leaf_modules: bool = True, **kwargs: Any) -> None:
        if find_spec("deepspeed") is None:
            remedy = "pip install 'lt-tiled[deepspeed]'"
            raise ModuleNotFoundError(f"{type(self).__name__} needs the package deepspeed: {remedy}.")
        super().__init__(*args, **kwargs)
        self.zero3_leaf_modules = zero3_leaf_modules
        self._hooks: list[Any] = []
        self._leaves: list[tuple[str, nn.Module]] = []
        self._filter: Any = None
        if (
            self.config.get("activation_checkpointing", {}).get("cpu_checkpointing")
            and self.activation_checkpointing is not None
        ):
            raise ValueError(
                f"{type(self).__name__} was given cpu_checkpointing while activation_checkpointing is on (the default):"
                " both would checkpoint the blocks. Leave cpu_checkpointing out and pass"
                " activation_checkpointing='cpu', or pass activation_checkpointing=False."
            )

        if self.sequence_parallel is not None and "sequence_parallel_size" in self.config:
            raise ValueError(
                f"{type(self).__name__} was given sequence_parallel={self.sequence_parallel.size} and DeepSpeed's"
                " sequence_parallel_size, which would share sequences twice: leave sequence_parallel_size out of the"
                " config."
            )

    def setup_environment(self) -> None:
        """Let DeepSpeed run on the CPU too, which it supports and Lightning does not allow."""
        if not self.on_cpu:
            return super().setup_environment()
        import deepspeed
        from deepspeed.accelerator import get_accelerator, set_accelerator
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        if get_accelerator().device_name() != "cpu":
            set_accelerator(CPU_Accelerator())
        # DeepSpeed would compile both for minutes at their first use; gloo and torch's optimizers do the same work.
        # https://github.com/deepspeedai/DeepSpeed/pull/5391
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        if "offload_optimizer" in self.config.get("zero_optimization", {}):
            self.config.setdefault("zero_force_ds_cpu_optimizer", False)
        # DeepSpeed and Lightning's check index devices by the local rank; an indexed CPU is the CPU.
        assert self.parallel_devices is not None
        self.parallel_devices = [torch.device("cpu", index) for index in range(len(self.parallel_devices))]
        ancestors: Any = type(self).__mro__
        parent = next(kind for kind in ancestors[ancestors.index(_DeepSpeed) :] if kind.__name__ == "DeepSpeedStrategy")
        super(parent, self).setup_environment()  # not the parent's own, which accepts only CUDA devices
        self.make_groups()
        return None

    def prepare_once(self, model: nn.Module) -> None:
        """Apply the policies, and make leaf modules of ZeRO-3 before ``deepspeed.initialize`` runs."""
        # DeepSpeed 0.19 calls functions that torch 2.13 deprecates in each step. The filter stays until release().
        message = r".*torch\.distributed\.(all_gather_into|reduce_scatter)_tensor` is deprecated"
        warnings.filterwarnings("ignore", message, FutureWarning)
        self._filter = warnings.filters[0]
        before = len(self.prepared)
        super().prepare_once(model)
        if len(self.prepared) == before:
            return
        if self.zero_stage_3:
            from deepspeed.utils import set_z3_leaf_module, z3_leaf_module

            whole, own = whole_modules(model), [pair for pair in model.named_modules() if z3_leaf_module(pair[1])]
            leaves = outermost([*(whole if self.zero3_leaf_modules else []), *own])
            trained = (row for row in shared_weights(model, leaves) if row[2].requires_grad)
            if shared := next(trained, None):
                first, second, weight = shared
                shape = list(getattr(weight, "ds_shape", weight.shape))
                raise ValueError(
                    f"{first} and {second} share a weight of shape {shape}. ZeRO-3 would reduce its gradient when the"
                    f" backward pass of a block with tiles ends, and lose the rest. {_INSTEAD}"
                )
            for _, module in whole:
                self._hooks.append(module.register_forward_pre_hook(_let_modes_see_linear))
            for _, leaf in leaves:
                set_z3_leaf_module(leaf, True)  # remains after release, because the engine's hooks depend on it
                self._hooks.append(leaf.register_forward_pre_hook(_hidden_by_position, with_kwargs=True))
                leaf.__dict__["register_full_backward_hook"] = MethodType(_register_full_backward_hook, leaf)
            self._leaves += leaves
        adapt_tiles(self, model)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the backward pass.

        Raises:
            RuntimeError: If ZeRO-3 left gradients of a leaf module, which its optimizer would drop.
        """
        agree_on_tiles(self.prepared)
        result = super().backward(*args, **kwargs)  # type: ignore[misc]
        for path, leaf in self._leaves:
            if any(p.grad is not None for p in leaf.parameters()):
                raise RuntimeError(
                    f"{path} ({type(leaf).__name__}) has gradients that ZeRO-3 would lose, because it was given no"
                    f" hidden states or its weights were used outside of its forward, and tiles run in it. {_INSTEAD}"
                    " You can also pass zero3_leaf_modules=False and make the tiled modules leaf modules in"
                    " configure_model, with deepspeed.utils.set_z3_leaf_modules."
                )
        return result

    def release(self) -> None:
        """Restore every model, except for ZeRO-3's leaf modules, which its engine still needs."""
        super().release()
        while self._hooks:
            self._hooks.pop().remove()
        while self._leaves:
            self._leaves.pop()[1].__dict__.pop("register_full_backward_hook", None)
        if self._filter in warnings.filters:
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]

    @contextmanager
    def sharded_context(self, inherited: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
        """Build models sharded, and tell transformers about it.

        Otherwise Hugging Face models start with torch's default weights, and ``from_pretrained`` loads none:
        https://huggingface.co/docs/transformers/deepspeed#non-trainer-integration.
        """
        with inherited():  # completes the config
            known = None  # transformers refers to the config weakly
            if self.zero_stage_3 and find_spec("transformers") is not None:
                if find_spec("accelerate") is None:
                    remedy = "pip install 'lt-tiled[deepspeed]'"
                    warn(f"transformers needs accelerate to initialize a model that ZeRO-3 shards: {remedy}.")
                else:
                    from transformers.integrations.deepspeed import HfDeepSpeedConfig

                    known = HfDeepSpeedConfig(self.config)
            yield
            del known


class TrainerDeepSpeed(_DeepSpeed, TiledTrainerStrategy, TrainerParent):
    """DeepSpeed for Trainer."""

    def setup(self, trainer: pl.Trainer) -> None:
        if (batches := trainer.accumulate_grad_batches) > 1 and trainer.state.fn == "fit":
            warn(
                f"Lightning and DeepSpeed each divide the loss by accumulate_grad_batches={batches}: gradients are"
                f" {batches} times smaller than with other strategies, with and without tiling"
                " (https://github.com/Lightning-AI/pytorch-lightning/issues/6170)."
            )
        super().setup(trainer)

    def model_sharded_context(self) -> Any:
        return self.sharded_context(super().model_sharded_context)


class FabricDeepSpeed(_DeepSpeed, TiledFabricStrategy, FabricParent):
    """DeepSpeed for Fabric."""

    def module_sharded_context(self) -> Any:
        return self.sharded_context(super().module_sharded_context)


def adapt_tiles(strategy: Any, model: nn.Module) -> None:
    """Adapt the tiled modules of a model to DeepSpeed.

    Raises:
        ValueError: Under ZeRO-3, if a tiled module is neither a leaf module nor inside of one.
    """
    for _, _, patch in tiled_patches(model):
        patch.needs = EngineNeeds.of_zero(3 if strategy.zero_stage_3 else 2)
    if not strategy.zero_stage_3:
        return
    from deepspeed.utils import get_z3_leaf_modules

    whole = {part for leaf in get_z3_leaf_modules(model) for part in leaf.modules()}
    together = all(module in whole for _, module in whole_modules(model))
    for path, module, patch in tiled_patches(model):
        patch.needs.defer = together  # else ZeRO-3 runs hooks on what is deferred, and may free a neighbor's weights
        if module not in whole:
            raise ValueError(
                f"{path} ({type(module).__name__}) is tiled and not inside a leaf module of ZeRO-3, which would shard"
                " its weights while its tiles run: use TiledDeepSpeedStrategy(stage=3) with zero3_leaf_modules=True,"
                " which makes its block one; a callback runs too late. Or call deepspeed.utils.set_z3_leaf_modules at"
                " the end of configure_model."
            )


def agree_on_tiles(models: Iterable[Prepared]) -> None:
    """Compare what the first step left untiled on all ranks; from then on nothing may change on one rank alone.

    Raises:
        RuntimeError: On all ranks, if they differ.
    """
    patches = [patch for prepared in models for _, _, patch in tiled_patches(prepared.model)]
    new = [patch for patch in patches if patch.needs.same_order and not patch.needs.agreed]
    if not new:
        return
    own = {}
    for patch in new:
        refused, alone = (sorted(map(repr, keys)) for keys in (patch.learned.refused, patch.learned.alone))
        own[patch.name] = patch.learned.untiled, refused, alone
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    differing = sorted(name for name in own if any(other.get(name) != own[name] for other in everyone))
    if differing:
        raise RuntimeError(
            f"{', '.join(differing)} can run in tiles on some ranks and not on others, and the engine needs the same"
            " order of gradients on all ranks: name the modules to tile, as in Tiling(targets=...), and set the same"
            " hooks on all ranks."
        )
    for patch in new:
        patch.needs.agreed = True


_INSTEAD = "Use another strategy or stage, or do not tile it: Tiling(targets=...), or tiling=False."


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


def _register_full_backward_hook(self: nn.Module, hook: Any, *args: Any, **kwargs: Any) -> Any:
    """Register a hook of ZeRO-3 on a token, see NOTE [ZeRO-3 leaves], and all others as ever."""
    if is_of(hook, ("deepspeed.",)):
        return self.register_forward_pre_hook(_AfterAllCalls(hook))  # the last one, so inside of what frees the weights
    return type(self).register_full_backward_hook(self, hook, *args, **kwargs)


class _AfterAllCalls:
    """Runs a backward hook once per backward pass, after all calls of the module."""

    def __init__(self, hook: Callable[..., None]) -> None:
        self.hook = hook
        self.token: Tensor | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        index = next((i for i, arg in enumerate(args) if _has_hidden(arg)), None)
        if index is None or not (torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())):
            return args
        tensors, spec = pytree.tree_flatten(args[index])
        first = next(i for i, tensor in enumerate(tensors) if _is_hidden(tensor))
        if self.token is None:
            self.token = tensors[first].new_zeros((), requires_grad=True)
            self.token.register_hook(lambda _: self.hook(module, (), ()))
        tensors[first] = _JoinToken.apply(tensors[first], self.token)
        return (*args[:index], pytree.tree_unflatten(tensors, spec), *args[index + 1 :])


class _JoinToken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, token: Tensor) -> Tensor:
        return hidden.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, gradient.new_zeros(())
