"""Training steps outside of a training loop: the first batch, other sequence lengths, the loss, errors of ranks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import copy_context
from datetime import timedelta
from itertools import count, islice
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lt_tiled.errors import SimulationError

_calls = count()
PATIENCE = 10.0
"""How many seconds a rank that failed waits for the other ranks to fail, or to end, too."""


def first_batch(module: LightningModule, datamodule: LightningDataModule | None, index: int = 0) -> Any:
    """Return the first batch of the training data, or another, as ``training_step`` receives it, on the CPU.

    Raises:
        SimulationError: If there is none.
    """
    loader = (module if datamodule is None else datamodule).train_dataloader()
    batches = deque(islice(CombinedLoader(loader, "max_size_cycle"), index + 1), maxlen=1)
    if not batches:
        raise SimulationError("train_dataloader() yields no batch: add data, or make batch_size smaller.")
    batch, _, _ = batches.pop()
    for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
        overridden = datamodule is not None and is_overridden(hook, datamodule)
        batch = getattr(datamodule if overridden else module, hook)(batch, 0)
    return batch


def tensors_of(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch, in order."""
    found: list[Tensor] = []
    apply_to_collection(batch, Tensor, found.append)
    return found


def to_meta(batch: Any) -> Any:
    """Return a batch without its values, on the meta device."""
    return apply_to_collection(batch, Tensor, lambda t: torch.empty_like(t, device="meta"))


def length_of(batch: Any) -> int:
    """Return a batch's sequence length: dimension 1 of its first 2D or 3D tensor, or 0 if there is none (images)."""
    return next((tensor.shape[1] for tensor in tensors_of(batch) if tensor.dim() in (2, 3)), 0)


def with_length(batch: Any, tokens: int) -> Any:
    """Repeat or cut a batch's sequences to ``tokens``, in each dimension but the first that has the sequence length.

    Raises:
        ValueError: If the batch has no sequences.
    """
    length = length_of(batch)
    if not length:
        raise ValueError(
            "The batch has no tensor with two or three dimensions, so its sequences cannot be made longer: yield"
            " tensors of shape [batch, sequence] from the data, or do not set a sequence length."
        )

    def changed(tensor: Tensor) -> Tensor:
        for dim, size in enumerate(tensor.shape):
            if dim and size == length != tokens:
                tensor = torch.cat([tensor] * -(-tokens // length), dim).narrow(dim, 0, tokens)
        return tensor

    return apply_to_collection(batch, Tensor, changed)


def training_loss(run: Callable[..., Any], module: LightningModule, batch: Any) -> Tensor:
    """Run a module's ``training_step`` by ``run`` and return its loss.

    Raises:
        SimulationError: If it returns none.
    """
    indexed = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    output = run(batch, 0) if indexed else run(batch)
    loss = output["loss"] if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        step = f"{type(module).__name__}.training_step"
        raise SimulationError(f"{step} returned {type(loss).__name__} and no loss: use automatic optimization.")
    return loss


def raising_on_all(run: Callable[[], None], strategy: Strategy) -> None:
    """Run a function with collectives, and raise on all ranks what one of them raises.

    A collective that waits for a rank that failed cannot be interrupted. So with several ranks the function runs in a
    thread, and this one looks for errors in the store of the process group. After an error on some ranks, that thread
    keeps waiting, so the process group is of no further use.
    """
    group = dist.group.WORLD
    if group is None or group.size() == 1:
        return run()
    store, call, raised = group.get_group_store(), next(_calls), list[BaseException]()
    failed, left, ended = (f"lt_tiled/{call}/{key}" for key in ("failed", "left", "ended"))

    def work() -> None:
        try:
            torch.get_device_module(strategy.root_device).set_device(strategy.root_device)  # each thread has its own
            run()
        except BaseException as error:
            raised.append(error)

    thread = Thread(target=copy_context().run, args=(work,), daemon=True)
    thread.start()
    while thread.is_alive() and not store.check([failed]):
        thread.join(0.1)
    if raised:
        store.set(failed, f"Rank {group.rank()} cannot run its step: {type(raised[0]).__name__}: {raised[0]}")
    elif thread.is_alive():
        strategy.teardown = nothing  # type: ignore[method-assign]  # it would wait for the thread
    else:
        return None
    if store.add(left, 1) == group.size():
        store.set(ended, "")
    with suppress(RuntimeError):  # not all ranks came this far
        store.wait([ended], timedelta(seconds=PATIENCE))  # the rank that ends first may be the one that holds the store
    raise raised[0] if raised else ValueError(store.get(failed).decode())


def ranks_fail_together(error: Exception) -> bool:
    """Return whether all ranks raise at the same place, where each that raises calls this function.

    A rank that does not raise may wait for this one in a collective, so the answer is no after ``PATIENCE`` seconds.
    """
    group = dist.group.WORLD
    if group is None or group.size() == 1:
        return True
    store, call = group.get_group_store(), next(_calls)
    keys = [f"lt_tiled/{call}/failed on {rank}" for rank in range(group.size())]
    store.set(keys[group.rank()], repr(error))
    end = time.monotonic() + PATIENCE
    while not store.check(keys):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing, for example in place of ``self.log``, which needs a training loop."""


def stepped_on(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return all parameters of an optimizer."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]
