"""What a call does beside its outputs: it is refused by name, and what it changed in the check is as it was before."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lt_tiled import NotPositionWiseError, Tiling, prepare, tile
from lt_tiled.recompute.mode import RandomState
from lt_tiled.tiling import check
from tests.models import AttachedLoss, GatedMLP, H
from tests.parity import randn
from tests.world import World

pytestmark = pytest.mark.self_checks


What = Callable[[Any, Tensor], object]


class Does(GatedMLP):
    """An MLP; ``what`` says what it does beside."""

    def __init__(self, what: What) -> None:
        super().__init__()
        self.what, self.calls, self.loss = what, 0, None
        self.list, self.dict, self.deque = [], {"nested": [1]}, deque(maxlen=2)
        self.load = torch.zeros(2)
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        found = self.what(self, y)
        return found if isinstance(found, Tensor) and found.shape == y.shape else y


def setting(name: str, value: Callable[[Any, Tensor], Any]) -> What:
    return lambda module, y: setattr(module, name, value(module, y))


def with_gradients(module: Any, y: Tensor) -> None:
    if torch.is_grad_enabled():
        module.load += len(y)


OWN = torch.Generator()
CHANGES = r"changes Does\."
ATTACHES = "has gradients that do not come from its output"
EFFECTS: dict[str, tuple[What, str]] = {
    "attaches a mean": (lambda module, y: AttachedLoss.apply(y, y.square().mean()), ATTACHES),
    "attaches a loss of a weight": (lambda module, y: AttachedLoss.apply(y, module.up.weight.abs().mean()), ATTACHES),
    "keeps a loss": (setting("loss", lambda module, y: y.mean()), f"{CHANGES}loss"),
    "keeps a loss of a weight": (setting("loss", lambda module, y: module.up.weight.abs().mean()), f"{CHANGES}loss"),
    "keeps a loss in a list": (lambda module, y: module.list.append(y.mean()), f"{CHANGES}list"),
    "keeps a loss in a list of a dict": (lambda module, y: module.dict["nested"].append(y.mean()), f"{CHANGES}dict"),
    "keeps a value": (setting("loss", lambda module, y: y.mean().detach()), f"{CHANGES}loss"),
    "counts": (setting("calls", lambda module, y: module.calls + 1), f"{CHANGES}calls"),
    "counts in a tensor": (lambda module, y: module.load.add_(1), f"{CHANGES}load"),
    "counts where gradients are on": (with_gradients, f"{CHANGES}load"),
    "counts in a buffer": (lambda module, y: module.count.add_(y.shape[1]), f"{CHANGES}_buffers"),
    "replaces a buffer": (setting("mean", lambda module, y: y.detach()[0, 0, :2]), f"{CHANGES}_buffers"),
    "appends": (lambda module, y: module.list.append(len(y)), f"{CHANGES}list"),
    "appends to a deque": (lambda module, y: module.deque.append(float(y.detach().sum())), f"{CHANGES}deque"),
    "writes into a dict": (lambda module, y: module.dict.update(calls=module.dict.get("calls", 0) + 1), CHANGES),
    "draws from a generator": (
        lambda module, y: y + torch.rand(y.shape, generator=OWN),
        "is not position-wise: its output",
    ),
    "writes into a weight": (lambda module, y: module.down.weight.data.mul_(0.5), r"changes Linear\._parameters"),
}


def held(module: nn.Module) -> list[Any]:
    """Return what a module holds, as plain values."""
    found: list[Any] = []
    for part in module.modules():
        for name, value in (*part.__dict__.items(), *part._buffers.items(), *part._parameters.items()):
            if name not in ("_buffers", "_parameters", "forward"):
                found.append((name, value.tolist() if isinstance(value, Tensor) else repr(value)))
    return found


@pytest.mark.parametrize("most_bytes", [2**28, 0])
@pytest.mark.parametrize(("what", "reason"), EFFECTS.values(), ids=EFFECTS)
def test_a_module_that_is_named_is_refused(
    what: What, reason: str, most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a call does beside its output is refused with the reason and the remedy, and nothing is left of it, whether
    the check runs in float64 or not. Weights that are too large to be copied stay as the module left them.
    """
    monkeypatch.setattr(check, "MOST_BYTES", most_bytes)
    module = tile(Does(what), num_shards=4)
    before, random = held(module), RandomState.now(torch.device("cpu"))
    with pytest.raises(NotPositionWiseError, match=rf"Does:? .*{reason}.*Remove it from targets"):
        module(randn(1, 40, H))
    assert random.same_as(RandomState.now(torch.device("cpu")))
    if most_bytes or "_parameters" not in reason:
        assert held(module) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_an_exception_in_the_check(call: int, error: type[BaseException]) -> None:
    """Ctrl-C, or no memory from any call of the check on, is no refusal and leaves the module as it was."""
    calls = itertools.count(1)

    def what(module: Any, y: Tensor) -> None:
        module.calls += 1
        module.count.add_(1)
        module.list.append(1)
        if next(calls) >= call:
            raise error

    module = tile(Does(what), num_shards=4)
    before = held(module)
    with pytest.raises((error, NotPositionWiseError)) as raised:
        module(randn(1, 40, H))
    assert raised.type is (error if next(calls) > call else NotPositionWiseError)
    assert held(module) == before


class Communicates(GatedMLP):
    """An MLP whose ranks share something in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.tensor([x.numel() // H])
        dist.all_reduce(tokens)
        self.seen.append(int(tokens))
        return super().forward(x)


def losses_of_ranks(tiling: Tiling | None) -> tuple[list[float], list[list[int]], int]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(H), Communicates()) for _ in range(2)))
    x = randn(1, 40 if dist.get_rank() == 0 else 2, H)
    with prepare(model, tiling=tiling) as prepared:
        losses = []
        for _ in range(2):
            loss = model(x).square().sum()
            loss.backward()
            losses.append(float(loss.detach()))
        return losses, [block[1].seen for block in model], len(prepared.report().tiled)


def refusal_of_a_rank() -> str:
    module = tile(Communicates(), num_shards=4)
    with pytest.raises(NotPositionWiseError) as refused:
        module(randn(1, 40 if dist.get_rank() == 0 else 2, H))
    assert module.seen == []
    return str(refused.value)


def test_a_module_that_communicates(world: World) -> None:
    """A module with a collective in its forward pass runs untiled on all ranks, whatever their lengths, with the
    exchanges of the untiled model; one that is named is refused on all ranks before anything is exchanged.
    """
    tiled, untiled = world(losses_of_ranks, Tiling(num_shards=4)), world(losses_of_ranks, None)
    assert [rank[:2] for rank in tiled] == [rank[:2] for rank in untiled]
    assert [rank[2] for rank in tiled] == [0, 0]
    for refusal in world(refusal_of_a_rank):
        assert "Communicates communicates with other ranks in its forward" in refusal
