"""An accelerator without hardware: tensors on ``second`` are not CPU tensors, and operations that mix the two raise.

The device is torch's ``PrivateUse1``, which vendors of accelerators register, with kernels in Python. A tensor on it is
a plain ``torch.Tensor`` with a storage of its own. Its memory is CPU memory under another label, so each kernel is the
CPU's. Everything above the kernels is torch's own: autograd with a thread for the device, views, factories, the state
of autocast, and most checks of operands.

Call ``register()`` before the first backward pass of a process, because torch then starts one thread per device. It
cannot be undone. ``torch.accelerator`` then names this device, also where there is CUDA, so a process that uses CUDA
must not register it. The device is available only inside ``attached()``. It has one index, and lacks what torch leaves
to C++: ``torch.Generator("second")``, streams, pinned memory and ``torch.load`` without ``map_location``.
``tests/offload/test_streams.py`` checks the order of copies and computation instead.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed  # defines the collectives
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.dlpack import from_dlpack, to_dlpack

NAME = "second"
_LABELS = {"cpu": 1, NAME: 12}
"""DLPack's codes, ``kDLCPU`` and ``kDLExtDev``."""
_Device = ctypes.c_int32 * 2
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
_LIBRARIES: list[torch.library.Library] = []
_LOCK = threading.RLock()  # a garbage collection while it is held may free storages
GENERATOR = torch.Generator()

# Memory


def _relabel(tensor: Tensor, kind: str) -> Tensor:
    """Return a tensor on another device with the same memory, which it keeps alive.

    DLPack is the one API of torch that makes a tensor of any device on given memory.
    """
    capsule = to_dlpack(tensor)
    dltensor = _pointer(capsule, b"dltensor")  # it begins with a pointer to the data, the type of its device, the index
    _Device.from_address(dltensor + ctypes.sizeof(ctypes.c_void_p))[:] = _LABELS[kind], 0
    return from_dlpack(capsule)


def _to_second(value: Any) -> Any:
    """Put a tensor that a kernel of the CPU has returned on the device, and count its bytes until they are freed."""
    if not isinstance(value, Tensor):
        return value
    storage = value.untyped_storage()
    MODULE.count(storage.nbytes())
    weakref.finalize(storage, MODULE.count, -storage.nbytes()).atexit = False
    return _relabel(value, NAME)


def _on_second(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


def _to_cpu(value: Any) -> Any:
    """Return the same memory as a CPU tensor, and any other value as it is."""
    return _relabel(value, "cpu") if _on_second(value) else value


@contextmanager
def _drawing() -> Iterator[None]:
    """Let the CPU's kernels draw from the generator of the device."""
    with _LOCK:
        host = torch.get_rng_state()
        torch.set_rng_state(GENERATOR.get_state())
        try:
            yield
        finally:
            GENERATOR.set_state(torch.get_rng_state())
            torch.set_rng_state(host)


# Kernels


def _kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run any operator on the device: with the CPU's kernel, on the same memory."""
    if op.is_view:
        return op.redispatch(_ON_CPU, *args, **kwargs)  # which keeps the storage and its device
    _check_devices(op._schema.name.removeprefix("aten::"), args, kwargs)
    lent: dict[int, tuple[Tensor, Tensor]] = {}

    def to_cpu(value: Any) -> Any:
        if not _on_second(value):
            return value
        tensor = _relabel(value, "cpu")
        lent[id(tensor)] = tensor, value
        return tensor

    given = tree_map(to_cpu, kwargs)
    empty = {key: out for key, out in kwargs.items() if _on_second(out) and not out.numel()}
    for key, out in empty.items():  # of which the kernel may resize one
        given[key] = torch.empty(0, dtype=out.dtype)
        lent[id(given[key])] = given[key], out
    if given.get("device") is not None:
        given["device"] = "cpu"
    # A Python number may stand for a tensor, so that another overload takes it.
    with _drawing():
        result = op.overloadpacket(*tree_map(to_cpu, args), **given)
    for key, out in empty.items():
        new = _to_second(given[key])
        out.set_(new.untyped_storage(), 0, new.shape, new.stride())
    return tree_map(lambda value: lent[id(value)][1] if id(value) in lent else _to_second(value), result)


_TAKES_HOST_INDICES = {"index", "_unsafe_index", "index_put_", "index_put", "_index_put_impl_", "_unsafe_index_put"}
"""Operators whose second argument may hold tensors of the CPU, on CUDA too."""


def _check_devices(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if tensors, but for scalars of the CPU, or a generator are of another device."""
    leaves = tree_leaves(((*args[:1], *args[2:]) if name in _TAKES_HOST_INDICES else args, kwargs))
    devices = {v.device.type for v in leaves if isinstance(v, Tensor) and (v.dim() or _on_second(v))}
    if len(devices) > 1:
        raise RuntimeError(f"Expected all tensors to be on the same device, but {name} has {sorted(devices)}")
    if any(isinstance(value, torch.Generator) for value in leaves):
        raise RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu'")


def _copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    _to_cpu(target).copy_(_to_cpu(source))
    return target


def _clone_storage(real: Callable[..., Any], storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Clone a storage, for ``copy.deepcopy``. Torch would ask an allocator in C++, which the device has not."""
    if storage.device.type != NAME:
        return real(storage)  # type: ignore[no-any-return]
    held = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
    return held.clone().untyped_storage()  # type: ignore[no-any-return]


def _collective(op: Any, *args: Any) -> Any:
    """Run a collective in place with the CPU's backend, such as gloo, on the same memory."""
    return op(*tree_map(_to_cpu, args))


_COLLECTIVES = (
    *("allreduce_", "allgather_", "_allgather_base_", "reduce_scatter_", "_reduce_scatter_base_"),
    *("alltoall_", "alltoall_base_", "broadcast_"),
)


def _autocast(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator in the dtype of autocast, as CUDA's does."""

    def cast(value: Any) -> Any:
        eligible = _on_second(value) and value.is_floating_point() and value.dtype != torch.float64
        return value.to(torch.get_autocast_dtype(NAME)) if eligible else value

    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        return op(*tree_map(cast, args), **tree_map(cast, kwargs))


_LOW = ("mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "scaled_dot_product_attention")
"""The operators of CUDA's list of low precision that models in the tests use."""

# The device


class SecondModule(types.ModuleType):
    """What ``torch.get_device_module("second")`` returns. The device computes in order with the host."""

    attached = live = peak = 0
    _initialized = True
    """Read by ``torch.utils.checkpoint``, which restores the generators of initialized devices alone."""
    is_initialized = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    current_device = staticmethod(lambda: 0)
    device = staticmethod(lambda device: nullcontext())
    synchronize = staticmethod(lambda device=None: None)
    empty_cache = staticmethod(lambda: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.float16, torch.bfloat16])
    get_rng_state = staticmethod(lambda device=NAME: GENERATOR.get_state())
    set_rng_state = staticmethod(lambda new_state, device=NAME: GENERATOR.set_state(new_state))
    manual_seed_all = staticmethod(GENERATOR.manual_seed)

    def count(self, change: int) -> None:
        """Count bytes that are allocated or freed."""
        with _LOCK:
            self.live += change
            self.peak = max(self.peak, self.live)

    def is_available(self) -> bool:
        return self.attached > 0

    def device_count(self) -> int:
        return min(self.attached, 1)

    def memory_allocated(self, device: Any = None) -> int:
        return self.live

    def max_memory_allocated(self, device: Any = None) -> int:
        return self.peak

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self.peak = self.live


MODULE = SecondModule(NAME)


def register() -> None:
    """Name the device and give it its kernels. Once in a process, and before its first backward pass."""
    if _LIBRARIES:
        return
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend  # not in every torch

    class Hooks(torch._C._acc.PrivateUse1Hooks):
        def is_built(self) -> bool:
            return True

        def is_available(self) -> bool:
            return MODULE.is_available()

        def has_primary_context(self, index: int) -> bool:
            return True

    _setup_privateuseone_for_python_backend(NAME, MODULE, Hooks())
    every, aten, c10d = (torch.library.Library(namespace, "IMPL") for namespace in ("_", "aten", "c10d"))
    _LIBRARIES.extend((every, aten, c10d))
    every.fallback(_kernel, "PrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    own: dict[str, Any] = {"copy_": _copy_, "_local_scalar_dense": lambda t: _to_cpu(t).item()}
    own |= {"record_stream": lambda tensor, stream: None}
    for name in ("set_.source_Storage", "set_.source_Storage_storage_offset"):
        own[name] = functools.partial(_overload(torch.ops.aten, name).redispatch, _ON_CPU)
    for name in ("empty.memory_format", "empty_strided"):
        # ``torch.tensor`` calls them past an active TorchDispatchMode, where torch finds no fallback in Python.
        own[name] = functools.partial(_kernel, _overload(torch.ops.aten, name))
    for name, kernel in own.items():
        aten.impl(name, kernel, "PrivateUse1")
    for name in _LOW:
        aten.impl(name, functools.partial(_autocast, _overload(torch.ops.aten, name)), "AutocastPrivateUse1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has kernels of its own for these, which look for a backend
        for name in _COLLECTIVES:
            c10d.impl(name, functools.partial(_collective, _overload(torch.ops.c10d, name)), "PrivateUse1")
    torch.UntypedStorage.clone = functools.partialmethod(  # type: ignore[method-assign, assignment]
        lambda storage, real: _clone_storage(real, storage), torch.UntypedStorage.clone
    )


def _overload(namespace: Any, name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(namespace, packet), overload or "default")


@contextmanager
def attached() -> Iterator[None]:
    """Let the device be available, with its generator and peak as new."""
    register()
    MODULE.attached += 1
    MODULE.manual_seed_all(torch.initial_seed())
    MODULE.reset_peak_memory_stats()
    try:
        yield
    finally:
        MODULE.attached -= 1
