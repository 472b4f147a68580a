"""Blocks of which ``recompute="auto"`` recomputes the calls that save much."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lt_tiled.auto
from lt_tiled import ActivationCheckpointing, TiledDDPStrategy, TiledSingleDeviceStrategy, prepare
from lt_tiled.checkpointing import BlockPatch
from lt_tiled.modules.patch import get_patch
from tests.meters import flops, peak_bytes
from tests.models import TinyLM, lm_loss, tiny_llama


def step(net: nn.Module, tokens: int = 256) -> Callable[[], None]:
    ids = torch.arange(tokens).view(1, -1) % 32
    return lambda: lm_loss(net(ids), ids).backward()


def allowance(net: Any) -> Any:
    patch = get_patch(net.blocks[0], BlockPatch)
    assert patch is not None
    assert patch.auto is not None
    return patch.auto.allowance


def test_a_short_call_is_not_recomputed() -> None:
    """From the second step on, 256 tokens have the FLOPs and the gradients of the model without lt_tiled."""
    torch.manual_seed(0)
    net = TinyLM()
    plain = flops(step(net))
    expected = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    with prepare(net, tiling=True, activation_checkpointing="auto") as prepared:
        first = flops(step(net))
        net.zero_grad()
        assert first > plain == flops(step(net))
        assert prepared.report().blocks[0].tokens == 256
        assert prepared.report().table().columns[3]._cells[-1] == "not recomputed: 256"
    for gradient, p in zip(expected, net.parameters(), strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=0, atol=0)


def test_what_was_asked_for_is_always_recomputed() -> None:
    """A policy, True and the model's own gradient checkpointing recompute calls of any size."""
    for policy in (True, ActivationCheckpointing()):
        net = TinyLM()
        with prepare(net, activation_checkpointing=policy):
            assert flops(step(net)) == flops(step(net))
            assert flops(step(net)) > flops(step(TinyLM()))
    llama = tiny_llama()
    llama.gradient_checkpointing_enable()
    with prepare(llama, activation_checkpointing="auto"):
        patch = get_patch(llama.model.layers[0], BlockPatch)
        assert patch is not None
        assert patch.auto is not None
        assert not patch.auto.may_save(1)


def test_memory_is_that_of_a_recompute_and_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each length a step peaks at most by the bound above one that recomputes, and is the same past it."""
    monkeypatch.setattr(lt_tiled.auto, "LEAST", 2**20)
    apart = {}
    for tokens in (64, 128, 1024):
        for policy in ("auto", True):
            net = TinyLM()
            with prepare(net, activation_checkpointing=policy):
                step(net, tokens)()
                net.zero_grad(set_to_none=False)
                apart[tokens, policy] = peak_bytes(step(net, tokens)), flops(step(net, tokens))
        above = apart[tokens, "auto"][0] - apart[tokens, True][0]
        assert above <= 2**20
        if tokens <= 128:
            assert apart[tokens, "auto"][1] < apart[tokens, True][1]
    assert apart[1024, "auto"] == apart[1024, True]


def test_the_bytes_are_those_that_are_saved() -> None:
    """A block is measured at the bytes that it makes a forward pass keep."""
    net = TinyLM(1)
    x = torch.randn(1, 256, net.embed.embedding_dim, requires_grad=True)
    kept: dict[int, torch.Tensor] = {}
    known = {t.untyped_storage().data_ptr() for t in (x, *net.parameters())}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = net.blocks[0](x)
    saved = sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in known)
    del output
    with prepare(net, activation_checkpointing="auto"):
        net.blocks[0](x)
        patch = get_patch(net.blocks[0], BlockPatch)
        assert patch is not None
        assert patch.auto is not None
        assert [row.saved for rows in patch.auto.measured.values() for row in rows] == [saved]


def test_several_forward_passes_share_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls whose backward pass is still to come count, until it has run or their graph is freed."""
    net = TinyLM()
    with prepare(net, activation_checkpointing="auto"):
        step(net)()
        step(net)()
        shared = allowance(net)
        assert shared.used == 0
        ids = torch.arange(256).view(1, -1) % 32
        loss = lm_loss(net(ids), ids)
        one = shared.used
        assert one > 0
        shared.limit = one * 3 // 2  # room for one forward pass, and half of another
        loss = loss + lm_loss(net(ids), ids)
        assert one < shared.used <= shared.limit
        loss.backward()
        assert shared.used == 0
        loss = lm_loss(net(ids), ids)
        del loss
        assert shared.used == 0


def test_a_longer_call_is_measured_again() -> None:
    """A call longer than those before it is recomputed once, and others than those before it in kind too."""
    net = TinyLM()
    with prepare(net, activation_checkpointing="auto"):
        for tokens in (128, 256):
            assert flops(step(net, tokens)) > flops(step(net, tokens))
        assert flops(step(net, 128)) == flops(step(net, 128))
        net.blocks[0].requires_grad_(False)
        assert flops(step(net, 128)) > flops(step(net, 128))


def test_it_is_the_default_of_the_strategies() -> None:
    """Strategies have it by default, and offload is refused with it."""
    for strategy in (TiledDDPStrategy(), TiledSingleDeviceStrategy()):
        assert strategy.activation_checkpointing == ActivationCheckpointing(recompute="auto")
    with pytest.raises(ValueError, match="recompute='auto' has no effect with offload='cpu'"):
        ActivationCheckpointing(recompute="auto", offload="cpu")


def test_nested_tensors() -> None:
    """Blocks of jagged hidden states, whose sizes are not integers, are recomputed."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)])
    rows = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged)
    policy = ActivationCheckpointing(targets=["*0", "*1"], recompute="auto")
    with prepare(model, activation_checkpointing=policy):
        for _ in range(2):
            model(rows).values().sum().backward()
    assert model[0][0].weight.grad is not None
