"""What is not position-wise is refused by name, before it is tiled."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lt_tiled import NotPositionWiseError, Tiling, prepare, tile, untile
from lt_tiled.modules.patch import get_patch
from lt_tiled.recompute.mode import RandomState
from lt_tiled.tiling import check as module_of_the_check
from lt_tiled.tiling.patch import TiledPatch
from tests.models import GatedMLP, H, PlainMLP, RoutedMLP
from tests.parity import less_accurate, randn
from tests.property.grammar import Case, Composed, differences, refused, run
from tests.property.parts import MODULES, OTHERS, POSITION_WISE
from tests.property.parts import H as PARTS

pytestmark = pytest.mark.self_checks


class Mean(GatedMLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(1, keepdim=True))


class Positions(GatedMLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.arange(x.shape[1], dtype=x.dtype, device=x.device)[:, None]


class PerCallLoss(GatedMLP):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y, y.square().mean()


def test_token_mixing_is_refused(device: str) -> None:
    """A module whose tokens see each other is refused by name at its first call, with the remedy, on each device."""
    module = tile(Mean().to(device), num_shards=4)
    with pytest.raises(NotPositionWiseError, match=r"Mean is not position-wise.*Remove it from targets"):
        module(randn(1, 40, H, device=device))


REASONS = {  # of those parts that are not refused because their outputs differ
    "shared noise|noise of rows|locked dropout": "draws one random mask for several tokens",
    "mixed in the backward pass|mixed by a hook": "is not position-wise: its gradient of argument 0",
    "counts and uses": r"changes Part\.calls in its forward.*Return it",
    "writes into its input": "changes its input in place.*out of place",
    "counts in a buffer|sets a buffer|running mean": r"changes Part\._buffers\['stat'\] in its forward",
    "spectral norm": r"changes \w+\._buffers\['_u'\] in its forward",
    "writes into a weight": r"changes Linear\._parameters\['weight'\] in its forward",
}


REFUSED_MODULES = ["nn.LSTM", "nn.TransformerEncoderLayer", "nn.Softmax", "spectral norm"]


@pytest.mark.parametrize("part", [*(name for name in OTHERS if name != "mean behind a zero"), *REFUSED_MODULES])
def test_each_other_part_is_refused(part: str) -> None:
    """Each part of the generated tests that mixes tokens, shares random numbers or changes something is refused by
    itself, with the reason and a remedy; its input and its buffers are as they were.
    """
    torch.manual_seed(0)
    module, x = tile(Composed((part,), "tensor").double(), num_shards=4), randn(4, 10, PARTS, dtype=torch.float64)
    before = [t.clone() for t in (x, *module.buffers())]
    reason = next((text for names, text in REASONS.items() if part in names.split("|")), "is not position-wise: its")
    with pytest.raises(NotPositionWiseError, match=rf"Composed:? .*{reason}") as error:
        module(x.detach() if part == "writes into its input" else x * 1)
    assert refused(error.value)
    assert all(torch.equal(a, b) for a, b in zip((x, *module.buffers()), before, strict=True))


@pytest.mark.parametrize("part", [*POSITION_WISE, *MODULES])
def test_each_position_wise_part_passes(part: str) -> None:
    """Each part of the generated tests that works token by token has its untiled outputs and gradients by itself."""
    case = Case(parts=(part,), lead=(4, 10))
    assert differences(case, run(case, tiled=True), run(case, tiled=False)) == []


@pytest.mark.parametrize("self_check", [True, False])
def test_per_call_scalar_is_refused(self_check: bool) -> None:
    """A scalar output per call is refused with its name, its shape and the remedy, with the self-check and without."""
    module = tile(PerCallLoss(), num_shards=4, self_check=self_check)
    with pytest.raises(ValueError, match=r"PerCallLoss: output 1 \(of shape \[\]\) is not per token"):
        module(randn(1, 40, H))


class Phases(nn.Module):
    """Returns a conjugate that torch has not computed yet, and mixes tokens in the imaginary part alone if asked to."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.mixes = mixes

    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(x, x - self.mixes * x.mean(-2, keepdim=True)).conj()


def test_imaginary_parts_are_compared() -> None:
    """A module whose complex output mixes tokens in the imaginary part alone is refused, and else it is tiled."""
    x = randn(1, 40, H)
    assert torch.equal(tile(Phases(False), num_shards=4)(x), Phases(False)(x))
    with pytest.raises(NotPositionWiseError, match="Phases is not position-wise"):
        tile(Phases(True), num_shards=4)(x)


def test_batch_norm() -> None:
    """Batch statistics depend on all tokens in training: refused in the first call."""
    module = tile(nn.Sequential(nn.Linear(H, H), nn.BatchNorm1d(H)), num_shards=4)
    with pytest.raises(NotPositionWiseError, match=r"Sequential"):
        module(randn(40, H))


@pytest.mark.low_precision
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("module", [GatedMLP(), PlainMLP(dropout=0.5), RoutedMLP(), nn.RMSNorm(H)])
def test_token_wise_modules_pass(
    module: nn.Module, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Position-wise modules pass in every dtype, also with dropout or experts, and only the first call is checked."""
    calls, forward = [], type(module).forward
    monkeypatch.setattr(type(module), "forward", lambda self, x: calls.append(x.numel() // H) or forward(self, x))
    module = copy.deepcopy(module).to(device, dtype).train()
    tile(module, num_shards=4)
    module(randn(1, 64, H, dtype=dtype, device=device))
    assert calls[0] == 32  # the check runs first
    assert calls[-4:] == [16] * 4
    assert len(calls) >= 7
    calls.clear()
    module(randn(1, 64, H, dtype=dtype, device=device))
    assert calls == [16] * 4


def test_the_check_leaves_no_trace(device: str) -> None:
    """The check leaves the random numbers to the call, and each submodule in its own mode."""
    x, states, outputs = randn(1, 40, H, device=device), [], []
    torch.manual_seed(0)
    module = PlainMLP(dropout=0.5).to(device)
    module.act.eval()
    modes = [m.training for m in module.modules()]
    for self_check in (False, True):
        tile(module, num_shards=4, self_check=self_check)
        torch.manual_seed(1)
        before = RandomState.now(x.device)
        outputs.append(module(x))
        states.append(RandomState.now(x.device))
        assert [m.training for m in module.modules()] == modes
        untile(module)
    assert not states[0].same_as(before)  # dropout has drawn
    assert states[0].same_as(states[1])
    assert torch.equal(*outputs)


def test_self_check_off() -> None:
    """With ``self_check=False`` a module that is not position-wise runs in tiles: each one starts at position 0."""
    module, x = Positions(), randn(1, 40, H)
    tiles = [module(x[:, start : start + 10]) for start in range(0, 40, 10)]
    y = tile(module, num_shards=4, self_check=False)(x)
    torch.testing.assert_close(y, torch.cat(tiles, 1))


def test_changes_inside_an_argument_are_refused() -> None:
    """A module that adds to a list of the caller's, which would grow with each tile, is refused, and the list is as it
    was.
    """

    class Notes(GatedMLP):
        def forward(self, x: Tensor, notes: dict[str, Any]) -> Tensor:  # type: ignore[override]
            notes["a"].append(1)
            return super().forward(x)

    notes: dict[str, Any] = {"a": []}
    with pytest.raises(NotPositionWiseError, match="Notes changes its argument"):
        tile(Notes(), num_shards=4)(randn(1, 40, H), notes)
    assert notes["a"] == []


def test_zero_output_is_checked_again() -> None:
    """Without gradients a projection that starts at zero tells nothing: the check waits until it does."""
    module = Mean()
    with torch.no_grad():
        module.down.weight.zero_()
        tile(module, num_shards=4)
        module(randn(1, 40, H))
        module.down.weight.normal_()
        with pytest.raises(ValueError, match="Mean is not position-wise"):
            module(randn(1, 40, H))


class Then(nn.Module):
    """An MLP, and a function of its output and of one weight."""

    def __init__(self, then: Callable[[Tensor, Tensor], Tensor], gate: float = 1.0) -> None:
        super().__init__()
        self.mlp, self.then = GatedMLP(), then
        self.gate = nn.Parameter(torch.full((H,), gate))

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.mlp(x), self.gate)


MIXING: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "height of an image": (lambda: Then(lambda y, gate: y - y.mean(1, keepdim=True)), (2, 5, 4)),
    "width of an image": (lambda: Then(lambda y, gate: y - y.mean(2, keepdim=True)), (2, 5, 4)),
    "response norm with a zero gate": (
        lambda: Then(lambda y, gate: y + gate * y * y.norm(dim=1, keepdim=True), gate=0.0),
        (2, 20),
    ),
}


@pytest.mark.parametrize(("build", "lead"), MIXING.values(), ids=MIXING)
def test_mixing_in_every_direction_is_refused(build: Callable[[], nn.Module], lead: tuple[int, ...]) -> None:
    """What mixes along any dimension, behind a gate that starts at zero, or in the backward pass alone, is refused."""
    torch.manual_seed(0)
    module = tile(build(), num_shards=4)
    with pytest.raises(NotPositionWiseError, match="is not position-wise"):
        module(randn(*lead, H))


def test_an_equal_output_of_another_shape_is_refused() -> None:
    """A module whose output has the dimensions in another order is refused, though all of its values are equal."""
    module = tile(Then(lambda y, gate: (torch.zeros_like(y) + gate).transpose(0, 1)), num_shards=2)
    with pytest.raises(NotPositionWiseError, match="its output 0 has another shape"):
        module(randn(1, 2, 2, H))


class Keeps(GatedMLP):
    """Changes something of its own in each call; ``how`` says what."""

    def __init__(self, how: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.how, self.calls, self.stats = how, 0, {}

    def forward(self, x: Tensor) -> Tensor:
        self.how(self, x)
        return super().forward(x)


@pytest.mark.parametrize("dropout", [nn.Dropout(), nn.AlphaDropout(), lambda y: y * torch.rand_like(y).gt(0.3)])
def test_mixing_in_training_alone_is_refused(dropout: Callable[[Tensor], Tensor]) -> None:
    """Beside dropout, what mixes tokens in training only is seen; and dropout with noise in evaluation too passes."""

    class Mixes(GatedMLP):
        mixes = True

        def forward(self, x: Tensor) -> Tensor:
            y = dropout(super().forward(x))
            return y - y.mean(1, keepdim=True) if self.training and self.mixes else y

    with pytest.raises(NotPositionWiseError, match="Mixes is not position-wise"):
        tile(Mixes(), num_shards=4)(randn(1, 40, H))
    Mixes.mixes = False
    module = tile(Mixes(), num_shards=4)
    for mode in (True, False):
        module.train(mode)(randn(1, 40, H))


def test_memory_that_ends_in_the_check_is_no_refusal() -> None:
    """Out of memory in the self-check stays that error, which ``SequenceLengthFinder`` waits for."""

    class Ends(GatedMLP):
        def forward(self, x: Tensor) -> Tensor:
            raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        tile(Ends(), num_shards=4)(randn(1, 40, H))


@pytest.mark.parametrize("asks", [lambda x: torch.is_grad_enabled(), lambda x: x.requires_grad])
def test_a_branch_on_the_gradient_mode_is_refused(asks: Callable[[Tensor], bool]) -> None:
    """A module that computes something else with a graph is refused: tiles run without one first."""

    class Branches(GatedMLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (2.0 if asks(x) else 1.0)

    with pytest.raises(NotPositionWiseError, match="Branches is not position-wise: its output"):
        tile(Branches(), num_shards=4)(randn(1, 40, H).requires_grad_())


SAMPLES: dict[str, Callable[[Tensor], Tensor]] = {
    "multinomial": lambda p: torch.multinomial(p.flatten(0, -2), 1).view(*p.shape[:-1], 1),
    "randint": lambda p: torch.randint(2, 9, (*p.shape[:-1], 1)),
}


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
def test_samples_of_each_token_pass(sample: Callable[[Tensor], Tensor]) -> None:
    """A router that samples for each token is tiled, and so is a module that takes probabilities."""

    class Samples(GatedMLP):
        def forward(self, x: Tensor, probability: Tensor) -> Tensor:
            assert bool((probability <= 1).all())
            y = super().forward(x)
            return y * (1 + sample(y.softmax(-1))) * torch.bernoulli(probability)

    module = tile(Samples(), num_shards=4)
    module(randn(1, 40, H), torch.rand(1, 40, 1)).sum().backward()
    patch = get_patch(module, TiledPatch)
    assert patch is not None
    assert patch.checked


@pytest.mark.parametrize("shape", [(3, 1, 1), (1, 20, H)])
def test_arguments_that_broadcast_over_tokens_are_refused(shape: tuple[int, ...]) -> None:
    """Arguments that broadcast along a part of the leading dimensions are refused with the remedy."""

    class Scaled(GatedMLP):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return super().forward(x) * scale

    with pytest.raises(
        NotPositionWiseError, match=r"Scaled(: output 0 .* is not per token| fails when .* must be expanded)"
    ):
        tile(Scaled(), num_shards=4)(randn(3, 20, H), torch.ones(shape))


def _own_generator() -> Callable[[Tensor], Tensor]:
    generator = torch.Generator()
    return lambda y: y * torch.rand(y.shape, generator=generator)


RANDOM: dict[str, tuple[Callable[[], Callable[[Tensor], Tensor]], str]] = {
    "mask of rows": (lambda: lambda y: y * torch.rand(y.shape[0], 1, H).gt(0.5), "one random mask"),
    "locked dropout behind another": (
        lambda: lambda y: nn.functional.dropout(y) * torch.rand(1, 1, H).gt(0.5),
        "one random mask",
    ),
    "an own generator": (_own_generator, "its output"),
}


@pytest.mark.parametrize(("build", "reason"), RANDOM.values(), ids=RANDOM)
def test_random_numbers_that_are_not_per_token_are_refused(
    build: Callable[[], Callable[[Tensor], Tensor]], reason: str
) -> None:
    """A mask for several tokens is refused, and so are generators that tiles would draw from in another order."""
    draw = build()
    module = tile(Then(lambda y, gate: draw(y)), num_shards=4)
    torch.manual_seed(0)
    with pytest.raises(NotPositionWiseError, match=reason):
        module(randn(2, 20, H))


class InBf16(GatedMLP):
    """Computes in bfloat16 inside."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


def _sets_anew(module: Any, x: Tensor) -> None:
    module.stats = {"a": x.dtype}


@pytest.mark.low_precision
@pytest.mark.parametrize("build", [InBf16, lambda: Keeps(_sets_anew)])
def test_no_false_alarm(build: Callable[[], nn.Module]) -> None:
    """A module that computes in 16 bits inside, or sets an attribute anew to an equal value, is tiled."""
    torch.manual_seed(0)
    module, x = build(), randn(2, 100, H)
    true, untiled = {"y": GatedMLP.forward(copy.deepcopy(module).double(), x.double())}, {"y": module(x)}
    assert less_accurate({"y": tile(module, num_shards=4)(x)}, untiled, true, torch.bfloat16) == {}


def test_the_mode_of_a_submodule_counts() -> None:
    """A module is checked again when one of its submodules is in another mode."""

    class Inner(GatedMLP):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y - y.mean(-2, keepdim=True) if self.part.training else y

    module = Inner()
    module.part.eval()
    tile(module, num_shards=4)(randn(1, 40, H))
    module.part.train()
    with pytest.raises(NotPositionWiseError, match="is not position-wise"):
        module(randn(1, 40, H))


def test_a_batch_is_checked_again() -> None:
    """A module that was checked with one row is checked again with several, which may be mixed."""
    module = tile(Then(lambda y, gate: y - y.mean(0) * (y.shape[0] > 1)), num_shards=4)
    module(randn(1, 40, H))
    with pytest.raises(NotPositionWiseError, match="is not position-wise"):
        module(randn(4, 10, H))


class Router(nn.Linear):
    def __init__(self) -> None:
        super().__init__(H, H)
        self.expert_capacity = 64


def test_experts_with_a_capacity() -> None:
    """Experts' capacities, which a few tokens do not show, are refused if they are named and passed over by auto."""
    mlp = nn.Sequential(GatedMLP(), Router())
    with pytest.raises(ValueError, match="experts have a capacity"):
        tile(mlp)
    model = nn.Sequential(nn.Sequential(nn.LayerNorm(H), mlp), nn.Sequential(nn.LayerNorm(H), copy.deepcopy(mlp)))
    with prepare(model, tiling=Tiling(4)) as prepared:
        assert [row.path for row in prepared.report().tiled] == ["0.1.0", "1.1.0"]


@pytest.fixture
def _default_bfloat16() -> Iterator[None]:
    """What Lightning's ``bf16-true`` makes the default around a forward."""
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.low_precision
@pytest.mark.parametrize("tokens", [2, 2048])
@pytest.mark.usefixtures("_default_bfloat16")
def test_any_default_dtype(tokens: int) -> None:
    """The tokens that are compared are tokens of the input where the default dtype cannot count them, as under
    ``bf16-true``.
    """
    module = tile(GatedMLP(), num_shards=2)
    assert module(torch.randn(1, tokens, H)).shape == (1, tokens, H)


class FiniteInTiles(nn.Module):
    """Divides by what is zero in the layout of the whole call alone."""

    def forward(self, x: Tensor) -> Tensor:
        y = x - x.detach().mean(-2, keepdim=True)
        return y / y.detach().abs().amax()


def test_values_that_are_finite_in_tiles_alone() -> None:
    """A module whose output is NaN for all tokens and is not in tiles is refused."""
    with pytest.raises(NotPositionWiseError, match="is finite elsewhere"):
        tile(FiniteInTiles(), num_shards=2)(torch.randn(4, 1, H))


class Blocks(nn.Module):
    """Four MLPs one after the other, each with its input in its own dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.mlps = nn.ModuleList(GatedMLP() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for mlp in self.mlps:
            x = x + mlp(x.to(next(mlp.parameters()).dtype)).to(x.dtype)
        return x


OTHER_KINDS: dict[str, Callable[[Any], object]] = {
    "class": lambda mlp: setattr(mlp, "act", nn.ReLU()),
    "shape": lambda mlp: mlp.__init__(bias=True),
    "dtype": lambda mlp: mlp.double(),
    "training mode": lambda mlp: mlp.eval(),
    "frozen weight": lambda mlp: mlp.up.weight.requires_grad_(False),
    "number": lambda mlp: setattr(mlp, "offset", 0.5),
    "settings": lambda mlp: setattr(mlp, "config", SimpleNamespace(mix=True)),
    "containers": lambda mlp: setattr(mlp, "factors", {"mix": 0.5}),
    "buffer": lambda mlp: mlp.register_buffer("scale", torch.ones(1)),
    "function": lambda mlp: setattr(mlp, "squash", torch.sigmoid),
}


@pytest.mark.parametrize("differ", OTHER_KINDS.values(), ids=OTHER_KINDS)
def test_one_module_of_each_kind_is_checked(differ: Callable[[Any], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of modules of one kind the first is checked, and one of another kind is checked by itself."""
    names: list[str] = []

    class Noted(module_of_the_check._Check):
        def __init__(self, call: Any, *args: Any) -> None:
            names.append(call.name)
            super().__init__(call, *args)

    monkeypatch.setattr(module_of_the_check, "_Check", Noted)
    model = Blocks()
    for mlp in model.mlps:
        mlp.offset, mlp.squash = 0.25, torch.tanh  # type: ignore[assignment]
    differ(model.mlps[2])
    with prepare(model, tiling=Tiling(num_shards=2, targets="mlps.*")):
        model(randn(2, 40, H).requires_grad_()).sum().backward()
    assert names == ["mlps.0 (GatedMLP)", "mlps.2 (GatedMLP)"]
