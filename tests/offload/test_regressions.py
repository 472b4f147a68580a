"""Bugs of other offloaders, which this one does not have."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lt_tiled import ActivationCheckpointing, OffloadDiskFullError, Tiling, prepare
from lt_tiled.offload.build import build_offloader
from lt_tiled.offload.offloader import Offloader
from lt_tiled.offload.pinned import SLAB, CPUMemory
from lt_tiled.offload.prefetch import OffloadedTensor
from tests.models import Block, H, TinyLM, lm_loss
from tests.offload.test_faults import unused
from tests.offload.test_offloader import away, freed, settle
from tests.parity import randn
from tests.processes import LIMIT

IDS, CPU = torch.arange(2 * 24).view(2, 24) % 32, torch.device("cpu")


def disk(tmp_path: Path, **fields: object) -> Offloader:
    return build_offloader(
        ActivationCheckpointing(
            **{"offload": "disk", "directory": str(tmp_path), "min_bytes": 0, "keep_last": 0, **fields}
        )
    )


def test_a_tensor_is_not_freed_while_it_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchtune #1867: the source lives until its copy has ended, even without another reference."""
    offloader, gate = disk(tmp_path), threading.Event()
    real = offloader.disk.spill._write
    monkeypatch.setattr(offloader.disk.spill, "_write", lambda *a: (gate.wait(LIMIT), real(*a)))
    tensor = torch.randn(1000)
    expected, storage = tensor.clone(), weakref.ref(tensor.untyped_storage())
    packed = offloader.pack(tensor, "block")
    del tensor
    assert storage() is not None
    gate.set()
    settle(offloader)
    assert freed(storage)
    assert torch.equal(offloader.unpack(packed), expected)
    offloader.close()


def test_a_graph_dropped_in_mid_write_does_not_lend_its_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot of a graph that is gone goes to no other tensor while its write still runs."""
    offloader, gate, running = disk(tmp_path), threading.Event(), threading.Event()
    real = offloader.disk.spill._write
    monkeypatch.setattr(offloader.disk.spill, "_write", lambda *a: (running.set(), gate.wait(LIMIT), real(*a)))
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
    offloader.close()


@pytest.mark.parametrize("device", ["second", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_a_load_that_is_dropped_does_not_lend_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """The CPU memory of a load that nobody waits for any more goes to no other tensor while its read still runs."""
    offloader, gate, running = disk(tmp_path), threading.Event(), threading.Event()
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
    offloader.close()


def test_a_tensor_and_its_transpose_are_two(tmp_path: Path) -> None:
    """ms-swift PR 10157: what shares a storage does not share a copy unless it is the same view."""
    offloader, x = disk(tmp_path), torch.randn(20, 30)
    packed = [offloader.pack(t, "block") for t in (x, x.t(), x[5:], x[:, 3:], x)]
    settle(offloader)
    assert packed[4] is packed[0]
    assert len({id(p) for p in packed}) == 4
    for p, t in zip(packed, (x, x.t(), x[5:], x[:, 3:]), strict=False):
        assert torch.equal(offloader.unpack(p), t)
    offloader.close()


def test_a_new_tensor_at_an_old_address_is_new(tmp_path: Path) -> None:
    """DeepSpeed's reused ``id()``: tensors that get the memory of freed ones one after the other each come back as
    themselves.
    """
    offloader, packed = disk(tmp_path), []
    for i in range(50):
        packed.append(away(offloader, torch.full((500,), float(i))))
    assert [float(offloader.unpack(p)[0]) for p in packed] == [float(i) for i in range(50)]
    offloader.close()


def test_offset_views(tmp_path: Path) -> None:
    """TRL PR 5694: a view that begins inside its storage comes back with its own values."""
    offloader, x = disk(tmp_path), torch.arange(1000.0)
    assert torch.equal(offloader.unpack(away(offloader, x[250:750])), torch.arange(250.0, 750.0))
    offloader.close()


def test_tensor_subclasses_are_left_in_place(tmp_path: Path) -> None:
    """Torchtune #2451: a wrapper whose local data has another shape (as a DTensor's) is not moved by its outer one."""
    from torch.testing._internal.two_tensor import TwoTensor

    offloader = disk(tmp_path)
    wrapped = TwoTensor(torch.randn(10), torch.randn(10))
    assert offloader.pack(wrapped, "block") is wrapped
    offloader.close()


def test_a_restored_tensor_is_dropped_after_use(tmp_path: Path) -> None:
    """DeepSpeed #8282: what was brought back is not kept until the end of the step."""
    offloader = disk(tmp_path)
    packed = [away(offloader, torch.randn(1000)) for _ in range(4)]
    for p in reversed(packed):
        back = offloader.unpack(p)
        storage = weakref.ref(back.untyped_storage())
        del back
        assert freed(storage)
    offloader.close()


@pytest.mark.parametrize(
    "disguise", [lambda w: w, lambda w: w.t(), lambda w: w.detach(), lambda w: w.detach().t(), lambda w: w[2:]]
)
def test_a_weight_is_not_taken_for_an_activation(disguise: object) -> None:
    """torchtune: a weight, its transpose, its detached alias and a part of it stay where they are, as inputs of a
    block.
    """

    class UsesWeight(Block):
        def forward(self, weight: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x + weight.mean())

    model, shapes = nn.ModuleList([UsesWeight(), UsesWeight()]), []
    model.shared = nn.Linear(H, H)
    with prepare(
        model,
        activation_checkpointing=ActivationCheckpointing(
            "UsesWeight", offload="disk", min_bytes=0, select=["weight", "x"]
        ),
    ) as prepared:
        real = prepared.offloader.pack
        prepared.offloader.pack = lambda t, block: shapes.append(t.shape) or real(t, block)
        x = randn(1, 8, H) * 1
        for block in (model[0], model[1]):
            x = block(disguise(model.shared.weight), x)
        x.sum().backward()
    assert shapes == [(1, 8, H)] * 2


def test_keyword_hidden_states_are_found() -> None:
    """Hidden states that a model passes by keyword move as positional ones do."""

    class Keyword(Block):
        def forward(self, *, mask: Tensor, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(hidden_states)

    model = nn.ModuleList([Keyword(), Keyword()])
    mask = torch.ones(8, dtype=torch.bool)
    with prepare(
        model, activation_checkpointing=ActivationCheckpointing(offload="disk", min_bytes=0, keep_last=0)
    ) as prepared:
        x = randn(1, 8, H)
        model[1](mask=mask, hidden_states=model[0](mask=mask, hidden_states=x)).sum().backward()
        assert prepared.offloader.so_far().disk_bytes == 2 * x.nbytes


@pytest.mark.self_checks
def test_a_hook_around_the_backward_sees_no_tile() -> None:
    """Saved-tensors hooks around forward and backward see the block inputs, and no intermediate of a tile."""
    packed: list[tuple[int, ...]] = []
    model = TinyLM(3)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(tuple(t.shape)) or t, lambda t: t)
    with prepare(model, tiling=Tiling(4), activation_checkpointing=ActivationCheckpointing()), hooks:
        lm_loss(model(IDS), IDS).backward()
    assert packed.count((2, 24, H)) >= 3
    assert not any(48 in shape[-1:] for shape in packed)  # intermediate_size


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


def test_slabs_have_the_size_they_were_asked_to_have() -> None:
    """Torch rounds pinned allocations up to powers of two: a budget of 300 MiB is 300 MiB here, in two slabs."""
    slabs = CPUMemory(300 * 2**20)
    slots = [slabs.take(50 * 2**20, CPU) for _ in range(5)]
    assert slabs.size == SLAB
    slots += [slabs.take(50 * 2**20, CPU) for _ in range(2)]  # the sixth begins in the first slab
    assert [slot is None for slot in slots] == [False] * 6 + [True]
    assert slabs.size == 300 * 2**20
    slabs.close()


def test_thousands_of_tensors_share_a_slab() -> None:
    """llm-compressor #2790: ten thousand small tensors are ranges of one slab, not ten thousand pinned blocks."""
    slabs = CPUMemory(2**30)
    slots = [slabs.take(5000, CPU) for _ in range(10_000)]
    assert len(slabs._slabs) == 1
    addresses = {slot.memory[0].data_ptr() for slot in slots}
    assert len(addresses) == 10_000
    assert all(address % 4096 == 0 for address in addresses)
    slots.clear()
    assert slabs.take(slabs.size, CPU) is not None
    slabs.close()
