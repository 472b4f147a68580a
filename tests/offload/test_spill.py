"""The spill file: what is written comes back, or an error says why; and nothing is ever left on the disk."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lt_tiled.errors import OffloadDiskFullError, OffloadError
from lt_tiled.offload.extents import Extent, aligned
from lt_tiled.offload.spill import CHUNK, SpillFile, wait_for
from tests.offload.faults import each_call, fail, nth_call, short

DATA = os.urandom(CHUNK + 12345)


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def spill(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SpillFile]:
    file = SpillFile(tmp_path, direct=request.param)
    yield file
    file.close()
    assert os.listdir(tmp_path) == []


def put(spill: SpillFile, data: bytes = DATA) -> Extent:
    extent = spill.take(len(data))
    wait_for(spill.write(extent, [memoryview(data)]))
    return extent


def get(spill: SpillFile, extent: Extent, length: int = len(DATA)) -> bytes:
    into = bytearray(length)
    wait_for(spill.read(extent, [memoryview(into)]))
    return bytes(into)


@pytest.mark.parametrize("length", [1, 511, 4096, 4097, CHUNK - 1, CHUNK, CHUNK + 1])
def test_every_length_comes_back(spill: SpillFile, length: int) -> None:
    """Data of any length, aligned or not, one chunk or several, comes back as it was."""
    data = DATA[:length]
    assert get(spill, put(spill, data), length) == data


def test_private_and_unnamed(spill: SpillFile, tmp_path: Path) -> None:
    """The open file has no name, mode 0600 and no other link; no directory is left beside it, while it is open and
    after.
    """
    put(spill)
    status = os.fstat(spill._file)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_nlink == 0
    assert os.listdir(tmp_path) == []


def test_o_direct_refused_at_open(tmp_path: Path) -> None:
    """A filesystem that refuses ``O_DIRECT`` when the file is opened is used through the page cache."""
    real = fcntl.fcntl

    def refuse(file: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "invalid")
        return real(file, command, flags)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fcntl, "fcntl", refuse)
        spill = SpillFile(tmp_path)
    assert not spill.direct
    assert get(spill, put(spill)) == DATA
    spill.close()


def test_o_direct_refused_at_the_first_call(tmp_path: Path) -> None:
    """So is one that takes the flag and refuses the first write."""
    spill = SpillFile(tmp_path)
    with nth_call("pwritev", 1, fail(errno.EINVAL)):
        offset = put(spill)
    assert not spill.direct
    assert get(spill, offset) == DATA
    spill.close()


@pytest.mark.parametrize("function", ["pwritev", "preadv"])
def test_short_calls_go_on(spill: SpillFile, function: str) -> None:
    """A call that moves only a part, whichever it is, is followed by one for the rest."""
    for _ in each_call(function, short):
        assert get(spill, put(spill)) == DATA


def test_full_disk_while_growing(tmp_path: Path) -> None:
    """Without a budget the file grows by what its free end lacks. If the disk reserves half of that and fails, as ext4
    does, the error says so, the half is given back, and the file is used as before.
    """
    spill, real = SpillFile(tmp_path), os.posix_fallocate

    def half_way(file: int, offset: int, length: int) -> None:
        real(file, offset, length // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for length in (len(DATA), len(DATA) + 9 * CHUNK):
        spill.take(length)
        assert os.fstat(spill._file).st_size == aligned(length)
    size = os.fstat(spill._file).st_size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", half_way)
        with pytest.raises(OffloadDiskFullError, match="cannot reserve"):
            spill.take(2**30)
    file = os.fstat(spill._file)
    assert file.st_size == size
    assert file.st_blocks * 512 <= size + 2**15  # on a fragmented disk ext4 counts blocks that list the others
    assert get(spill, put(spill)) == DATA
    spill.close()


def test_unlink_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filesystem without unnamed files that unlinks no open file is refused, and the file is unlinked when closed."""

    def busy(_: Any, path: str) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)

    monkeypatch.setattr(tempfile, "_O_TMPFILE_WORKS", False)
    with (
        nth_call("unlink", 1, busy),
        pytest.raises(OffloadError, match=r"cannot create the spill file .*: Device or resource busy"),
    ):
        SpillFile(tmp_path)
    assert os.listdir(tmp_path) == []


def test_budget(tmp_path: Path) -> None:
    """A budget is reserved at once, is enough for exactly as much, and the error beyond it says what is in use."""
    spill = SpillFile(tmp_path, 10 * 2**20)
    assert os.fstat(spill._file).st_blocks * 512 >= 10 * 2**20
    offsets = [spill.take(2**20) for _ in range(10)]
    with pytest.raises(
        OffloadDiskFullError,
        match=r"share of disk_budget, 10\.0 MiB, has no free range of 1\.0 MiB \(10\.0 MiB are in use\): raise disk_b",
    ):
        spill.take(2**20 - 4095)
    free = offsets.pop(3).offset
    assert spill.take(2**20).offset == free
    spill.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "missing", "No such file or directory"),
        (lambda p: (p / "file").write_text("x") and p / "file", "Not a directory"),
    ],
)
def test_bad_directory(tmp_path: Path, make: object, message: str) -> None:
    """A directory that is missing, or none, is named with the system's reason."""
    directory = make(tmp_path)
    with pytest.raises(
        OffloadError,
        match=rf"cannot create the spill file \(set a directory that exists and is writable\): {message}.*{directory}",
    ):
        SpillFile(directory)


def test_closed(spill: SpillFile) -> None:
    """After ``close`` nothing hangs: what waited is cancelled, what is new is an error, and closing again is none."""
    offset = put(spill)
    waiting = [spill.write(offset, [memoryview(DATA)]) for _ in range(20)]
    spill.close()
    assert all(call.done() for call in waiting)  # a cancelled one is done too
    assert any(call.cancelled() for call in waiting)
    with pytest.raises(RuntimeError, match="after shutdown"):
        spill.write(offset, [memoryview(DATA)])
    spill.close()


def test_dropped_without_close(tmp_path: Path) -> None:
    """A file that was not closed is closed when it is collected."""
    gc.collect()  # files of other tests
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        put(SpillFile(tmp_path))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_parts_too_small_for_direct_calls(tmp_path: Path) -> None:
    """A disk that moves 512 bytes at a time under ``O_DIRECT`` is used through the page cache instead of for ever."""
    real = os.pwritev

    def crumbs(file: int, buffers: list[memoryview], offset: int) -> int:
        return real(file, [buffers[0][:512]] if spill.direct else buffers, offset)

    with pytest.MonkeyPatch.context() as patch:
        spill = SpillFile(tmp_path)
        direct = spill.direct
        patch.setattr(os, "pwritev", crumbs)
        offset = put(spill, DATA[:50_000])
    assert direct
    assert not spill.direct
    assert get(spill, offset, 50_000) == DATA[:50_000]
    spill.close()
