"""The file: what is written comes back, or an error says why; and nothing is ever left on the disk."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lt_tiled.errors import OffloadDiskFullError, OffloadError
from lt_tiled.offload import pinned
from lt_tiled.offload.disk import Disk, Place
from tests.offload.faults import each_call, fail, nth_call, short

DATA = torch.randint(256, (5 * 2**20 + 12345,), dtype=torch.uint8)
CPU = torch.device("cpu")


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    file = Disk(str(tmp_path), direct=request.param)
    yield file
    file.close()
    assert os.listdir(tmp_path) == []


def put(disk: Disk, data: Tensor = DATA) -> Place:
    place, _, wait = disk.store(data, None)
    wait()
    return place


def right(disk: Disk, place: Place, data: Tensor = DATA) -> bool:
    return torch.equal(disk.load(place, data.nbytes, CPU)(), data)


@pytest.mark.parametrize("length", [1, 4096, 4097, 2**20 - 1, 2**20, 2**20 + 1, len(DATA)])
def test_every_length_comes_back(disk: Disk, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """Data of any length, aligned or not, one piece or several, comes back as it was."""
    monkeypatch.setattr(pinned, "PIECE", 2**20)
    assert right(disk, put(disk, DATA[:length]), DATA[:length])


def test_private_and_unnamed(disk: Disk, tmp_path: Path) -> None:
    """The open file has no name, mode 0600 and no other link; no directory is left beside it."""
    put(disk)
    status = os.fstat(disk._file)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_nlink == 0
    assert os.listdir(tmp_path) == []


def test_o_direct_refused(tmp_path: Path) -> None:
    """A filesystem that refuses ``O_DIRECT``, when the file is opened or in the first call, is used through the page
    cache.
    """
    real = fcntl.fcntl

    def refuse(file: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "invalid")
        return real(file, command, flags)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fcntl, "fcntl", refuse)
        at_open = Disk(str(tmp_path))
    first_call = Disk(str(tmp_path))
    with nth_call("pwritev", 1, fail(errno.EINVAL)):
        place = put(first_call)
    for disk, where in ((at_open, put(at_open)), (first_call, place)):
        assert not disk.direct
        assert right(disk, where)
        disk.close()


def test_parts_too_small_for_direct_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that moves 512 bytes at a time under ``O_DIRECT`` is used through the page cache instead of for ever."""
    disk, real = Disk(str(tmp_path)), os.pwritev

    def crumbs(file: int, buffers: list[memoryview], offset: int) -> int:
        return real(file, [buffers[0][:512]] if disk.direct else buffers, offset)

    monkeypatch.setattr(os, "pwritev", crumbs)
    assert right(disk, put(disk))
    assert not disk.direct
    disk.close()


@pytest.mark.parametrize("function", ["pwritev", "preadv"])
def test_short_calls_go_on(disk: Disk, function: str) -> None:
    """A call that moves only a part, whichever it is, is followed by one for the rest."""
    for _ in each_call(function, short):
        assert right(disk, put(disk))


def test_budget(tmp_path: Path) -> None:
    """A budget is reserved at once, and is enough for exactly as much."""
    disk = Disk(str(tmp_path), 10 * 2**20)
    assert os.fstat(disk._file).st_blocks * 512 >= 10 * 2**20
    places = [disk._take(2**20) for _ in range(10)]  # in use while they are referred to
    with pytest.raises(OffloadDiskFullError, match=r"share of disk_budget, 10485760 bytes, has no room for 4096 bytes"):
        disk._take(4096)
    assert len(places) == 10
    disk.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "missing", "No such file or directory: set another directory, which exists and is writable"),
        (lambda p: (p / "file").write_text("x") and p / "file", "Not a directory: set another directory"),
    ],
)
def test_bad_directory(tmp_path: Path, make: object, message: str) -> None:
    """A directory that is missing, or none, is named with the system's reason."""
    directory = make(tmp_path)
    with pytest.raises(OffloadError, match=rf"cannot create a file of .* in '{directory}': {message}"):
        Disk(str(directory))


def test_closed(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """After ``close`` nothing hangs: what waited is cancelled, what is new is an error, and closing again is none."""
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *args: (time.sleep(0.01), real(*args))[1])
    calls = [disk.store(DATA[:4096], None)[1] for _ in range(20)]
    disk.close()
    assert all(done() for done in calls)  # a cancelled one is done too
    assert any(call.cancelled() for call in disk._calls)
    with pytest.raises(RuntimeError, match="after shutdown"):
        disk.store(DATA, None)


def test_dropped_without_close(tmp_path: Path) -> None:
    """A file that was not closed is closed when it is collected."""
    gc.collect()  # files of other tests
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        put(Disk(str(tmp_path)))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
