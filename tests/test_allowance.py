"""What blocks keep of attention under ``keep="auto"``, the default."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import lt_tiled.allowance
import lt_tiled.auto
import lt_tiled.memory
from lt_tiled import ActivationCheckpointing, prepare, shared_attention
from lt_tiled.checkpointing import BlockPatch
from lt_tiled.memory import Usage, usage
from lt_tiled.modules.patch import get_patch
from lt_tiled.planner.ledger import Ledger
from tests.meters import peak_bytes
from tests.models import tiny_llama
from tests.world import World

LAYERS, LONG = 4, 512
PLENTY = 2**40


@dataclass
class Device:
    """The memory that a device is said to have."""

    free: int = PLENTY
    used: int = 0
    peak: int = 0

    def __call__(self, device: torch.device, ranks: int) -> Usage:
        return Usage(self.used, self.peak, self.free)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A device whose memory a test sets."""
    said = Device()
    monkeypatch.setattr(lt_tiled.allowance, "usage", said)
    return said


def llama() -> Any:
    torch.manual_seed(0)
    return tiny_llama(num_hidden_layers=LAYERS)


def step(net: Any, tokens: int = LONG) -> Callable[[], None]:
    ids = torch.arange(tokens).view(1, -1) % 32
    return lambda: net(input_ids=ids, labels=ids, use_cache=False).loss.backward()


def flops(run: Callable[[], object]) -> int:
    """The FLOPs of a run, attention's kernel included."""
    with Ledger() as counter:
        run()
    return counter.flops


def room(net: Any) -> Any:
    """The room of a model, its own figures and the bytes that a block keeps."""
    patch = get_patch(net.model.layers[0], BlockPatch)
    assert patch is not None
    assert patch.auto is not None
    return patch.auto.room


def flops_of(keep: Any, tokens: int = LONG) -> int:
    net = llama()
    with prepare(net, activation_checkpointing=ActivationCheckpointing(keep=keep)):
        return flops(step(net, tokens))


def kept_bytes() -> int:
    """The bytes that one block keeps."""
    net = llama()
    with prepare(net, activation_checkpointing=True) as prepared:
        for _ in range(3):
            step(net)()
        return prepared.report().blocks[0].kept_bytes


def test_attention_is_kept_from_the_third_step_on(device: Device) -> None:
    """Two steps are measured and keep nothing; later ones have the FLOPs and the gradients of ``attention_output``."""
    net, gradients = llama(), []
    with prepare(net, activation_checkpointing=True):
        found = []
        for _ in range(4):
            net.zero_grad()
            found.append(flops(step(net)))
            gradients.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    recomputed, kept = flops_of(None), flops_of("attention_output")
    assert kept < recomputed
    assert found == [recomputed, recomputed, kept, kept]
    assert all(torch.equal(gradients[0], other) for other in gradients)


def test_without_room_nothing_is_kept(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    """Steps take the FLOPs of ``keep=None``, and one line says why."""
    caplog.set_level("INFO")
    device.free = 0
    net = llama()
    with prepare(net, activation_checkpointing=True) as prepared:
        assert {flops(step(net)) for _ in range(4)} == {flops_of(None)}
        assert {row.kept_tokens for row in prepared.report().blocks} == {0}
    assert caplog.text.count("keep='auto' has 0.0 MiB on cpu for what blocks keep of attention") == 1


@pytest.mark.parametrize("offload", [None, "cpu", "disk"])
def test_no_more_is_kept_than_there_is_room(offload: Any, device: Device) -> None:
    """With room for three blocks, three keep attention's output, and the peak is no more than that above
    ``keep=None``.
    """
    one = kept_bytes()
    peaks = {}
    fields: Any = {"offload": offload, "prefetch": 1, "min_bytes": 0} if offload else {}
    for keep in (None, "auto"):
        net = llama()
        with prepare(net, activation_checkpointing=ActivationCheckpointing(keep=keep, **fields)):
            for _ in range(3):
                step(net)()
                net.zero_grad(set_to_none=False)
            if keep == "auto":
                device.free = 2 * (3 * one + one // 2)
            peaks[keep] = peak_bytes(step(net))
            took = flops(step(net))
    assert peaks["auto"] - peaks[None] <= 3 * one
    assert flops_of(None) - took == (flops_of(None) - flops_of("attention_output")) * 3 // 4


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_what_is_kept_stays_on_the_device(offload: Any, device: Device) -> None:
    """Block inputs are offloaded as with ``keep=None``, and nothing else is, in steps that compute attention once."""
    found = []
    for keep in (None, "auto"):
        net = llama()
        policy = ActivationCheckpointing(keep=keep, offload=offload, min_bytes=0, keep_last=0)
        with prepare(net, activation_checkpointing=policy) as prepared:
            for _ in range(3):
                took = flops(step(net))
            assert took == flops_of(keep and "attention_output")
            assert prepared.offloader is not None
            stats = prepared.offloader.so_far()
            found.append((stats.cpu_bytes, stats.disk_bytes))
    assert found[0] == found[1]
    assert sum(found[0]) == 3 * LAYERS * LONG * net.config.hidden_size * 4


def test_what_may_be_loaded_ahead_is_no_room(device: Device) -> None:
    """The backward pass may load more block inputs ahead after the steps that were measured, unless their number is
    given.
    """
    limits: list[int] = []
    for prefetch in ("auto", 2):
        net = llama()
        policy = ActivationCheckpointing(offload="cpu", prefetch=prefetch)  # type: ignore[arg-type]
        with prepare(net, activation_checkpointing=policy):
            step(net)()
            limits.append(room(net).limit)
    assert limits[1] - limits[0] == 8 * LONG * net.config.hidden_size * 4 // 2


def test_room_is_half_of_what_passes_leave_free(device: Device) -> None:
    """The room follows what is free at the start of a pass, such as optimizer state, and what measured passes took
    above their start.
    """
    net = llama()
    device.used, device.free, device.peak = 1000, 10**9, 5000
    with prepare(net, activation_checkpointing=True):
        step(net)()
        device.used, device.free, device.peak = 3000, 10**9 - 2000, 9000
        step(net)()
        step(net)()
        assert room(net).growth == 6000
        assert room(net).limit == (10**9 - 2000 - 6000) // 2
        device.used, device.free, device.peak = 10**6, 10**8, 10**7  # a later pass is not measured again
        step(net)()
        assert room(net).limit == (10**8 - 6000) // 2


def test_a_larger_pass_keeps_nothing_at_first(device: Device) -> None:
    """A longer call than those before it, and more of them in a pass, are measured twice before they keep something."""
    net = llama()
    with prepare(net, activation_checkpointing=True):
        for tokens in (LONG // 2, LONG):
            none, kept = flops_of(None, tokens), flops_of("attention_output", tokens)
            assert [flops(step(net, tokens)) for _ in range(4)] == [none, none, kept, kept]
        assert flops(step(net, LONG // 2)) == flops_of("attention_output", LONG // 2)
        ids = torch.arange(LONG).view(1, -1) % 32

        def two() -> None:
            losses = [net(input_ids=ids, labels=ids, use_cache=False).loss for _ in range(2)]
            sum(losses).backward()

        assert [flops(two) for _ in range(4)] == [none + kept, 2 * none, 2 * kept, 2 * kept]


class Interrupted(nn.Module):
    """A layer after the blocks that raises."""

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("interrupted")


@pytest.mark.parametrize("how", ["dropped", "raised"])
def test_passes_without_a_backward_pass(how: str, device: Device) -> None:
    """Evaluations with gradients enabled and forward passes that raise are not counted to the passes after them:
    those are as large as without them, and are measured from their own start.
    """
    net = llama()
    ids = torch.arange(LONG).view(1, -1) % 32
    norm = net.model.norm

    def alone() -> None:
        if how == "dropped":
            net(input_ids=ids, labels=ids, use_cache=False)
            return
        net.model.norm = Interrupted()
        with pytest.raises(RuntimeError, match="interrupted"):
            net(input_ids=ids, use_cache=False)
        net.model.norm = norm

    none, kept = flops_of(None), flops_of("attention_output")
    with prepare(net, activation_checkpointing=True):
        for _ in range(3):
            alone()
        device.used, device.peak = 4000, 9000
        assert [flops(step(net)) for _ in range(3)] == [none, none, kept]
        assert room(net).growth == 5000
        alone()
        assert flops(step(net)) == kept
        assert room(net).most == LAYERS * LONG * net.config.hidden_size * 4


def test_short_calls_are_not_recomputed_and_long_ones_keep_attention(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``recompute="auto"`` and ``keep="auto"``, the defaults of strategies, work together, and the report says how."""
    monkeypatch.setattr(lt_tiled.auto, "LEAST", 2**20)
    net = llama()
    plain, kept = {tokens: flops(step(net, tokens)) for tokens in (16, LONG)}, flops_of("attention_output")
    assert plain[LONG] < kept
    with prepare(net, activation_checkpointing="auto") as prepared:
        for _ in range(3):
            for tokens in (16, LONG):
                took = flops(step(net, tokens))
        assert took == kept
        assert flops(step(net, 16)) == plain[16]
        table = prepared.report().table()
        assert table.columns[3]._cells[-1] == f"not recomputed: 16, attention kept: {LONG}"
        assert f"of attention's output kept, so that {LAYERS} blocks compute it once" in str(table.caption)


def test_derivatives(device: Device) -> None:
    """Second derivatives, batched gradients, and a second loss after a backward pass that freed what was kept work as
    with ``keep=None``.
    """
    net = llama().double()
    x = torch.randn(1, 32, net.config.hidden_size, dtype=torch.float64, requires_grad=True)

    def output() -> Tensor:
        hidden: Tensor = net.model(inputs_embeds=x, use_cache=False).last_hidden_state
        return hidden

    found: dict[Any, list[Tensor]] = {}
    for keep in (None, "auto"):
        policy = ActivationCheckpointing(keep=keep)
        with sdpa_kernel(SDPBackend.MATH), prepare(net, activation_checkpointing=policy) as prepared:
            for _ in range(3):
                output().sum().backward()
            assert all((row.kept_tokens > 0) == (keep == "auto") for row in prepared.report().blocks)
            (first,) = torch.autograd.grad(output().square().sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), x)
            rows, eye = output()[0, :2, 0], torch.eye(2, dtype=torch.float64)
            (batched,) = torch.autograd.grad(rows, x, eye, is_grads_batched=True)
            found[keep] = [first.detach(), second, batched]
    torch.testing.assert_close(found["auto"], found[None])


def total(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention that adds what the other ranks have, so that a recompute of it communicates."""
    summed = query.detach().sum()
    dist.all_reduce(summed)
    return query * value + key * summed


STEP = [0]
"""That of the model."""
TABLE = [total]
"""A function that no code names."""


def late(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The same in later steps only."""
    return total(query, key, value) if STEP[0] > 2 else F.scaled_dot_product_attention(query, key, value)


class Summing(nn.Module):
    """Attention that communicates."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = shared_attention(TABLE[0])(*[self.inner(x)[:, None]] * 3)
        return out[:, 0]


class Late(Summing):
    """Attention that communicates in later steps only."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = shared_attention(late)(*[self.inner(x)[:, None]] * 3)
        return out[:, 0]


class Blocks(nn.Module):
    """Two blocks."""

    def __init__(self, part: type[Summing]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(part(), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def kept_where_it_communicates(part: type[Summing]) -> list[int]:
    """What blocks keep whose attention communicates, on ranks of which one has memory left."""
    lt_tiled.allowance.usage = Device(free=(0, PLENTY)[dist.get_rank()])
    try:
        with prepare(net := Blocks(part), activation_checkpointing=True) as prepared:
            for STEP[0] in range(4):
                net(torch.randn(1, 16, 8)).sum().backward()
            return [row.kept_tokens for row in prepared.report().blocks]
    finally:
        lt_tiled.allowance.usage = usage


@pytest.mark.parametrize("part", [Summing, Late])
def test_attention_that_communicates_is_not_kept(part: type[Summing], world: World) -> None:
    """Its recompute would wait for other ranks, which may decide otherwise."""
    assert world(kept_where_it_communicates, part) == [[0, 0]] * 2


def test_usage() -> None:
    """The figures of a CPU follow what the process allocates, and a device without figures has nothing free."""
    before = usage(torch.device("cpu"), 1)
    block = torch.ones(2**26)
    now = usage(torch.device("cpu"), 2)
    assert now.used - before.used >= block.nbytes * 3 // 4
    assert now.peak >= now.used
    assert 0 < now.free < before.free
    assert usage(torch.device("meta"), 1).free == 0


def test_usage_of_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its allocator reserved and does not use is free, up to the share of the device that a process may use."""
    figures = {
        "mem_get_info": (30, 100),
        "memory_allocated": 20,
        "memory_reserved": 50,
        "max_memory_allocated": 45,
        "get_per_process_memory_fraction": 1.0,
    }
    module = SimpleNamespace(**{name: (lambda device, name=name: figures[name]) for name in figures})
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(lt_tiled.memory, "provides", lambda device, name: name in figures)
    assert usage(torch.device("cuda"), 8) == Usage(used=20, peak=45, free=60)
    figures["get_per_process_memory_fraction"] = 0.5
    assert usage(torch.device("cuda"), 8).free == 30
    del figures["get_per_process_memory_fraction"]
    assert usage(torch.device("cuda"), 8).free == 60
