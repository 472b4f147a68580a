"""Ranks that share sequences and have different memory left, in which ``keep="auto"`` keeps attention's output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import lt_tiled
import lt_tiled.allowance
from lt_tiled import ActivationCheckpointing, shared_attention
from lt_tiled.checkpointing import BlockPatch
from lt_tiled.memory import Usage, usage
from lt_tiled.modules.find import walk_all
from lt_tiled.modules.patch import get_patch
from tests.sequence_parallel.hybrids import hybrid
from tests.sequence_parallel.models import CASES, HeadsOnly, causal, ids
from tests.sequence_parallel.runs import step, value_of
from tests.sequence_parallel.test_states import with_labels
from tests.world import World

PLENTY = 2**40
LENGTHS = (37, 39, 38, 40, 40, 40, 40, 40)
"""Of eight steps: the largest calls of four ranks are in different ones."""


class Flash(HeadsOnly):
    """Attention by a function of the user's."""

    def __init__(self) -> None:
        super().__init__(32, 4)
        for block in self.blocks:
            block.attention = shared_attention(lambda q, k, v, _: torch.softmax(q @ k.mT, -1) @ v)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, x)
        return x


class Summing(nn.Module):
    """A block that ends with attention that saves no tensor, so that torch's recompute ends before it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.inner(x).unflatten(-1, (4, 8)).transpose(1, 2)
        out: Tensor = shared_attention(lambda q, k, v: (q + k + v).cumsum(2))(heads, heads, heads)
        return out.transpose(1, 2).flatten(2)


class Sums(nn.Module):
    """Two such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Summing() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def model_of(name: str) -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    """A model in float64, and its inputs of so many tokens."""
    kind, _, which = name.partition(": ")
    if kind == "hybrid":
        return hybrid(which), lambda tokens: with_labels(ids(2, tokens))
    torch.manual_seed(0)
    if kind == "dropout":
        return causal("gpt2", resid_pdrop=0.3, attn_pdrop=0.3)(), lambda tokens: with_labels(ids(2, tokens))
    if kind in ("function", "sum"):
        model = Flash() if kind == "function" else Sums()
        return model.double(), lambda tokens: {"x": torch.randn(2, tokens, 32, dtype=torch.float64)}
    case = CASES[name]
    return case.build(), lambda tokens: case.given(ids(case.rows, tokens))


def room(model: nn.Module) -> Any:
    """The room of a model."""
    patches = [patch for _, module in walk_all(model) for patch in [get_patch(module, BlockPatch)] if patch is not None]
    assert patches[0].auto is not None
    return patches[0].auto.room


def run(name: str, keep: Any, offload: Any = None) -> tuple[list[Any], list[int], list[int]]:
    """The losses and gradients of eight steps that all ranks share, the bytes that each keeps, and its room.

    The first rank has no memory left, and the third has too little for all blocks in the last two steps.
    """
    (model, inputs), found, kept, limits = model_of(name), list[Any](), list[int](), list[int]()
    rank, free = dist.get_rank(), 0
    lt_tiled.allowance.usage = lambda device, ranks: Usage(0, 0, free)
    policy = ActivationCheckpointing(keep=keep, offload=offload, min_bytes=0, keep_last=0)
    try:
        with lt_tiled.prepare(model, activation_checkpointing=policy, sequence_parallel=dist.get_world_size()):
            if keep == "auto":
                given = room(model)
                model.register_forward_hook(lambda *_: kept.append(given.used) or limits.append(given.limit))  # type: ignore[func-returns-value]
            for index, tokens in enumerate(LENGTHS):
                torch.manual_seed(index)
                free = 2 * (kept[5] - 1) if rank == 2 and len(kept) > 5 else PLENTY * (rank > 0)
                found.append(step(model, inputs(tokens)))
    finally:
        lt_tiled.allowance.usage = usage
    return found, kept, limits


def compare(*args: Any) -> tuple[bool, list[int], list[int]]:
    """Whether losses and gradients are those of ``keep=None`` bit for bit, what was kept, and the room for it."""
    name, *options = args
    (plain, *_), (found, *kept) = (run(name, keep, *options) for keep in (None, "auto"))
    same = all(torch.equal(true[key], ours[key]) for true, ours in zip(plain, found, strict=True) for key in true)
    return same, *kept


NAMES = ("llama", "packed", "padded left", "sliding window", "gemma 3", "gpt-2", "hand-written", "function", "dropout")
FEW = ("few heads, 2/1", "few heads, packed", "few heads, sliding window", "few heads, hand-written")
HYBRID = ("hybrid: qwen3_next", "hybrid: bamba", "hybrid: lfm2", "hybrid: jamba", "hybrid: minimax")


@pytest.mark.table("llama|function|few heads, packed|hybrid: lfm2")
@pytest.mark.parametrize("name", NAMES + FEW + HYBRID)
def test_ranks_with_other_rooms(name: str, four_ranks: World) -> None:
    """Ranks that share a sequence and keep all, a part or nothing have the gradients of ``keep=None`` bit for bit, and
    never keep more than their room.
    """
    found = four_ranks(compare, name)
    assert all(same for same, *_ in found)
    assert all(used <= limit for _, kept, limits in found for used, limit in zip(kept, limits, strict=True))
    none, everything, some, other = (kept for _, kept, _ in found)
    assert max(none) == 0
    assert everything[-1] > 0 < other[-1]
    assert some[-1] < some[5]


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_with_offload(offload: Any, four_ranks: World) -> None:
    """They do so while block inputs are offloaded."""
    for same, kept, _ in four_ranks(compare, "llama", offload)[1:]:
        assert same
        assert kept[5] > 0


def test_nothing_is_kept(four_ranks: World) -> None:
    """Attention that saves no tensor is not kept, because torch's recompute of a block that ends with it does not
    exchange.
    """
    for same, kept, _ in four_ranks(compare, "sum"):
        assert same
        assert max(kept) == 0


def recomputed() -> list[int]:
    """The largest calls that were not recomputed, of ranks whose parts are not larger than before in other steps."""
    model, inputs = model_of("llama")
    with lt_tiled.prepare(model, activation_checkpointing="auto", sequence_parallel=2) as prepared:
        for tokens in (33, 34, 34):
            step(model, inputs(tokens))
        return [row.tokens for row in prepared.report().blocks]


def test_blocks_that_share_sequences_are_always_recomputed(world: World) -> None:
    """Under ``recompute="auto"`` no rank waits for one that recomputes nothing."""
    assert world(recomputed) == [[0, 0]] * 2


def second_derivatives(name: str, keep: Any) -> tuple[int, list[Tensor]]:
    """The bytes that are kept in the fourth step, and the gradients of the squares of its gradients."""
    model, inputs = model_of(name)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    lt_tiled.allowance.usage = lambda device, ranks: Usage(0, 0, PLENTY * dist.get_rank())
    policy = ActivationCheckpointing(keep=keep)
    try:
        with (
            sdpa_kernel(SDPBackend.MATH),
            lt_tiled.prepare(model, activation_checkpointing=policy, sequence_parallel=2),
        ):
            for _ in range(3):
                step(model, inputs(36))
            loss = value_of(model(**inputs(36)))
            kept = room(model).used if keep else 0
            first = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
            squares = torch.stack([g.square().sum() for g in first if g is not None]).sum()
            second = torch.autograd.grad(squares, weights, allow_unused=True)
            return kept, [gradient for gradient in second if gradient is not None]
    finally:
        lt_tiled.allowance.usage = usage


@pytest.mark.parametrize("name", ["llama", "packed", "hybrid: bamba"])
def test_second_derivatives(name: str, world: World) -> None:
    """They are those of ``keep=None`` where some ranks keep attention."""
    plain, ours = (world(second_derivatives, name, keep) for keep in (None, "auto"))
    assert [kept > 0 for kept, _ in ours] == [False, True]
    for (_, true), (_, found) in zip(plain, ours, strict=True):
        torch.testing.assert_close(found, true, rtol=1e-5, atol=1e-5)  # states are in float32
