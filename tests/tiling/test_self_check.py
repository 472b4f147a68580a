"""What is not position-wise is refused by name, before it is tiled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lt_tiled import NotPositionWiseError, Tiling, prepare, tile, untile
from lt_tiled.modules.patch import get_patch
from lt_tiled.recompute.mode import RandomState
from lt_tiled.tiling import check as module_of_the_check
from lt_tiled.tiling.patch import TiledPatch
from tests.models import Coded, GatedMLP, H, PlainMLP, RoutedMLP
from tests.parity import randn
from tests.property.grammar import Composed, refused
from tests.property.parts import OTHERS
from tests.property.parts import H as PARTS

pytestmark = pytest.mark.self_checks


def centered(y: Tensor, dim: int = -2) -> Tensor:
    return y - y.mean(dim, keepdim=True)


REASONS = {  # of those parts that are not refused because their outputs differ
    "shared noise": "draws one random mask for several tokens",
    "mixed by a hook": "is not position-wise: its gradient of argument 0",
    "counts and uses": r"changes Part\.calls",
    "spectral norm": r"changes \w+\._buffers\['_u'\] in its forward",
    "writes into its input": "changes its input in place.*out of place",
}


@pytest.mark.parametrize("part", [*OTHERS, "spectral norm"])
def test_each_other_part_is_refused(part: str) -> None:
    """Each part of the generated tests that mixes tokens, shares random numbers or changes its input is refused by
    itself, with the reason and a remedy; its input is as it was.
    """
    torch.manual_seed(0)
    module, x = tile(Composed((part,), "tensor").double(), num_shards=4), randn(4, 10, PARTS, dtype=torch.float64)
    before = x.clone()
    reason = REASONS.get(part, "is not position-wise: its")
    with pytest.raises(NotPositionWiseError, match=rf"Composed:? .*{reason}") as error:
        module(x.detach() if part == "writes into its input" else x * 1)
    assert refused(error.value)
    assert torch.equal(x, before)


@pytest.mark.parametrize("self_check", [True, False])
def test_per_call_scalar_is_refused(self_check: bool) -> None:
    """A scalar output per call is refused with its name, its shape and the remedy, with the self-check and without."""
    module = tile(Coded(lambda m, x: (x, x.square().mean())), num_shards=4, self_check=self_check)
    with pytest.raises(ValueError, match=r"Coded: output 1 \(of shape \[\]\) is not per token"):
        module(randn(1, 40, H))


@pytest.mark.parametrize("other", [lambda y: (y, y), lambda y: y[..., :1]], ids=["structure", "shape"])
def test_outputs_that_change_from_tile_to_tile_are_refused(other: Callable[[Tensor], Any]) -> None:
    """Without the self-check, another structure or shape of the output in a later tile is refused by name."""
    module = tile(Coded(lambda m, x: x if x.shape[1] == 11 else other(x)), num_shards=4, self_check=False)
    with pytest.raises(NotPositionWiseError, match=r"Coded: the structure or the shapes .* change from tile to tile"):
        module(randn(1, 41, H))


def in_imaginary_parts(module: Any, x: Tensor) -> Tensor:
    """Return a conjugate that torch has not computed yet, which mixes tokens in the imaginary part alone."""
    return torch.complex(x, centered(x)).conj()


def behind_a_zero_gate(module: Any, x: Tensor) -> Tensor:
    y = module.mlp(x)
    return y + module.gain * y * y.norm(dim=1, keepdim=True)


def finite_in_tiles(module: Any, x: Tensor) -> Tensor:
    """Divide by a number that is zero in the layout of the whole call alone."""
    y = centered(x.detach())
    return y / y.abs().amax()


NOT = "is not position-wise"
REFUSED: dict[str, tuple[Callable[[Any, Tensor], Any], tuple[int, ...], str]] = {
    # the code of a module, the leading dimensions of its input, and the reason
    "height of an image": (lambda m, x: centered(m.mlp(x), 1), (2, 5, 4), NOT),
    "width of an image": (lambda m, x: centered(m.mlp(x), 2), (2, 5, 4), NOT),
    "behind a gate of zero": (behind_a_zero_gate, (2, 20), NOT),
    "in imaginary parts": (in_imaginary_parts, (1, 40), NOT),
    "in training, beside dropout": (lambda m, x: centered(F.dropout(m.mlp(x)), 1 if m.training else -1), (1, 40), NOT),
    "another shape": (lambda m, x: (0 * x + m.gain).transpose(0, 1), (2, 2), "its output 0 has another shape"),
    "finite in tiles": (finite_in_tiles, (4, 1), "is finite elsewhere"),
    "other values with a graph": (lambda m, x: m.mlp(x) * (1 + torch.is_grad_enabled()), (1, 40), f"{NOT}: its output"),
    "other values of a graph": (lambda m, x: m.mlp(x) * (1 + x.requires_grad), (1, 40), f"{NOT}: its output"),
    "a mask of rows": (lambda m, x: x * torch.rand(x.shape[0], 1, H).gt(0.5), (2, 20), "one random mask"),
    "a mask behind dropout": (lambda m, x: F.dropout(x) * torch.rand(1, 1, H).gt(0.5), (2, 20), "one random mask"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """What mixes in any direction or mode, has other values with a graph, or shares random numbers is refused."""
    torch.manual_seed(0)
    code, lead, reason = REFUSED[name]
    module = Coded(code)
    module.gain = nn.Parameter(torch.zeros(H))
    with pytest.raises(NotPositionWiseError, match=f"Coded.*{reason}"):
        tile(module, num_shards=2)(randn(*lead, H))


def samples(module: Any, x: Tensor) -> Tensor:
    """Sample for each token, as a router may."""
    y = module.mlp(x)
    chosen = torch.multinomial(y.softmax(-1).flatten(0, -2), 1).view(*y.shape[:-1], 1)
    drawn = chosen + torch.randint(2, 9, chosen.shape)
    return y * (1 + drawn) * torch.bernoulli(torch.full_like(y, 0.5))


def in_16_bits(module: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return module.mlp(x).float()


def sets_anew(module: Any, x: Tensor) -> Tensor:
    module.stats = {"a": x.dtype}
    return module.mlp(x)


PASSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "samples": samples,
    "dropout": lambda m, x: F.alpha_dropout(F.dropout(m.mlp(x), training=m.training)),
    "an attribute set to an equal value": sets_anew,
    "16 bits inside": in_16_bits,
}


@pytest.mark.parametrize("code", PASSES.values(), ids=PASSES)
def test_no_false_alarm(code: Callable[[Any, Tensor], Tensor]) -> None:
    """Random numbers of each token, in any mode, an attribute set to an equal value, and 16 bits inside a module are no
    reason to refuse.
    """
    module = Coded(code)
    module.stats = {}
    tile(module, num_shards=4)
    for mode in (True, False):
        module.train(mode)(randn(1, 40, H))
        assert get_patch(module, TiledPatch).plans


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
    module, x = Coded(lambda m, x: m.mlp(x) * torch.arange(x.shape[1])[:, None]), randn(1, 40, H)
    tiles = [module(x[:, start : start + 10]) for start in range(0, 40, 10)]
    y = tile(module, num_shards=4, self_check=False)(x)
    torch.testing.assert_close(y, torch.cat(tiles, 1))


def test_changes_inside_an_argument_are_refused() -> None:
    """A module that adds to a list of the caller's, which would grow with each tile, is refused, and the list is as it
    was.
    """
    notes: dict[str, Any] = {"a": []}
    with pytest.raises(NotPositionWiseError, match="Coded changes its argument"):
        tile(Coded(lambda m, x, notes: notes["a"].append(1) or m.mlp(x)), num_shards=4)(randn(1, 40, H), notes)
    assert notes["a"] == []


@pytest.mark.parametrize("shape", [(3, 1, 1), (1, 20, H)])
def test_arguments_that_broadcast_over_tokens_are_refused(shape: tuple[int, ...]) -> None:
    """Arguments that broadcast along a part of the leading dimensions are refused with the remedy."""
    module = tile(Coded(lambda m, x, scale: m.mlp(x) * scale), num_shards=4)
    reason = r"Coded(: output 0 .* is not per token| fails when .* Expand arguments)"
    with pytest.raises(NotPositionWiseError, match=reason):
        module(randn(3, 20, H), torch.ones(shape))


AGAIN: dict[str, tuple[Callable[..., Tensor], Callable[[Any], object], dict[str, Any], tuple[int, ...]]] = {
    # the code, and what differs in the second call: the module, its arguments, or the input
    "the mode of a submodule": (
        lambda m, x: centered(m.mlp(x)) if m.act.training else m.mlp(x),
        lambda m: m.act.train(),
        {},
        (1, 40),
    ),
    "several rows": (lambda m, x: m.mlp(x) - x.mean(0) * (x.shape[0] > 1), lambda m: None, {}, (4, 10)),
    "a flag": (lambda m, x, mixes=False: m.mlp(centered(x) if mixes else x), lambda m: None, {"mixes": True}, (1, 40)),
}


@pytest.mark.parametrize("name", AGAIN)
def test_another_kind_of_call_is_checked_by_itself(name: str) -> None:
    """A module that was checked is checked again in another mode, with another flag, and with several rows."""
    code, change, flags, lead = AGAIN[name]
    module = Coded(code, act=nn.SiLU())
    module.act.eval()
    tile(module, num_shards=4)(randn(1, 40, H), **dict.fromkeys(flags, False))
    change(module)
    with pytest.raises(NotPositionWiseError, match=NOT):
        module(randn(*lead, H), **flags)


def test_experts_with_a_capacity() -> None:
    """Experts with capacities, which a few tokens do not show, are passed over by auto."""
    mlp = nn.Sequential(GatedMLP(), nn.Linear(H, H))
    mlp[1].expert_capacity = 64
    model = nn.Sequential(nn.Sequential(nn.LayerNorm(H), mlp), nn.Sequential(nn.LayerNorm(H), copy.deepcopy(mlp)))
    with prepare(model, tiling=Tiling(4)) as prepared:
        assert [row.path for row in prepared.report().tiled] == ["0.1.0", "1.1.0"]


@pytest.mark.low_precision
@pytest.mark.parametrize("tokens", [2, 2048])
def test_any_default_dtype(tokens: int) -> None:
    """The tokens that are compared are tokens of the input where the default dtype cannot count them, as under
    Lightning's ``bf16-true``.
    """
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert tile(GatedMLP(), num_shards=2)(torch.randn(1, tokens, H)).shape == (1, tokens, H)
    finally:
        torch.set_default_dtype(torch.float32)


OTHER_KINDS: dict[str, Callable[[Any], object]] = {
    "class": lambda mlp: setattr(mlp, "act", nn.ReLU()),
    "shape": lambda mlp: mlp.__init__(bias=True),
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
    model = nn.Sequential(*(GatedMLP() for _ in range(4)))
    for mlp in model:
        mlp.offset, mlp.squash = 0.25, torch.tanh  # type: ignore[assignment]
    differ(model[2])
    with prepare(model, tiling=Tiling(num_shards=2, targets="GatedMLP")):
        model(randn(2, 40, H).requires_grad_()).sum().backward()
    assert names == ["0 (GatedMLP)", "2 (GatedMLP)"]
