"""One module of each kind is checked, and every module that differs from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from lt_tiled import NotPositionWiseError, Tiling, prepare
from lt_tiled.tiling import self_check
from lt_tiled.tiling.probe import Probe
from tests.meters import flops
from tests.models import WIDE, GatedMLP, H
from tests.parity import randn

pytestmark = pytest.mark.self_checks
COUNT = 4
"""How many modules a model has; the third one differs from the others."""
TARGETS = [f"mlps.{index}" for index in range(COUNT)]


class Net(nn.Module):
    """Residual modules of one kind; each gets its input in its own dtype."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.mlps = nn.ModuleList(build() for _ in range(COUNT))
        self.before: Callable[[int], object] = lambda index: None
        """Runs before each module."""

    def forward(self, x: Tensor) -> Tensor:
        for index, mlp in enumerate(self.mlps):
            self.before(index)
            x = x + mlp(x.to(next(mlp.parameters()).dtype)).to(x.dtype)
        return x


class Mixing(GatedMLP):
    """Mixes tokens by what its attributes say."""

    strength = 0.0
    mix: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.mix is None else self.mix(x)
        gate = getattr(self, "gate_of_mean", 0.0)
        return super().forward(x + (self.strength + gate) * x.mean(1, keepdim=True))


class Reads(GatedMLP):
    """Reads an object that all of them share."""

    shared = SimpleNamespace(scale=1.0, scales=[1.0])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.shared.scale)


class Subclass(Mixing):
    """Is the same under another name."""


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The name of each module that is checked."""
    found: list[str] = []

    class Noted(Probe):
        def __init__(self, call: Any, *args: Any) -> None:
            found.append(call.patch.name)
            super().__init__(call, *args)

    monkeypatch.setattr(self_check, "Probe", Noted)
    return found


def checked(net: Net, names: list[str]) -> list[int]:
    """The numbers of the modules of which a step checks any."""
    with prepare(net, tiling=Tiling(num_shards=2, targets=TARGETS)):
        net(randn(2, 40, H).requires_grad_()).sum().backward()
    return [int(name.partition(" ")[0].rpartition(".")[2]) for name in names]


def _closure(scale: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * scale


def _set(name: str, value: Any) -> Callable[[nn.Module], object]:
    return lambda module: setattr(module, name, value)


def _in_place(module: nn.Module) -> nn.Linear:
    assert isinstance(module, GatedMLP)
    return module.up


def _adapt(module: nn.Module) -> None:
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["gate", "up"]), module)


DIFFERENCES: dict[str, Callable[[nn.Module], object]] = {
    "hook": lambda m: m.register_forward_hook(lambda module, args, output: output * 1),
    "number": _set("scale", 2.0),
    "number in a list": _set("scales", [1.0, 2.0]),
    "object": _set("options", SimpleNamespace(scale=2.0)),
    "what cannot be compared": _set("options", object()),
    "dtype": lambda m: m.double(),
    "training mode": lambda m: m.eval(),
    "frozen weight": lambda m: _in_place(m).weight.requires_grad_(False),
    "weight that is zero": lambda m: nn.init.zeros_(_in_place(m).weight),
    "tied weight": lambda m: setattr(m, "gate", _in_place(m)),
    "width": lambda m: m.__init__(H, 2 * WIDE),  # type: ignore[misc]
    "bias": lambda m: m.__init__(bias=True),  # type: ignore[misc]
    "value of a buffer": lambda m: m.register_buffer("scale", torch.tensor([2.0])),
    "large buffer": lambda m: m.register_buffer("table", torch.ones(1000)),
    "function in a closure": _set("act", _closure(2.0)),
    "forward of the instance": lambda m: setattr(m, "forward", lambda x: type(m).forward(m, x)),
    "forward of a part": lambda m: setattr(_in_place(m), "forward", lambda x: x @ _in_place(m).weight.T),
    "parametrization": lambda m: nn.utils.parametrizations.weight_norm(_in_place(m)),
    "hook of a weight": lambda m: _in_place(m).weight.register_hook(lambda gradient: gradient),
    "adapter": _adapt,
    "class": _set("__class__", Subclass),
}


def _build() -> nn.Module:
    """A module with an entry of each kind that the third one has otherwise."""
    module = Mixing(act=_closure(1.0))
    module.scale, module.scales, module.options = 1.0, [1.0, 1.0], SimpleNamespace(scale=1.0)  # type: ignore[assignment]
    return module


@pytest.mark.parametrize("differ", DIFFERENCES.values(), ids=DIFFERENCES)
def test_what_differs_is_checked(differ: Callable[[nn.Module], object], names: list[str]) -> None:
    """Of modules that are alike the first one is checked, and one that differs in one thing is checked by itself."""
    net = Net(_build)
    if differ is DIFFERENCES["value of a buffer"]:
        for mlp in net.mlps:
            del mlp.scale
            mlp.register_buffer("scale", torch.tensor([1.0]))
        del net.mlps[2].scale
    differ(net.mlps[2])
    assert checked(net, names) == [0, 2]


def test_a_gate_of_another_value_is_checked(names: list[str]) -> None:
    """A trained number, on which code may branch, is compared by value."""
    net = Net(_build)
    for index, mlp in enumerate(net.mlps):
        mlp.threshold = nn.Parameter(torch.tensor(1.0 + (index == 2)))
    assert checked(net, names) == [0, 2]


SWITCHES: dict[str, Callable[[bool], object]] = {
    "attribute of a shared object": lambda on: setattr(Reads.shared, "scale", 1.0 + on),
    "list in a shared object": lambda on: Reads.shared.scales.__setitem__(0, 1.0 + on),
    "attribute of the class": lambda on: setattr(Reads, "number", 1.0 + on),
}


@pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES)
def test_what_was_switched_between_two_modules_is_checked(switch: Callable[[bool], object], names: list[str]) -> None:
    """A module is checked by itself if what all of them read had another value when the others ran."""
    net = Net(Reads)
    net.before = lambda index: switch(index == 2)
    assert checked(net, names) == [0, 2]


class Number(float):
    """A number of a class of its own."""


class Slots:
    """Has a slot."""

    __slots__ = ("strength",)


class Slotted(Slots):
    """Has a slot and attributes."""

    def __init__(self, strength: float) -> None:
        self.strength = strength


HOLDERS: dict[str, tuple[Callable[[float], Any], Callable[[Any], float]]] = {
    "number of a class of its own": (Number, float),
    "slot": (Slotted, lambda held: held.strength),
    "default of a dictionary": (lambda value: defaultdict(lambda: value), lambda held: held[0]),
}


class Holding(Mixing):
    """Mixes tokens by what it reads from an object."""

    read: Callable[[Any], float]

    def forward(self, x: Tensor) -> Tensor:
        return GatedMLP.forward(self, x + self.read(self.held) * x.mean(1, keepdim=True))


@pytest.mark.parametrize("kind", HOLDERS)
def test_values_that_are_no_attributes(kind: str) -> None:
    """A module that mixes tokens is refused if what tells it from others of its class is no attribute of an object."""
    make, read = HOLDERS[kind]
    net = Net(Holding)
    for index, mlp in enumerate(net.mlps):
        mlp.held, mlp.read = make(float(index == 2)), read  # type: ignore[assignment]
    with (
        prepare(net, tiling=Tiling(num_shards=2, targets=TARGETS)),
        pytest.raises(NotPositionWiseError, match=r"mlps\.2 \(Holding\) is not position-wise"),
    ):
        net(randn(2, 40, H).requires_grad_())


WRONG: dict[str, Callable[[nn.Module], object]] = {
    "number": _set("strength", 1.0),
    "closure": lambda m: setattr(m, "mix", _mix(1.0)),
    "buffer": lambda m: m.gate_of_mean.fill_(1.0),  # type: ignore[operator]
    "frozen gate": lambda m: setattr(m, "gate_of_mean", nn.Parameter(torch.ones(()), requires_grad=False)),
    "forward": lambda m: setattr(m, "forward", lambda x: x + x.roll(1, 1)),
}


def _mix(strength: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x + strength * x.mean(1, keepdim=True)


@pytest.mark.parametrize("kind", WRONG)
def test_the_wrong_one_among_right_ones_is_refused(kind: str) -> None:
    """A module that mixes tokens is refused with its own name after one of its class passed; so is the next like it."""
    net = Net(Mixing)
    for mlp in net.mlps:
        mlp.mix = _mix(0.0)  # type: ignore[assignment]
        if kind == "frozen gate":
            mlp.gate_of_mean = nn.Parameter(torch.zeros(()), requires_grad=False)
        elif kind == "buffer":
            mlp.register_buffer("gate_of_mean", torch.zeros(()))
    for wrong in (2, 3):
        WRONG[kind](net.mlps[wrong])
    x = randn(2, 40, H).requires_grad_()
    with prepare(net, tiling=Tiling(num_shards=2, targets=TARGETS)):
        for index, mlp in enumerate(net.mlps):
            if index < 2:
                mlp(x)
                continue
            with pytest.raises(NotPositionWiseError, match=rf"mlps\.{index} \(Mixing\) is not position-wise"):
                mlp(x)


def llama(layers: int, heads: int) -> LlamaForCausalLM:
    """A Llama with so many heads of keys and values, and four of queries."""
    sizes: Any = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 32, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers, num_key_value_heads=heads))


def step(net: nn.Module) -> None:
    ids = torch.arange(80)[None] % 32
    net(input_ids=ids, labels=ids, use_cache=False).loss.backward()


@pytest.mark.parametrize(("heads", "count"), [(4, 3), (2, 4)])
def test_checks_of_a_llama(heads: int, count: int, names: list[str]) -> None:
    """Of a Llama of any depth a norm, a norm with its MLP, and a norm with a projection of each shape are checked."""
    net = llama(4, heads)
    with prepare(net, tiling=Tiling(num_shards=2), activation_checkpointing=True):
        step(net)
    assert len(names) == count


def test_checks_of_adapters(names: list[str]) -> None:
    """With LoRA, whose layers hold their own names, so are those, and the first norm, whose input has no gradient."""
    net = llama(4, heads=4)
    inject_adapter_in_model(LoraConfig(r=2, target_modules="all-linear"), net.model)
    with prepare(net, tiling=Tiling(num_shards=2), activation_checkpointing=True):
        step(net)
    assert len(names) == 4


def test_flops_of_the_checks_do_not_grow_with_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step has the FLOPs of later steps, and of three self-checks however many layers there are."""
    monkeypatch.setattr(self_check, "hidden_from_modes", lambda tensor: nullcontext())
    found = []
    for layers in (1, 5):
        net = llama(layers, 4)
        with prepare(net, tiling=Tiling(num_shards=2), activation_checkpointing=True):
            found.append(flops(partial(step, net)) - flops(partial(step, net)))
    assert found[0] == found[1] > 0
