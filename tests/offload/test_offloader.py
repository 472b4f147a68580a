"""The offloader: packing and unpacking in any order, and failures."""

from __future__ import annotations

import errno
import gc
import pickle
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from lt_tiled import ActivationCheckpointing, OffloadDiskFullError, OffloadError
from lt_tiled.errors import Origin
from lt_tiled.offload import offloader as offloading
from lt_tiled.offload import prefetch
from lt_tiled.offload.offloader import Offloader, build_offloader
from tests.offload.faults import each_call, fail, nothing
from tests.offload.offloaders import away, freed, hold_writes, settle, unused
from tests.processes import LIMIT

Make = Callable[..., Offloader]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes offloaders, to disk by default, and closes them; each must have freed its space."""
    made: list[Offloader] = []

    def build(offload: str = "disk", **fields: object) -> Offloader:
        if "disk" in offload:
            fields.setdefault("directory", str(tmp_path))
        fields = {"keep_last": 0, **fields}
        made.append(build_offloader(ActivationCheckpointing(offload=offload, **fields)))
        return made[-1]

    yield build
    for offloader in made:
        gc.collect()
        settle(offloader)
        assert not offloader._live
        if offloader.disk is not None:
            assert unused(offloader)
        offloader.close()
    assert list(tmp_path.iterdir()) == []


TIERS = [
    ("disk", {}),
    ("cpu", {}),
    ("cpu+disk", {"cpu_budget": 8192}),
    ("disk", {"direct_io": False}),
]


@pytest.mark.parametrize(("offload", "fields"), TIERS)
def test_round_trip(make: Make, offload: str, fields: dict[str, object], device: str) -> None:
    """Tensors come back bit for bit, and on their device, from every tier, last packed first and in any other order.

    The second device has two indices.
    """
    offloader = make(offload, **fields)
    devices = [torch.device(device, index) for index in range(torch.get_device_module(device).device_count())]
    tensors = [torch.randn(3, 500 + i).to(devices[i % len(devices)]) for i in range(12)]
    packed = [offloader.pack(t.clone(), f"block {i}") for i, t in enumerate(tensors)]
    assert all(torch.equal(offloader.unpack(p), t) for p, t in reversed(list(zip(packed, tensors, strict=True))))
    assert all(torch.equal(offloader.unpack(p), t) for p, t in zip(packed, tensors, strict=True))
    assert [offloader.unpack(p).device for p in packed] == [t.device for t in tensors]


def test_keep_last(make: Make) -> None:
    """The last tensors packed stay on the device, and unpacking returns them."""
    offloader = make(keep_last=2)
    tensors = [torch.randn(100) for _ in range(4)]
    packed = [offloader.pack(t, "block") for t in tensors]
    settle(offloader)
    assert [p.tensor is not None for p in packed] == [False, False, True, True]
    assert offloader.unpack(packed[3]).data_ptr() == tensors[3].data_ptr()


def test_in_flight(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchtune #1867: a tensor lives until its write has ended, even without another reference. One that is needed
    before is returned at once.
    """
    offloader, tensor = make(), torch.randn(1000)
    _, gate = hold_writes(offloader, monkeypatch)
    expected, storage = tensor.clone(), weakref.ref(tensor.untyped_storage())
    packed = offloader.pack(tensor, "block")
    del tensor
    assert torch.equal(offloader.unpack(packed), expected)
    gate.set()
    settle(offloader)
    assert freed(storage)
    assert torch.equal(offloader.unpack(packed), expected)


@pytest.mark.parametrize(("most", "alive"), [(2**30, offloading.IN_FLIGHT), (399, 1)])
def test_slow_disk_costs_time_and_not_memory(
    make: Make, monkeypatch: pytest.MonkeyPatch, most: int, alive: int
) -> None:
    """Behind a slow disk no more than the allowed number of tensors and of bytes are alive at once, beside one that is
    kept. What is larger has left when the backward pass begins.
    """
    monkeypatch.setattr(offloading, "BYTES_IN_FLIGHT", most)
    offloader = make(keep_last=1)
    packed, found, write = [], 0, offloader.disk.spill._write
    monkeypatch.setattr(offloader.disk.spill, "_write", lambda *args: (time.sleep(0.02), write(*args)))
    for _ in range(8):
        packed.append(offloader.pack(torch.randn(100), "block"))
        found = max(found, sum(p.tensor is not None for p in packed))
    assert found == alive + 1
    if alive == 1:
        offloader.unpack(packed[-1])
        assert [p.tensor is not None for p in packed] == [False] * 7 + [True]


def test_prefetch(make: Make) -> None:
    """The next ``prefetch`` tensors and no more are loaded ahead, in each step. An older graph that is alive does not
    stop that, and comes back, too.
    """
    offloader = make(prefetch=2)
    older = [away(offloader, torch.full((300,), float(i))) for i in range(5)]
    for _ in range(4):
        offloader.end_step()
        packed = [away(offloader, torch.randn(300)) for _ in range(6)]
        for p in reversed(packed):
            offloader.unpack(p)
            assert sum(q.loading is not None for q in packed) == min(2, packed.index(p))
        del packed, p
    assert [float(offloader.unpack(p)[0]) for p in reversed(older)] == [4.0, 3.0, 2.0, 1.0, 0.0]


def test_no_room_to_load_ahead(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the memory of the device ends, fewer tensors are loaded ahead, and all come back."""
    offloader = make(prefetch=4)
    real, packed = prefetch.OffloadedTensor.begin_loading, [away(offloader, torch.randn(100)) for _ in range(8)]

    def load(tensor: prefetch.OffloadedTensor) -> object:
        if tensor.loading is None and sum(p.loading is not None for p in packed) == 2:
            raise torch.OutOfMemoryError
        return real(tensor)

    monkeypatch.setattr(prefetch.OffloadedTensor, "begin_loading", load)
    while packed:
        assert offloader.unpack(packed.pop()).shape == (100,)
    assert offloader.prefetcher.depth == 2


@pytest.mark.parametrize(("most", "ahead"), [(399, 0), (400, 1)])
def test_large_tensors_are_not_loaded_ahead(make: Make, monkeypatch: pytest.MonkeyPatch, most: int, ahead: int) -> None:
    """Nothing is loaded ahead beyond a number of bytes."""
    monkeypatch.setattr(prefetch, "MAX_BYTES_AHEAD", most)
    offloader = make()
    packed = [away(offloader, torch.randn(100)) for _ in range(6)]
    found = 0
    for p in reversed(packed):
        offloader.unpack(p)
        found = max(found, sum(q.loading is not None for q in packed))
    assert found == ahead


@pytest.mark.parametrize("keep_last", [0, 1])
def test_changed_in_place(make: Make, monkeypatch: pytest.MonkeyPatch, keep_last: int) -> None:
    """A change in place of a tensor that is written, or kept, raises, instead of mixing old and new values."""
    offloader, tensor = make(keep_last=keep_last), torch.randn(1000)
    _, gate = hold_writes(offloader, monkeypatch)
    packed = offloader.pack(tensor.detach(), "layers.3")
    tensor.add_(1)
    gate.set()
    if packed.stored is not None:
        packed.stored.wait()
    with pytest.raises(
        OffloadError, match=r"changed in place after it was saved.*step 1, block layers.3, \[1000\] float32"
    ):
        offloader.unpack(packed)


def test_changed_in_place_after_it_left(make: Make) -> None:
    """A change after the bytes are stored is harmless: the old values come back."""
    offloader, tensor = make(), torch.randn(10)
    before = tensor.clone()
    packed = away(offloader, tensor.detach())
    tensor.add_(1)
    assert torch.equal(offloader.unpack(packed), before)


def test_dropped_without_backward(make: Make) -> None:
    """Graphs that are dropped, also while they are written or read, free their space (checked by the fixture)."""
    offloader = make()
    for _ in range(20):
        packed = [offloader.pack(torch.randn(5000), "block") for _ in range(3)]
        offloader.unpack(packed[-1])
        del packed


def test_small_and_other_tensors_stay(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors, weights and tensors that cannot be moved are returned as they are."""
    monkeypatch.setattr(offloading, "MIN_BYTES", 1000)
    offloader = make()
    for tensor in (torch.randn(10), torch.nn.Parameter(torch.randn(1000)), torch.empty(0)):
        assert offloader.pack(tensor, "block") is tensor


def test_cpu_budget_without_disk(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Tensors that exceed the CPU budget stay on the device and are right, with one warning."""
    offloader = make("cpu", cpu_budget=8192)
    tensors = [torch.randn(1000) for _ in range(5)]
    packed = [offloader.pack(t.clone(), f"block {i}") for i, t in enumerate(tensors)]
    assert all(torch.equal(offloader.unpack(p), t) for p, t in zip(packed, tensors, strict=True))
    assert offloader.stats.cpu_bytes == 8000
    assert offloader.stats.over_budget_bytes == 12000
    assert caplog.text.count("This rank's share of cpu_budget, 0.0 MiB, is full: a tensor of") == 1


def test_tiers_in_order(make: Make) -> None:
    """With both tiers, CPU memory is filled first, and the overflow goes to disk."""
    offloader = make("cpu+disk", cpu_budget=8192)
    packed = [away(offloader, torch.randn(1000)) for _ in range(5)]
    assert [p.stored.tier is offloader.cpu for p in packed] == [True, True, False, False, False]


def test_budgets_are_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's budgets are divided by its ranks: the given number, or torchrun's."""
    policy = ActivationCheckpointing(offload="cpu+disk", cpu_budget="1MiB", disk_budget="2MiB", directory=str(tmp_path))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for ranks, shares in ((None, 4), (2, 2)):
        offloader = build_offloader(policy, ranks)
        assert offloader.cpu.budget == 2**20 // shares
        assert offloader.disk.spill.budget == 2**21 // shares
        offloader.close()


FULL = r"on a disk with .* free: set another directory"


@pytest.mark.parametrize(
    ("function", "fault", "kind", "message"),
    [
        ("pwritev", fail(errno.ENOSPC), OffloadDiskFullError, f"cannot write .* bytes {FULL}.*: No space left"),
        ("pwritev", fail(errno.EDQUOT), OffloadDiskFullError, f"cannot write .* bytes {FULL}.*: Disk quota"),
        ("pwritev", fail(errno.EIO), OffloadError, "cannot write .* bytes: Input/output error"),
        ("pwritev", nothing, OffloadError, "short write: 0 of"),
        ("preadv", fail(errno.EIO), OffloadError, "cannot read .* bytes: Input/output error"),
        ("preadv", nothing, OffloadError, "short read: 0 of"),
        ("posix_fallocate", fail(errno.ENOSPC), OffloadDiskFullError, f"cannot reserve .* {FULL}.*: No space left"),
        ("posix_fallocate", fail(errno.EFBIG), OffloadDiskFullError, "cannot reserve .* in a file .*ulimit -f.*large"),
    ],
)
def test_each_failing_call(
    make: Make, function: str, fault: object, kind: type[OffloadError], message: str, tmp_path: Path
) -> None:
    """Whichever call fails, the error names the remedy, step, block, shape and place, and nothing leaks."""
    errors: list[OffloadError] = []
    for _ in each_call(function, fault):
        offloader = make()
        try:
            packed = [offloader.pack(torch.randn(500), f"layers.{i}") for i in range(4)]
            while offloader._storing:
                offloader._reap()
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
        assert error.directory == str(tmp_path)
        assert (error.offset is None) == (function == "posix_fallocate")


def test_errors_can_be_pickled() -> None:
    """An error that another process raised keeps its message and attributes."""
    origin = Origin(1, "layers.0", torch.Size([2, 3]), torch.float32)
    error = OffloadDiskFullError("no room", origin=origin, offset=4096, directory="/scratch")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is OffloadDiskFullError
    assert (str(back), vars(back)) == (str(error), vars(error))


def test_released_before_the_backward(make: Make) -> None:
    """A graph that outlives the offloader raises, instead of using wrong data."""
    offloader = make()
    packed = away(offloader, torch.randn(100), "layers.0")
    offloader.close()
    offloader.close()
    with pytest.raises(OffloadError, match=r"released before this graph's backward pass.*block layers.0"):
        offloader.unpack(packed)


def test_statistics(make: Make) -> None:
    """A step's figures count bytes by tier; the total adds the steps."""
    offloader = make(keep_last=1)
    for _ in range(2):
        packed = [offloader.pack(torch.randn(250), "block") for _ in range(4)]
        settle(offloader)
        for p in reversed(packed):
            offloader.unpack(p)
        del packed, p
        stats = offloader.end_step()
        assert stats.disk_bytes == 3 * 1000
    assert offloader.so_far().disk_bytes == 6000
    assert offloader.step == 2
    lines = offloader.so_far().describe(2, seconds=1.0)
    assert lines[0] == "offloaded per step: 0.0 MiB to CPU memory, 0.0 MiB to disk"
    assert "TB per day" in lines[-1]


def test_a_graph_dropped_in_mid_write_does_not_lend_its_slot(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot of a graph that is gone goes to no other tensor while its write still runs."""
    offloader = make()
    running, gate = hold_writes(offloader, monkeypatch)
    first = offloader.pack(torch.randn(1000), "block")
    assert running.wait(LIMIT)
    offset = first.stored.room.offset
    del first
    second = offloader.pack(torch.randn(1000), "block")
    assert second.stored.room.offset != offset
    gate.set()
    settle(offloader)
    del second
    assert unused(offloader)
    assert away(offloader, torch.randn(1000)).stored.room.offset == offset


@pytest.mark.parametrize("device", ["second", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_a_load_that_is_dropped_does_not_lend_its_memory(
    make: Make, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """The CPU memory of a load that nobody waits for any more goes to no other tensor while its read still runs."""
    offloader, gate, running = make(), threading.Event(), threading.Event()
    real, into = offloader.disk.spill._read, []

    def read(extent: object, views: list[memoryview], *rest: object) -> None:
        into.append(np.frombuffer(views[0], dtype=np.uint8).ctypes.data)
        running.set()
        assert gate.wait(LIMIT)
        real(extent, views, *rest)

    packed = away(offloader, torch.randn(1000, device=device))
    monkeypatch.setattr(offloader.disk.spill, "_read", read)
    packed.begin_loading()
    packed.loading = None
    assert running.wait(LIMIT)
    other = offloader.disk.memory.take(4000, torch.device(device))
    assert other is not None
    assert other.memory[0].data_ptr() != into[0]
    gate.set()
    del packed, other


def test_a_tensor_and_its_transpose_are_two(make: Make) -> None:
    """ms-swift PR 10157: what shares a storage does not share a copy unless it is the same view."""
    offloader, x = make(), torch.randn(20, 30)
    packed = [offloader.pack(t, "block") for t in (x, x.t(), x[5:], x[:, 3:], x)]
    settle(offloader)
    assert packed[4] is packed[0]
    assert len({id(p) for p in packed}) == 4
    for p, t in zip(packed, (x, x.t(), x[5:], x[:, 3:]), strict=False):
        assert torch.equal(offloader.unpack(p), t)


def test_a_new_tensor_at_an_old_address_is_new(make: Make) -> None:
    """DeepSpeed's reused ``id()``: tensors that get the memory of freed ones one after the other each come back as
    themselves.
    """
    offloader, packed = make(), []
    for i in range(50):
        packed.append(away(offloader, torch.full((500,), float(i))))
    assert [float(offloader.unpack(p)[0]) for p in packed] == [float(i) for i in range(50)]
