"""What a recompute finds as its forward pass found it: random state, autocast, default dtype, kernels and buffers.

And what surrounds both: modes, hooks on saved tensors, transforms and other activation checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel  # no public name reads them
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from lt_tiled._log import inform

# Random numbers


@dataclass(frozen=True)
class RandomState:
    """The states of the random generators that a module on ``device`` draws from."""

    device: torch.device
    states: list[Tensor]
    """That of the CPU, and behind it that of the device."""

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        states = [torch.get_rng_state()]
        if device.type not in ("cpu", "meta"):
            states.append(torch.get_device_module(device).get_rng_state(device))
        return cls(device, states)

    def set(self) -> None:
        torch.set_rng_state(self.states[0])
        for state in self.states[1:]:
            torch.get_device_module(self.device).set_rng_state(state, self.device)

    def same_as(self, other: RandomState) -> bool:
        """Whether both would give the same random numbers."""
        with _disable_current_modes():  # states are real tensors, also where a model runs on fake ones
            return all(map(torch.equal, self.states, other.states))


@contextmanager
def random_state_kept(device: torch.device, start: RandomState | None = None) -> Iterator[None]:
    """Restore the generators at the end; inside, let them begin at ``start``."""
    before = RandomState.now(device)
    try:
        if start is not None:
            start.set()
        yield
    finally:
        before.set()


# Precision and kernels


@dataclass(frozen=True)
class Precision:
    """Torch's default dtype, ``torch.autocast`` for a device, and the kernels that attention may use."""

    kind: str
    default: torch.dtype
    dtype: torch.dtype | None
    """The dtype of autocast on the device, if it is enabled."""
    kernels: tuple[SDPBackend, ...]
    """Those that ``torch.nn.attention.sdpa_kernel`` enables."""

    @classmethod
    def now(cls, device: torch.device) -> Precision:
        kind = device.type
        dtype = None
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        return cls(kind, torch.get_default_dtype(), dtype, tuple(_cur_sdpa_kernel_backends()))

    @contextmanager
    def context(self) -> Iterator[None]:
        before = Precision.now(torch.device(self.kind))
        with ExitStack() as stack:
            if before.dtype != self.dtype:
                stack.enter_context(torch.autocast(self.kind, self.dtype, self.dtype is not None))
            if before.kernels != self.kernels:
                stack.enter_context(sdpa_kernel(list(self.kernels)))
            stack.callback(torch.set_default_dtype, before.default)
            torch.set_default_dtype(self.default)
            yield


def rounds_products() -> bool:
    """Whether products of float32 may be rounded to TF32 or bfloat16."""
    # torch.get_float32_matmul_precision() raises where these attributes were set.
    backends: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
    return any(backend.fp32_precision in ("tf32", "bf16") for backend in backends)


# Buffers

SMALL = 2**20
"""The most bytes of a buffer that is copied. Of a larger one the tensor is put back, whatever was written to it."""
Values = dict[str, Tensor | None]


class Buffers:
    """The buffers of modules as they are now, without those of their submodules."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.values = [(module, _copied(module._buffers)) for module in modules]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let modules find these values in tensors of their own, and put back what is there now."""
        before = [(module, module._buffers) for module, _ in self.values]
        for module, values in self.values:
            vars(module)["_buffers"] = _copied(values)
        try:
            yield
        finally:
            for module, buffers in before:
                vars(module)["_buffers"] = buffers


def _copied(buffers: Values) -> Values:
    """Return buffers with copies of the small ones. One with a graph is replaced by code, not written to."""
    values = dict(buffers)
    for name, buffer in buffers.items():
        if buffer is not None and not buffer.requires_grad and buffer.nbytes <= SMALL:
            values[name] = buffer.detach().clone()
    return values


carried: list[ContextVar[Any]] = []
"""The variables that a recompute finds as its forward pass found them. Other packages add theirs.

Not all of a context: others hold outputs of the block, such as that by which transformers collects hidden states."""


# Modes, hooks and transforms around

PLAIN_TENSORS = (Tensor, nn.Parameter)
"""The classes of tensors with values of their own: others are fake, sharded, quantized or a tensor in another way."""


def is_real(tensor: Tensor) -> bool:
    """Whether a tensor has values: fake ones have none, nor have weights that ZeRO-3 has released."""
    return type(tensor) in PLAIN_TENSORS and not tensor.is_meta and tensor.numel() > 0


def hidden_from_modes(tensor: Tensor) -> AbstractContextManager[object]:
    """Hide what runs on a tensor that has values from FlopCounterMode and other modes."""
    return _disable_current_modes() if type(tensor) in PLAIN_TENSORS else nullcontext()


_SELECTIVE = ("torch.utils.checkpoint", "lt_tiled.recompute.keep")


@contextmanager
def hidden_from_checkpoints() -> Iterator[None]:
    """Hide what runs from selective activation checkpoints, which would keep it, and expect it in the recompute."""
    modes = _get_current_dispatch_mode_stack()
    others = [mode for mode in modes if type(mode).__module__ not in _SELECTIVE]
    with ExitStack() as stack:
        if len(others) < len(modes):
            stack.enter_context(_disable_current_modes())
            for mode in others:
                stack.enter_context(mode)
        yield


class PlainSavedTensors(torch.autograd.graph.saved_tensors_hooks):
    """Hides the saved tensors of a graph from other hooks, such as those of an offloader."""

    def __init__(self) -> None:
        # A saved output would otherwise keep its own node alive.
        super().__init__(lambda tensor: tensor if tensor.is_leaf else tensor.detach(), lambda packed: packed)


def hooks_of_saved_tensors() -> Any:
    """Return the hooks that see the saved tensors of a graph that is made now; ``None`` without."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # no public name


def in_checkpoint() -> bool:
    """Whether torch's activation checkpoint runs this code, or its recompute."""
    hooks = hooks_of_saved_tensors()
    name: str = getattr(hooks and hooks[0], "__qualname__", "")
    return name.startswith(("_checkpoint_hook", "_recomputation_hook"))


def is_transformed() -> bool:
    """Return whether a transform is active that Functions and checkpoints do not support. It is logged once."""
    if torch._C._are_functorch_transforms_active():
        transform = "torch.func"
    elif forward_ad._current_level >= 0:
        transform = "forward-mode differentiation"
    elif parametrize._cache_enabled:
        transform = "torch.nn.utils.parametrize.cached()"  # whose cache the first tile would fill, without a graph
    else:
        return False
    inform(f"under {transform} nothing runs in tiles or with lt_tiled's activation checkpointing", once=transform)
    return True


def is_backward() -> bool:
    """Whether a backward pass runs in this thread."""
    return torch._C._current_graph_task_id() != -1  # no public name


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version
