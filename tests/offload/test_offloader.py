"""The offloader: packing and unpacking in any order."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from lt_tiled import ActivationCheckpointing, OffloadError
from lt_tiled.offload import offloader as offloading
from lt_tiled.offload import pinned
from lt_tiled.offload.offloader import OffloadedTensor, Offloader, build_offloader
from lt_tiled.offload.pinned import CPUMemory
from lt_tiled.offload.tensors import movable, raw_bytes
from tests.offload.offloaders import away, settle, unused, within_limit
from tests.processes import LIMIT

Make = Callable[..., Offloader]


def hold_writes(offloader: Offloader, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event that lets writes go on."""
    gate, write = threading.Event(), offloader.disk._write
    monkeypatch.setattr(offloader.disk, "_write", lambda *args: (gate.wait(LIMIT), write(*args)))
    return gate


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
        assert not offloader.waiting()
        assert unused(offloader)
        offloader.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keeps", [0, 3])
def test_keep_last(make: Make, keeps: int) -> None:
    """The last block inputs stay on the device with what their blocks keep, and unpacking returns them."""
    offloader = make(keep_last=2)
    for _ in range(2):
        inputs, packed = [], []
        for _ in range(4):
            inputs.append(torch.randn(100))
            packed.append(offloader.pack(inputs[-1], "block"))
            packed += [offloader.pack(torch.randn(100), "block", kept=True) for _ in range(keeps)]
        settle(offloader)
        assert [p.tensor is not None for p in packed] == [False] * (2 + 2 * keeps) + [True] * (2 + 2 * keeps)
        assert offloader.unpack(packed[3 + 3 * keeps]).data_ptr() == inputs[3].data_ptr()
        del packed


def test_a_tensor_lives_until_its_write_has_ended(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without another reference (torchtune #1867). One that is needed before is returned at once."""
    offloader, tensor = make(), torch.randn(1000)
    gate = hold_writes(offloader, monkeypatch)
    expected, storage = tensor.clone(), weakref.ref(tensor.untyped_storage())
    packed = offloader.pack(tensor, "block")
    del tensor
    assert torch.equal(offloader.unpack(packed), expected)
    gate.set()
    settle(offloader)
    assert within_limit(lambda: storage() is None)
    assert torch.equal(offloader.unpack(packed), expected)


def test_slow_disk_costs_time_and_not_memory(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a slow disk no more than the allowed number of tensors are alive at once, beside one that is kept."""
    offloader = make(keep_last=1)
    packed, found, write = [], 0, offloader.disk._write
    monkeypatch.setattr(offloader.disk, "_write", lambda *args: (time.sleep(0.02), write(*args)))
    for _ in range(8):
        packed.append(offloader.pack(torch.randn(100), "block"))
        found = max(found, sum(p.tensor is not None for p in packed))
    assert found == offloading.IN_FLIGHT + 1


@pytest.mark.parametrize("most", [offloading.MOST_BYTES, 1200])
def test_prefetch(make: Make, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """The next ``prefetch`` block inputs and no more are loaded ahead, with what blocks keep, each once; and nothing
    beyond a number of bytes.
    """
    monkeypatch.setattr(offloading, "MOST_BYTES", most)
    offloader, packed = make(prefetch=2), []
    for number in range(18):  # of three tensors of a block, the first is its input
        packed.append(offloader.pack(torch.randn(200), "block", kept=number % 3 > 0))
        settle(offloader)
    for block in reversed(range(6)):
        for p in packed[3 * block : 3 * block + 3]:  # a recompute needs the input and then what was kept
            offloader.unpack(p)
            ahead = [q for q in packed if q._loading is not None]
            assert all(q.uses == 0 for q in ahead)
            if most > 1200:
                assert sum(not q.kept for q in ahead) == min(2, block)
            else:
                assert sum(q.nbytes for q in ahead) <= most
        if most > 1200:
            assert sum(q.kept for q in ahead) == 2 * min(2, block)


@pytest.mark.parametrize("keep_last", [0, 1])
def test_changed_in_place(make: Make, monkeypatch: pytest.MonkeyPatch, keep_last: int) -> None:
    """A change in place of a tensor that is written, or kept, raises, instead of mixing old and new values. Once the
    bytes are stored it is harmless.
    """
    offloader, tensor, stored = make(keep_last=keep_last), torch.randn(1000), torch.randn(10)
    expected, first = stored.clone(), offloader.pack(stored, "block")
    offloader.pack(torch.randn(10), "block")
    settle(offloader)
    stored.add_(1)
    assert torch.equal(offloader.unpack(first), expected)
    assert torch.equal(offloader.unpack(offloader.pack(stored, "block")), stored)
    gate = hold_writes(offloader, monkeypatch)
    packed = offloader.pack(tensor.detach(), "layers.3")
    tensor.add_(1)
    gate.set()
    assert keep_last or within_limit(packed.is_stored)
    with pytest.raises(OffloadError, match=r"changed in place after.*step 1, block layers.3, \[1000\] float32"):
        offloader.unpack(packed)


def test_cpu_budget(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Tensors that exceed the CPU budget stay on the device and are right, with one warning; or go to disk. Longer ones
    of the next step have the budget of the first again. The figures count bytes by tier.
    """
    for tiers, overflow in (("cpu", "over_budget_bytes"), ("cpu+disk", "disk_bytes")):
        offloader = make(tiers, cpu_budget=8192)
        for length in (1000, 1024):
            tensors = [torch.randn(length) for _ in range(5)]
            packed = [away(offloader, t.clone()) for t in tensors]
            assert [p.tier is offloader.cpu for p in packed] == [True] * 2 + [False] * 3
            assert all(torch.equal(offloader.unpack(p), t) for p, t in zip(packed, tensors, strict=True))
            del packed
        figures = asdict(offloader.stats)
        assert (figures["cpu_bytes"], figures[overflow]) == (2 * (4000 + 4096), 3 * (4000 + 4096))
        assert offloader.step == 2
    assert caplog.text.count("This rank's share of cpu_budget is full: a tensor of") == 1


def test_budgets_are_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's budgets are divided by its ranks: the given number, or torchrun's, which must be one."""
    policy = ActivationCheckpointing(offload="cpu+disk", cpu_budget="1MiB", disk_budget="2MiB", directory=str(tmp_path))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for ranks, shares in ((None, 4), (2, 2)):
        offloader = build_offloader(policy, ranks)
        assert offloader.cpu.budget == 2**20 // shares
        assert offloader.disk.limit == 2**21 // shares
        offloader.close()
    for wrong in ("0", "-3", "abc"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", wrong)
        with pytest.raises(ValueError, match=f"LOCAL_WORLD_SIZE='{wrong}' must be the number of ranks of this node"):
            build_offloader(policy)


def test_released_before_the_backward_pass(make: Make) -> None:
    """A graph that outlives the offloader raises, instead of using wrong data."""
    offloader = make()
    packed = away(offloader, torch.randn(100), "layers.0")
    offloader.close()
    offloader.close()
    with pytest.raises(OffloadError, match=r"released before this graph's backward pass.*block layers.0"):
        offloader.unpack(packed)


def test_a_graph_dropped_in_mid_write_does_not_lend_its_place(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The place of a graph that is gone goes to no other tensor while its write still runs."""
    offloader = make()
    gate = hold_writes(offloader, monkeypatch)
    first = offloader.pack(torch.randn(1000), "block").stored.room.offset
    second = offloader.pack(torch.randn(1000), "block")
    assert second.stored.room.offset != first
    gate.set()
    settle(offloader)
    del second
    assert unused(offloader)
    assert away(offloader, torch.randn(1000)).stored.room.offset == first


def test_a_fork(make: Make) -> None:
    """A forked child, such as a DataLoader's worker, may not offload, and leaves its parent's data alone."""
    offloader, tensor = make(), torch.randn(1000)
    packed = away(offloader, tensor)

    def child(pipe: Connection) -> None:
        try:
            pipe.send(repr(offloader.pack(tensor, "block")))
        except OffloadError as error:
            pipe.send(str(error))
        offloader.close()

    ours, theirs = Pipe()
    process = get_context("fork").Process(target=child, args=(theirs,))
    process.start()
    assert "this process is a fork" in ours.recv()
    process.join(LIMIT)
    assert process.exitcode == 0
    assert torch.equal(offloader.unpack(packed), tensor)


def test_each_view_is_its_own(make: Make) -> None:
    """Only the same view of a storage shares a copy (ms-swift 10157); a new tensor at the address of a freed one is new
    (DeepSpeed's reused ``id()``).
    """
    offloader, x = make(), torch.randn(20, 30)
    views = [x, x.t(), x[5:], x[:, 3:]]
    packed = [offloader.pack(t, "block") for t in (*views, x)]
    settle(offloader)
    assert packed[4] is packed[0]
    assert len({id(p) for p in packed}) == 4
    for p, t in zip(packed, views, strict=False):
        assert torch.equal(offloader.unpack(p), t)
    packed = [away(offloader, torch.full((500,), float(i))) for i in range(50)]
    assert [float(offloader.unpack(p)[0]) for p in packed] == [float(i) for i in range(50)]


# Tensors as bytes and back

BASE = torch.arange(240.0)
TABLE = BASE.view(20, 12)


VIEWS = {
    "transposed": TABLE.t(),
    "transposed batches": BASE.view(2, 10, 12).transpose(1, 2),
    "offset": TABLE[3:7],
    "gaps": TABLE[:, 2:9],
    "stride 0": TABLE[:, :1].expand(20, 12),
    "overlaps": BASE.as_strided((20, 8), (2, 1)),
    "scalar": torch.tensor(3.0),
    "bool": TABLE > 3,
}
DTYPES = (torch.int16, torch.complex64, torch.bfloat16, torch.half, torch.float8_e4m3fn)
VIEWS |= {str(dtype): TABLE.to(dtype) for dtype in DTYPES}


@pytest.mark.low_precision
@pytest.mark.parametrize("tensor", VIEWS.values(), ids=VIEWS)
def test_values_and_strides_come_back(tensor: Tensor) -> None:
    """Views with offsets, gaps, overlaps and strides of zero, and every dtype, come back with the same values and
    strides.
    """
    offloader = build_offloader(ActivationCheckpointing(offload="cpu", keep_last=0))
    packed = offloader.pack(tensor, "block")
    assert isinstance(packed, OffloadedTensor)
    packed.free()
    back = offloader.unpack(packed)
    assert torch.equal(raw_bytes(back), raw_bytes(tensor))
    assert (back.shape, back.stride(), back.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)


STAYS = {
    "empty": lambda: torch.empty(0, 4),
    "parameter": lambda: nn.Parameter(BASE),
    "gaps": lambda: TABLE[:, :2],  # more gaps than entries
    "conjugate": lambda: torch.zeros(3, dtype=torch.complex64).conj(),
    "coo": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.empty(3, device="meta"),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "subclass": lambda: TwoTensor(torch.ones(3), torch.ones(3)),
}


def test_what_stays(make: Make) -> None:
    """Weights, empty and lazy tensors, other layouts, subclasses, views with mostly gaps, and small tensors stay."""
    assert [kind for kind, build in STAYS.items() if movable(build())] == []
    (offloader := make()).min_bytes = 41
    assert offloader.pack(tensor := torch.randn(10), "block") is tensor


# CPU memory


def test_refused_pinning_falls_back(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Memory that cannot be pinned is used unpinned, with one warning and no further attempts."""
    empty = mock.Mock(side_effect=RuntimeError("CUDA error: out of memory"))
    monkeypatch.setattr(torch, "empty", empty)
    memory = CPUMemory(2**30)
    buffers = [memory.take(2**20, torch.device("cuda", 0)) for _ in range(3)]
    assert all(buffer is not None for buffer in buffers)
    assert empty.call_count == 1
    assert caplog.text.count("refuses to pin CPU memory") == 1


def test_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of any size, after those of other sizes, use the whole budget, and come back from several pieces. What is
    free counts until it is used again.
    """
    monkeypatch.setattr(pinned, "PIECE", 4 * pinned.ALIGNMENT)
    memory = CPUMemory(64 * pinned.ALIGNMENT)
    for pages in (1, 5, 64, 3, 16):
        tensors, stored = [], []
        for number in range(64 // pages):
            tensors.append(torch.full((pages * pinned.ALIGNMENT - 7,), number, dtype=torch.uint8))
            stored.append(memory.store(tensors[-1], None))
            free = sum(piece.nbytes for pieces in memory._free.values() for piece in pieces)
            assert free + sum(buffer.nbytes for buffer in memory._buffers) <= memory.budget
        assert memory.store(torch.ones(pages * pinned.ALIGNMENT, dtype=torch.uint8), None) is None
        for tensor, (buffer, *_) in zip(tensors, stored, strict=True):
            assert torch.equal(memory.load(buffer, tensor.nbytes, torch.device("cpu"))(), tensor)
            assert max(piece.nbytes for piece in buffer.pieces) <= pinned.PIECE
        del buffer, _
