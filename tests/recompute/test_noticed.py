"""What is noticed: whatever a recompute reads, its gradients are right, or refused in the step in which it changed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lt_tiled import ActivationCheckpointing, Tiling, prepare
from tests.models import GatedMLP, H
from tests.parity import EXACT, gradients, randn, worst
from tests.recompute.noticed import AROUND, CHANGES, DRAWS, SWITCH, Namespace, Reads, ReadsBlock, as_before

pytestmark = [pytest.mark.usefixtures("float64", "places")]

TILES: dict[str, Any] = {"tiling": Tiling(4, targets=["Reads"]), "activation_checkpointing": None}
BLOCKS: dict[str, Any] = {"tiling": None, "activation_checkpointing": ActivationCheckpointing(["0"])}
KEPT: dict[str, Any] = {"tiling": None, "activation_checkpointing": ActivationCheckpointing(["0"], keep="attention")}
POLICIES: dict[str, tuple[type[Reads], dict[str, Any]]] = {
    "tiles": (Reads, TILES),
    "blocks": (ReadsBlock, BLOCKS),
    "kept": (ReadsBlock, KEPT),
}
RESTORED = {"buffer in place", "buffer, replaced", "buffer, by its data", "random state", *AROUND}
"""What a block's recompute finds as its forward pass found it."""
REFUSED = (
    r"Reads.*(computes other values than|changed in place|depends on a tensor)",
    "modified by an inplace operation",
)


@pytest.fixture
def places(tmp_path: Path) -> Iterator[None]:
    """Give the modules a file, and undo changes outside of modules."""
    Namespace.path = str(tmp_path / "number")
    as_before()
    yield
    as_before()
    Namespace.path = ""


def gradients_of_step(policy: str, frozen: bool, name: str, step: int, early: bool) -> dict[str, Tensor] | None:
    """Return the gradients of a step, in which something changes before the backward pass or after it.

    ``None`` if the backward pass is refused. The next step goes on.
    """
    kind, options = POLICIES[policy]
    torch.manual_seed(0)
    model = nn.ModuleList([kind()]).requires_grad_(not frozen)
    mask = torch.linspace(0.5, 1.5, 40)[:, None].expand(2, 40, H).clone()
    around: AbstractContextManager[Any] = AROUND[name]() if name in AROUND else nullcontext()
    with prepare(model, **options):
        for earlier in range(step - 1):
            model[0](randn(2, 40, H, seed=earlier), mask).square().sum().backward()
        model.zero_grad()
        model[0].draw = DRAWS.get(name, float)
        x = randn(2, 40, H, seed=step)
        with around:
            loss = model[0](x, mask).square().sum()
            if name in AROUND and not early:
                loss.backward()
        if name in CHANGES and early:
            with torch.no_grad():
                CHANGES[name](model[0], mask)
        try:
            if early or name not in AROUND:
                loss.backward()
        except (RuntimeError, ValueError) as error:
            if not any(re.search(message, str(error)) for message in REFUSED):
                raise
            model[0].draw = float
            model[0](x, mask).sum().backward()
            return None
        finally:
            as_before()
    return {"x": x.grad} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", [*CHANGES, *DRAWS, *AROUND])
def test_a_change(name: str, policy: str, frozen: bool) -> None:
    """Tiles and blocks are right, or refused in that step, the first one or a later one. Blocks restore what they
    promise.
    """
    for step in (1, 3, 5):
        found = gradients_of_step(policy, frozen, name, step, early=True)
        if found is None:
            assert policy == "tiles" or name not in RESTORED
        else:
            assert name not in DRAWS
            assert worst(found, gradients_of_step(policy, frozen, name, step, early=False)) < EXACT


@pytest.mark.parametrize("policy", POLICIES)
def test_the_last_of_several_calls(policy: str) -> None:
    """A change for the third call alone, which is undone before the backward pass, is refused in each step."""
    kind, options = POLICIES[policy]
    model, x, mask = nn.ModuleList([kind()]), randn(2, 40, H), torch.ones(2, 40, H)
    with prepare(model, **options):
        for step in range(3):
            y = model[0](x, mask).sum() + model[0](x, mask).sum()
            SWITCH["scale"] = 3.0 if step == 2 else 1.5
            y = y + model[0](x, mask).sum()
            SWITCH["scale"] = 1.5
            if step < 2:
                y.backward()
        with pytest.raises(RuntimeError, match=REFUSED[0]):
            y.backward()


ENDS: dict[str, Callable[[Tensor], Tensor]] = {
    "number": lambda y: y * torch.tensor(SWITCH["scale"]),
    "vector": lambda y: y * torch.linspace(0.5, SWITCH["scale"], H),
    "index": lambda y: y[:, (torch.arange(40) + int(SWITCH["scale"])) % 40],
    "flags": lambda y: torch.where(torch.arange(40)[:, None] > 20 * SWITCH["scale"] - 25, y, y.sin()),
}


class EndsInReads(GatedMLP):
    """Ends with something whose saved tensors are small."""

    def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.end = end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(super().forward(x))


@pytest.mark.parametrize("end", ENDS)
def test_small_saved_tensors(end: str) -> None:
    """A block that saves only numbers, vectors or flags of what changed is refused."""
    model = nn.ModuleList([EndsInReads(ENDS[end])])
    with prepare(model, **BLOCKS):
        y = model[0](randn(2, 40, H))
        SWITCH["scale"] = 3.0
        with pytest.raises(RuntimeError, match=REFUSED[0]):
            y.sum().backward()


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_put_back_is_no_change(policy: str) -> None:
    """Weights that are exchanged for a while, as for an average of them, are those of the forward pass again."""
    kind, options = POLICIES[policy]
    torch.manual_seed(0)
    model, x, mask = nn.ModuleList([kind().eval()]), randn(1, 40, H), torch.ones(1, 40, H)

    def call(x: Tensor) -> Tensor:
        y: Tensor = model[0](x, mask)
        kept = {p: p.data for p in model.parameters()}
        for p in kept:
            p.data = p.data * 2
        with torch.no_grad():
            model[0](x, mask)
        for p, data in kept.items():
            p.data = data
        return y

    true = gradients(model, x, call=call)
    with prepare(model, **options):
        assert worst(gradients(model, x, call=call), true) < EXACT


def test_other_blocks_only_warn(caplog: pytest.LogCaptureFixture) -> None:
    """With ``compare="warn"`` a step with other values goes on, and a warning names all blocks, in few words."""
    model, mask = nn.ModuleList([ReadsBlock() for _ in range(5)]), torch.ones(2, 40, H)
    with prepare(model, activation_checkpointing=ActivationCheckpointing("ReadsBlock", compare="warn")):
        x = randn(2, 40, H)
        for block in model:
            x = block(x, mask)
        SWITCH["scale"] = 3.0
        x.sum().backward()
    (record,) = [record for record in caplog.records if "computes other values" in record.message]
    assert "4 (ReadsBlock), 3 (ReadsBlock) and 3 more" in record.message
    assert len(record.message.split()) <= 35


@pytest.mark.parametrize(("change", "difference"), [(2, r"\[2, 40, 32\]"), (-1, "it saves fewer tensors")])
def test_other_tensors(change: int, difference: str) -> None:
    """A recompute that saves tensors of other shapes, or fewer of them, is refused with the name of the block."""

    class Changes(GatedMLP):
        change = 1

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y if self.change < 0 else y.repeat(1, 1, self.change).sin()

    model = nn.ModuleList([Changes()])
    with prepare(model, **BLOCKS):
        y = model[0](randn(2, 40, H)).sum()
        model[0].change = change
        with pytest.raises(RuntimeError, match=rf"0 \(Changes\) computes other values .*{difference}"):
            y.backward()


class ParallelBlock(GatedMLP):
    """A block whose MLP does not depend on its attention, nor its attention on the MLP."""

    attends_first = True

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(H, 3 * H), nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, 2, H // 2)).transpose(1, 3)  # [B, 2, 3, S, H / 2]
        attended = F.scaled_dot_product_attention(*heads.unbind(2), is_causal=True)
        attention = self.out(attended.transpose(1, 2).flatten(2))
        return x + attention + super().forward(x) if self.attends_first else x + super().forward(x) + attention


@pytest.mark.parametrize("changed", ["qkv", "out", "up", "down"])
@pytest.mark.parametrize("attends_first", [False, True])
@pytest.mark.parametrize("options", [BLOCKS, KEPT], ids=["blocks", "kept"])
def test_a_parallel_block(options: dict[str, Any], attends_first: bool, changed: str) -> None:
    """A change in a branch is refused in its step, also where no other branch depends on it."""
    model = nn.ModuleList([ParallelBlock()])
    model[0].attends_first = attends_first
    with prepare(model, **options):
        for _ in range(2):
            model[0](randn(2, 40, H)).sum().backward()
        y = model[0](randn(2, 40, H)).sum()
        model[0].get_submodule(changed).weight.data.mul_(1.1)
        with pytest.raises(RuntimeError, match=REFUSED[0].replace("Reads", "ParallelBlock")):
            y.backward()


class TwoOutputs(nn.Module):
    """Returns two tensors, of which one reads a number."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.one, self.other, self.first = nn.Linear(H, H), nn.Linear(H, 4), first

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        reads, others = torch.tanh(self.other(x)) * SWITCH["scale"], torch.tanh(self.one(x)) * 100
        return (reads, others) if self.first else (others, reads)


@pytest.mark.parametrize("first", [True, False])
def test_each_output_of_tiles(first: bool) -> None:
    """A change in any tensor that a tiled module returns is refused, also where another one is larger."""
    model = nn.ModuleList([TwoOutputs(first)])
    with prepare(model, tiling=Tiling(4, targets=["TwoOutputs"]), activation_checkpointing=None):
        one, other = model[0](randn(2, 40, H))
        SWITCH["scale"] = 3.0
        with pytest.raises(RuntimeError, match=r"TwoOutputs.*computes other values than"):
            (one.square().mean() + other.square().mean()).backward()
