"""Modules that a block runs one behind another, tiled as one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lt_tiled import Checkpointing, Tiling, prepare
from tests.architectures import ARCHITECTURES
from tests.meters import flops, peak_bytes
from tests.models import WIDE, GatedMLP, H
from tests.parity import gradients, randn, reference, worst

TILES = Tiling(num_shards=4)
ERROR = 1e-10
"""In float64."""


class Inline(nn.Module):
    """A block that runs the two halves of its feed-forward part itself."""

    def __init__(self, after: Callable[[nn.Module, Tensor, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.attention = nn.Linear(H, H)
        self.fc1 = nn.Linear(H, WIDE)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(WIDE, H)
        self.norm = nn.LayerNorm(H)
        self.dropout = 0.0
        self.after = after

    def forward(self, x: Tensor) -> Any:
        x = x + self.attention(x)
        y = self.fc2(F.dropout(self.act(self.fc1(x)), p=self.dropout, training=self.training))
        return x + y if self.after is None else self.after(self, x, y)


class Sandwich(nn.Module):
    """A block with a norm behind its MLP."""

    def __init__(self, after: Callable[[nn.Module, Tensor, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.attention = nn.Linear(H, H)
        self.mlp = GatedMLP()
        self.post_mlp_norm = nn.RMSNorm(H)
        self.after = after

    def forward(self, x: Tensor) -> Any:
        x = x + self.attention(x)
        y = self.mlp(x)
        return x + self.post_mlp_norm(y) if self.after is None else self.after(self, x, y)


class Function(torch.autograd.Function):
    """One that takes what it is given past Python's operators."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def model(block: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(block, copy.deepcopy(block)).double()


def tokens(length: int = 24, batch: int = 1) -> Tensor:
    return randn(batch, length, H, dtype=torch.float64)


def agrees(net: nn.Module, x: Tensor, rows: int = 2, **kwargs: Any) -> bool:
    true = reference(net, x)
    with prepare(net, tiling=TILES, **kwargs) as prepared:
        assert [row.tiles for row in prepared.report().tiled] == [0] * rows
        found = gradients(net, x)
        assert all(row.tiles == 4 for row in prepared.report().tiled)
    return worst(found, true) <= ERROR


def step(net: nn.Module, x: Tensor) -> None:
    y = net(x)
    torch.autograd.backward(y, torch.ones_like(y))


USES: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "residual of something else": lambda block, x, y: x.detach() + y,
    "used twice": lambda block, x, y: y * y.sigmoid() + x,
    "given back as it is": lambda block, x, y: y,
    "changed in place": lambda block, x, y: y.add_(1.0),
    "added to in place": lambda block, x, y: x.clone().add_(y),
    "read without a gradient": lambda block, x, y: x + y * (1 + 0 * float(y.detach().abs().max())),
    "reshaped": lambda block, x, y: (x.view(-1, H) + y.reshape(-1, H)).view(x.shape),
    "across tokens": lambda block, x, y: x + y.mean(1, keepdim=True),
    "indexed": lambda block, x, y: x + torch.cat([y[:, :3], y[:, 3:]], 1),
    "under another autocast": lambda block, x, y: x + torch.autocast("cpu", enabled=False)(F.gelu)(y),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("kind", [Inline, Sandwich])
def test_whatever_the_block_does_with_the_output(kind: type[Inline | Sandwich], use: Callable[..., Any]) -> None:
    """Whatever code touches a chain's output gets its value: loss and gradients are the untiled ones, checkpointed or
    not.
    """
    for options in ({}, {"checkpointing": Checkpointing()}):
        assert agrees(model(kind(use)), tokens(batch=2), **options)


NORMS: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "norm": lambda block, x, y: block.norm(y),
    "residual, norm": lambda block, x, y: block.norm(x + y),
    "dropout, residual, norm": lambda block, x, y: block.norm(F.dropout(y, 0.0) + x),
    "norm of twice the output": lambda block, x, y: block.norm(y + y),
    "norm and the output itself": lambda block, x, y: block.norm(y) + y,
    "norm of something else": lambda block, x, y: block.norm(x) + y,
    "norm twice": lambda block, x, y: block.norm(block.norm(y)),
}


@pytest.mark.parametrize("use", NORMS.values(), ids=NORMS)
def test_norms_behind(use: Callable[..., Any]) -> None:
    """With a norm behind the feed-forward part in any place, loss and gradients are the untiled ones."""
    for options in ({}, {"checkpointing": Checkpointing()}):
        assert agrees(model(Inline(use)), tokens(batch=2), **options)


@pytest.mark.parametrize("use", [use for name, use in NORMS.items() if "residual" in name or name == "norm"])
def test_post_norm_costs_nothing_more(use: Callable[..., Any]) -> None:
    """FLOPs of a checkpointed block whose last norm stands behind the feed-forward part are 1.00 times the untiled
    ones.
    """
    net, x = model(Inline(use)), tokens(64)
    costs = []
    for tiling in (None, Tiling(num_shards=4, self_check=False)):
        with prepare(net, tiling=tiling, checkpointing=Checkpointing(targets=["0", "1"])):
            costs.append(flops(lambda: step(net, x)))
    assert costs[1] == costs[0]


@pytest.mark.parametrize(
    "name", ["Llama", "Gemma 2", "Gemma 3", "OLMo 2", "GLM-4", "EXAONE 4", "BERT", "BART", "OPT", "Whisper", "Mixtral"]
)
def test_architectures_cost_nothing_more(name: str) -> None:
    """FLOPs of a checkpointed model, pre-norm, sandwich-norm or post-norm, are 1.00 times the untiled ones from the
    first step on.
    """
    architecture = ARCHITECTURES[name]
    net = architecture.build(torch.float32)

    def run() -> None:
        net(**architecture.feed(net)).loss.backward()

    with prepare(net, checkpointing=Checkpointing()):
        untiled = flops(run)
    with prepare(net, checkpointing=Checkpointing(), tiling=Tiling(num_shards=4, self_check=False)):
        assert [flops(run) for _ in range(2)] == [untiled] * 2


def test_memory_of_an_inline_chain() -> None:
    """The wide tensors between the two halves are those of one tile."""
    net, x = model(Inline()), tokens(512)
    peaks = []
    for shards in (4, 16):
        with prepare(net, tiling=Tiling(num_shards=shards, self_check=False)):
            step(net, x)
            peaks.append(peak_bytes(lambda: step(net, x)))
    wide = 8 * WIDE * 512
    assert peaks[0] - peaks[1] >= 2 * wide * (1 / 4 - 1 / 16)


def test_randomness_in_a_chain_is_replayed() -> None:
    """Dropout between and behind the halves draws the same masks in the recompute: gradients are those of the same
    tiles, run plainly.
    """
    net, x = model(Inline(lambda block, x, y: x + F.dropout(y, 0.3))), tokens()
    block: Any = net[0]
    block.dropout = 0.4

    def plainly(x: Tensor) -> Tensor:
        x = x + block.attention(x)
        parts = [F.dropout(block.fc2(F.dropout(block.act(block.fc1(tile)), 0.4)), 0.3) for tile in x.chunk(4, 1)]
        return x + torch.cat(parts, 1)

    torch.manual_seed(1)
    true = gradients(net, x, call=plainly)
    with prepare(net, tiling=Tiling(num_shards=4, self_check=False)):
        torch.manual_seed(1)
        assert worst(gradients(net, x, call=block), true) <= ERROR


def test_a_custom_function_on_the_output_is_refused() -> None:
    """A custom autograd Function that takes a chain's output directly gets no silent gradient: the backward says what
    to do.
    """
    net = model(Sandwich(lambda block, x, y: x + Function.apply(y)))
    with prepare(net, tiling=TILES), pytest.raises(RuntimeError, match=r"mlp.*custom autograd Function.*targets"):
        step(net, tokens())


def test_input_changed_before_the_output_is_used() -> None:
    """A block that changes the chain's input in place before it uses the output gets an error, not the output of
    another input.
    """

    def after(block: Any, x: Tensor, y: Tensor) -> Tensor:
        x.add_(1.0)
        return x + y

    net = model(Inline(after))
    with (
        prepare(net, tiling=TILES),
        pytest.raises(RuntimeError, match=r"fc1.*changed in place before its output was used"),
    ):
        step(net, tokens())


def test_hooks_on_the_first_module_see_its_value() -> None:
    """A forward hook on the MLP of a sandwich block sees the MLP's own output."""
    net, x, seen = model(Sandwich()), tokens(), []
    net[0].mlp.register_forward_hook(lambda module, args, output: seen.append(output.detach().clone()))
    net(x)
    with prepare(net, tiling=TILES):
        net(x)
    assert torch.allclose(seen[0], seen[1], atol=1e-6)


def test_nothing_pending_leaves_the_block() -> None:
    """What a block gives back holds plain tensors, inside tuples too."""
    net, seen = model(Inline(lambda block, x, y: (x, [y]))), []
    net[0].register_forward_hook(lambda module, args, output: seen.append(output[1][0]))
    with prepare(net, tiling=TILES):
        net[0](tokens())
    assert type(seen[0]) is Tensor


@pytest.mark.parametrize("kind", [Inline, Sandwich])
def test_copies_pickles_and_release(kind: type[nn.Module]) -> None:
    """A deep copy of a chained model uses its own weights, a pickled one comes back plain, and release leaves nothing
    behind.
    """
    net, x = model(kind()), tokens()
    before = [set(vars(m)) for m in net.modules()]
    with prepare(net, tiling=TILES, checkpointing=Checkpointing()):
        clone = copy.deepcopy(net)
        with torch.no_grad():
            for p in net.parameters():
                p.zero_()
        true = reference(clone, x)
        assert worst(gradients(clone, x), true) <= ERROR
        plain = pickle.loads(pickle.dumps(clone))
        assert worst(gradients(plain, x), true) <= ERROR
    assert [set(vars(m)) for m in net.modules()] == before


def test_compiled_as_a_whole() -> None:
    """``torch.compile`` of a model with chains works, and gives the untiled gradients."""
    for kind in (Inline, Sandwich):
        net, x = model(kind()), tokens()
        true = reference(net, x)
        with prepare(net, tiling=TILES):
            compiled = torch.compile(net, backend="aot_eager")
            assert worst(gradients(net, x, call=compiled), true) <= ERROR


def test_broken_chain_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Where the block's code stands between the halves with more than entrywise functions, the result is right and a
    line says so.
    """

    class Between(Inline):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.fc2(self.fc1(x).flip(1))

    net, x = model(Between()), tokens()
    true = reference(net, x)
    with caplog.at_level("INFO", "lt_tiled"), prepare(net, tiling=TILES):
        assert worst(gradients(net, x), true) <= ERROR
    assert "without what follows it" in caplog.text


def test_users_own_checkpoint_around_the_block() -> None:
    """A user's ``torch.utils.checkpoint`` around a block with a chain recomputes the same graph."""
    for kind in (Inline, Sandwich):
        net, x = model(kind()), tokens()
        true = reference(net, x)
        with prepare(net, tiling=TILES):
            call = lambda x: checkpoint(net[1], checkpoint(net[0], x, use_reentrant=False), use_reentrant=False)  # noqa: B023,E731
            assert worst(gradients(net, x, call=call), true) <= ERROR


def test_a_reentrant_checkpoint_inside_the_block_is_refused() -> None:
    """Torch's reentrant checkpoint around a chain, which would lose its gradients, is refused with what to do
    instead.
    """

    class Inside(Inline):
        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attention(x)
            return x + checkpoint(lambda h: self.fc2(self.act(self.fc1(h))), x, use_reentrant=True)

    net = model(Inside())
    with prepare(net, tiling=TILES), pytest.raises(RuntimeError, match=r"reentrant checkpoint is one.*targets"):
        step(net, tokens())


CHANGED = [
    ("input", "training"),
    ("input", "no_grad"),
    ("input", "inference"),
    ("residual", "training"),
    ("residual", "no_grad"),
]


@pytest.mark.parametrize(("which", "mode"), CHANGED)
def test_what_the_chain_uses_is_changed_in_place(which: str, mode: str) -> None:
    """Neither the chain's input nor an argument that a later module takes may change before the output is used."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.intermediate, self.output = nn.Linear(H, H), nn.Linear(H, WIDE), Output()

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attention(x)
            residual = x * 2
            y = self.output(self.intermediate(x), residual)
            (x if which == "input" else residual).zero_()
            return y * 1.0

    net = model(Two())
    grad = {"training": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]
    with (
        prepare(net, tiling=TILES),
        grad(),
        pytest.raises(RuntimeError, match="changed in place before its output was used"),
    ):
        net(tokens().detach())


class Output(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDE, H)

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        return self.dense(F.gelu(y)) + x


@pytest.mark.parametrize("kind", ["forward", "full backward", "backward pre"])
@pytest.mark.parametrize("name", ["fc1", "fc2", "act", "norm"])
def test_hooks_on_what_a_chain_consists_of(name: str, kind: str) -> None:
    """Hooks of users on any module of a chain see values and gradients as untiled, and the gradients are the untiled
    ones.
    """
    net, x = model(Inline(lambda block, x, y: block.norm(x + y))), tokens()
    seen: list[Any] = []
    module = net[0].get_submodule(name)
    if kind == "forward":
        module.register_forward_hook(lambda m, args, out: seen.append(out))
    if kind == "full backward":
        module.register_full_backward_hook(lambda m, into, out: seen.append(into[0].clone()))
    if kind == "backward pre":
        module.register_full_backward_pre_hook(lambda m, out: seen.append(out[0].clone()))
    true = gradients(net, x)
    with prepare(net, tiling=TILES):
        assert worst(gradients(net, x), true) <= ERROR
    with torch.no_grad():
        net[0].fc1.weight.zero_()
    assert len(seen) == 2
    assert torch.allclose(seen[0], seen[1], rtol=1e-10, atol=1e-12)


def test_chains_behind_one_another() -> None:
    """A module that runs twice in a block, and a module that takes two pending values, give the untiled gradients."""

    class Twice(Inline):
        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attention(x)
            return x + self.fc2(self.act(self.fc1(self.fc2(self.act(self.fc1(x))))))

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.mlp, self.mlp2 = nn.Linear(H, H), GatedMLP(), GatedMLP()
            self.post_mlp_norm = SumNorm(H)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attention(x)
            return x + self.post_mlp_norm(self.mlp(x), self.mlp2(x))

    assert agrees(model(Twice()), tokens())
    assert agrees(model(Both()), tokens(), rows=4)


class SumNorm(nn.LayerNorm):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x) + y


def test_a_convolution_between_the_halves() -> None:
    """Two halves with a convolution between them, as in Segformer, are no chain."""

    class Mix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.fc1 = nn.Linear(H, H), nn.Linear(H, WIDE)
            self.depthwise, self.fc2 = nn.Conv1d(WIDE, WIDE, 3, padding=1, groups=WIDE), nn.Linear(WIDE, H)

    with pytest.raises(ValueError, match="found no feed-forward module"):
        prepare(model(Mix()), tiling=TILES)
