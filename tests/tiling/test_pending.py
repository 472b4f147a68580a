"""Norms that run in the tiles of the MLP next to them, by a pending tensor, which is computed on first use."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lt_tiled import Tiling, prepare
from lt_tiled.modules.patch import get_patch
from lt_tiled.tiling.patch import TiledPatch
from tests.meters import peak_bytes
from tests.models import WIDE, GatedMLP, H
from tests.parity import gradients, randn, reference, worst

TILES = Tiling(num_shards=4)
ERROR = 1e-10
"""In float64."""
Use = Callable[[Any, Tensor, Tensor, Tensor], Any]


class Twice(torch.autograd.Function):
    """Takes what it is given past Python's operators."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Sandwich(nn.Module):
    """A block with norms before attention, before its MLP and after it; ``use`` says what it does with the outputs."""

    def __init__(self, use: Use = lambda block, x, h, y: x + block.post_mlp_norm(y), dropout: float = 0.0) -> None:
        super().__init__()
        self.input_norm = nn.LayerNorm(H)
        self.attention = nn.Linear(H, H)
        self.pre_mlp_norm = nn.LayerNorm(H)
        self.mlp = GatedMLP()
        self.mlp.act = lambda x: F.dropout(F.silu(x), dropout)
        self.post_mlp_norm = nn.RMSNorm(H)
        self.use = use

    def forward(self, x: Tensor) -> Any:
        x = x + self.attention(self.input_norm(x))
        h = self.pre_mlp_norm(x)
        return self.use(self, x, h, self.mlp(h))


def model(*args: Any, **kwargs: Any) -> nn.Sequential:
    torch.manual_seed(0)
    block = Sandwich(*args, **kwargs)
    return nn.Sequential(block, copy.deepcopy(block)).double()


def tokens(length: int = 24, batch: int = 1) -> Tensor:
    return randn(batch, length, H, dtype=torch.float64)


def step(net: nn.Module, x: Tensor) -> None:
    y = net(x)
    torch.autograd.backward(y, torch.ones_like(y))


def read_first(mode: Any) -> Use:
    """First read its output without gradients, which it still has a graph for."""

    def use(block: Any, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
        with mode():
            scale = float(y.abs().max()) * 0 + 1
        assert y.requires_grad
        return x + y * scale + h

    return use


USES: dict[str, Use] = {
    "norm after": lambda block, x, h, y: x + block.post_mlp_norm(y),
    "no norm after": lambda block, x, h, y: x + y,
    "norm of the residual": lambda block, x, h, y: block.post_mlp_norm(x + y),
    "norm and the output itself": lambda block, x, h, y: block.post_mlp_norm(y) + y,
    "norm of something else": lambda block, x, h, y: block.post_mlp_norm(x) + y,
    "input of the MLP used again": lambda block, x, h, y: h + block.post_mlp_norm(y) + block.attention(h),
    "MLP of its own output": lambda block, x, h, y: x + block.post_mlp_norm(block.mlp(y)),
    "MLP twice less": lambda block, x, h, y: block.mlp(h) - y,
    "normed twice less": lambda block, x, h, y: F.rms_norm(y, (H,)) - block.post_mlp_norm(y),
    "only the norm before": lambda block, x, h, y: x + h,
    "returned": lambda block, x, h, y: y,
    "changed in place": lambda block, x, h, y: y.add_(1.0).mul_(3.0) + y,
    "added to in place": lambda block, x, h, y: x.clone().add_(y),
    "read under no_grad": lambda block, x, h, y: x + block.post_mlp_norm(y) * torch.no_grad()(torch.sum)(y).sign(),
    "first read under no_grad": read_first(torch.no_grad),
    "first read in inference mode": read_first(torch.inference_mode),
    "reshaped": lambda block, x, h, y: (x.view(-1, H) + y.reshape(-1, H)).view(x.shape),
    "across tokens": lambda block, x, h, y: x + y.mean(1, keepdim=True),
    "indexed": lambda block, x, h, y: x + torch.cat([y[:, :3], y[:, 3:]], 1),
    "under another autocast": lambda block, x, h, y: x + torch.autocast("cpu", enabled=False)(F.gelu)(y),
    "custom Function on the output": lambda block, x, h, y: x + Twice.apply(y),
    "custom Function on both": lambda block, x, h, y: block.post_mlp_norm(y) + Twice.apply(y) * Twice.apply(h),
    "reentrant checkpoint": lambda block, x, h, y: x + checkpoint(block.post_mlp_norm, y, use_reentrant=True),
    "in a closure of a checkpoint": lambda block, x, h, y: checkpoint(lambda x: x + y, x, use_reentrant=False),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_whatever_the_block_does_with_the_outputs(use: Use) -> None:
    """Whatever uses a pending output gets its value: loss and gradients are the untiled ones."""
    for options in ({}, {"activation_checkpointing": True}):
        net, x = model(use), tokens(batch=2)
        true = reference(net, x)
        with prepare(net, tiling=TILES, **options) as prepared:
            assert worst(gradients(net, x), true) <= ERROR
            assert all(row.tiles == 4 for row in prepared.report().tiled)


def test_what_is_between_is_not_held() -> None:
    """Norm, MLP and norm hold the input of the first alone: neither the MLP's own input nor its output."""
    net, x = model(lambda block, x, h, y: block.post_mlp_norm(y))[:1], tokens(256)
    with prepare(net, tiling=TILES):
        net(x)
        held = peak_bytes(lambda: net(x))
    # The inputs of attention and of the norm behind it, and the output; a tile's tensors are a quarter as large.
    tile = 4 * 256 * WIDE // 4 * 8
    assert held <= 3 * 256 * H * 8 + tile


AROUND: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "autocast": lambda mlp, h: torch.autocast("cpu", torch.bfloat16)(mlp)(h),
    "a checkpoint": lambda mlp, h: checkpoint(mlp, h, use_reentrant=False),
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_what_is_around_the_mlp_alone(around: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """A norm outside of what is around the MLP runs by itself, also where another call took it into its tiles."""
    net, x, seen = model(lambda block, x, h, y: y + around(block.mlp, block.pre_mlp_norm(x)))[:1], tokens(), []
    true = reference(net, x)
    net[0].mlp.register_forward_hook(lambda module, args, output: seen.append(args[0].computed is not None))
    with prepare(net, tiling=TILES):
        assert worst(gradients(net, x), true) <= ERROR
    assert seen[:2] == [False, True]


class MixingNorm(nn.Module):
    """Is named like a norm and mixes tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


@pytest.mark.self_checks
@pytest.mark.parametrize("norm", [MixingNorm, lambda: nn.LayerNorm((24, H))], ids=["mixes tokens", "takes no tile"])
@pytest.mark.parametrize("name", ["pre_mlp_norm", "post_mlp_norm"])
def test_a_norm_that_is_not_position_wise_runs_by_itself(name: str, norm: Callable[[], nn.Module]) -> None:
    """A norm next to an MLP that mixes tokens, or over more than the last dimension, is left out of the tiles: that is
    checked also with ``self_check=False``.
    """
    net, x = model(), tokens()
    for block in net:
        setattr(block, name, norm().double())
    true = reference(net, x)
    with prepare(net, tiling=Tiling(4, self_check=False), activation_checkpointing=True):
        for _ in range(2):
            assert worst(gradients(net, x), true) <= ERROR


class NoisyNorm(nn.LayerNorm):
    """A norm with dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5)


@pytest.mark.parametrize("where", ["nowhere", "norm", "MLP"])
def test_random_numbers_are_drawn_once(where: str) -> None:
    """An output with dropout is not pending: whatever uses it, more than once, sees the same mask."""
    use = USES["MLP twice less" if where == "norm" else "normed twice less"]
    net = model(use, dropout=0.5 if where == "MLP" else 0.0)[:1]
    if where == "norm":
        net[0].pre_mlp_norm = NoisyNorm(H).double()
    with prepare(net, tiling=Tiling(4, self_check=False)):
        found = net(tokens())
    assert torch.allclose(found, torch.zeros_like(found), atol=1e-12)


def test_input_changed_before_the_output_is_used() -> None:
    """A block that changes the norm's input in place before the MLP runs gets an error, not another input's output."""

    class Changes(Sandwich):
        def forward(self, x: Tensor) -> Any:
            x = x + self.attention(self.input_norm(x))
            h = self.pre_mlp_norm(x)
            x.add_(1.0)
            return x + self.mlp(h)

    net = nn.Sequential(Changes()).double()
    with (
        prepare(net, tiling=Tiling(4, targets=["auto"])),
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
    ):
        step(net, tokens())


class ScaledNorm(nn.LayerNorm):
    """A norm that takes a number beside its input."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x) * scale


def test_other_arguments_of_a_norm() -> None:
    """A norm that runs in the tiles of the MLP gets its other arguments, those of each call."""
    net, x = model(lambda block, x, h, y: y + block.mlp(block.pre_mlp_norm(x, 2.0)) - block.attention(h))[:1], tokens()
    net[0].pre_mlp_norm = ScaledNorm(H).double()
    true = reference(net, x)
    with prepare(net, tiling=TILES):
        assert worst(gradients(net, x), true) <= ERROR


HOOKS: dict[str, Callable[[nn.Module, Callable[[Tensor], None]], object]] = {
    "forward": lambda m, see: m.register_forward_hook(lambda m, args, out: see(out)),
    "plain": lambda m, see: m.register_forward_hook(lambda m, args, out: see(out) if type(out) is Tensor else None),
    "forward pre": lambda m, see: m.register_forward_pre_hook(lambda m, args: see(args[0])),
    "full backward": lambda m, see: m.register_full_backward_hook(lambda m, into, out: see(into[0])),
    "full backward pre": lambda m, see: m.register_full_backward_pre_hook(lambda m, out: see(out[0])),
    "tensor": lambda m, see: m.register_forward_hook(lambda m, args, out: out.register_hook(see) and None),
    "weight": lambda m, see: next(m.parameters()).register_hook(see),
}


@pytest.mark.self_checks
@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("name", ["pre_mlp_norm", "mlp", "post_mlp_norm"])
def test_hooks(name: str, kind: str) -> None:
    """Hooks of users on the norms, the MLP and their weights see values and gradients once, as untiled, and change
    nothing.
    """
    net, x = model(), tokens()
    seen: list[Tensor] = []
    HOOKS[kind](net[0].get_submodule(name), lambda t: seen.append(t.detach().clone()))
    true = gradients(net, x)
    with prepare(net, tiling=TILES) as prepared:
        assert worst(gradients(net, x), true) <= ERROR
        assert [row.tiles for row in prepared.report().tiled] == [4, 4]
    assert len(seen) == 2
    assert torch.allclose(seen[0], seen[1], rtol=1e-10, atol=1e-12)


def test_nothing_pending_leaves_the_block() -> None:
    """What a block returns holds plain tensors, inside tuples too."""
    net, seen = model(lambda block, x, h, y: (x, [y, {"h": h}])), []
    net[0].register_forward_hook(lambda module, args, output: seen.extend([output[1][0], output[1][1]["h"]]))
    with prepare(net, tiling=TILES):
        net[0](tokens())
    assert [type(t) for t in seen] == [Tensor, Tensor]


@pytest.mark.self_checks
def test_copies_and_release() -> None:
    """A deep copy uses its own weights and learns by itself, also after release, which leaves nothing."""
    net, x = model(), tokens()
    before, true = [set(vars(m)) for m in net.modules()], reference(net, x)
    with prepare(net, tiling=TILES, activation_checkpointing=True):
        gradients(net, x)
        clone = copy.deepcopy(net)
        patches = [get_patch(m[0].mlp, TiledPatch) for m in (net, clone)]
        assert patches[0].plans
        assert not patches[1].plans
        assert get_patch(clone[0].pre_mlp_norm, TiledPatch).leader is patches[1]
        with torch.no_grad():
            for p in net.parameters():
                p.zero_()
    assert [set(vars(m)) for m in net.modules()] == before
    assert worst(gradients(clone, x), true) <= ERROR


@pytest.mark.parametrize("use", ["norm after", "no norm after"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_users_own_checkpoint_around_the_block(reentrant: bool, use: str) -> None:
    """A user's ``torch.utils.checkpoint`` around the blocks recomputes the same graph."""
    net, x = model(USES[use]), tokens()
    true = reference(net, x)

    def call(x: Tensor) -> Tensor:
        return checkpoint(net[1], checkpoint(net[0], x, use_reentrant=reentrant), use_reentrant=reentrant)

    with prepare(net, tiling=TILES):
        for _ in range(2):
            assert worst(gradients(net, x, call=call), true) <= ERROR


def test_without_gradients() -> None:
    """Under ``no_grad``, in inference mode and of a frozen model the outputs are the untiled ones, as plain tensors."""
    net, x = model(), tokens().detach()
    true = net(x).detach()
    with prepare(net, tiling=TILES):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert torch.allclose(net(x), true, rtol=1e-10)
        assert not net.requires_grad_(False)(x).requires_grad


@pytest.mark.parametrize("name", ["h", "y"])
def test_an_output_that_is_stored(name: str) -> None:
    """An output that the block stores has the values of its own step, also after the optimizer has stepped."""
    stored: list[Tensor] = []

    def use(block: Any, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
        stored.append({"h": h, "y": y}[name])
        return x + block.post_mlp_norm(y)

    net, x = model(use)[:1], tokens()
    net(x)
    with prepare(net, tiling=TILES):
        net(x)
        with torch.no_grad():
            for p in net.parameters():
                p.add_(1.0)
        assert torch.allclose(stored[1], stored[0], rtol=1e-10)
