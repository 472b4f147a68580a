"""Errors of some ranks in a step with collectives, in which the other ranks would wait forever."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from itertools import count
from threading import Thread

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch.distributed.elastic.utils.store import barrier

from lt_tiled.training_step.step import nothing

_calls = count()
PATIENCE = 10.0
"""How many seconds a rank that failed waits for the other ranks to fail or to end."""


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
    failed = f"lt_tiled/{call}/failed"

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
    error = raised[0] if raised else ValueError(store.get(failed).decode())
    _all_ranks_come(group, f"lt_tiled/{call}/left")
    raise error


def ranks_fail_together() -> bool:
    """Return whether all ranks raise at the same place, where each that raises calls this function.

    A rank that does not raise may wait for this one in a collective, so the answer is no after ``PATIENCE`` seconds.
    """
    group = dist.group.WORLD
    if group is None or group.size() == 1:
        return True
    return _all_ranks_come(group, f"lt_tiled/{next(_calls)}/raised")


def _all_ranks_come(group: dist.ProcessGroup, place: str) -> bool:
    """Wait for the other ranks at a place, and return whether all of them come in time."""
    try:
        barrier(group.get_group_store(), group.size(), place, PATIENCE)
    except RuntimeError:  # in time not all of them, or the rank that held the store has ended
        return False
    return True
