"""Compare offloading with axolotl's disk store when something fails: ``python -m benchmarks --only faults``.

Each fault is made in a process of its own, ``python -m benchmarks.faults STORE FAULT DIRECTORY``, which prints what
came of it; one that does not end in time hangs. Green is data as it was, or an error.
"""

from __future__ import annotations

import importlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.sheet import Cell, Sheet

WAIT_SECONDS = 30
COUNT, ELEMENTS = 8, 2**20


class Store(Protocol):
    """Takes tensors to the disk, and brings them back."""

    def save(self, tensor: Tensor) -> Any: ...

    def load(self, saved: Any) -> Tensor: ...

    def settle(self, saved: list[Any]) -> None:
        """Wait until all is written."""

    def files(self) -> list[Path]:
        """Where the data is."""


class OurStore:
    """The offloader of a disk policy."""

    def __init__(self, directory: str) -> None:
        from lt_tiled import ActivationCheckpointing
        from lt_tiled.offload.offloader import build_offloader

        self.offloader = build_offloader(
            ActivationCheckpointing(offload="disk", directory=directory, keep_last=0, checksum=True)
        )

    def save(self, tensor: Tensor) -> Any:
        return self.offloader.pack(tensor, "block")

    def load(self, saved: Any) -> Tensor:
        return self.offloader.unpack(saved)

    def settle(self, saved: list[Any]) -> None:
        for packed in saved:
            packed.stored.settle(WAIT_SECONDS)

    def files(self) -> list[Path]:
        return [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_unnamed(f"/proc/self/fd/{fd}")]


class TheirStore:
    """axolotl's store of one file for each tensor."""

    def __init__(self, directory: str) -> None:
        module = importlib.import_module("axolotl.monkeypatch.gradient_checkpointing.offload_disk")
        tempfile.tempdir = directory
        self.manager = module.DiskOffloadManager(prefetch_to_gpu=False)

    def save(self, tensor: Tensor) -> Any:
        return self.manager.save_tensor(tensor)

    def load(self, saved: Any) -> Tensor:
        tensor: Tensor = self.manager.load_tensor(saved, target_device="cpu")
        return tensor

    def settle(self, saved: list[Any]) -> None:
        for path in saved:
            self.manager.wait_for_save(path, WAIT_SECONDS)

    def files(self) -> list[Path]:
        return sorted(Path(self.manager.temp_dir).iterdir())


STORES: dict[str, Callable[[str], Store]] = {"lt_tiled": OurStore, "axolotl": TheirStore}


def _is_unnamed(link: str) -> bool:
    try:
        return "(deleted)" in os.readlink(link) and os.stat(link).st_size >= ELEMENTS
    except OSError:
        return False


# The faults, each of which prints what came of it


def overwritten(store: Store) -> str:
    """The tensor changes as soon as it was handed over."""
    tensors = [torch.randn(ELEMENTS) for _ in range(COUNT)]
    true = [tensor.clone() for tensor in tensors]
    saved = []
    for tensor in tensors:
        saved.append(store.save(tensor))
        tensor.fill_(7.0)
    return _restored(store, saved, true)


def flipped(store: Store) -> str:
    """A byte changes on the disk."""

    def flip(file: Path) -> None:
        with file.open("r+b", buffering=0) as stream:
            stream.seek(ELEMENTS)
            (byte,) = stream.read(1)
            stream.seek(ELEMENTS)
            stream.write(bytes([byte ^ 16]))

    return _damaged(store, flip)


def cut(store: Store) -> str:
    """The file is cut short."""
    return _damaged(store, lambda file: os.truncate(file, 4096))


def bounded(store: Store) -> str:
    """Files may not grow beyond a quarter of a tensor, as under a quota."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ELEMENTS, ELEMENTS))
    true = [torch.randn(ELEMENTS) for _ in range(4 * COUNT)]
    return _restored(store, [store.save(tensor.clone()) for tensor in true], true)


def runs(store: Store) -> str:
    """Writes until it is killed."""
    print("writing", flush=True)
    while True:
        store.settle([store.save(torch.randn(ELEMENTS)) for _ in range(4)])


def _damaged(store: Store, damage: Callable[[Path], None]) -> str:
    true = [torch.randn(ELEMENTS) for _ in range(COUNT)]
    saved = [store.save(tensor.clone()) for tensor in true]
    store.settle(saved)
    files = store.files()
    assert files, "there is no file to damage"
    for file in files:
        damage(file)
    return _restored(store, saved, true)


def _restored(store: Store, saved: list[Any], true: list[Tensor]) -> str:
    wrong = sum(not torch.equal(store.load(s), t) for s, t in zip(saved, true, strict=True))
    return f"{wrong} of {len(true)} silently wrong" if wrong else "restored"


FAULTS: dict[str, Callable[[Store], str]] = {
    "tensor changed in place after it was saved": overwritten,
    "a bit flips on the disk": flipped,
    "file cut short": cut,
    "no room for the file": bounded,
}


# Running them


def faults(directory: str) -> list[Sheet]:
    """One row for each fault, one column for each store."""
    missing = _missing()
    here = [name for name in STORES if name not in missing]
    sheet = Sheet("faults", "offloading to disk, when things go wrong", ["", *here])
    sheet.notes = [
        "lt_tiled with its default `checksum=True`; without it a flipped bit is not noticed.",
        *missing.values(),
    ]
    for title, fault in FAULTS.items():
        sheet.add(title, *(_outcome(name, fault.__name__, directory) for name in here))
    for kind in (signal.SIGTERM, signal.SIGKILL):
        sheet.add(f"ended by {kind.name}", *(_ended(name, kind, directory) for name in here))
    return [sheet]


def _missing() -> dict[str, str]:
    try:
        importlib.import_module("axolotl.monkeypatch.gradient_checkpointing.offload_disk")
    except Exception as error:  # a package may refuse a machine with any error
        return {"axolotl": f"axolotl is not in it: {error}."}
    return {}


def _command(*args: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.faults", *args]


def _outcome(store: str, fault: str, directory: str) -> Cell:
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        try:
            done = subprocess.run(_command(store, fault, folder), capture_output=True, text=True, timeout=WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            return Cell("hangs", False)
    said = (done.stdout.strip().splitlines() or [f"died with {done.returncode}"])[-1]
    return Cell(said, said == "restored" or said.startswith("raises"))


def _ended(store: str, kind: signal.Signals, directory: str) -> Cell:
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        with subprocess.Popen(
            _command(store, "runs", folder), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            assert process.stdout is not None
            writing = process.stdout.readline() == "writing\n"
            time.sleep(1)
            if not writing or process.poll() is not None:
                process.kill()
                return Cell("ended by itself", False)
            process.send_signal(kind)
            process.wait(WAIT_SECONDS)
        left = [path for path in Path(folder).rglob("*") if path.is_file()]
    return Cell(f"{len(left)} files left" if left else "nothing left", not left)


def main(store: str, fault: str, directory: str) -> None:
    """Make one fault."""
    functions = {function.__name__: function for function in (*FAULTS.values(), runs)}
    torch.manual_seed(0)
    made = STORES[store](directory)
    try:
        print(functions[fault](made), flush=True)
    except AssertionError:
        raise  # the fault was not made
    except Exception as error:  # whatever a store makes of it
        print(f"raises {type(error).__name__}", flush=True)
    os._exit(0)  # a store whose threads hang shall not hold up the answer


if __name__ == "__main__":
    main(*sys.argv[1:])
