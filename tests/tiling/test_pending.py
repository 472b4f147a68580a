"""Norms that run in the tiles of the MLP next to them, by a pending tensor, which is computed on first use."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lt_tiled import ActivationCheckpointing, Tiling, prepare
from lt_tiled.modules.patch import get_patch
from lt_tiled.tiling.patch import TiledPatch
from lt_tiled.tiling.pending import Pending
from tests.architectures import ARCHITECTURES
from tests.meters import flops, peak_bytes
from tests.models import WIDE, GatedMLP, H, Twice
from tests.parity import gradients, randn, reference, worst

TILES = Tiling(num_shards=4)
ERROR = 1e-10
"""In float64."""
Use = Callable[[Any, Tensor, Tensor, Tensor], Any]


class Sandwich(nn.Module):
    """A block with a norm before its MLP and one after it; ``use`` says what it does with their outputs."""

    def __init__(self, use: Use = lambda block, x, h, y: x + block.post_mlp_norm(y), dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = nn.Linear(H, H)
        self.pre_mlp_norm = nn.LayerNorm(H)
        self.mlp = GatedMLP()
        self.mlp.act = lambda x: F.dropout(F.silu(x), dropout)
        self.post_mlp_norm = nn.RMSNorm(H)
        self.use = use

    def forward(self, x: Tensor) -> Any:
        x = x + self.attention(x)
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
    "the output, then its norm": lambda block, x, h, y: y + block.post_mlp_norm(y),
    "norm of something else": lambda block, x, h, y: block.post_mlp_norm(x) + y,
    "norm twice": lambda block, x, h, y: block.post_mlp_norm(block.post_mlp_norm(y)),
    "input of the MLP used again": lambda block, x, h, y: h + block.post_mlp_norm(y) + block.attention(h),
    "MLP of its own output": lambda block, x, h, y: x + block.post_mlp_norm(block.mlp(y)),
    "MLP run twice": lambda block, x, h, y: block.post_mlp_norm(block.mlp(h) + y),
    "only the norm before": lambda block, x, h, y: x + h,
    "used twice": lambda block, x, h, y: y * y.sigmoid() + x,
    "returned": lambda block, x, h, y: y,
    "changed in place": lambda block, x, h, y: y.add_(1.0).mul_(3.0) + y,
    "added to in place": lambda block, x, h, y: x.clone().add_(y),
    "read without a gradient": lambda block, x, h, y: x + y * (1 + 0 * float(y.detach().abs().max())),
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


@pytest.mark.self_checks
@pytest.mark.table("Llama|Gemma 2")
@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "Gemma 3", "OLMo 2", "GLM-4", "EXAONE 4", "BERT", "Mixtral"])
def test_architectures_cost_nothing_more(name: str) -> None:
    """FLOPs of a checkpointed model are 1.00 times the untiled ones from the first step on, by ``FlopCounterMode``."""
    architecture = ARCHITECTURES[name]
    net = architecture.build(torch.float32)

    def run() -> None:
        net(**architecture.feed(net)).loss.backward()

    with prepare(net, activation_checkpointing=True):
        untiled = flops(run)
    with prepare(net, activation_checkpointing=True, tiling=Tiling(num_shards=4, self_check=False)):
        assert [flops(run) for _ in range(2)] == [untiled] * 2


def saved_sizes(net: nn.Module, x: Tensor) -> list[int]:
    """The entries of each large tensor that a forward pass saves, without the weights."""
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel() if not isinstance(tensor, nn.Parameter) else 0)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        net(x)
    return [size for size in sizes if size >= x.numel()]


def test_what_is_between_is_not_saved() -> None:
    """Norm, MLP and norm keep the input of the first alone: neither the MLP's own input nor its output is held."""
    net, x = model(lambda block, x, h, y: block.post_mlp_norm(y))[:1], tokens(256)
    with prepare(net, tiling=TILES):
        net(x)
        held = peak_bytes(lambda: net(x))
        sizes = saved_sizes(net, x)
    assert sizes == [256 * H] * len(sizes)
    # The input of the block and of the norm, and the output; a tile's tensors are a quarter as large.
    tile = 4 * 256 * WIDE // 4 * 8
    assert held <= 3 * 256 * H * 8 + tile


def test_flop_counter_uses_no_pending_tensor() -> None:
    """``FlopCounterMode``, which looks at every module's output, leaves the norms in the MLP's tiles."""
    net, x, seen = model(), tokens(), []
    net[0].mlp.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with prepare(net, tiling=TILES), FlopCounterMode(display=False):
        y = net(x)
        assert type(y) is Tensor
    assert type(seen[0]) is Pending
    assert seen[0].computed is None


class MixingNorm(nn.Module):
    """Is named like a norm and mixes tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


@pytest.mark.self_checks
@pytest.mark.parametrize("norm", [MixingNorm, lambda: nn.LayerNorm((24, H))], ids=["mixes tokens", "takes no tile"])
@pytest.mark.parametrize("name", ["pre_mlp_norm", "post_mlp_norm"])
def test_a_norm_that_is_not_position_wise_runs_by_itself(name: str, norm: Callable[[], nn.Module]) -> None:
    """A norm next to an MLP that mixes tokens, or over more than the last dimension, is left out of the tiles."""
    net, x = model(), tokens()
    for block in net:
        setattr(block, name, norm().double())
    true = reference(net, x)
    with prepare(net, tiling=TILES, activation_checkpointing=True):
        for _ in range(2):
            assert worst(gradients(net, x), true) <= ERROR


@pytest.mark.parametrize(
    "use", ["norm and the output itself", "the output, then its norm", "input of the MLP used again"]
)
def test_dropout_is_drawn_once(use: str) -> None:
    """An output with dropout is not pending: a norm and what else uses it see the same masks."""
    net, x = model(USES[use], dropout=0.5)[:1], tokens()
    block = net[0]

    def plainly(x: Tensor) -> Tensor:
        x = x + block.attention(x)
        h = F.layer_norm(x, (H,), block.pre_mlp_norm.weight, block.pre_mlp_norm.bias)
        y = torch.cat([GatedMLP.forward(block.mlp, tile) for tile in h.chunk(4, 1)], 1)
        norm = F.rms_norm(y, (H,), block.post_mlp_norm.weight)
        return (h + norm + F.linear(h, block.attention.weight, block.attention.bias)) if "again" in use else norm + y

    torch.manual_seed(1)
    true = gradients(net, x, call=plainly)
    for options in ({}, {"activation_checkpointing": ActivationCheckpointing(targets=["0"])}):
        with prepare(net, tiling=Tiling(num_shards=4, self_check=False), **options):
            torch.manual_seed(1)
            assert worst(gradients(net, x), true) <= ERROR


def test_a_recompute_that_joins_other_modules_is_noticed() -> None:
    """A block whose recompute uses an output that its forward pass did not raises, and has no wrong gradient."""
    looks = iter([False, True])  # no data to restore

    def use(block: Any, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
        return x + block.post_mlp_norm(y)

    class Looks(Sandwich):
        def forward(self, x: Tensor) -> Any:
            h = self.pre_mlp_norm(x)
            if next(looks):
                h = h * 1
            return x + self.mlp(h)

    net = nn.Sequential(Looks(use)).double()
    with prepare(
        net, tiling=Tiling(4, self_check=False), activation_checkpointing=ActivationCheckpointing(targets=["0"])
    ):
        y = net(tokens())
        with pytest.raises(CheckpointError, match="different number of tensors"):
            y.sum().backward()


def test_a_buffer_of_a_pending_module() -> None:
    """An MLP with a buffer whose output is used by other code than its norm has the untiled gradients."""
    net, x = model(lambda block, x, h, y: x + y.sin()), tokens()
    for block in net:
        block.mlp.register_buffer("gain", torch.linspace(0.5, 1.5, WIDE, dtype=torch.float64))
        block.mlp.act = lambda x, mlp=block.mlp: F.silu(x) * mlp.gain
    true = gradients(net, x)
    with prepare(net, tiling=TILES):
        for _ in range(2):
            assert worst(gradients(net, x), true) <= ERROR


def test_input_changed_before_the_output_is_used() -> None:
    """A block that changes the norm's input in place before the MLP runs gets an error, not another input's output."""

    class Changes(Sandwich):
        def forward(self, x: Tensor) -> Any:
            x = x + self.attention(x)
            h = self.pre_mlp_norm(x)
            x.add_(1.0)
            return x + self.mlp(h)

    net = nn.Sequential(Changes()).double()
    with prepare(net, tiling=Tiling(4, targets=["auto"])), pytest.raises(RuntimeError, match="modified inplace"):
        step(net, tokens())


@pytest.mark.parametrize("kind", ["forward", "forward pre", "full backward", "full backward pre", "tensor"])
@pytest.mark.parametrize("name", ["pre_mlp_norm", "mlp", "post_mlp_norm"])
def test_hooks(name: str, kind: str) -> None:
    """Hooks of users on the norms and the MLP see values and gradients as untiled, and change nothing."""
    net, x = model(), tokens()
    seen: list[Any] = []
    module = net[0].get_submodule(name)
    if kind == "forward":
        module.register_forward_hook(lambda m, args, out: seen.append(out))
    if kind == "forward pre":
        module.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    if kind == "full backward":
        module.register_full_backward_hook(lambda m, into, out: seen.append(into[0].clone()))
    if kind == "full backward pre":
        module.register_full_backward_pre_hook(lambda m, out: seen.append(out[0].clone()))
    if kind == "tensor":
        module.register_forward_hook(lambda m, args, out: out.register_hook(lambda g: seen.append(g.clone())) and None)
    true = gradients(net, x)
    with prepare(net, tiling=TILES):
        assert worst(gradients(net, x), true) <= ERROR
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
def test_copies_pickles_and_release() -> None:
    """A deep copy uses its own weights and learns by itself, a pickled one comes back plain, release leaves nothing."""
    net, x = model(), tokens()
    before = [set(vars(m)) for m in net.modules()]
    with prepare(net, tiling=TILES, activation_checkpointing=True):
        gradients(net, x)
        clone = copy.deepcopy(net)
        patches = [get_patch(m[0].mlp, TiledPatch) for m in (net, clone)]
        assert patches[0].checked
        assert not patches[1].checked
        assert get_patch(clone[0].pre_mlp_norm, TiledPatch).leader is patches[1]
        with torch.no_grad():
            for p in net.parameters():
                p.zero_()
        true = reference(clone, x)
        assert worst(gradients(clone, x), true) <= ERROR
    assert [set(vars(m)) for m in net.modules()] == before


@pytest.mark.full
def test_compiled_as_a_whole() -> None:
    """``torch.compile`` of a model with norms in the tiles works, and gives the untiled gradients."""
    net, x = model(), tokens()
    true = reference(net, x)
    with prepare(net, tiling=TILES):
        compiled = torch.compile(net, backend="aot_eager")
        assert worst(gradients(net, x, call=compiled), true) <= ERROR


def test_users_own_checkpoint_around_the_block() -> None:
    """A user's ``torch.utils.checkpoint`` around the blocks recomputes the same graph."""
    for reentrant in (False, True):
        net, x = model(), tokens()
        true = reference(net, x)

        def call(x: Tensor, net: Any = net, reentrant: bool = reentrant) -> Tensor:
            return checkpoint(net[1], checkpoint(net[0], x, use_reentrant=reentrant), use_reentrant=reentrant)

        with prepare(net, tiling=TILES):
            assert worst(gradients(net, x, call=call), true) <= ERROR


def test_without_gradients() -> None:
    """Under ``no_grad`` and in inference mode the outputs are the untiled ones, as plain tensors."""
    net, x = model(), tokens().detach()
    true = net(x).detach()
    with prepare(net, tiling=TILES):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert torch.allclose(net(x), true, rtol=1e-10)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_post_norm_block_that_returns_its_mlps_output_too(dropout: float) -> None:
    """A post-norm block that also returns its MLP's output returns the one that its norm saw."""
    net, x = model(lambda block, x, h, y: (block.post_mlp_norm(y), y), dropout=dropout)[:1], tokens()
    with prepare(net, tiling=Tiling(4, self_check=False)):
        normed, y = net(x)
        assert torch.allclose(normed, F.rms_norm(y, (H,)), rtol=1e-10)


def test_gradients_of_the_output() -> None:
    """Hooks and ``retain_grad`` on an MLP's output get its whole gradient."""
    seen: list[Tensor] = []

    def use(block: Any, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
        y.register_hook(lambda g: seen.append(g.clone()) and None)
        y.retain_grad()
        seen.append(y)
        return x + block.post_mlp_norm(y) + h + y

    net, x = model(use)[:1], tokens()
    true = gradients(net, x)
    with prepare(net, tiling=TILES):
        assert worst(gradients(net, x), true) <= ERROR
    kept, plain, tiled_kept, tiled = seen
    assert torch.allclose(tiled, plain, rtol=1e-10)
    assert torch.allclose(tiled_kept.grad, kept.grad, rtol=1e-10)


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


def test_a_frozen_model_saves_nothing() -> None:
    """Without anything to differentiate, nothing is pending: the output wants no gradient."""
    net, x = model().requires_grad_(False), tokens().detach()
    with prepare(net, tiling=TILES):
        assert not net(x).requires_grad


def test_a_norm_that_draws_random_numbers_runs_by_itself() -> None:
    """A norm with dropout before an MLP has one mask, also where its output is used twice."""

    class NoisyNorm(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), 0.5)

    outputs: list[Tensor] = []

    def use(block: Any, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
        outputs.append(h)
        return block.mlp(h) - y

    net = model(use)[:1]
    net[0].pre_mlp_norm = NoisyNorm(H).double()
    with prepare(net, tiling=Tiling(4, self_check=False)):
        assert torch.allclose(net(tokens()), torch.zeros((), dtype=torch.float64), atol=1e-12)
    assert bool((outputs[0] == 0).any())
