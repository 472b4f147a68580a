"""Mixtures of experts: router logits, auxiliary losses, shared experts, statistics over tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lt_tiled import Tiling, prepare
from lt_tiled.modules.feed_forward import find_sizes
from tests.architectures import ARCHITECTURES
from tests.models import AttachedLoss, GatedMLP, H
from tests.parity import MIXED, gradients, randn, worst, worst_of_model

pytestmark = pytest.mark.self_checks

MIXTURES = ["Mixtral", "Qwen 3 MoE", "GPT-OSS", "DeepSeek V3"]


def run(model: nn.Module, inputs: dict[str, Tensor], **kwargs: Any) -> dict[str, Tensor]:
    output = model(**inputs, **kwargs)
    output.loss.backward()
    found = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    logits = {f"router {i}": t.detach().double() for i, t in enumerate(getattr(output, "router_logits", None) or ())}
    return {"loss": output.loss.detach().double(), **found, **logits}


@pytest.mark.table("Mixtral-.*|GPT-OSS-grouped_mm")
@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", MIXTURES)
def test_every_implementation_of_the_experts(name: str, experts: str) -> None:
    """With each of the experts' implementations of transformers, loss and gradients are the untiled ones (float32)."""
    architecture = ARCHITECTURES[name]
    model = architecture.build(torch.float32, experts)
    true = run(model, architecture.feed(model))
    with prepare(model, tiling=Tiling(tile_tokens=24), activation_checkpointing=True):
        assert worst_of_model(run(model, architecture.feed(model)), true) <= 1e-5


@pytest.mark.table("(Mixtral|GPT-OSS)-.*")
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", [name for name in MIXTURES if name != "DeepSeek V3"])
def test_recorded_router_logits_and_auxiliary_loss(name: str, checkpointed: bool) -> None:
    """With ``output_router_logits=True`` the recorded logits, the auxiliary loss and the gradients are the untiled
    ones, and the mixture with its router runs in tiles.
    """
    architecture = ARCHITECTURES[name]
    model = architecture.build()
    inputs = architecture.feed(model)
    true = run(model, inputs, output_router_logits=True)
    assert "router 0" in true
    with prepare(model, tiling=Tiling(tile_tokens=24), activation_checkpointing=checkpointed) as prepared:
        for _ in range(2):
            assert worst(run(model, inputs, output_router_logits=True), true) <= MIXED
        tiled = prepared.report().tiled
        assert len(tiled) == len(model.model.layers)
        assert all(row.tiles > 1 and "experts" not in row.path for row in tiled)


_ONE = 3 * 32 * 192
"""The elements of one expert, or of the shared one."""


@pytest.mark.parametrize(
    ("name", "shared"),
    [("Qwen 3 MoE", 0), ("GPT-OSS", 0), ("DeepSeek V3", _ONE)],
)
def test_sizes_are_found(name: str, shared: int) -> None:
    """A tile sums the gradients of all four experts, and a token uses two of them, whichever way the matrices are kept.
    Below the router the experts have the sizes of the mixture, and frozen ones have no sums.
    """
    model = ARCHITECTURES[name].build(torch.float32)
    module = next(m for m in reversed(list(model.modules())) if hasattr(m, "experts"))
    sizes = find_sizes(module)
    assert sizes is not None
    assert sizes.summed == sum(p.numel() for p in module.parameters())
    assert sizes.summed - sizes.used == pytest.approx(2 * _ONE, rel=0.02)
    assert sizes.used == pytest.approx(2 * _ONE + shared, rel=0.05)
    below = find_sizes(module.experts)
    assert below is not None
    assert below.summed - below.used == sizes.summed - sizes.used
    sizes_of_frozen = find_sizes(module.requires_grad_(False))
    assert sizes_of_frozen is not None
    assert (sizes_of_frozen.summed, sizes_of_frozen.used) == (0, sizes.used)


def test_sizes_of_experts_in_a_list() -> None:
    """Experts in a list are counted, where the router or a config says how many a token uses."""
    module = Balanced("")
    one = find_sizes(module.shared_expert)
    assert one is not None
    assert find_sizes(module) == one
    module.router.top_k = 2  # type: ignore[assignment]
    sizes, router = find_sizes(module), 3 * H
    assert sizes is not None
    assert (sizes.summed, sizes.used) == (4 * one.used + router, 3 * one.used + router)


class Balanced(nn.Module):
    """A mixture of experts with a shared one, whose router uses something of all its tokens."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.router = nn.Linear(H, 3, bias=False)
        self.experts = nn.ModuleList(GatedMLP() for _ in range(3))
        self.shared_expert = GatedMLP()
        self.register_buffer("load", torch.zeros(3))

    def forward(self, x: Tensor) -> Any:
        tokens = x.reshape(-1, H)
        scores = self.router(tokens).softmax(-1)
        if self.kind == "balance over tokens":
            scores = scores / scores.sum(0)
        if self.kind == "counted load" and self.training:
            self.load += scores.detach().sum(0).to(self.load.dtype)
        if self.kind == "capacity":
            first = scores.argsort(0, descending=True).argsort(0) < len(tokens) // 3
            scores = scores * first
        out = sum(expert(tokens) * scores[:, i, None] for i, expert in enumerate(self.experts))
        if self.kind == "attached loss":
            out = AttachedLoss.apply(out, scores.mean(0).square().sum())
        return (out + self.shared_expert(tokens)).view_as(x)


class Layer(nn.Module):
    """A block with such a mixture between two norms."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.pre_mlp_norm, self.mlp, self.post_mlp_norm = nn.LayerNorm(H), Balanced(kind), nn.RMSNorm(H)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.post_mlp_norm(self.mlp(self.pre_mlp_norm(x)))


KINDS = ["balance over tokens", "attached loss", "counted load", "capacity"]


def statistics(kind: str, targets: str, checkpointed: bool, tiled: bool) -> dict[str, Any]:
    """Return the gradients of two layers, what they counted, and the tiles of their parts."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Layer(kind), Layer(kind)).double(), randn(2, 24, H, dtype=torch.float64)
    tiling = Tiling(num_shards=4, targets=targets) if tiled else None
    with prepare(model, tiling=tiling, activation_checkpointing=checkpointed) as prepared:
        with torch.no_grad():  # a validation before the first step
            model.eval()(x)
        model.train()
        found = {"gradients": gradients(model, x)}
        rows = prepared.report().tiled
    found["loads"] = [layer.mlp.load.tolist() for layer in model]
    return {**found, "tiles": {row.path.split(".", 2)[2]: row.tiles for row in rows}}


@pytest.mark.table("auto-.*-True|.*-attached loss-False")
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("targets", ["auto", "*.mlp"])
def test_statistics_over_tokens(targets: str, kind: str, checkpointed: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A mixture that computes something over all its tokens is tiled below its router, with a warning, named or found:
    nothing is changed.
    """
    found, true = (statistics(kind, targets, checkpointed, tiled) for tiled in (True, False))
    assert worst(found["gradients"], true["gradients"]) <= 1e-10
    assert found["loads"] == true["loads"]
    assert found["tiles"] == {"experts.0": 4, "experts.1": 4, "experts.2": 4, "shared_expert": 4}
    assert "Below its router" in caplog.text
