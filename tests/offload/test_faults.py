"""Faults of the disk and interrupts: each ends the step it belongs to and no other, and nothing is lost or left."""

from __future__ import annotations

import errno
import gc
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lt_tiled import OffloadDiskFullError, OffloadError
from lt_tiled.offload.offloader import Offloader
from lt_tiled.offload.prefetch import OffloadedTensor
from tests.interrupts import interrupted_at
from tests.offload.faults import EIO, ENOSPC, Fault, fail, no_tmpfile, nothing, nth_call
from tests.offload.offloaders import disk, settle, unused, within_limit
from tests.processes import LIMIT


@pytest.fixture
def offloader(tmp_path: Path) -> Iterator[Offloader]:
    """An offloader that sends everything to a disk, of which nothing is left."""
    made = disk(tmp_path)
    yield made
    made.close()
    assert list(tmp_path.iterdir()) == []


def right(offloader: Offloader, then: Callable[[], object] = lambda: None) -> bool:
    """Run a step, all of whose tensors leave, and return whether they come back bit for bit."""
    tensors = [torch.randn(2000) for _ in range(4)]
    packed = [offloader.pack(tensor.clone(), f"layers.{i}") for i, tensor in enumerate(tensors)]
    assert all(within_limit(record.stored.done) for record in packed)
    then()
    return all(torch.equal(offloader.unpack(p), t) for p, t in reversed(list(zip(packed, tensors, strict=True))))


class SlowWrites:
    """Writes that begin while ``slow`` is set reach the disk late."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slow, self.running, self.real = False, [], os.pwritev
        monkeypatch.setattr(os, "pwritev", self)

    def __call__(self, *args: Any) -> int:
        if self.slow:
            self.running.append(1)
            time.sleep(0.01)
            self.running.pop()
        return self.real(*args)

    def wait(self) -> None:
        end = time.monotonic() + LIMIT
        while self.running and time.monotonic() < end:
            time.sleep(0.001)


def test_interrupted_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at every seventh line of a step on a slow disk: the next step is right, and no space is lost."""
    offloader, writes = disk(tmp_path), SlowWrites(monkeypatch)

    def step() -> None:
        packed = [offloader.pack(torch.randn(2000), "block") for _ in range(3)]
        offloader.unpack(packed[-1])

    for count, line in enumerate(range(1, 100_000, 7)):  # noqa: B007
        writes.slow = True
        if not interrupted_at(line, step):
            break
        writes.slow = False
        assert right(offloader, then=writes.wait), line
    assert count > 20
    assert unused(offloader)
    offloader.close()


BREAKDOWNS = [("pwritev", fail(EIO)), ("pwritev", nothing), ("preadv", fail(EIO)), ("preadv", nothing)]


@contextmanager
def broken(function: str, n: int, fault: Fault) -> Iterator[None]:
    """Let two calls fail from the n-th on: those in flight at the same time."""
    with nth_call(function, n, fault), nth_call(function, n, fault):
        yield


@pytest.mark.parametrize("fields", [{}, {"disk_budget": 4 * 8192}], ids=["grows", "budget"])
@pytest.mark.parametrize(("function", "fault"), BREAKDOWNS)
def test_an_error_ends_its_own_step_alone(tmp_path: Path, function: str, fault: Fault, fields: dict[str, Any]) -> None:
    """Whichever two calls of a step fail, the error is raised in that step. The next step is right at once, while the
    error is still there, and in a budget of a single step.
    """
    offloader, kept = disk(tmp_path, **fields), []

    def failing() -> bool:
        try:
            return right(offloader)
        except OffloadError as error:
            kept.append(error if not fields else str(error))  # an error refers to its step, whose space it so keeps
            failed = error  # a reference cycle: this frame refers to the error, and the error to it
            return failed is None

    for n in range(1, 6):
        with broken(function, n, fault):
            failing()
        assert right(offloader), n
    assert len(kept) == 4
    kept.clear()
    gc.collect()
    assert unused(offloader)
    offloader.close()


def test_the_step_after_an_error_waits_for_no_write_of_it(
    offloader: Offloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While an error is kept and another write of its step does not end, the next step goes on."""
    gate, real, calls = threading.Event(), os.pwritev, [0]

    def pwritev(*args: Any) -> int:
        calls[0] += 1
        if calls[0] == 1:
            gate.wait(LIMIT)
        if calls[0] == 2:
            raise OSError(EIO, "Input/output error")
        return real(*args)

    monkeypatch.setattr(os, "pwritev", pwritev)

    def pack_three() -> None:
        packed: list[Any] = []
        for _ in range(3):
            packed.append(offloader.pack(torch.randn(2000), "block"))
            assert len(packed) < 2 or within_limit(packed[1].stored.done)

    with pytest.raises(OffloadError) as kept:
        pack_three()
    assert right(offloader)
    gate.set()
    assert kept.value.origin.step == 1


def test_release_reports_and_does_not_raise(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the filesystem is gone, the error of the run stays the one that is raised: the release writes to the log."""
    offloader, real = disk(tmp_path), os.close

    def close(file: int) -> None:
        real(file)
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    right(offloader)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "close", close)
        offloader.close()
    assert f"Closing the spill file in {tmp_path} failed: Transport endpoint is not connected" in caplog.text


def test_release_survives_other_tiers(offloader: Offloader, caplog: pytest.LogCaptureFixture) -> None:
    """A GPU that fails in the release is reported too."""

    def close() -> None:
        raise RuntimeError("CUDA error")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offloader.disk.memory, "close", close)
        offloader.close()
    assert "Releasing memory and disk space failed: CUDA error" in caplog.text


def test_unlink_that_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filesystem without unnamed files that renames an open file when it is unlinked (NFS, FUSE) is used, and no
    directory of ours is left in which its hidden file would be.
    """
    with monkeypatch.context() as patch, no_tmpfile():
        patch.setattr(os, "unlink", lambda path: os.rename(path, Path(path).parent / ".nfs0001"))
        offloader = disk(tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / ".nfs0001"]  # until the system removes it with the last descriptor
    assert right(offloader)
    offloader.close()


def test_unlink_that_is_refused(tmp_path: Path) -> None:
    """A filesystem that unlinks no open file is refused with our error, and the file is unlinked when closed."""

    def busy(_: Any, path: str) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)

    with (
        no_tmpfile(),
        nth_call("unlink", 1, busy),
        pytest.raises(OffloadError, match=r"cannot create the spill file .*: Device or resource busy"),
    ):
        disk(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_no_directory_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No directory is made that another user could exchange where everybody may write: the file has no name at all."""
    tmp_path.chmod(0o777)
    monkeypatch.setattr(os, "mkdir", fail(errno.EACCES))
    offloader = disk(tmp_path)
    assert right(offloader)
    offloader.close()


def test_no_larger_file_than_the_limit(tmp_path: Path) -> None:
    """Under ``ulimit -f`` the file grows up to it, and the error beyond it names that limit."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5 * 8192, limits[1]))
    try:
        offloader = disk(tmp_path)
        assert right(offloader)
        packed = [offloader.pack(torch.randn(2000), "block") for _ in range(5)]
        with pytest.raises(OffloadDiskFullError, match=r"cannot reserve .* in a file .*ulimit -f.*too large"):
            packed.append(offloader.pack(torch.randn(2000), "block"))
        del packed
        assert right(offloader)
        offloader.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_growth_that_fails_gives_back(tmp_path: Path) -> None:
    """A growth that fails half-way, as on ext4, leaves the file with the blocks that it knows of, and no others."""
    offloader, real = disk(tmp_path), os.posix_fallocate

    def half_way(file: int, offset: int, length: int) -> None:
        if length > 2**20:
            real(file, offset, length // 2)
            raise OSError(ENOSPC, os.strerror(ENOSPC))
        real(file, offset, length)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", half_way)
        assert right(offloader)
        with pytest.raises(OffloadDiskFullError, match="cannot reserve"):
            offloader.pack(torch.randn(2**19), "block")
    extents, file = offloader.disk.spill._extents, os.fstat(offloader.disk.spill._file)
    assert file.st_size == extents.size <= 4 * 8192
    # On a fragmented disk ext4 counts blocks that list the others. What failed is 32 times as much.
    assert file.st_blocks * 512 <= extents.size + 2**15
    offloader.close()


def test_the_budget_is_released_on_the_error_path(tmp_path: Path) -> None:
    """DataFusion #24230: after a step that fails with a full disk, the next step has the full budget."""
    offloader = disk(tmp_path, disk_budget=4 * 4096)
    for _ in range(5):
        packed: list[Tensor | OffloadedTensor] = [offloader.pack(torch.randn(1000), "block") for _ in range(4)]
        with pytest.raises(OffloadDiskFullError, match="raise disk_budget"):
            offloader.pack(torch.randn(1000), "block")
        packed.clear()
        gc.collect()
        settle(offloader)
        assert unused(offloader)
    offloader.close()
