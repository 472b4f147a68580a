"""Between the forward and the backward pass: what is changed there, by whom, and what interrupts it."""

from __future__ import annotations

import copy
import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from transformers import LlamaConfig

from lt_tiled import ActivationCheckpointing, Tiling, prepare, tile, untile
from lt_tiled.errors import NotPositionWiseError
from lt_tiled.modules.patch import get_patch
from lt_tiled.tiling.patched import TiledPatch
from lt_tiled.tiling.recompute import differ
from tests.models import GatedMLP, H, tiny_llama
from tests.parity import EXACT, gradients, less_accurate, randn, reference, spread, worst

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.self_checks]


SWITCH = {"scale": 1.5}


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
        return _scaled(y + self.shift + float(self.table[0]) + self.slots.value) ** self.options["power"][0]


def _replace_submodule(m: Scaled) -> None:
    m.frozen = nn.Linear(H, H, bias=False).requires_grad_(False)


REFUSED: dict[str, tuple[Callable[[Scaled], Any], str]] = {
    "buffer in place": (lambda m: m.mean.add_(1), r"Scaled\.mean of shape \[16\] was changed in place"),
    "frozen weight in place": (lambda m: m.frozen.weight.mul_(2), r"Linear\.weight .*was changed in place"),
    "frozen weight's data": (
        lambda m: setattr(m.frozen.weight, "data", m.frozen.weight * 2),
        r"the data of Linear\.weight .*was replaced",
    ),
    "frozen weight": (
        lambda m: setattr(m.frozen, "weight", nn.Parameter(m.frozen.weight * 2)),
        r"Linear\.weight .*was replaced",
    ),
    "trainable weight's data": (
        lambda m: setattr(m.up.weight, "data", m.up.weight.detach() * 2),
        r"the data of Linear\.weight .*was replaced",
    ),
    "trainable weight in place": (lambda m: m.up.weight.mul_(2), r"Linear\.weight .*was changed in place"),
    "plain tensor in place": (lambda m: m.offset.zero_(), r"Scaled\.offset of shape \[16\] was changed in place"),
    "tensor in a list": (lambda m: m.tensors[0].zero_(), r"Scaled\.tensors of shape \[16\] was changed in place"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_change_is_noticed(name: str) -> None:
    """A tensor that has other values when the recompute reads it raises in the backward pass, with its name."""
    change, message = REFUSED[name]
    m, x = tile(Scaled(), num_shards=4), randn(1, 40, H).requires_grad_()
    m(x).sum().backward()  # a first call copies what is small
    y = m(x)
    with torch.no_grad():
        change(m)
    with pytest.raises(RuntimeError, match=rf"Scaled: .*{message}.*untile"):
        y.sum().backward()


RESTORED: dict[str, Callable[[Scaled], Any]] = {
    "buffer": lambda m: setattr(m, "mean", m.mean + 1),
    "submodule": _replace_submodule,
    "number": lambda m: setattr(m, "factor", 3.0),
    "new attribute": lambda m: setattr(m, "other_factor", 3.0),
    "inside a dictionary": lambda m: m.options["power"].insert(0, 3),
    "function": lambda m: setattr(m, "act", torch.sin),
    "plain tensor": lambda m: setattr(m, "offset", torch.zeros(H)),
    "frozen": lambda m: m.up.weight.requires_grad_(False),
    "slot": lambda m: setattr(m.slots, "value", 1.5),
    "array": lambda m: m.table.fill(3.0),
    "class attribute": lambda m: setattr(Scaled, "shift", 3.0),
    "global": lambda m: SWITCH.update(scale=3.0),
}


@pytest.mark.parametrize("name", RESTORED)
def test_a_change_does_not_reach_the_recompute(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What code sets between the passes changes no gradient, and is there after the backward pass."""
    found = []
    for tiled in (False, True):
        monkeypatch.setattr(Scaled, "shift", 0.25)
        monkeypatch.setitem(SWITCH, "scale", 1.5)
        torch.manual_seed(0)
        m, x = Scaled(), randn(1, 40, H)

        def call(x: Tensor, m: Scaled = m) -> Any:
            y = m(x)
            RESTORED[name](m)
            return y

        if tiled:
            tile(m, num_shards=4)
        found.append({**gradients(m, x, call=call), "later": m(x)})
    assert worst(found[1], found[0]) < EXACT


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
@pytest.mark.parametrize("policy", ["blocks", "tiles"])
@pytest.mark.parametrize("name", UNSEEN)
def test_a_change_that_no_observation_sees(name: str, policy: str, calls: str) -> None:
    """A recompute that reads something else is refused with the module's name: in the first step, and in later ones if
    the module runs again before the backward pass.
    """
    tiling = Tiling(4, targets=["Odd"]) if policy == "tiles" else None
    model, x = nn.Sequential(Odd()), randn(2, 40, H)
    with prepare(
        model, tiling=tiling, activation_checkpointing=None if tiling else ActivationCheckpointing(targets=["Odd"])
    ):
        for _ in range(0 if calls == "first" else 3):
            model(x).sum().backward()
        y = model(x).sum()
        with torch.no_grad():
            UNSEEN[name](model[0])
        if calls != "first":
            with torch.set_grad_enabled(calls == "again"):
                more = model(x).sum()
            y = y + more
        with pytest.raises(RuntimeError, match=r"Odd.*: its recompute computes other values .*Make the change after"):
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
    with prepare(model, activation_checkpointing=ActivationCheckpointing(targets=["Ends"])):
        y = model(x).sum()
        VARIABLE.set(3.0)
        y = y + model(x).sum()
        with pytest.raises(RuntimeError, match=r"Ends: its recompute computes other values .*Make the change after"):
            y.backward()


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("policy", ["blocks", "tiles"])
def test_the_last_of_several_calls_is_compared(policy: str) -> None:
    """A change for the third call alone, which is undone before the backward pass, is refused in each step."""
    tiling = Tiling(4, targets=["Odd"]) if policy == "tiles" else None
    model, x = nn.Sequential(Odd()), randn(2, 40, H)
    with prepare(
        model, tiling=tiling, activation_checkpointing=None if tiling else ActivationCheckpointing(targets=["Odd"])
    ):
        for step in range(3):
            y = model(x).sum() + model(x).sum()
            VARIABLE.set(3.0 if step == 2 else 1.5)
            y = y + model(x).sum()
            VARIABLE.set(1.5)
            if step < 2:
                y.backward()
        with pytest.raises(RuntimeError, match=r"Odd.*: its recompute computes other values .*Make the change after"):
            y.backward()


class Schedule(GatedMLP):
    """Mixes tokens from some step on."""

    mix: float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y - self.mix * y.mean(1, keepdim=True)


def test_a_number_that_is_no_longer_zero_is_checked() -> None:
    """A module that begins to mix tokens when an attribute is no longer zero is refused then."""
    m, x = tile(Schedule(), num_shards=4), randn(1, 40, H)
    m(x).sum().backward()
    m.mix = 0.5
    with pytest.raises(NotPositionWiseError, match="Schedule is not position-wise"):
        m(x)


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_data_of_weights(activation_checkpointing: bool, tokens: int) -> None:
    """Weights whose data changed, of which torch keeps no version, are noticed where the module ran again, in
    evaluation or on few tokens too, where it runs by itself and not together with its norm.
    """
    model, ids = tiny_llama(), torch.randint(32, (2, 40))
    model.model.layers[0].mlp.gate_proj.requires_grad_(False)
    with prepare(model, tiling=4, activation_checkpointing=activation_checkpointing):
        for _ in range(3):
            model(input_ids=ids, labels=ids).loss.backward()
        loss = model(input_ids=ids, labels=ids).loss
        model.model.layers[0].mlp.gate_proj.weight.data.mul_(3)
        with torch.no_grad():
            model(input_ids=ids[:1, :tokens])
        with pytest.raises(RuntimeError, match="its recompute computes other values"):
            loss.backward()


class InHalf(GatedMLP):
    """Returns float32 of what autocast computes in 16 bits."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


@pytest.mark.slow
@pytest.mark.low_precision
def test_compiled_tiles_are_not_compared() -> None:
    """A compiled tile that rounds otherwise than uncompiled is not taken for one that reads something else."""
    m, x = tile(InHalf().float(), num_shards=4, compile=True, self_check=False), randn(1, 64, H).float()
    with torch.autocast("cpu", torch.bfloat16):
        y = m(x.requires_grad_())
    y.sum().backward()
    assert m.up.weight.grad is not None


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


def test_functional_call() -> None:
    """Trainable weights given by ``functional_call`` for the forward pass alone get the untiled gradients; frozen ones
    raise.
    """
    torch.manual_seed(0)
    m, x = Scaled(), randn(1, 40, H)
    given = {name: (p * 2).detach().requires_grad_() for name, p in m.named_parameters() if p.requires_grad}

    def run() -> dict[str, Tensor]:
        loss = torch.func.functional_call(m, given, x).sum()
        return dict(zip(given, torch.autograd.grad(loss, [*given.values()]), strict=True))

    true = run()
    tile(m, num_shards=4)
    assert worst(run(), true) < EXACT
    frozen = {"frozen.weight": m.frozen.weight * 2}
    y = torch.func.functional_call(m, frozen, x.requires_grad_())
    with pytest.raises(RuntimeError, match=r"Linear\.weight .*was replaced"):
        y.sum().backward()


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


@pytest.mark.parametrize("replaced", [False, True])
def test_untiled_before_the_backward_pass(replaced: bool) -> None:
    """A module that is untiled between its forward and its backward pass gets its gradients."""
    torch.manual_seed(0)
    m, x = GatedMLP(), randn(1, 40, H)
    true = reference(m, x)
    if replaced:
        m.forward = m.forward  # type: ignore[method-assign]  # as Liger sets it

    def call(x: Tensor) -> Any:
        tile(m, num_shards=4)
        y = m(x)
        untile(m)
        return y

    assert worst(gradients(m, x, call=call), true) < EXACT


@pytest.mark.low_precision
def test_backward_under_another_autocast() -> None:
    """A backward pass inside another autocast region gives the gradients of the forward's own."""
    torch.manual_seed(0)
    m, x = GatedMLP().float(), randn(1, 40, H, dtype=torch.float32)
    true, untiled = reference(m, x), gradients(m, x)
    tile(m, num_shards=4)
    inside = x.detach().requires_grad_()
    y = m(inside)
    loss = spread(y)
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    found = {name: p.grad for name, p in m.named_parameters() if p.grad is not None}
    assert less_accurate({"loss": loss.detach(), **found, "input 0": inside.grad}, untiled, true) == {}


def test_threads() -> None:
    """Four threads that train one model at the same time get the gradients of one, and leave its weights alone."""
    torch.manual_seed(0)
    m = GatedMLP()
    inputs = [randn(1, 40, H, seed=i) for i in range(4)]
    weights = list(m.parameters())

    def run(x: Tensor) -> dict[str, Tensor]:
        inside = x.detach().requires_grad_()
        return {str(i): g for i, g in enumerate(torch.autograd.grad(m(inside).square().sum(), [inside, *weights]))}

    true = [run(x) for x in inputs]
    tile(m, num_shards=8)
    wrong: list[str] = []

    def work(index: int) -> None:
        try:
            for _ in range(25):
                if worst(run(inputs[index]), true[index]) >= EXACT:
                    wrong.append("other gradients")
        except Exception as error:
            wrong.append(repr(error))

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switch)
    assert wrong == []
    assert [id(p) for p in m.parameters()] == [id(p) for p in weights]


@pytest.mark.slow
def test_interrupted_anywhere() -> None:
    """Ctrl-C at every eleventh line of a step leaves the weights in place, and the next step is right."""
    torch.manual_seed(0)
    m, x = GatedMLP(), randn(1, 40, H)
    true = reference(m, x)
    tile(m, num_shards=2)
    gradients(m, x)
    weights = [id(p) for p in m.parameters()]

    def interrupted_at(line: int) -> bool:
        left = line

        def trace(frame: Any, event: str, arg: Any) -> Any:
            nonlocal left
            file, name = frame.f_code.co_filename, frame.f_code.co_name
            if "lt_tiled" not in file and not ("overrides" in file and name == "__exit__"):
                return None
            if event == "line":
                left -= 1
                if left == 0:
                    raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            gradients(m, x)
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
            m.zero_grad(set_to_none=True)
        return False

    def steps() -> int:
        for count, line in enumerate(range(1, 100_000, 11)):
            if not interrupted_at(line):
                return count
            assert [id(p) for p in m.parameters()] == weights
            assert worst(gradients(m, x), true) < EXACT
        raise AssertionError("the step has no end")

    # In a thread of its own: Ctrl-C inside of torch's own contexts may leave that thread's hooks of saved tensors on.
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(steps).result() > 20


@pytest.mark.parametrize("container", [list, dict])
def test_gradients_inside_containers(container: type) -> None:
    """A tensor in a list or dictionary that begins to want a gradient is refused at that call."""

    class Takes(GatedMLP):
        def forward(self, x: Tensor, extra: Any) -> Tensor:
            return super().forward(x) * (extra["scale"] if isinstance(extra, dict) else extra[0])

    m, x, scale = tile(Takes(), num_shards=4), randn(1, 40, H), torch.ones(H)
    extra = {"scale": scale} if container is dict else [scale]
    m(x, extra).sum().backward()
    scale.requires_grad_()
    with torch.no_grad():
        m(x, extra)
    with pytest.raises(NotPositionWiseError, match="Takes was given a tensor that requires a gradient inside a list"):
        m(x, extra)


def test_plain_tensor_that_begins_to_learn() -> None:
    """A plain tensor of the module that begins to want a gradient gets it."""
    torch.manual_seed(0)
    m, x = Scaled(), randn(1, 40, H)
    tile(m, num_shards=4)
    m(x).sum().backward()
    m.offset.requires_grad_()
    m(x).sum().backward()
    found, m.offset.grad = m.offset.grad, None
    plain = Scaled()
    plain.load_state_dict(m.state_dict())
    plain.offset.requires_grad_()
    plain(x).sum().backward()
    assert worst({"offset": found}, {"offset": plain.offset.grad}) < EXACT


def test_plain_tensor_that_gets_a_graph() -> None:
    """A plain tensor of the module that begins to have a graph is refused at that call."""
    m, x = tile(Scaled(), num_shards=4), randn(1, 40, H)
    m(x).sum().backward()
    m.offset = torch.ones(H, requires_grad=True) * 2
    with pytest.raises(NotPositionWiseError, match="neither one of its arguments nor"):
        m(x)


def test_user_hook_inside(caplog: pytest.LogCaptureFixture) -> None:
    """A module runs untiled while a user's hook is on a module inside it, with one warning; then tiled again."""
    m, x = GatedMLP(), randn(1, 40, H)
    seen: list[int] = []
    tile(m, num_shards=4)
    caplog.clear()
    handle = m.down.register_forward_hook(lambda module, args, output: seen.append(output.shape[1]))
    for _ in range(2):
        m(x).sum().backward()
    assert seen == [40, 40]
    assert caplog.text.count("GatedMLP runs untiled, because Linear inside it has a hook") == 1
    handle.remove()
    m.register_forward_hook(lambda module, args, output: seen.append(output.shape[1]))
    m(x).sum().backward()
    assert seen == [40, 40, 40]
    patch = get_patch(m, TiledPatch)
    assert patch is not None
    assert patch.learned.largest == (40, 4)


def _jvp(m: nn.Module, x: Tensor) -> Any:
    with torch.no_grad():
        return torch.func.jvp(m, (x,), (x,))


def _dual(m: nn.Module, x: Tensor) -> Any:
    with forward_ad.dual_level():
        return m(forward_ad.make_dual(x, x))


def _dual_weight(m: nn.Module, x: Tensor) -> Any:
    with forward_ad.dual_level():
        given = {name: forward_ad.make_dual(p.detach(), p.detach()) for name, p in m.named_parameters()}
        return torch.func.functional_call(m, given, x)


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "jvp": _jvp,
    "jacfwd": lambda m, x: torch.func.jacfwd(m)(x),
    "dual numbers": _dual,
    "dual weights": _dual_weight,
    "vmap": lambda m, x: torch.func.vmap(m)(torch.stack([x, x])),
    "grad": lambda m, x: torch.func.grad(lambda t: m(t).sum())(x),
    "export": lambda m, x: torch.export.export(m, (x,)),
    "export, not strict": lambda m, x: torch.export.export(m, (x,), strict=False),
    "trace": lambda m, x: torch.jit.trace(m, (x,)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_what_cannot_go_through_tiles(name: str) -> None:
    """Forward-mode differentiation, ``vmap``, ``torch.export`` and ``torch.jit`` raise with the module's name, and work
    when it is untiled.
    """
    m, x = tile(GatedMLP(), num_shards=4), randn(1, 40, H)
    with pytest.raises(RuntimeError, match=r"GatedMLP is tiled, and .* cannot go through its tiles.*untile"):
        TRANSFORMS[name](m, x)
    untile(m)
    TRANSFORMS[name](m, x)


def test_another_thread_may_draw() -> None:
    """Random numbers that another thread draws meanwhile are not taken for the module's."""
    drawn: list[float] = []

    def draw_once(x: Tensor) -> Tensor:
        if not drawn:
            thread = threading.Thread(target=lambda: drawn.append(random.random()))
            thread.start()
            thread.join()
        return nn.functional.silu(x)

    tile(GatedMLP(act=draw_once), num_shards=4)(randn(1, 40, H))
    assert len(drawn) == 1


def _exchange(m: GatedMLP) -> None:
    m.gate.weight, m.up.weight = m.up.weight, m.gate.weight


def _tie(m: GatedMLP) -> None:
    m.gate.weight = m.up.weight


@pytest.mark.parametrize("change", [_exchange, _tie])
def test_weights_that_are_exchanged(change: Callable[[GatedMLP], None]) -> None:
    """Two weights that are exchanged or tied between the passes raise: their gradients could not be told apart."""
    m = tile(GatedMLP(), num_shards=4)
    y = m(randn(1, 40, H))
    change(m)
    with pytest.raises(RuntimeError, match="were exchanged or tied since its forward pass"):
        y.sum().backward()


def test_cached_parametrizations() -> None:
    """A parametrization that torch caches for a while raises: the first tile would fill the cache without a graph."""
    m, x = GatedMLP(), randn(1, 40, H)
    nn.utils.parametrizations.weight_norm(m.up)
    tile(m, num_shards=4)
    m(x).sum().backward()
    with nn.utils.parametrize.cached(), pytest.raises(RuntimeError, match=r"cached.* cannot go through its tiles"):
        m(x)


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


def test_a_scripted_part() -> None:
    """A part that ``torch.jit.script`` compiled gets its gradients."""
    torch.manual_seed(0)
    m, x = GatedMLP(), randn(1, 40, H)
    true = reference(m, x)
    m.up = torch.jit.script(m.up)  # type: ignore[no-untyped-call]
    assert worst(gradients(tile(m, num_shards=4), x), true) < EXACT


def test_a_sparse_gradient() -> None:
    """An embedding with a sparse gradient in a tiled module gets the sum of all tiles, sparse."""

    class Embeds(GatedMLP):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, H, sparse=True)

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            return super().forward(x) + self.table(ids)

    torch.manual_seed(0)
    m, x, ids = Embeds(), randn(1, 40, H), torch.randint(9, (1, 40))
    m(x, ids).square().sum().backward()
    true, m.table.weight.grad = m.table.weight.grad.to_dense(), None
    tile(m, num_shards=4)(x, ids).square().sum().backward()
    assert m.table.weight.grad.is_sparse
    assert worst({"table": m.table.weight.grad.to_dense()}, {"table": true}) < EXACT


def test_nested_tensors() -> None:
    """A jagged nested tensor runs untiled, with its gradients."""
    torch.manual_seed(0)
    m = GatedMLP()

    def run() -> dict[str, Tensor]:
        rows = [randn(n, H, seed=n) for n in (5, 7)]
        x = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
        m(x).values().square().sum().backward()
        found = {name: p.grad for name, p in m.named_parameters()} | {"x": x.grad.values()}
        m.zero_grad()
        return found

    true = run()
    tile(m, num_shards=4)
    assert worst(run(), true) < EXACT


def test_the_mode_of_a_scripted_part() -> None:
    """A scripted part is in the training mode of the forward pass while it is recomputed, and in its own afterwards."""
    torch.manual_seed(0)
    m, x = GatedMLP(), randn(1, 40, H)
    true = reference(m, x)
    m.up = torch.jit.script(m.up)  # type: ignore[no-untyped-call]

    def call(x: Tensor) -> Any:
        y = m(x)
        m.eval()
        return y

    assert worst(gradients(tile(m, num_shards=4), x, call=call), true) < EXACT
    assert not m.up.training
