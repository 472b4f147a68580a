"""The file: what is written comes back, or an error says why; and nothing is ever left on the disk."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lt_tiled.errors import OffloadDiskFullError, OffloadError
from lt_tiled.offload import pinned
from lt_tiled.offload.disk import Disk, Place
from tests.offload.offloaders import each_call, fail, nth_call

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


def test_every_length_comes_back(disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data of any length, aligned or not, one piece or several, comes back as it was, from a file that has no name and
    that nobody else may read.
    """
    monkeypatch.setattr(pinned, "PIECE", 2**20)
    for length in (1, 4096, 4097, 2**20 - 1, 2**20, 2**20 + 1, len(DATA)):
        assert right(disk, put(disk, DATA[:length]), DATA[:length])
    status = os.fstat(disk._file)
    assert (stat.S_IMODE(status.st_mode), status.st_nlink) == (0o600, 0)
    assert os.listdir(tmp_path) == []


def test_o_direct_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filesystem that refuses ``O_DIRECT``, at once or in the first call, is used through the page cache."""

    def refuse(file: int, command: int, flags: int = 0) -> int:
        raise OSError(errno.EINVAL, "invalid")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "fcntl", refuse)
        disks = [Disk(str(tmp_path))]
    disks.append(Disk(str(tmp_path)))
    with nth_call("pwritev", 1, fail(errno.EINVAL)):
        put(disks[-1])
    for disk in disks:
        assert not disk.direct
        assert right(disk, put(disk))
        disk.close()


def half(real: Any, file: int, buffers: list[memoryview], offset: int) -> int:
    """A read or write that moves half of its bytes, but at least a page."""
    pages = max(len(buffers[0]) // 2 // 4096 * 4096, 1)
    return real(file, [buffers[0][:pages]], offset)


@pytest.mark.parametrize("function", ["pwritev", "preadv"])
def test_short_calls_go_on(disk: Disk, function: str) -> None:
    """A call that moves only a part, whichever it is, is followed by one for the rest."""
    for _ in each_call(function, half):
        assert right(disk, put(disk))


def test_budget(tmp_path: Path) -> None:
    """A budget is reserved at once, is enough for exactly as much, and for any lengths one after the other."""
    disk = Disk(str(tmp_path), 64 * 4096)
    assert os.fstat(disk._file).st_blocks * 512 >= 64 * 4096
    for pages in (1, 3, 2, 16, 1, 32, 5):
        places = [put(disk, DATA[: pages * 4096]) for _ in range(64 // pages)]  # in use while they are referred to
        del places[0]
        places.append(put(disk, DATA[: pages * 4096]))
        with pytest.raises(
            OffloadDiskFullError, match=r"share of disk_budget, 262144 bytes, has no room for \d+ bytes"
        ):
            put(disk, DATA[: pages * 4096])
        del places
    disk.close()


def test_bad_directory(tmp_path: Path) -> None:
    """A directory that is missing, or none, is named with the system's reason."""
    (tmp_path / "file").write_text("x")
    for name, reason in (("missing", "No such file or directory"), ("file", "Not a directory")):
        message = rf"cannot create a file of .* in '{tmp_path / name}': {reason}: set another directory, which exists"
        with pytest.raises(OffloadError, match=message):
            Disk(str(tmp_path / name))
