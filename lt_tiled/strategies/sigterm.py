"""SIGTERM, as preempted jobs get it, ends all ranks together.

NOTE [SIGTERM]
Lightning's signal handler calls a collective wherever a rank happens to be, and ranks may then wait for each other
forever. The handler here only notes the signal. Before each step and after the last one the ranks agree whether one of
them has received it, and then all of them raise ``SIGTERMException``. So every step and every checkpoint is complete.
The cost is one all-reduce of an integer per step, whose result the CPU waits for; Lightning's epoch loop already
broadcasts a flag and waits for it after each batch. A run of one process has none. ``validate``, ``test`` and
``predict`` have nothing to complete: a rank ends at once, and the others with it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lt_tiled._log import warn
from lt_tiled.modules.patch import is_of
from lt_tiled.namespaces import LIGHTNING

if TYPE_CHECKING:
    import lightning.pytorch as pl

_FIRST = "LT_TILED_FIRST_PROCESS"


def end_with_launcher() -> None:
    """Ask the kernel for SIGTERM when torchrun, or the first rank of Lightning's launcher, dies.

    Otherwise ranks would outlive it. Call this before they are launched, and in each before they wait for each other.
    """
    if sys.platform != "linux":
        return
    first = int(os.environ.get(_FIRST, 0)) if "LOCAL_RANK" in os.environ else 0
    if not first:
        os.environ[_FIRST] = str(os.getpid())  # which the ranks that Lightning starts inherit
    by_torchrun = torch.distributed.is_torchelastic_launched()
    if first == os.getppid() or by_torchrun:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if first and not by_torchrun and _has_ended(first):
        raise RuntimeError(f"Process {first}, which started this rank, has ended.")


def _has_ended(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in ("Z", "X")  # a zombie


class Sigterm:
    """Handles SIGTERM in one run of a Trainer with several processes; see the note above."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._rank, self._agreed_step = -1, -1  # none
        self._other_handler = _users_handler()

    def handle(self) -> None:
        """Replace the handler that Lightning installs when a run begins, and replaces at its end."""
        if threading.current_thread() is threading.main_thread() and self._trainer.world_size > 1:
            self._other_handler = _users_handler() or self._other_handler
            signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._rank = self._trainer.global_rank
        if callable(self._other_handler):
            self._other_handler(number, frame)
        if self._trainer.state.fn != "fit":
            print(f"Rank {self._rank} received SIGTERM, and all ranks end.", file=sys.stderr)
            raise SIGTERMException(128 + signal.SIGTERM)

    def end_before_step(self, batch_idx: int) -> None:
        """End all ranks if one has received it, but not between micro-batches, whose gradients would be lost."""
        if batch_idx == 0 or self._trainer.global_step != self._agreed_step:
            self._agreed_step = self._trainer.global_step
            self.end(f"before step {self._trainer.global_step}. Resume from the last checkpoint (ckpt_path).")

    def end(self, when: str) -> None:
        """End all ranks if one has received it; all of them must call this."""
        trainer = self._trainer
        if trainer.world_size == 1:  # Lightning's own handling is enough
            return
        own = torch.tensor(self._rank, device=trainer.strategy.root_device)
        rank = int(trainer.strategy.reduce(own, reduce_op="max"))
        if rank >= 0:
            warn(f"Rank {rank} received SIGTERM: all ranks end {when}")
            # Lightning's launcher kills rank 0, whatever it still writes, when another rank ends with an error.
            raise SIGTERMException(0 if trainer.local_rank else 128 + signal.SIGTERM)


def _users_handler() -> Any:
    """Return the handler of SIGTERM, unless it is Lightning's, or one of ours that a failed run left."""
    handler = signal.getsignal(signal.SIGTERM)
    return None if is_of(handler, (*LIGHTNING, "lt_tiled.")) else handler
