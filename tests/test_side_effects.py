"""Blocks that change more than their output: buffers, and what they keep in Python."""

from __future__ import annotations

import gc
import itertools
import random
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lt_tiled import ActivationCheckpointing, prepare
from lt_tiled.tiling.observe import Observation
from lt_tiled.tiling.recompute import Substituted
from tests.models import H
from tests.parity import randn
from tests.processes import LIMIT


class Base(nn.Module):
    """A block with two projections. The change comes before, between or after what the backward pass saves."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(H, H), nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).sin()
        x = self.change(x)
        return self.b(x).sin().exp().sin() * 0.5

    def change(self, x: Tensor) -> Tensor:
        return x


class BatchNorm(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(H)

    def change(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class InstanceNorm(BatchNorm):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(H, track_running_stats=True)


class CumulativeNorm(BatchNorm):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(H, momentum=None)


class OldSpectralNorm(Base):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.a = nn.utils.spectral_norm(self.a)


class SpectralNorm(Base):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.spectral_norm(self.a)


class WithBuffer(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.ones(H))


class InPlace(WithBuffer):
    def change(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.state.mul_(0.9).add_(x.detach().mean((0, 1)))
        return x * self.state.clone()


class ReadFirst(WithBuffer):
    def change(self, x: Tensor) -> Tensor:
        x = x * self.state.clone()
        self.state += x.detach().amax((0, 1))
        self.state[0] = 0.3
        return x + self.state.clone()


class ByData(WithBuffer):
    def change(self, x: Tensor) -> Tensor:
        self.state.data.mul_(0.9).add_(x.detach().mean((0, 1)))
        return x * self.state.clone()


class Replaced(WithBuffer):
    def change(self, x: Tensor) -> Tensor:
        self.state = 0.9 * self.state + x.detach().mean((0, 1))
        return x * self.state


class Saved(WithBuffer):
    """The graph saves the buffer, and the next forward pass replaces it."""

    def change(self, x: Tensor) -> Tensor:
        x = x * self.state
        self.state = self.state + x.detach().amax((0, 1))
        return x


class Counter(WithBuffer):
    """What is computed depends on a count in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def change(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return x * 2 if self.count.item() % 2 else x.cos()


class CountedLast(Counter):
    def forward(self, x: Tensor) -> Tensor:
        x = Base.forward(self, x)
        self.count += 1
        return x

    def change(self, x: Tensor) -> Tensor:
        return x * 2 if bool(self.count % 2) else x.cos()


class Lazy(Base):
    """The buffer is there after the first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", None)

    def change(self, x: Tensor) -> Tensor:
        if self.state is None:
            self.state = x.detach().mean((0, 1))
        else:
            self.state = self.state.lerp(x.detach().mean((0, 1)), 0.5)
        return x * self.state


class Registered(Base):
    def change(self, x: Tensor) -> Tensor:
        if not hasattr(self, "state"):
            self.register_buffer("state", x.detach().mean((0, 1)))
            return x.cos()
        return x * self.state


class OfAGraph(WithBuffer):
    """The buffer carries a graph from one call to the next."""

    def change(self, x: Tensor) -> Tensor:
        x = x * self.state
        self.state = torch.tanh(self.state + x.mean((0, 1)))
        return x


class OwnBatchNorm(WithBuffer):
    """Batch norm without a module of its own, which changes its buffers without a new version."""

    def change(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        old = self.state.clone()
        y = F.batch_norm(flat, self.state, torch.ones(H), training=True)
        return y.view_as(x) * old


class _Counting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, state: Tensor) -> Tensor:
        state.add_(1.0)
        ctx.factor = state.clone()
        return x * ctx.factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class InAFunction(WithBuffer):
    def change(self, x: Tensor) -> Tensor:
        return _Counting.apply(x, self.state)


KINDS = [
    BatchNorm,
    InstanceNorm,
    CumulativeNorm,
    OldSpectralNorm,
    SpectralNorm,
    InPlace,
    ReadFirst,
    ByData,
    Replaced,
    Saved,
    Counter,
    CountedLast,
    Lazy,
    Registered,
    OwnBatchNorm,
    InAFunction,
]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


def steps(model: nn.Module) -> dict[str, Tensor]:
    """Train two steps of two forward passes each, with calls in between, and one backward pass kept for another."""
    inputs = [randn(2, 5, H, seed=i).detach() for i in range(4)]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        first, second = model(inputs[0]), model(inputs[1])
        with torch.no_grad():
            model(inputs[2])
        first.square().sum().backward(retain_graph=True)
        model.eval()
        model(inputs[3])
        model.train()
        first.sum().backward()
        second.square().sum().backward()
        optimizer.step()
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    return {**model.state_dict(), **gradients, "output": second.detach()}


def without_and_with(
    run: Callable[[nn.Sequential], Any], *blocks: type[nn.Module], checkpointing: ActivationCheckpointing | None = None
) -> list[Any]:
    """What the same blocks give without activation checkpointing, and with."""
    found = []
    for policy in (False, checkpointing or ActivationCheckpointing(blocks[0].__name__)):
        torch.manual_seed(0)
        model = nn.Sequential(*(block() for block in blocks))
        with prepare(model, activation_checkpointing=policy, tiling=False):
            found.append(run(model))
    return found


WHERE: dict[str, Callable[[str], ActivationCheckpointing]] = {
    "flat": ActivationCheckpointing,
    "nested": lambda name: ActivationCheckpointing(["0", "1", "2", *(f"{i}.0" for i in range(3))]),
    "offloaded": lambda name: ActivationCheckpointing(name, offload="disk", keep_last=0),
}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("kind", KINDS)
def test_buffers(kind: type[Base], where: str) -> None:
    """Blocks that change buffers have bit for bit the gradients and the state without checkpointing, also in blocks
    that are checkpointed themselves, and with offloaded inputs.
    """

    def nested() -> nn.Module:
        return nn.Sequential(kind())

    assert same(*without_and_with(steps, nested, nested, nested, checkpointing=WHERE[where](kind.__name__)))


def test_a_buffer_with_a_graph() -> None:
    """A buffer that carries a graph gets the gradients without checkpointing."""

    def run(model: nn.Module) -> list[Tensor]:
        x = randn(2, 5, H)
        return list(torch.autograd.grad(model(model(x)).square().sum(), [x, *model.parameters()]))

    assert equal(*without_and_with(run, OfAGraph, OfAGraph))


def test_torch_applies_the_change_twice() -> None:
    """Canary: torch's own checkpoint changes a buffer in the recompute again. If it does not, this module can go."""
    block = InPlace()
    y = checkpoint(block, randn(2, 5, H), use_reentrant=False)
    after = block.state.clone()
    y.sum().backward()
    assert not torch.equal(block.state, after)


def test_a_buffer_that_an_outer_graph_saved() -> None:
    """A graph outside of the block that saved the buffer has its gradients after the recompute."""

    def run(model: nn.Sequential) -> list[Tensor]:
        x = randn(2, 5, H)
        y = model(x)
        z = y * model[0].state
        return [torch.autograd.grad(out.sum(), x, retain_graph=True)[0] for out in (y, z)]

    assert equal(*without_and_with(run, InPlace, InPlace))


def test_the_recompute_changes_nothing_for_other_threads() -> None:
    """While a block is recomputed, another thread sees its buffers as the forward pass left them."""

    class Waits(InPlace):
        calls = itertools.count(1)  # no data to restore

        def change(self, x: Tensor) -> Tensor:
            x = super().change(x)
            if next(self.calls) == 2:
                inside.set()
                assert seen.wait(LIMIT)
            return x

    inside, seen = threading.Event(), threading.Event()
    model = nn.ModuleList([Waits()])
    found: list[Tensor] = []

    def look() -> None:
        assert inside.wait(LIMIT)
        found.append(model[0].state.clone())
        seen.set()

    with prepare(model, activation_checkpointing=ActivationCheckpointing("Waits")):
        y = model[0](randn(2, 5, H))
        after = model[0].state.clone()
        thread = threading.Thread(target=look)
        thread.start()
        y.sum().backward()
        thread.join(LIMIT)
    assert torch.equal(found[0], after)


def test_an_exception_in_the_recompute_restores_buffers() -> None:
    """A recompute that is interrupted leaves the buffers as they were."""

    class Fails(Replaced):
        calls = itertools.count()  # no data to restore

        def change(self, x: Tensor) -> Tensor:
            x = super().change(x)
            if next(self.calls):
                raise KeyboardInterrupt
            return x

    model = nn.ModuleList([Fails()])
    with prepare(model, activation_checkpointing=ActivationCheckpointing("Fails")):
        y = model[0](randn(2, 5, H))
        state = model[0].state
        with pytest.raises(KeyboardInterrupt):
            y.sum().backward()
        assert model[0].state is state


class Large(WithBuffer):
    begins = 0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(2**19))
        self.calls = 0

    def change(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > self.begins:
            self.table.mul_(2)
        return x * self.table[:H].clone()


def test_large_buffers() -> None:
    """A large buffer that changes in the first call is copied; one that begins to change later raises by name."""
    model = nn.ModuleList([Large()])
    x = randn(2, 5, H)
    with prepare(model, activation_checkpointing=ActivationCheckpointing("Large")):
        for call in range(3):
            model[0](x).sum().backward()
            assert model[0].table[0] == 2 ** (call + 1)
    model[0].begins = model[0].calls + 1
    with prepare(model, activation_checkpointing=ActivationCheckpointing("Large")):
        model[0](x)
        with pytest.raises(RuntimeError, match=r"Large: its forward pass changed the buffer Large.table of shape"):
            model[0](x)


def test_batch_norm_that_begins_to_train() -> None:
    """Batch norm that was frozen in the first steps is right once it trains, for its submodule alone."""

    def run(model: nn.Sequential) -> dict[str, Tensor]:
        for trains in (False, True, True):
            for block in model:
                block.norm.train(trains)
            model(randn(2, 5, H)).square().sum().backward()
        return {**model.state_dict(), **{f"gradient of {name}": p.grad for name, p in model.named_parameters()}}

    assert same(*without_and_with(run, BatchNorm, BatchNorm))


def test_blocks_without_changes_save_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks whose buffers stay the same hold no copy, and run no mode in the recompute."""

    class Constant(WithBuffer):
        def change(self, x: Tensor) -> Tensor:
            return x * self.state

    made: list[Observation] = []
    real = Observation.end_forward
    monkeypatch.setattr(Observation, "end_forward", lambda self: (real(self), made.append(self))[0])
    monkeypatch.setattr(Substituted, "__enter__", None)
    model = nn.Sequential(Constant(), Constant())
    with prepare(model, activation_checkpointing=ActivationCheckpointing("Constant")):
        for _ in range(2):
            y = model(randn(2, 5, H))
            assert not any(observation._copies for observation in made)
            y.sum().backward()
    assert len(made) == 4


class Compiled(InPlace):
    def __init__(self) -> None:
        super().__init__()
        self.b = torch.compile(self.b, backend="aot_eager")


class Evaluates(Base):
    """Is in evaluation mode for a while."""

    def forward(self, x: Tensor) -> Tensor:
        before = self.training
        self.eval()
        x = super().forward(x)
        self.train(before)
        return x


class HooksItself(Base):
    """Registers a hook in its first forward pass, as transformers does to record hidden states."""

    hooked = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            self.a.register_forward_hook(lambda module, args, output: output * 2)
            self.hooked = True
        return super().forward(x)


@pytest.mark.parametrize("kind", [Evaluates, HooksItself, Compiled])
def test_blocks_that_are_odd(kind: type[Base]) -> None:
    """A training mode that changes inside of the forward pass, a hook that the block registers
    once, and a compiled part next to a buffer that changes are as they were.
    """
    torch._dynamo.reset()  # graphs of nn.Linear that other tests left save tensors in other orders

    def run(model: nn.Sequential) -> list[Tensor]:
        x = randn(2, 5, H)
        gradients = [torch.autograd.grad(model(x).sum(), x)[0] for _ in range(2)]
        assert all(part.training for part in model.modules())
        assert len(model[0].a._forward_hooks) == (kind is HooksItself)
        return [*gradients, *model.buffers()]

    assert equal(*without_and_with(run, kind))


# What a block keeps in Python


class Appends(Base):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[float] = []

    def change(self, x: Tensor) -> Tensor:
        self.log.append(float(x.detach().sum()))
        return x


class AddsToMany(Base):
    """Adds to a list and a dictionary that are too large to be looked into."""

    def __init__(self) -> None:
        super().__init__()
        self.log = [*range(2000)], dict.fromkeys(range(2000))

    def change(self, x: Tensor) -> Tensor:
        self.log[0].append(len(self.log[0]))
        self.log[1][len(self.log[1])] = None
        return x


class KeepsDeque(Base):
    def __init__(self) -> None:
        super().__init__()
        self.log: deque[Tensor] = deque(maxlen=1)

    def change(self, x: Tensor) -> Tensor:
        self.log.append(x.detach().sum() + sum(self.log))
        return x


class KeepsDict(Base):
    def __init__(self) -> None:
        super().__init__()
        self.log: dict[str, list[int]] = {"seen": []}

    def change(self, x: Tensor) -> Tensor:
        self.log["seen"].append(x.shape[1])
        return x


class Calls(Base):
    calls = 0

    def change(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


class CallsLast(Base):
    """The recompute of the first call stops before the change."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x * 2 if self.calls % 2 else x)
        self.calls += 1
        return x


class AddsInPlace(Base):
    """Adds to a tensor in a dictionary and to one that only a hook refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.log, total = {"mean": torch.zeros(H)}, torch.zeros(())
        self.total = lambda: total

        def adds(module: nn.Module, args: Any, output: Tensor) -> None:
            total.add_(output.detach().mean())

        self.b.register_forward_hook(adds)

    def change(self, x: Tensor) -> Tensor:
        self.log["mean"].add_(x.detach().mean((0, 1)))
        return x * (1 + self.total())


class PlainTensor(Base):
    def __init__(self) -> None:
        super().__init__()
        self.ema = torch.zeros(H)

    def change(self, x: Tensor) -> Tensor:
        self.ema = 0.9 * self.ema + x.detach().mean((0, 1))
        return x


class Shared(Base):
    """Counts in its class, appends to a global, and keeps a running mean in an object."""

    calls, reads = 0, SimpleNamespace(mean=0.0)

    def change(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        LOG.append(self.calls)
        self.reads.mean = 0.5 * self.reads.mean + float(x.detach().mean())
        return x * (1 + self.calls % 3) + len(LOG) + self.reads.mean


class Draws(Base):
    """Draws from Python's, NumPy's and its own generators."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.objects = torch.Generator().manual_seed(1), np.array([None], dtype=object)
        self.others = [random.Random(2), np.random.default_rng(3), np.random.RandomState(4), random.SystemRandom()]

    def change(self, x: Tensor) -> Tensor:
        one = random.random() + np.random.rand() + sum(generator.random() for generator in self.others[:2])
        one += self.others[2].random_sample()
        self.objects[0] = [x.shape]
        return x * one + torch.rand(H, generator=self.own)


LOG: list[int] = []


class LargeStatistic(Base):
    """Adds in place to a tensor of 2 MiB in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.log = {"counts": torch.zeros(2**18)}

    def change(self, x: Tensor) -> Tensor:
        self.log["counts"].add_(1.0)
        return x * float(self.log["counts"][0])


STATEFUL = [Appends, AddsToMany, AddsInPlace, KeepsDeque, KeepsDict, Calls, CallsLast, PlainTensor, Shared, Draws]
STATEFUL += [LargeStatistic]


@pytest.mark.parametrize("kind", STATEFUL)
def test_python_state_changes_once(kind: type[Base]) -> None:
    """What a block keeps in Python, and the random numbers that it draws, are bit for bit those without checkpointing,
    with two forward passes before the first backward pass. A large tensor is copied in the first call.
    """

    def run(model: nn.Sequential) -> tuple[Any, ...]:
        LOG.clear()
        Shared.calls, Shared.reads.mean = 0, 0.0
        random.seed(0)
        np.random.seed(0)
        result = steps(model)
        kept = [{name: v for name, v in vars(b).items() if name in ("log", "calls", "ema")} for b in model]
        return result, str(kept), list(LOG), Shared.calls, Shared.reads.mean, random.random(), np.random.rand()

    plain, found = without_and_with(run, kind, kind)
    assert same(plain[0], found[0])
    assert plain[1:] == found[1:]


class Notes(Base):
    """Adds to a list and a dictionary of the caller's."""

    def forward(self, x: Tensor, notes: list[Tensor], names: dict[str, int]) -> Tensor:  # type: ignore[override]
        notes.append(self.b(x).square().mean() * (1 + len(notes)))
        names["rows"] = names.get("rows", 0) + len(x)
        return super().forward(x)


class WithoutNames(Notes):
    """Takes its arguments as they come."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("kind", [Notes, WithoutNames])
def test_a_list_among_the_arguments(kind: type[Notes]) -> None:
    """A list and a dictionary of the caller's to which blocks add hold one entry for each forward pass, whose losses
    have their gradients, step after step, whether the block names its arguments or not.
    """

    def run(model: nn.Sequential) -> dict[str, Any]:
        for _ in range(3):
            x, notes, names = randn(2, 5, H), [], {}
            for block in model:
                x = block(x, notes, names=names)
            (x.sum() + sum(notes)).backward()
            assert (len(notes), names) == (2, {"rows": 4})
        return {name: p.grad for name, p in model.named_parameters()}

    assert same(*without_and_with(run, kind, kind))


class Features(Base):
    """Collects its output in a list, and keeps it in a tuple."""

    log: list[Tensor] = []

    def change(self, x: Tensor) -> Tensor:
        Features.log.append(x)
        self.last = (x,)
        return x


def test_what_a_step_made_is_freed_with_it() -> None:
    """Features that blocks collected are freed when the list is cleared, and no observation keeps them."""
    model = nn.Sequential(Features(), Features(), Features())
    with prepare(model, activation_checkpointing=ActivationCheckpointing("Features")):
        for _ in range(2):
            model(randn(2, 5, H)).sum().backward()
            alive = [weakref.ref(x) for x in Features.log]
            Features.log.clear()
            for block in model:
                block.last = ()
            gc.collect()
            assert [reference() for reference in alive] == [None] * 3


class KeepsUnused(Base):
    """Keeps a tensor with a graph that no backward pass goes through, as an auxiliary loss whose weight is zero."""

    aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.aux, self.both = y.exp().mean(), (y.cos().mean(),)
        ALIVE.extend(map(weakref.ref, (self.aux, *self.both)))
        return y


ALIVE: list[weakref.ref[Tensor]] = []


def test_unused_graphs_of_earlier_steps_are_freed() -> None:
    """A block that keeps tensors with a graph that nobody uses has those of the last step alone."""
    model = nn.Sequential(KeepsUnused(), KeepsUnused())
    ALIVE.clear()
    with prepare(model, activation_checkpointing=ActivationCheckpointing("KeepsUnused")):
        for _ in range(5):
            model(randn(2, 5, H)).sum().backward()
            gc.collect()
            assert sum(reference() is not None for reference in ALIVE) <= 4


class Asks(Base):
    def forward(self, x: Tensor, source: Any = None) -> Tensor:
        return super().forward(x)


def test_an_argument_without_a_state() -> None:
    """An argument that raises where it is asked for its state is left alone."""
    model = nn.ModuleList([Asks()])
    with prepare(model, activation_checkpointing=ActivationCheckpointing("Asks")):
        model[0](randn(2, 5, H), random.SystemRandom()).sum().backward()
