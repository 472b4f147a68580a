"""An MLP that takes the sum of its block's input and a norm behind attention, which its backward pass adds again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lt_tiled import Tiling, prepare
from tests.meters import flops
from tests.models import GatedMLP, H, PythonNorm
from tests.parity import EXACT, gradients, randn, reference, worst

TILES = Tiling(num_shards=4)
Add = Callable[[Any, Tensor, Tensor], Tensor]


class Block(nn.Module):
    """A block of Gemma 3: norms before and behind what stands for attention and the MLP; ``add`` makes the sum."""

    def __init__(self, add: Add) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.Linear(H, H))
        self.input_norm, self.post_attention_norm = PythonNorm(), PythonNorm()
        self.pre_mlp_norm, self.mlp, self.post_mlp_norm = PythonNorm(), GatedMLP(), PythonNorm()
        self.add = add

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention(self.input_norm(x))
        h = self.add(self, x, self.post_attention_norm(y))
        return h + self.post_mlp_norm(self.mlp(self.pre_mlp_norm(h)))


def model(add: Add) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(add) for _ in range(2))).double()


def tokens(count: int = 9, requires_grad: bool = True) -> Tensor:
    return randn(2, count, H, dtype=torch.float64).requires_grad_(requires_grad)


def plain(block: Any, x: Tensor, y: Tensor) -> Tensor:
    return x + y


ADDS: dict[str, Add] = {
    "x + y": plain,
    "y + x": lambda block, x, y: y + x,
    "torch.add": lambda block, x, y: torch.add(x, y),
    "with a factor": lambda block, x, y: torch.add(x, y, alpha=2),
    "to something else": lambda block, x, y: x * 2 + y,
    "to itself": lambda block, x, y: y + y,
    "to a number": lambda block, x, y: x + (y + 1.0),
    "to a row": lambda block, x, y: x + (y + x[:1]),
    "in place": lambda block, x, y: x.clone().add_(y),
    "changed in place": lambda block, x, y: (x + y).mul_(3.0),
    "the norm used again": lambda block, x, y: x + y + y.tanh(),
    "the norm used before": lambda block, x, y: y.tanh() + (x + y),
    "two sums": lambda block, x, y: (x + y) * (x + y),
    "under no_grad": lambda block, x, y: x + y + torch.no_grad()(torch.add)(x, y),
}


@pytest.mark.parametrize("checkpointed", [True, False])
@pytest.mark.parametrize("add", ADDS.values(), ids=ADDS)
def test_whatever_is_added(add: Add, checkpointed: bool) -> None:
    """However the block adds, and whether its input wants a gradient or not, gradients are the untiled ones."""
    for wants_grad in (True, False):
        net, x = model(add), tokens(requires_grad=wants_grad)
        true = reference(net, x)
        with prepare(net, tiling=TILES, activation_checkpointing=checkpointed):
            for _ in range(3):
                assert worst(gradients(net, x), true) <= EXACT


def test_the_sum_is_not_saved() -> None:
    """Each block saves its input and the input of the norm behind attention, and no sum; FLOPs are the untiled ones."""
    net, x = model(plain), tokens(256)
    with prepare(net, activation_checkpointing=True):
        untiled = flops(lambda: net(x).sum().backward())
    with prepare(net, tiling=TILES, activation_checkpointing=True):
        net(x).sum().backward()
        assert flops(lambda: net(x).sum().backward()) == untiled
    saved = set[int]()

    def pack(tensor: Tensor) -> Tensor:
        if tensor.numel() == x.numel():
            saved.add(tensor.untyped_storage().data_ptr())
        return tensor

    with prepare(net, tiling=TILES), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = net(x)
    assert len(saved) == 4
    assert output.grad_fn is not None  # which holds them


def test_second_derivatives() -> None:
    """A backward pass that is differentiated goes through the sum to what was added."""
    net, x = model(plain), tokens()

    def penalty() -> list[Tensor]:
        net.zero_grad()
        (first,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
        first.square().sum().backward()
        return [p.grad.clone() for p in net.parameters() if p.grad is not None]

    true = penalty()
    with prepare(net, tiling=TILES):
        for found, expected in zip(penalty(), true, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_a_norm_that_changed_is_refused() -> None:
    """A sum that would be added again with another weight of the norm is refused, with the weight's name."""
    net, x = model(plain), tokens()
    with prepare(net, tiling=TILES):
        loss = net(x).sum()
        with torch.no_grad():
            net[1].post_attention_norm.weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"weight .*changed"):
            loss.backward()


@pytest.mark.parametrize("frozen", ["post_attention_norm", "mlp", "pre_mlp_norm", "attention"])
def test_frozen_parts(frozen: str) -> None:
    """With frozen parts the gradients of the others are the untiled ones."""
    net, x = model(plain), tokens(requires_grad=False)
    for block in net:
        block.get_submodule(frozen).requires_grad_(False)
    true = reference(net, x)
    with prepare(net, tiling=TILES, activation_checkpointing=True):
        assert worst(gradients(net, x), true) <= EXACT


def test_hooks_see_the_norm() -> None:
    """A hook on the norm sees all tokens of its output, and may replace it."""
    net, x = model(plain), tokens()
    net[0].post_attention_norm.register_forward_hook(lambda module, args, output: output * 2)
    true = reference(net, x)
    with prepare(net, tiling=TILES, activation_checkpointing=True):
        assert worst(gradients(net, x), true) <= EXACT


def test_lower_precision() -> None:
    """Under autocast a sum that is added again has the dtypes of the first one."""
    net, x = model(plain).float(), tokens().detach().float().requires_grad_()

    def step() -> list[Tensor]:
        net.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(x).sum()
        loss.backward()
        return [p.grad.clone() for p in net.parameters() if p.grad is not None]

    true = step()
    with prepare(net, tiling=TILES, activation_checkpointing=True):
        for found, expected in zip(step(), true, strict=True):
            assert float((found - expected).norm()) <= 2e-2 * float(expected.norm())


def test_an_input_that_is_changed_after_the_sum() -> None:
    """A block's input that is changed in place once it was added is not added again: the sum is saved."""

    def add(block: Any, x: Tensor, y: Tensor) -> Tensor:
        total = x + y
        x.mul_(3.0)
        return total

    net, x = model(add), tokens()
    for block in net:
        block.input_norm = nn.Identity()
        block.attention.requires_grad_(False)  # so that nothing else saves the input
        block.register_forward_pre_hook(lambda module, args: args[0].clone())
    true = reference(net, x)
    with prepare(net, tiling=TILES):
        assert worst(gradients(net, x), true) <= EXACT
