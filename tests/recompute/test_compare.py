"""The comparison of each recompute with its forward pass: what it must see, and what is rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from lt_tiled import ActivationCheckpointing, prepare, tile
from lt_tiled.recompute.compare import EPS, FEW, ROWS, VERDICT, Fingerprints, fingerprint, rows_that_differ
from tests.meters import LiveBytes
from tests.models import Coded, GatedMLP, H
from tests.parity import EXACT, Reordered, gradients, randn, reference, worst

OTHER_VALUES = r"The recompute of .*GatedMLP.* computes different values"
WIDTH, TOKENS = 128, 512


class Attention(nn.Module):
    """Attention in documents of 32 tokens, with a residual stream: its output is what an anchor saves."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        documents = torch.arange(TOKENS) // 32
        self.mask = (documents[:, None] == documents).tril()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(1, TOKENS, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)  # [B, heads, S, D] each
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        return x + self.o_proj(y.transpose(1, 2).flatten(2))


def mask_of_one_document(m: Attention) -> None:
    m.mask[64:96, :96] = torch.ones(32, 96, dtype=torch.bool).tril(64)  # it sees the two documents before it


def larger_projection(m: Attention) -> None:
    m.o_proj.weight.data.mul_(1.1)


def half_a_unit(m: Attention) -> None:
    for weight in m.parameters():
        weight.data.mul_(1 + torch.finfo(weight.dtype).eps / 2 * torch.randn_like(weight).sign())


ROUNDING: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "nothing": nullcontext,
    "another kernel": lambda: sdpa_kernel(SDPBackend.MATH),
    "another order of sums": lambda: Reordered("features", "tokens"),
}


@pytest.mark.low_precision
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_a_change(dtype: torch.dtype) -> None:
    """The mask of one document of sixteen and a projection that is off by 10 % are noticed, and rounding is not."""
    torch.manual_seed(0)
    model, x = Attention().to(dtype), torch.randn(1, TOKENS, WIDTH, dtype=dtype)

    def differs(now: Tensor) -> bool:
        return rows_that_differ(before, fingerprint(now), EPS[dtype]) > FEW

    with torch.no_grad():
        before = fingerprint(model(x))
        for name, around in ROUNDING.items():
            with around():
                assert not differs(model(x)), name
        for change, is_noticed in ((half_a_unit, False), (mask_of_one_document, True), (larger_projection, True)):
            changed = copy.deepcopy(model)
            change(changed)
            assert differs(changed(x)) == is_noticed, change.__name__


@pytest.mark.parametrize("value", [7.0, torch.nan, torch.inf, -torch.inf])
def test_rows(value: float) -> None:
    """As many rows as go to other experts may have any other value, NaN and infinity too; one more may not. NaN equals
    NaN, and infinity itself, and other rows are still compared.
    """
    x = torch.randn(ROWS, WIDTH)
    before = fingerprint(x)
    for changed in (FEW, FEW + 1):
        now = before.clone()
        now[:changed] = value
        assert rows_that_differ(before, now, EPS[torch.bfloat16]) == changed
    x[:100] = value
    before = fingerprint(x)
    assert rows_that_differ(before, before.clone(), EPS[torch.float32]) == 0
    assert rows_that_differ(before, fingerprint(x * 1.1), EPS[torch.float32]) > FEW


def test_a_conjugate_that_a_block_saves() -> None:
    """A complex tensor whose conjugate torch has not computed yet, as of a Fourier transform, is compared, too."""
    model = nn.ModuleList([Coded(lambda m, x: (torch.fft.fft(m.mlp(x)).conj() * torch.fft.fft(x).conj()).real)])
    x = randn(2, 40, H)
    expected = gradients(model[0], x)
    with prepare(model, activation_checkpointing=ActivationCheckpointing(["0"])):
        for _ in range(4):  # each compares other tensors
            assert worst(gradients(model[0], x), expected) < 1e-6


def test_flags_are_compared_exactly() -> None:
    """Also in a block of bfloat16 one flag of a row of thousands counts. Where one of several raises, all do."""
    mask, pairs = torch.rand(64, 2**14) < 0.5, []
    for raises in (False, True):
        pairs.append([Fingerprints("Mask", "", raises, autocast=torch.bfloat16) for _ in range(2)])
        for prints, taken in zip(pairs[-1], (mask, mask.index_fill(1, torch.tensor([5]), True)), strict=True):
            prints.take(0, taken)
    with pytest.raises(RuntimeError, match="recompute of Mask computes different values"):
        VERDICT.read(pairs)


def test_what_is_taken() -> None:
    """Each of more tiles than rows gives one row, and the result of a collective is waited for."""
    prints, arriving = Fingerprints("MLP", "", tiles=2 * ROWS), AsyncCollectiveTensor(torch.ones(3, 4))
    prints.take(0, arriving)
    assert len(prints.at(0)) == 1
    assert arriving.completed


def test_rows_from_all_over() -> None:
    """About so many rows are taken, without a copy of all of them, and the last token is among them."""
    x = torch.arange(3.0 * 999 * 8).view(3, 8, 999).transpose(1, 2)
    all_of_them = fingerprint(x, rows=3000)
    with LiveBytes() as meter:
        few = fingerprint(x, rows=100)
    assert meter.peak < x.nbytes / 4
    assert 90 < len(few) < 110
    assert len(all_of_them) == 3 * 999
    assert few[-1] == all_of_them[-1]


# The verdict


@pytest.mark.usefixtures("float64")
def test_one_verdict() -> None:
    """Changes of several modules raise once, with the names of all, and the next step is right."""
    model, x = nn.Sequential(GatedMLP(), GatedMLP(), GatedMLP()), randn(1, 40, H)
    for part in model:
        tile(part, num_shards=4)
    y = model(x)
    for part in model[1:]:
        part.act = torch.sin
    with pytest.raises(RuntimeError, match=OTHER_VALUES):
        y.sum().backward()
    assert not VERDICT.pairs
    model.zero_grad()
    plain = nn.Sequential(GatedMLP(), GatedMLP(act=torch.sin), GatedMLP(act=torch.sin))
    plain.load_state_dict(model.state_dict())
    assert worst(gradients(model, x), reference(plain, x)) < EXACT


def test_each_sample_has_its_own_unit() -> None:
    """What is rounding in a 16-bit block is a change in one of float32, in the same verdict."""
    pairs = []
    for dtype in (torch.bfloat16, torch.float32):
        pair = (Fingerprints(str(dtype), "", autocast=dtype), Fingerprints("", ""))
        for prints, value in zip(pair, (1.0, 1.01), strict=True):
            prints.take(0, torch.full((64,), value))
        pairs.append(pair)
    for order in (pairs, pairs[::-1]):
        with pytest.raises(RuntimeError, match=r"The recompute of torch.float32 computes"):
            VERDICT.read(list(order))


def test_the_unit_of_a_block() -> None:
    """The least precise dtype inside a block decides what is rounding, also where what is compared is of float32."""
    module = Coded(lambda m, x: (m.mlp(x).bfloat16().sin().float() * m.scale).square())
    with prepare(nn.ModuleList([module]), activation_checkpointing=ActivationCheckpointing(["0"])):
        for _ in range(4):  # each compares other tensors, too
            module.scale = 1.0
            y = module(randn(2, 40, H))
            module.scale = 1.003
            y.sum().backward()


def test_a_backward_pass_inside_another() -> None:
    """Samples of a backward pass are compared also if another one, of torch's reentrant checkpoint, ran inside it."""
    inside, around = tile(GatedMLP(), num_shards=4), tile(GatedMLP(), num_shards=4)
    y = around(checkpoint(inside, inside(randn(1, 40, H)), use_reentrant=True))
    around.act = torch.sin
    with pytest.raises(RuntimeError, match=OTHER_VALUES):
        y.sum().backward()


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        raise ArithmeticError


def test_a_backward_pass_that_fails() -> None:
    """A backward pass that ends with an exception leaves no sample to the next one."""
    module, x = tile(GatedMLP(), num_shards=4), randn(1, 40, H)
    y = module(_Fails.apply(x))
    module.act = torch.sin
    with pytest.raises(ArithmeticError):
        y.sum().backward()
    module(x).sum().backward()
