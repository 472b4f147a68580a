"""Blocks keep the outputs of the operators that a policy chooses, and do not recompute them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from lt_tiled import ActivationCheckpointing, Tiling, prepare, shared_attention
from lt_tiled.recompute import saved
from lt_tiled.recompute.keep import KeepMode
from tests.meters import LiveBytes, flops
from tests.models import Coded, H, TinyLM, lm_loss, tiny_llama
from tests.parity import gradients, randn, step_of

IDS = torch.arange(2 * 24).view(2, 24) % 32
MM, SDPA = "aten.mm.default", "aten._scaled_dot_product_flash_attention_for_cpu.default"
OFFLOAD = {"offload": "cpu", "keep_last": 0}


@pytest.mark.parametrize("operators", ["attention", [MM], [SDPA], [MM, SDPA], ["aten.silu.default"]], ids=str)
def test_flops(operators: list[str]) -> None:
    """A recompute has exactly the FLOPs of the operators that are not kept, up to its early stop."""
    model, batch = tiny_llama(), {"input_ids": IDS, "labels": IDS}
    plain, work = flops(lambda: step_of(model, batch)), list[int]()
    for policy in (None, operators):
        with prepare(model, activation_checkpointing=ActivationCheckpointing(keep=policy)):
            work.append(flops(lambda: step_of(model, batch)) - plain)
    projections = 2 * 2 * IDS.numel() * (2 * 32 * 32 + 2 * 32 * 16)
    gate_and_up = 2 * 2 * IDS.numel() * 2 * 32 * 96  # the product after them is not recomputed
    kept = projections + gate_and_up if MM in operators else 0
    if SDPA in operators or operators == "attention":
        kept += work[0] - projections - gate_and_up
    assert work[1] == work[0] - kept


@pytest.mark.parametrize("tiling", [None, 3], ids=["untiled", "tiled"])
@pytest.mark.parametrize("more", [{}, OFFLOAD], ids=str)
@pytest.mark.parametrize("policy", ["attention", [MM, SDPA]], ids=["attention", "products"])
def test_same_gradients(policy: Any, more: dict[str, Any], tiling: int | None) -> None:
    """Loss and gradients are bit for bit those without a policy, with dropout, tiles, offload and keep too."""
    model, batch = tiny_llama(attention_dropout=0.2).train(), {"input_ids": IDS, "labels": IDS}

    def steps(policy: Any) -> list[dict[str, Tensor]]:
        torch.manual_seed(1)
        with prepare(model, tiling=tiling, activation_checkpointing=ActivationCheckpointing(keep=policy, **more)):
            return [step_of(model, batch) for _ in range(3)]

    for found, true in zip(steps(policy), steps(None), strict=True):
        assert found.keys() == true.keys()
        assert all(torch.equal(found[name], true[name]) for name in true)


def test_what_is_kept_goes_where_block_inputs_go() -> None:
    """Kept outputs are offloaded: no more bytes stay on the device than without a policy, and each is stored once."""
    model, batch = tiny_llama(), {"input_ids": IDS, "labels": IDS}
    held, stored = [], []
    for policy in (None, [MM]):
        with prepare(model, activation_checkpointing=ActivationCheckpointing(keep=policy, **OFFLOAD)) as prepared:
            step_of(model, batch)
            with LiveBytes() as meter:
                loss = model(**batch).loss
                held.append(meter.now)
            loss.backward()
            assert prepared.offloader is not None
            stored.append(prepared.offloader.stats.cpu_bytes // 2)
    products = 2 * IDS.numel() * (3 * 32 + 2 * 16 + 2 * 96) * 4
    assert stored[1] - stored[0] == products
    assert held[1] - held[0] < products // 20  # fingerprints, which do not grow with the tokens


@pytest.mark.parametrize("tiling", [None, 3], ids=["untiled", "tiled"])
@pytest.mark.parametrize("more", [{}, OFFLOAD, {"keep": [MM, SDPA]}, {"keep": "attention", **OFFLOAD}], ids=str)
def test_nothing_is_left_of_a_step(more: dict[str, Any], tiling: int | None) -> None:
    """After a step no argument of a block and no kept output is alive, also without Python's garbage collection."""
    gc.disable()
    try:
        with prepare(tiny_llama(), tiling=tiling, activation_checkpointing=ActivationCheckpointing(**more)) as prepared:
            for _ in range(2):
                saved._random.seed(0)  # what the first step caches is all that the second one needs
                with LiveBytes() as meter:
                    torch.autograd.grad(prepared.model(input_ids=IDS, labels=IDS).loss, [*prepared.model.parameters()])
        assert meter.now == 0
    finally:
        gc.enable()


def test_what_runs_in_tiles_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """No operator of tiles is kept, in the first step too."""
    kept = list[torch.Size]()
    pack = KeepMode._pack
    monkeypatch.setattr(KeepMode, "_pack", lambda self, output: (kept.append(output.shape), pack(self, output))[1])
    model, batch = tiny_llama(), {"input_ids": IDS, "labels": IDS}
    with prepare(model, tiling=Tiling(3), activation_checkpointing=ActivationCheckpointing(keep=["aten.mm"])):
        step_of(model, batch)
    assert kept == [(IDS.numel(), 32)] * 2  # the output projections


def drops(m: Any, x: Tensor) -> Tensor:
    """Draw random numbers before and behind a product."""
    y = F.dropout(m.mlp(x) * torch.rand_like(x), 0.5)
    y = F.dropout(m.mlp(y) + x, 0.5).sin()
    return m.mlp(y) + x


def test_random_numbers() -> None:
    """Random numbers go on after a kept operator as in the forward pass."""
    model, x, found = nn.Sequential(*(Coded(drops) for _ in range(3))), randn(2, 12, H), list[dict[str, Tensor]]()
    for policy in (None, *(ActivationCheckpointing(keep=[name]) for name in (MM, "aten.rand_like.default"))):
        torch.manual_seed(0)
        with prepare(model, activation_checkpointing=policy, tiling=None):
            found.append(gradients(model, x))
    assert all(torch.equal(gradient, other[name]) for name, gradient in found[0].items() for other in found)


def pair(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the last operator needs, beside what that returns. Change it in place, if the module is told to."""
    y = m.mlp(x)
    if m.inside:
        y = y.add_(x)
    return y, y.sin()


@pytest.mark.parametrize("offload", [None, "cpu"])
@pytest.mark.parametrize("inside", [False, True])
def test_an_output_changed_in_place(inside: bool, offload: Any) -> None:
    """A kept output that is changed in place, by its block or behind it, is an error with the remedy."""
    model, x = nn.Sequential(Coded(pair)), randn(12, H)
    policy = ActivationCheckpointing(targets=["Coded"], keep=[MM], offload=offload)
    model[0].inside = False

    def loss(doubles: bool) -> Tensor:
        y, z = model(x)
        return (y.mul_(2) if doubles else y * 2).sum() + z.sum()

    with prepare(model, activation_checkpointing=policy):
        loss(doubles=False).backward()
        model[0].inside = inside
        with pytest.raises(RuntimeError, match=r"changed in place after .*[Mm]ake the change out of place"):
            loss(doubles=not inside).backward()


def test_two_backward_passes() -> None:
    """A graph that is kept has a second backward pass with the same gradients, which torch's own modes refuse."""
    model, x = TinyLM(2), IDS
    with prepare(model, activation_checkpointing=ActivationCheckpointing(keep=["aten.addmm", SDPA])):
        loss = lm_loss(model(x), x)
        first = torch.autograd.grad(loss, [*model.blocks.parameters()], retain_graph=True)
        second = torch.autograd.grad(loss, [*model.blocks.parameters()])
    assert all(map(torch.equal, first, second))


# Attention


class Attends(nn.Module):
    """A block whose attention is a function of queries, keys and values ``[B, heads, S, D]``."""

    def __init__(self, attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv, self.out, self.attention = nn.Linear(H, 3 * H), nn.Linear(H, H), attention

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, H // 2).permute(2, 0, 3, 1, 4)
        return x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))


def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1) + F.scaled_dot_product_attention(v, q, k)


def own_checkpoint(reentrant: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: checkpoint(F.scaled_dot_product_attention, q, k, v, use_reentrant=reentrant)


def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score - (i - j).abs())


WRAPPED: Any = {"wrap_inductor_compiled_regions": True}
KINDS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], bool]] = {
    "several": (twice, True),
    "own checkpoint": (own_checkpoint(False), True),
    "own reentrant checkpoint": (own_checkpoint(True), True),
    "flex": (flex, True),
    "compiled flex": (torch.compile(flex, backend="aot_eager"), True),
    "compiled by inductor": (shared_attention(torch.compile(twice, options=WRAPPED)), True),
    "softmax": (lambda q, k, v: (q @ k.mT).softmax(-1) @ v, False),
}
"""Attention functions, and whether there is an operator to keep."""


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.full) if "inductor" in k else k for k in KINDS])
def test_kinds_of_attention(kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Attention in any form has the gradients of no recompute, and is kept if it is an operator."""
    monkeypatch.setattr(sys.modules[flex_attention.__module__], "_validate_device", lambda *_: None)  # refuses CPUs
    caplog.set_level("INFO")
    torch._dynamo.reset()
    kept: list[str] = []
    returned = KeepMode._unpack
    counted = staticmethod(lambda *args: (kept.append("1"), returned(*args))[1])
    monkeypatch.setattr(KeepMode, "_unpack", counted)
    attention, is_operator = KINDS[kind]
    model, x = nn.Sequential(Attends(attention), Attends(attention)), randn(2, 12, H)

    def step(checkpointing: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        with prepare(model, activation_checkpointing=checkpointing):
            return gradients(model, x)

    true = step(None)
    for _ in range(3):
        found = step(ActivationCheckpointing("Attends", keep="attention"))
        assert all(torch.equal(found[name], true[name]) for name in true)
    assert bool(kept) == is_operator
    assert ("nothing was kept" in caplog.text) != is_operator


def test_weights_of_attention() -> None:
    """A function of the user's that returns weights beside its output has them in the outputs and in the loss."""

    def weighted(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        weights = (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT).softmax(-1)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2), weights

    AttentionInterface.register("weighted", weighted)
    model, found = tiny_llama(), []
    model.set_attn_implementation("weighted")
    for policy in (None, ActivationCheckpointing(), ActivationCheckpointing(keep="attention")):
        with prepare(model, tiling=None, activation_checkpointing=policy):
            output = model(input_ids=IDS, labels=IDS, output_attentions=True)
            loss = output.loss + sum(weights.square().sum() for weights in output.attentions)
            found.append(torch.autograd.grad(loss, list(model.parameters())))
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0], found[2]))


BAD: list[tuple[Any, str]] = [
    ("aten.mm.default", r"keep='aten\.mm\.default' must be 'attention', or a list"),
    (["aten.mmm.default"], r"keep names 'aten.mmm.default', which is no operator of torch.ops: write namespace"),
    ([7], "keep names 7, which is no operator"),
    (print, "must be 'attention', or a list of operators"),
]


@pytest.mark.parametrize(("keep", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_policies(keep: Any, message: str) -> None:
    """A bad policy is an error with the value and the remedy, before the model is changed or in the first step."""
    model = TinyLM()
    with (
        pytest.raises(ValueError, match=message),
        prepare(model, activation_checkpointing=ActivationCheckpointing(keep=keep)),
    ):
        model(IDS)
    assert not any("forward" in vars(module) for module in model.modules())


def behind(m: Any, x: Tensor) -> Tensor:
    """Attention whose arguments depend on attributes."""
    query, value = m.gate(x * m.factor)[:, None], m.up(x)[:, None]
    return x + m.down(F.scaled_dot_product_attention(query, value, value, m.mask)[:, 0])


CHANGES: dict[str, Callable[[Any], Any]] = {
    "mask": lambda m: setattr(m, "mask", torch.full((24, 24), -1e9).triu(1)),
    "no mask": lambda m: setattr(m, "mask", None),
    "factor": lambda m: setattr(m, "factor", 3.0),
    "query": lambda m: m.gate.weight.data.mul_(2),
    "value": lambda m: m.up.weight.data.mul_(2),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("keep", ["attention", ["aten.addmm.default"]], ids=str)
def test_a_change_in_front_of_what_is_kept(keep: Any, change: str) -> None:
    """What a kept operator is given is compared: its output is that of the forward pass in any case."""
    model = nn.Sequential(Coded(behind, bias=True), Coded(behind, bias=True))
    for block in model:
        block.factor, block.mask = 1.0, torch.zeros(24, 24)
    with prepare(model, tiling=None, activation_checkpointing=ActivationCheckpointing(["Coded"], keep=keep)):
        for step in range(1, 4):
            loss = model(randn(2, 24, H)).square().mean()
            if step < 3:
                loss.backward()
        CHANGES[change](model[0])
        with pytest.raises(RuntimeError, match="computes different values"):
            loss.backward()
