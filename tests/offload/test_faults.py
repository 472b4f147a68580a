"""The fault table: each fault ends the step it belongs to and no other, and nothing is lost or left."""

from __future__ import annotations

import errno
import gc
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lt_tiled import OffloadDiskFullError, OffloadError
from lt_tiled.offload.offloader import Offloader
from tests.offload.offloaders import Fault, disk, each_call, fail, nth_call, unused, within_limit


def right(offloader: Offloader) -> bool:
    """Run a step, all of whose tensors leave, and return whether they come back bit for bit."""
    tensors = [torch.randn(2000) for _ in range(4)]
    packed = [offloader.pack(tensor.clone(), "block") for tensor in tensors]
    assert all(within_limit(record.is_stored) for record in packed)
    return all(torch.equal(offloader.unpack(p), t) for p, t in reversed(list(zip(packed, tensors, strict=True))))


def nothing(real: Any, *args: Any) -> int:
    """A read or write that moves nothing."""
    return 0


NO_SPACE = "No space left on device: set another directory, lower disk_budget, or delete files there"


@pytest.mark.parametrize(
    ("function", "fault", "kind", "message"),
    [
        ("pwritev", fail(errno.ENOSPC), OffloadDiskFullError, f"cannot write .*: {NO_SPACE}"),
        ("pwritev", fail(errno.EFBIG), OffloadDiskFullError, "cannot write .*: File too large: .*ulimit -f"),
        ("pwritev", fail(errno.EIO), OffloadError, "cannot write .*: Input/output error: look for errors of the disk"),
        ("pwritev", nothing, OffloadError, "cannot write .*: a short write, 4096 bytes are left"),
        ("preadv", fail(errno.EIO), OffloadError, "cannot read .*: Input/output error"),
        ("preadv", nothing, OffloadError, "cannot read .*: a short read, 4096 bytes are left"),
    ],
)
def test_each_failing_call(function: str, fault: Any, kind: type[OffloadError], message: str, tmp_path: Path) -> None:
    """Whichever call fails, the error names the remedy, step, block, shape and place, also in another process."""
    errors: list[OffloadError] = []
    for _ in each_call(function, fault):
        offloader = disk(tmp_path)
        try:
            packed = [offloader.pack(torch.randn(500), f"layers.{i}") for i in range(4)]
            offloader._settle(offloader.waiting(), 0)
            for p in reversed(packed):
                offloader.unpack(p)
        except OffloadError as error:
            errors.append(error)
        offloader.close()  # the calls that still run must not count as those of the next offloader
    assert [type(error) for error in errors] == [kind] * 4
    for error in errors:
        assert re.search(message, str(error))
        assert error.origin is not None
        assert (error.origin.step, error.origin.shape) == (1, torch.Size([500]))
        assert error.origin.block.startswith("layers.")
        assert repr(str(tmp_path)) in str(error)
        back = pickle.loads(pickle.dumps(error))
        assert (type(back), str(back), vars(back)) == (kind, str(error), vars(error))


@pytest.mark.parametrize("fields", [{}, {"disk_budget": 4 * 8192}], ids=["grows", "budget"])
@pytest.mark.parametrize("fault", [fail(errno.EIO), nothing], ids=["error", "short"])
@pytest.mark.parametrize("function", ["pwritev", "preadv"])
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
        with nth_call(function, n, fault), nth_call(function, n, fault):  # those in flight at the same time
            failing()
        assert right(offloader), n
    assert len(kept) == 4
    kept.clear()
    gc.collect()
    assert unused(offloader)
    offloader.close()


def test_release_reports_and_does_not_raise(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the filesystem is gone or a GPU fails, the error of the run stays the one that is raised."""
    offloader = disk(tmp_path)
    assert right(offloader)
    with nth_call("ftruncate", 1, fail(errno.ENOTCONN)), pytest.MonkeyPatch.context() as patch:
        patch.setattr(offloader.disk._memory, "close", lambda: torch.ones(2) + torch.ones(3))
        offloader.close()
    assert "Releasing memory and disk space failed: The size of tensor a (2)" in caplog.text
