"""Small programs that the process tests start."""

from __future__ import annotations

import os
import sys
import time

import torch

from lt_tiled import ActivationCheckpointing
from lt_tiled.offload.offloader import Offloader, build_offloader


def offloader(directory: str) -> Offloader:
    return build_offloader(ActivationCheckpointing(offload="disk", directory=directory, keep_last=0))


def write_for_ever(directory: str) -> None:
    """Pack and drop until the process is killed."""
    o, real = offloader(directory), os.pwritev
    os.pwritev = lambda *a: print("writing", flush=True) or real(*a)
    while True:
        packed = [o.pack(torch.randn(2**20), "block") for _ in range(4)]
        del packed


def exit_in_flight(directory: str) -> None:
    """Leave the interpreter while writes run."""
    o = offloader(directory)
    real = o.disk._write
    o.disk._write = lambda *a: (time.sleep(0.5), real(*a))
    packed = [o.pack(torch.randn(2**20), "block") for _ in range(2)]
    print(len(packed), "in flight", flush=True)


def fork_after_start(directory: str) -> None:
    """Fork, as DataLoader workers do; the child may not offload and leaves quietly, the parent goes on."""
    o = offloader(directory)
    tensor = torch.randn(1000)
    packed = o.pack(tensor, "block")
    child = os.fork()
    if child == 0:
        try:
            o.pack(torch.randn(1000), "block")
        except Exception as error:
            print("child:", error, flush=True)
        del packed
        sys.exit(7)
    status = os.waitpid(child, 0)[1]
    print("child left with", os.waitstatus_to_exitcode(status), flush=True)
    print("parent:", torch.equal(o.unpack(packed), tensor), flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
