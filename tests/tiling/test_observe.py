"""What others change between the passes: tiles refuse it by value, blocks restore or refuse it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from lt_tiled import ActivationCheckpointing, Tiling, prepare, tile
from lt_tiled.tiling.recompute import differ
from tests.models import GatedMLP, H, tiny_llama
from tests.parity import EXACT, gradients, randn, reference, worst

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.self_checks]


POLICIES = ["tiles", "blocks"]
OTHER_VALUES = r".*computes other values .*Make the change after"
SWITCH = {"scale": 1.5}


def policies(policy: str, target: str) -> dict[str, Any]:
    """The arguments of ``prepare`` for one class of modules in tiles, or for one of checkpointed blocks."""
    if policy == "tiles":
        return {"tiling": Tiling(4, targets=[target]), "activation_checkpointing": False}
    return {"tiling": False, "activation_checkpointing": ActivationCheckpointing([target])}


def _scaled(x: Tensor) -> Tensor:
    return x * SWITCH["scale"]


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.5


class Scaled(GatedMLP):
    """A gated MLP with a buffer, a frozen weight, an activation, a plain tensor and numbers in many places."""

    shift = 0.25

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((H,), 0.5))
        self.frozen = nn.Linear(H, H, bias=False).requires_grad_(False)
        self.factor = 2.0
        self.options, self.slots = {"power": [2]}, Slotted()
        self.act: Callable[[Tensor], Tensor] = torch.tanh
        self.offset, self.table, self.tensors = torch.ones(H), np.full(1, 0.5), [torch.ones(H)]

    def forward(self, x: Tensor) -> Tensor:
        factor = getattr(self, "other_factor", self.factor)
        y: Tensor = self.act(self.frozen(super().forward(x - self.mean)) * factor * self.tensors[0] + self.offset)
        y = y * getattr(type(self), "gain", 1.0)
        return _scaled(y + self.shift + float(self.table[0]) + self.slots.value) ** self.options["power"][0]


class Counted(Scaled):
    """Counts its calls itself, which is no change of others, and has dropout."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return F.dropout(super().forward(x), 0.5, self.training)


def _replace_submodule(m: Scaled) -> None:
    m.frozen = nn.Linear(H, H, bias=False).requires_grad_(False)


REFUSED: dict[str, tuple[Callable[[Scaled], Any], str]] = {
    "buffer in place": (lambda m: m.mean.add_(1), r"\.mean of shape \[16\] was changed in place"),
    "frozen weight in place": (lambda m: m.frozen.weight.mul_(2), r"Linear\.weight .*was changed in place"),
    "frozen weight's data": (
        lambda m: setattr(m.frozen.weight, "data", m.frozen.weight * 2),
        r"the data of Linear\.weight .*was replaced",
    ),
    "weight's data": (
        lambda m: setattr(m.up.weight, "data", m.up.weight.detach() * 2),
        r"the data of Linear\.weight .*was replaced",
    ),
    "weight in place": (lambda m: m.up.weight.mul_(2), r"Linear\.weight of shape \[48, 16\] was changed in place"),
    "plain tensor in place": (lambda m: m.offset.zero_(), r"\.offset of shape \[16\] was changed in place"),
    "tensor in a list": (lambda m: m.tensors[0].zero_(), r"\.tensors of shape \[16\] was changed in place"),
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_a_change_is_noticed(name: str, frozen: bool) -> None:
    """A tensor that has other values when a block's recompute reads it raises in the backward pass, with its name; the
    next step goes on.
    """
    change, message = REFUSED[name]
    model, x = nn.ModuleList([Counted()]), randn(1, 40, H).requires_grad_()
    if frozen:
        model.requires_grad_(False)
    with prepare(model, **policies("blocks", "Counted")):
        model[0](x)
        model[0](x).sum().backward()  # a first call copies what is small
        y = model[0](x)
        with torch.no_grad():
            change(model[0])
        with pytest.raises(RuntimeError, match=rf"Counted: .*{message}.*the recompute"):
            y.sum().backward()
        model[0](x).sum().backward()


RESTORED: dict[str, Callable[[Scaled], Any]] = {
    "buffer": lambda m: setattr(m, "mean", m.mean + 1),
    "mode": nn.Module.eval,
    "submodule": _replace_submodule,
    "frozen weight": lambda m: setattr(m.frozen, "weight", nn.Parameter(m.frozen.weight.detach() * 2, False)),
    "number": lambda m: setattr(m, "factor", m.factor + 1),
    "new attribute": lambda m: setattr(m, "other_factor", getattr(m, "other_factor", 2.0) + 1),
    "inside a dictionary": lambda m: m.options["power"].insert(0, 3),
    "function": lambda m: setattr(m, "act", torch.sin),
    "plain tensor": lambda m: setattr(m, "offset", m.offset + 1),
    "frozen": lambda m: m.up.weight.requires_grad_(False),
    "hook": lambda m: m.up.register_forward_hook(lambda module, args, output: output * 2),
    "slot": lambda m: setattr(m.slots, "value", m.slots.value + 1),
    "array": lambda m: np.add(m.table, 1, out=m.table),
    "class attribute": lambda m: setattr(Scaled, "shift", Scaled.shift + 1),
    "class attribute, set late": lambda m: setattr(Scaled, "gain", getattr(Scaled, "gain", 1.0) + 1),
    "global": lambda m: SWITCH.update(scale=SWITCH["scale"] + 1),
}


@pytest.mark.parametrize("name", RESTORED)
def test_a_change_does_not_reach_the_recompute(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What code sets between the passes changes no gradient of a block, in the first step and in later ones, and is
    there after the backward pass.
    """
    found: list[dict[str, Tensor]] = []
    for options in ({"tiling": False}, policies("blocks", "Counted")):
        torch.manual_seed(0)
        model, x = nn.ModuleList([Counted()]), randn(1, 40, H)

        def call(x: Tensor, m: Any = model[0]) -> Any:
            y = m(x)
            RESTORED[name](m)
            return y

        with prepare(model, **options), monkeypatch.context() as patch:
            patch.setattr(Scaled, "shift", 0.25)
            patch.setattr(Scaled, "gain", 1.5, raising=False)
            patch.setitem(SWITCH, "scale", 1.5)
            if "late" in name:
                del Scaled.gain
            steps = [gradients(model, x, call=call) for _ in range(2)]
            later = {"later": model[0](x), "calls": torch.tensor(float(getattr(model[0], "calls", 0)))}
        found.append(
            {f"{n} of step {step}": g for step, values in enumerate([*steps, later]) for n, g in values.items()}
        )
    assert worst(found[1], found[0]) < EXACT


def test_a_variable_that_is_assigned() -> None:
    """A variable of a closure that has no value yet in the forward pass has none in the recompute."""
    factor: float

    class Closure(GatedMLP):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x)
            try:
                return y * factor
            except NameError:
                return y

    x, model = randn(2, 5, H), nn.Sequential(Closure())
    (true,) = torch.autograd.grad(model(x).sum(), x)
    with prepare(model, **policies("blocks", "Closure")):
        y = model(x).sum()
        factor = 2.0
        (found,) = torch.autograd.grad(y, x)
    assert torch.equal(found, true)
    assert factor == 2.0


class Namespace:
    gain = 1.5


LOCAL, VARIABLE = threading.local(), ContextVar("variable", default=1.5)
ACT: Callable[[Tensor], Tensor] = torch.tanh
LARGE = np.ones((2**17 + 1, 2))


class Odd(GatedMLP):
    """A gated MLP that reads what no observation sees."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = [torch.full((H,), 1.5)]
        self.before = nn.Identity()
        self.unregistered = [nn.LayerNorm(H).requires_grad_(False)]

    def forward(self, x: Tensor) -> Tensor:
        gains = Namespace.gain * getattr(LOCAL, "gain", 1.5) * VARIABLE.get() * float(LARGE[0, 0])
        x = self.unregistered[0](self.before(x)) * self.tensors[0] * gains
        return self.down(self.act(self.gate(x)) * self.up(ACT(x)))


UNSEEN: dict[str, Callable[[Odd], Any]] = {
    "class as a namespace": lambda m: setattr(Namespace, "gain", 3.0),
    "variable of a thread": lambda m: setattr(LOCAL, "gain", 3.0),
    "context variable": lambda m: VARIABLE.set(3.0),
    "function in a global": lambda m: globals().update(ACT=torch.sin),
    "large array": lambda m: LARGE.fill(3.0),
    "unregistered module": lambda m: m.unregistered[0].bias.add_(1),
}


@pytest.fixture
def as_before() -> Iterator[None]:
    yield
    Namespace.gain, LOCAL.gain = 1.5, 1.5
    VARIABLE.set(1.5)
    globals().update(ACT=torch.tanh)
    LARGE.fill(1.0)


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("calls", ["first", "again", "again without a graph"])
@pytest.mark.parametrize("name", UNSEEN)
def test_a_change_that_no_observation_sees(name: str, calls: str) -> None:
    """A block's recompute that reads something else is refused with its name: in the first step, and in later ones if
    the block runs again before the backward pass.
    """
    model, x = nn.Sequential(Odd()), randn(2, 40, H)
    with prepare(model, **policies("blocks", "Odd")):
        for _ in range(0 if calls == "first" else 3):
            model(x).sum().backward()
        y = model(x).sum()
        with torch.no_grad():
            UNSEEN[name](model[0])
        if calls != "first":
            with torch.set_grad_enabled(calls == "again"):
                more = model(x).sum()
            y = y + more
        with pytest.raises(RuntimeError, match=f"Odd{OTHER_VALUES}"):
            y.backward()


def _replace_last(m: Scaled) -> None:
    m.down = nn.Linear(48, H, bias=False).requires_grad_(False)


CHANGES: dict[str, tuple[type[nn.Module], Callable[[Any], Any]]] = {
    **{name: (Scaled, change) for name, (change, _) in REFUSED.items()},
    **{name: (Scaled, change) for name, change in RESTORED.items() if name not in ("mode", "frozen")},
    **{name: (Odd, change) for name, change in UNSEEN.items()},
    "last projection": (Odd, _replace_last),
}


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("step", [1, 3, 5])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed_by_tiles(name: str, step: int, frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever changes what the recompute reads is refused in the step in which it happens, the first one or a later
    one, in training as with frozen weights, and the next step goes on.
    """
    kind, change = CHANGES[name]
    monkeypatch.setattr(Scaled, "shift", 0.25)
    monkeypatch.setattr(Scaled, "gain", 1.5, raising=False)
    monkeypatch.setitem(SWITCH, "scale", 1.5)
    model, x = nn.Sequential(kind()), randn(1, 40, H)
    if frozen:
        model.requires_grad_(False)
    with prepare(model, **policies("tiles", kind.__name__)):
        for _ in range(step - 1):
            model(x).sum().backward()
        y = model(x).sum()
        with torch.no_grad():
            change(model[0])
        with pytest.raises(RuntimeError, match=rf"{kind.__name__}.*computes other values|modified by an inplace"):
            y.backward()
        model(x).sum().backward()


def test_a_frozen_last_projection() -> None:
    """A change of a frozen last projection, which the recompute leaves out, is refused."""
    m, x = GatedMLP(), randn(1, 40, H)
    m.down.requires_grad_(False)
    tile(m, num_shards=4)
    for _ in range(2):
        y = m(x).sum()
        m.down.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()
        m(x).sum().backward()


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("policy", POLICIES)
def test_the_last_of_several_calls_is_compared(policy: str) -> None:
    """A change for the third call alone, which is undone before the backward pass, is refused in each step."""
    model, x = nn.Sequential(Odd()), randn(2, 40, H)
    with prepare(model, **policies(policy, "Odd")):
        for step in range(3):
            y = model(x).sum() + model(x).sum()
            VARIABLE.set(3.0 if step == 2 else 1.5)
            y = y + model(x).sum()
            VARIABLE.set(1.5)
            if step < 2:
                y.backward()
        with pytest.raises(RuntimeError, match=f"Odd{OTHER_VALUES}"):
            y.backward()


ENDS: dict[str, Callable[[Tensor], Tensor]] = {
    "number": lambda y: y * torch.tensor(VARIABLE.get()),
    "vector": lambda y: y * torch.linspace(0.5, VARIABLE.get(), H),
    "flags": lambda y: torch.where(torch.arange(40)[:, None] > 20 * VARIABLE.get() - 25, y, y.sin()),
}


class Ends(GatedMLP):
    """Ends with something whose saved tensors are small."""

    def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.end = end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(super().forward(x))


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_small_saved_tensors_are_compared(end: Callable[[Tensor], Tensor]) -> None:
    """A block that saves only numbers, vectors or flags of what changed is refused by name."""
    model, x = nn.Sequential(Ends(end)), randn(2, 40, H)
    with prepare(model, **policies("blocks", "Ends")):
        y = model(x).sum()
        VARIABLE.set(3.0)
        y = y + model(x).sum()
        with pytest.raises(RuntimeError, match=f"Ends{OTHER_VALUES}"):
            y.backward()


@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_data_of_weights(activation_checkpointing: bool) -> None:
    """Weights whose data changed, of which torch keeps no version, are noticed where an MLP runs with its norm."""
    model, ids = tiny_llama(), torch.randint(32, (2, 40))
    model.model.layers[0].mlp.gate_proj.requires_grad_(False)
    with prepare(model, tiling=4, activation_checkpointing=activation_checkpointing):
        loss = model(input_ids=ids, labels=ids).loss
        model.model.layers[0].mlp.gate_proj.weight.data.mul_(3)
        with pytest.raises(RuntimeError, match=f"LlamaMLP{OTHER_VALUES}"):
            loss.backward()


class Statistics(nn.Module):
    """Batch norm of as many channels as there are tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(H)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).sin()


def test_statistics_that_change_after_they_were_saved() -> None:
    """Batch norm in a block, which saves its statistics and then updates them, has the gradients without
    checkpointing.
    """
    torch.manual_seed(0)
    model, x = nn.Sequential(Statistics()), randn(4, H, H)
    true = gradients(copy.deepcopy(model), x)
    with prepare(model, tiling=None, activation_checkpointing=ActivationCheckpointing(targets=["Statistics"])):
        assert worst(gradients(model, x), true) < EXACT


def test_a_few_elements_may_differ() -> None:
    """One element in sixteen, as of a token that goes to another expert, is no difference; three are."""
    values = torch.arange(1.0, 17.0)
    assert [differ(values, values + (torch.arange(16) < many)) for many in (0, 1, 3)] == [False, False, True]


@pytest.mark.parametrize(
    ("policy", "given"),
    [("tiles", "trainable"), *(("blocks", given) for given in ("trainable", "frozen", "some frozen"))],
)
def test_functional_call(policy: str, given: str) -> None:
    """Weights given by ``functional_call`` for the forward pass alone are those of the backward pass too. Tiles refuse
    frozen ones, of which they hold none.
    """
    torch.manual_seed(0)
    m, x = Scaled(), randn(1, 40, H).requires_grad_()
    model = nn.ModuleList([m])
    names = ["frozen.weight", "up.weight"] if given == "some frozen" else [name for name, _ in m.named_parameters()]
    if policy == "tiles":
        names.remove("frozen.weight")
    weights = {name: (m.get_parameter(name) * 2).detach() for name in names}
    for name in names if given == "trainable" else ():
        weights[name].requires_grad_(name != "frozen.weight")

    def run() -> dict[str, Tensor]:
        before = dict(m.named_parameters())
        loss = torch.func.functional_call(m, weights, x).square().sum()
        wanted = {"input": x, **before, **{f"given {name}": weight for name, weight in weights.items()}}
        wanted = {name: tensor for name, tensor in wanted.items() if tensor.requires_grad}
        found = torch.autograd.grad(loss, [*wanted.values()], allow_unused=True)
        assert all(p is before[name] for name, p in m.named_parameters())
        return {name: g for name, g in zip(wanted, found, strict=True) if g is not None}

    true = run()
    with prepare(model, **policies(policy, "Scaled")):
        for _ in range(2):
            assert worst(run(), true) < EXACT


def test_what_is_put_back_is_no_change() -> None:
    """Weights that are exchanged for a while, as for an average of them, are those of the forward pass again."""
    torch.manual_seed(0)
    m, x = Scaled(), randn(1, 40, H)
    true = reference(m, x)
    tile(m, num_shards=4)

    def call(x: Tensor) -> Any:
        y = m(x)
        kept = {p: p.data for p in m.parameters()}
        for p in kept:
            p.data = p.data * 2
        with torch.no_grad():
            m(x)
        for p, data in kept.items():
            p.data = data
        return y

    assert worst(gradients(m, x, call=call), true) < EXACT


def _exchange(m: GatedMLP) -> None:
    m.gate.weight, m.up.weight = m.up.weight, m.gate.weight


def _tie(m: GatedMLP) -> None:
    m.gate.weight = m.up.weight


@pytest.mark.parametrize("change", [_exchange, _tie])
def test_weights_that_are_exchanged(change: Callable[[GatedMLP], None]) -> None:
    """Two weights that are exchanged or tied between the passes get the gradients of their places in the forward pass,
    as untiled.
    """
    m, x = GatedMLP(), randn(1, 40, H)
    found: list[dict[str, Tensor]] = []
    for tiled in (False, True):
        copied = copy.deepcopy(m)
        weights = dict(copied.named_parameters())
        y = (tile(copied, num_shards=4) if tiled else copied)(x).square().sum()
        change(copied)
        found.append(dict(zip(weights, torch.autograd.grad(y, [*weights.values()]), strict=True)))
    assert worst(*found) < EXACT


class Holds(GatedMLP):
    """Holds things that may change between the passes without any effect on what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.cache, self.table = LlamaConfig(), {}, np.array([1.0, np.nan])
        self.entries, self.function = dict.fromkeys(range(100_000)), np.tanh

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y + self.cache.setdefault(x.dtype, torch.zeros((), dtype=x.dtype))


def test_what_may_change() -> None:
    """A config's fields, and a cache that gets new keys, may change; NumPy's nan and functions are no change."""
    torch.manual_seed(0)
    m, x = Holds(), randn(1, 40, H)
    true = reference(m, x)
    tile(m, num_shards=4)

    def call(x: Tensor) -> Any:
        y = m(x)
        m.config.use_cache = not m.config.use_cache
        m.cache[len(m.cache)] = None
        return y

    assert worst(gradients(m, x, call=call), true) < EXACT
