"""What is noticed: whatever a recompute reads, its gradients are right, or refused in the step in which it changed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lt_tiled import ActivationCheckpointing, Tiling, prepare
from tests.models import Coded, H
from tests.parity import EXACT, gradients, randn, worst
from tests.recompute.noticed import AROUND, CHANGES, DRAWS, SWITCH, Reads, ReadsBlock

pytestmark = [pytest.mark.usefixtures("float64")]

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
    r"Reads.*(computes different values from|changed in place|depends on a tensor)",
    "modified by an inplace operation",
)


@pytest.fixture(autouse=True)
def _switch() -> Iterator[None]:
    """Undo changes of the global variable."""
    yield
    SWITCH["scale"] = 1.5


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
            SWITCH["scale"] = 1.5
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


class LeavesLoss(nn.Module):
    """A block that leaves a loss in an attribute."""

    loss: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        self.loss = (x * SWITCH["scale"]).sigmoid().square().mean()
        return x + self.mlp(x).relu()


def test_a_branch_without_output() -> None:
    """A change on a branch that reaches no output of a block is refused in one of the next steps."""
    model = nn.ModuleList([LeavesLoss()])

    def train() -> None:
        for step in range(300):
            y = model[0](randn(2, 40, H, seed=step)).sum() + model[0].loss
            SWITCH["scale"] = 3.0
            try:
                y.backward()
            finally:
                SWITCH["scale"] = 1.5

    with prepare(model, **BLOCKS), pytest.raises(RuntimeError, match="computes different values from"):
        train()


def attended(x: Tensor) -> Tensor:
    q = x[:, None]
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)[:, 0]


Code = Callable[[Any, Tensor], Any]
ALONE: dict[str, Code] = {
    "number": lambda m, x: m.mlp(x) * torch.tensor(SWITCH["scale"]),
    "vector": lambda m, x: m.mlp(x) * torch.linspace(0.5, SWITCH["scale"], H),
    "index": lambda m, x: m.mlp(x)[:, (torch.arange(40) + int(SWITCH["scale"])) % 40],
    "flags": lambda m, x: m.mlp(x).where(torch.arange(40)[:, None] > 20 * SWITCH["scale"] - 25, x.sin()),
    "flags of tokens": lambda m, x: m.mlp(x).where(torch.full_like(x, SWITCH["scale"]) < 2, x.sin()),
    "attention in front of an MLP": lambda m, x: x + attended(x * SWITCH["scale"]) + m.mlp(x),
    "attention behind an MLP": lambda m, x: x + m.mlp(x) + attended(x * SWITCH["scale"]),
    "MLP in front of attention": lambda m, x: x + m.mlp(x * SWITCH["scale"]) + attended(x),
    "MLP behind attention": lambda m, x: x + attended(x) + m.mlp(x * SWITCH["scale"]),
}
"""Blocks of which one small tensor, or a branch on which no other depends, is all that shows a change."""


@pytest.mark.parametrize("options", [BLOCKS, KEPT], ids=["blocks", "kept"])
@pytest.mark.parametrize("name", ALONE)
def test_what_one_tensor_alone_shows(name: str, options: dict[str, Any]) -> None:
    """A change that only a number, a vector, flags or a branch of a block shows is refused in its step."""
    model = nn.ModuleList([Coded(ALONE[name])])
    with prepare(model, **options):
        for _ in range(2):
            model[0](randn(2, 40, H)).sum().backward()
        y = model[0](randn(2, 40, H)).sum()
        SWITCH["scale"] = 3.0
        with pytest.raises(RuntimeError, match=REFUSED[0].replace("Reads", "Coded")):
            y.backward()


def outputs(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors, of which the small one reads a number."""
    return torch.tanh(m.mlp(x)[..., :4]) * SWITCH["scale"], torch.tanh(m.mlp(x)) * 100


@pytest.mark.parametrize("code", [outputs, lambda m, x: outputs(m, x)[::-1]], ids=["first", "second"])
def test_each_output_of_tiles(code: Code) -> None:
    """A change in any tensor that a tiled module returns is refused, also where another one is larger."""
    model = nn.ModuleList([Coded(code)])
    with prepare(model, tiling=Tiling(4, targets=["Coded"]), activation_checkpointing=None):
        one, other = model[0](randn(2, 40, H))
        SWITCH["scale"] = 3.0
        with pytest.raises(RuntimeError, match=r"Coded.*computes different values from"):
            (one.square().mean() + other.square().mean()).backward()


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
    (record,) = [record for record in caplog.records if "computes different values" in record.message]
    assert "4 (ReadsBlock), 3 (ReadsBlock) and 3 more" in record.message
    assert len(record.message.split()) <= 35


@pytest.mark.parametrize(("change", "difference"), [(2, r"\[2, 40, 32\]"), (-1, "it saves fewer tensors")])
def test_other_tensors(change: int, difference: str) -> None:
    """A recompute that saves tensors of other shapes, or fewer of them, is refused with the name of the block."""
    model = nn.ModuleList([Coded(lambda m, x: m.mlp(x) if m.times < 0 else m.mlp(x).repeat(1, 1, m.times).sin())])
    model[0].times = 1
    with prepare(model, **BLOCKS):
        y = model[0](randn(2, 40, H)).sum()
        model[0].times = change
        with pytest.raises(RuntimeError, match=rf"0 \(Coded\) computes different values .*{difference}"):
            y.backward()
