"""What DeepSpeed needs beside the shared mixins, for Trainer and for Fabric."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled._log import warn
from lt_tiled._prepare import PreparedModels
from lt_tiled.modules.patch import get_mark
from lt_tiled.policies import Checkpointing
from lt_tiled.strategies._device import on_cpu
from lt_tiled.tiling.api import tile_marks
from lt_tiled.tiling.state import TileMark


class DeepSpeedNeeds:
    """Mixed into both DeepSpeed strategies.

    Args:
        zero3_leaf_modules: Mark the tiled modules as leaves for ZeRO-3, which then gathers the weights of each once per
            pass, whatever the number of tiles. Turn it off only where a module around them is a leaf already.
    """

    guarded: ClassVar[Any]
    """The parent, whose ``setup_environment`` lets nothing but CUDA pass."""
    config: Any
    checkpointing: Checkpointing | None
    parallel_devices: list[torch.device] | None
    prepared: PreparedModels
    zero_stage_3: bool

    def __init__(self, *args: Any, zero3_leaf_modules: bool = True, **kwargs: Any) -> None:
        if find_spec("deepspeed") is None:
            raise ModuleNotFoundError(
                f"{type(self).__name__} needs the package deepspeed: pip install 'lt-tiled[deepspeed]'."
            )
        super().__init__(*args, **kwargs)
        # DeepSpeed 0.19 calls these by the names that torch 2.13 deprecates, and each call warns.
        warnings.filterwarnings(
            "ignore", r".*torch\.distributed\.(all_gather_into|reduce_scatter)_tensor` is deprecated", FutureWarning
        )
        self.zero3_leaf_modules = zero3_leaf_modules
        self._hooks: list[Any] = []
        if self.config.get("activation_checkpointing", {}).get("cpu_checkpointing") and self.checkpointing is not None:
            raise ValueError(
                f"{type(self).__name__} was given cpu_checkpointing and checkpointing={self.checkpointing!r}, two ways to offload the same"
                " activations. Leave cpu_checkpointing out and pass checkpointing='cpu', or pass checkpointing=False."
            )

    def setup_environment(self) -> None:
        if not on_cpu(self):
            return super().setup_environment()  # type: ignore[misc,no-any-return]
        self._prepare_for_cpu()
        return super(self.guarded, self).setup_environment()  # type: ignore[misc,no-any-return]

    def _prepare_for_cpu(self) -> None:
        """Let DeepSpeed run on the CPU, which it can and Lightning's guard does not know of."""
        import deepspeed
        from deepspeed.accelerator import get_accelerator, set_accelerator
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        if get_accelerator().device_name() != "cpu":
            set_accelerator(CPU_Accelerator())
        # Both would be compiled when first used, for minutes: gloo and torch's optimizers serve.
        # https://github.com/deepspeedai/DeepSpeed/pull/5391
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        if "offload_optimizer" in self.config.get("zero_optimization", {}):
            self.config.setdefault("zero_force_ds_cpu_optimizer", False)
        # DeepSpeed and Lightning's check index devices by the local rank; an indexed CPU is the CPU.
        assert self.parallel_devices is not None
        self.parallel_devices = [torch.device("cpu", index) for index in range(len(self.parallel_devices))]

    def prepare_once(self, model: nn.Module) -> None:
        """Apply the policies, and let ZeRO-3 gather each tiled module as a whole, before ``deepspeed.initialize``
        looks.

        Raises:
            ValueError: Under ZeRO-3, if a tiled module is neither marked as a leaf nor inside of one.
        """
        before = len(self.prepared)
        super().prepare_once(model)  # type: ignore[misc]
        if len(self.prepared) == before:
            return
        if self.zero_stage_3 and self.zero3_leaf_modules:
            from deepspeed.utils import set_z3_leaf_module

            for _, module in _gathered_together(model):
                set_z3_leaf_module(module, True)  # for as long as the model lives: the engine's hooks depend on it
                self._hooks.append(module.register_forward_pre_hook(_arguments_for_a_leaf, with_kwargs=True))
        adapt_tiles(self, model)

    def release(self) -> None:
        """Leave every model as it was, but for ZeRO-3's leaf modules, which its engine still needs."""
        super().release()  # type: ignore[misc]
        while self._hooks:
            self._hooks.pop().remove()

    @contextmanager
    def sharded_context(self, inherited: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
        """Build models sharded, and let transformers know, which otherwise initialises weights that are not there.

        Without that Hugging Face models begin at torch's default weights, and ``from_pretrained`` loads none:
        https://huggingface.co/docs/transformers/deepspeed#non-trainer-integration.
        """
        with inherited():  # which completes the config
            known = self._tell_transformers() if self.zero_stage_3 and find_spec("transformers") is not None else None
            yield
            del known

    def _tell_transformers(self) -> Any:
        """What transformers holds weakly, so that it knows for as long as this lives."""
        if find_spec("accelerate") is None:
            warn(
                "transformers needs accelerate to initialise a model that ZeRO-3 shards: pip install 'lt-tiled[deepspeed]'."
            )
            return None
        from transformers.integrations.deepspeed import HfDeepSpeedConfig

        return HfDeepSpeedConfig(self.config)


def adapt_tiles(strategy: Any, model: nn.Module) -> None:
    """Make a tiled model right for DeepSpeed.

    Raises:
        ValueError: Under ZeRO-3, if a tiled module is no leaf and in none: its weights would be sharded while it runs.
    """
    for _, _, mark in tile_marks(model):
        # DeepSpeed reads the gradient of each weight that autograd reaches, and counts those that it does not reach as
        # zeros.
        mark.needs.zeros_for_unused, mark.needs.defer = True, not strategy.zero_stage_3
    if not strategy.zero_stage_3:
        return
    from deepspeed.utils import get_z3_leaf_modules

    whole = {id(part) for leaf in get_z3_leaf_modules(model) for part in leaf.modules()}
    for path, module in _gathered_together(model):
        if id(module) not in whole:
            raise ValueError(
                f"{path} ({type(module).__name__}) is tiled and no leaf module of ZeRO-3, which would shard its weights while it runs: use"
                " TiledDeepSpeedStrategy(stage=3), which marks it, and not a callback, which comes too late; or call"
                " deepspeed.utils.set_z3_leaf_modules at the end of configure_model."
            )


def _gathered_together(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules whose weights must be there while tiles run: the tiled ones, and blocks that run a chain themselves.

    A norm is not tiled with the MLP before it, whose leaf it stands outside of.
    """
    return [(path, m) for path, m, _ in tile_marks(model)]


def _arguments_for_a_leaf(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Hand a leaf its tensors by position where its forward takes them so, and hidden states that require a gradient.

    ZeRO-3 reduces a leaf's gradients and frees its weights in hooks on the gradients of its positional inputs. Without
    one, as behind frozen embeddings, DeepSpeed fails, tiled or not: https://github.com/deepspeedai/DeepSpeed/pull/5074.
    """
    if kwargs:
        mark = get_mark(module, TileMark)
        forward = (mark and mark.replaced) or MethodType(type(module).forward, module)
        bound = inspect.signature(forward).bind(*args, **kwargs)
        args, kwargs = bound.args, bound.kwargs
    tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
    hidden = next((t for t in tensors if t.is_floating_point()), None)
    learns = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
    if not learns or hidden is None or any(t.requires_grad for t in tensors):
        return args, kwargs
    wanting = hidden.detach().requires_grad_()
    return pytree.tree_map(lambda leaf: wanting if leaf is hidden else leaf, args), kwargs
