"""The tiled cross-entropy: equal to the untiled one, logits never whole, no logits computed twice."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lt_tiled import tiled_linear_cross_entropy, tiled_token_logprobs
from lt_tiled.loss.autograd import tiled_loss
from lt_tiled.loss.cross_entropy import CrossEntropy
from tests.meters import LiveBytes, flops, peak_bytes
from tests.models import H
from tests.parity import EXACT, less_accurate, randn

VOCAB = 37
OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1},
    {"logit_softcap": 2.0},
    {"z_loss": 1e-2},
    {"label_smoothing": 0.2, "logit_softcap": 3.0, "z_loss": 1e-2},
    {"ignore_index": 5},
]


def untiled(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, reduction: str = "mean", **options: Any
) -> Tensor:
    """What torch computes from whole logits."""
    cap, z_loss, ignore = options.get("logit_softcap"), options.get("z_loss", 0.0), options.get("ignore_index", -100)
    logits = F.linear(hidden, weight, bias)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    flat, targets = logits.flatten(0, -2), labels.flatten()
    smoothing = options.get("label_smoothing", 0.0)
    if not z_loss and reduction != "none":
        return F.cross_entropy(flat, targets, ignore_index=ignore, label_smoothing=smoothing, reduction=reduction)
    losses = F.cross_entropy(flat, targets, ignore_index=ignore, label_smoothing=smoothing, reduction="none")
    losses = losses + z_loss * flat.logsumexp(-1).square() * (targets != ignore)
    return {"none": losses.view(labels.shape), "sum": losses.sum(), "mean": losses.sum() / (targets != ignore).sum()}[
        reduction
    ]


def some(
    dtype: torch.dtype = torch.float64, tokens: int = 38, vocab: int = VOCAB, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, labels of which the first tile's are all ignored, and bias."""
    labels = torch.randint(0, vocab, (2, tokens // 2), generator=torch.Generator().manual_seed(4))
    labels[0, :9] = -100
    return (
        randn(2, tokens // 2, H, dtype=dtype, device=device),
        randn(vocab, H, seed=1, dtype=dtype, device=device),
        labels.to(device),
        randn(vocab, seed=2, dtype=dtype, device=device),
    )


def differentiated(loss: Tensor, inputs: list[Tensor], scale: float = 1.0) -> list[Tensor]:
    """The loss and its gradients, for a gradient of the loss that is no one."""
    incoming = torch.linspace(0.5, 2.0, loss.numel(), dtype=loss.dtype, device=loss.device).view(loss.shape) * scale
    return [loss.detach(), *torch.autograd.grad(loss, inputs, incoming)]


def named(values: Iterable[Tensor]) -> dict[str, Tensor]:
    """Name values by their places."""
    return {str(index): value for index, value in enumerate(values)}


def error(found: list[Tensor], true: list[Tensor]) -> float:
    return max(
        float(((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-300)).detach())
        for a, b in zip(found, true, strict=True)
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equal_to_torch(options: dict[str, Any], reduction: Any, device: str) -> None:
    """Loss and gradients of hidden states, weight and bias are those of torch on whole logits (float64), for each
    option and reduction.
    """
    hidden, weight, labels, bias = some(device=device)
    labels[labels == -100] = options.get("ignore_index", -100)
    inputs = [hidden, weight, bias]
    true = differentiated(untiled(hidden, weight, labels, bias, reduction, **options), inputs)
    found = differentiated(
        tiled_linear_cross_entropy(hidden, weight, labels, bias, num_shards=5, reduction=reduction, **options), inputs
    )
    assert error(found, true) <= 1e-12


@pytest.mark.low_precision
@pytest.mark.parametrize("scale", [1 / 24, 1.0, 1024.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_precisions_and_scales(dtype: torch.dtype, scale: float, device: str) -> None:
    """In each dtype and at any scale of the loss, it and its gradients are as near to float64 as untiled. A GPU adds
    16-bit products to a float32 sum, others in parts.
    """
    hidden, weight, labels, bias = some(dtype, 1000, 1001, device)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    true = differentiated(untiled(exact[0], exact[1], labels, exact[2]), exact, scale)
    plain = differentiated(untiled(hidden, weight, labels, bias), [hidden, weight, bias], scale)
    found = differentiated(
        tiled_linear_cross_entropy(hidden, weight, labels, bias, num_shards=5), [hidden, weight, bias], scale
    )
    assert [t.dtype for t in found] == [torch.float32, dtype, dtype, dtype]
    assert less_accurate(*map(named, (found, plain, true)), dtype) == {}


@pytest.mark.low_precision
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast(reduction: Any, device: str) -> None:
    """Under autocast the projection runs in its dtype, also where the backward, outside of it, computes logits
    again.
    """
    hidden, weight, labels, bias = some(torch.float32, device=device)
    found = []
    for function in (untiled, tiled_linear_cross_entropy):
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = function(hidden, weight, labels, bias, reduction=reduction)
        found.append(differentiated(loss, [hidden, weight, bias]))
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    true = differentiated(untiled(exact[0], exact[1], labels, exact[2], reduction).double(), exact)
    assert less_accurate(named(found[1]), named(found[0]), named(true), torch.bfloat16) == {}


@pytest.mark.low_precision
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [0, 38])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_label_that_counts(reduction: Any, tokens: int, dtype: torch.dtype, device: str) -> None:
    """With all labels ignored, or no tokens at all, loss and gradients are torch's: a mean of nan, and gradients of
    zeros.
    """
    hidden, weight, labels, bias = some(dtype, tokens, device=device)
    labels.fill_(-100)
    true = differentiated(untiled(hidden, weight, labels, bias, reduction), [hidden, weight, bias])
    found = differentiated(
        tiled_linear_cross_entropy(hidden, weight, labels, bias, num_shards=3, reduction=reduction),
        [hidden, weight, bias],
    )
    for a, b in zip(found, true, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


def test_a_sum_divided_by_no_labels() -> None:
    """Gradients stay zeros, as torch's, where the caller divides a sum by the number of labels, which is 0."""
    hidden, weight, labels, _ = some(torch.float32)
    (tiled_linear_cross_entropy(hidden, weight, labels.fill_(-100), reduction="sum") / 0).backward()
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_labels_are_shifted_once() -> None:
    """``shift=True`` lets token t predict label t + 1, as Hugging Face's causal loss does on whole logits."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    hidden, weight, labels, _ = some(torch.float32)
    true = ForCausalLMLoss(F.linear(hidden, weight), labels, VOCAB)
    torch.testing.assert_close(tiled_linear_cross_entropy(hidden, weight, labels, num_shards=4, shift=True), true)


def test_count() -> None:
    """A count to divide by takes the place of the labels that count here, in the loss and in its gradients."""
    hidden, weight, labels, _ = some()
    true = differentiated(untiled(hidden, weight, labels, reduction="sum") / 100, [hidden, weight])
    for count in (100, torch.tensor(100)):
        loss = tiled_linear_cross_entropy(hidden, weight, labels, count=count)
        assert error(differentiated(loss, [hidden, weight]), true) <= 1e-12


@pytest.mark.parametrize("ignored", [0, 32])
@pytest.mark.parametrize("frozen", [(), (0,), (1,)])
def test_costs_no_more_flops(frozen: tuple[int, ...], ignored: int) -> None:
    """FLOPs of the loss forward and backward are those of the untiled head for the tokens whose label counts, also if a
    part is frozen.
    """
    hidden, weight, labels, _ = some(torch.float32, tokens=64)
    labels.clamp_min_(0).flatten()[torch.arange(ignored) * 2] = -100
    inputs = [t for i, t in enumerate((hidden, weight)) if i not in frozen]
    for i in frozen:
        (hidden, weight)[i].requires_grad_(False)
    full = flops(lambda: differentiated(untiled(hidden, weight, labels), inputs))
    tiled = flops(lambda: differentiated(tiled_linear_cross_entropy(hidden, weight, labels, num_shards=8), inputs))
    assert tiled * 64 == full * (64 - ignored)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_host_reads_one_number(reduction: Any) -> None:
    """Forward and backward ask for one number, that of the labels that count. The comparison of the recompute reads a
    list, once.
    """

    class Reads(TorchDispatchMode):
        found = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.found += func.overloadpacket in (torch.ops.aten.nonzero, torch.ops.aten._local_scalar_dense)
            return func(*args, **(kwargs or {}))

    hidden, weight, labels, bias = some()
    with Reads() as reads:
        loss = tiled_linear_cross_entropy(hidden, weight, labels, bias, reduction=reduction, num_shards=3)
        torch.autograd.grad(loss.sum(), [hidden, weight, bias])
    assert reads.found == 1


def peak_in_logits(dtype: torch.dtype, **options: Any) -> float:
    """The peak of a loss whose hidden states and weights want no gradient of their own memory, in tiles of logits."""
    tokens, tile, vocab = 1024, 256, options.pop("vocab", 32768)
    hidden, weight = randn(tokens, 4, dtype=dtype), randn(vocab, 4, seed=1, dtype=dtype)
    labels = torch.arange(tokens) % vocab
    labels[: options.pop("ignored", 0)] = -100
    run = partial(tiled_linear_cross_entropy, hidden, weight, labels, num_shards=tokens // tile, **options)
    return peak_bytes(lambda: differentiated(run(), [hidden, weight])) / (tile * vocab * dtype.itemsize)


@pytest.mark.table(".*(float32|softcap|ignored).*")
@pytest.mark.low_precision
@pytest.mark.parametrize(
    ("dtype", "options", "most"),
    [
        (torch.float32, {}, 1.2),
        (torch.bfloat16, {}, 1.6),
        (torch.bfloat16, {"logit_softcap": 3.0}, 1.8),
        (torch.bfloat16, {"z_loss": 1e-2, "label_smoothing": 0.1}, 1.6),
        (torch.bfloat16, {"ignored": 512}, 1.6),
        (torch.bfloat16, {"vocab": 2048}, 2.5),
    ],
    ids=str,
)
def test_peak_in_tiles_of_logits(dtype: torch.dtype, options: dict[str, Any], most: float) -> None:
    """A loss holds one tile of logits in their dtype, a part of it in float32, and the small gradients."""
    assert 1 < peak_in_logits(dtype, **options) <= most


@pytest.mark.low_precision
@pytest.mark.parametrize("device", ["second", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_peak_of_an_accelerator(device: str) -> None:
    """The most bytes that a bfloat16 loss allocates are less than two tiles of logits and the weight's gradients."""
    tokens, hidden_size, vocab, shards = (8192, 64, 65536, 8) if device == "cuda" else (512, 16, 2048, 8)
    hidden = torch.randn(tokens, hidden_size, device=device).bfloat16().requires_grad_()
    weight = torch.randn(vocab, hidden_size, device=device).bfloat16().requires_grad_()
    labels = torch.randint(vocab, (tokens,), device=device)
    tiled_linear_cross_entropy(hidden, weight, labels, num_shards=shards)  # allocates cuBLAS's workspace
    module = torch.get_device_module(device)
    module.synchronize()
    module.reset_peak_memory_stats()
    before = module.memory_allocated()
    tiled_linear_cross_entropy(hidden, weight, labels, num_shards=shards).backward()
    tile, gradients = 2 * tokens // shards * vocab, 10 * vocab * hidden_size + 4 * tokens * hidden_size
    assert module.max_memory_allocated() - before <= 2 * tile + gradients


@pytest.mark.low_precision
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_of_any_head(dtype: torch.dtype) -> None:
    """A head that is not one product holds its logits and a copy, in which the gradient is formed."""
    hidden, weight = randn(1024, 4, dtype=dtype), randn(32768, 4, seed=1, dtype=dtype)

    def run() -> None:
        loss = tiled_loss(lambda x, w: F.linear(x, *w) * 0.5, hidden, torch.arange(1024), [weight], CrossEntropy(), 4)
        torch.autograd.grad(loss, [hidden, weight])

    assert 2 < peak_bytes(run) / (256 * 32768 * dtype.itemsize) <= 2.1


@pytest.mark.full
def test_auto_tiles_do_not_raise_the_peak() -> None:
    """With the head of a model of 1B weights, the peak of ``"auto"`` is that of far smaller tiles, whose hidden states
    are fewer.
    """
    peaks = []
    with FakeTensorMode():
        hidden = torch.zeros(8192, 2048, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.zeros(128256, 2048, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.zeros(8192, dtype=torch.long)
        for shards in ("auto", 64):
            run = partial(tiled_linear_cross_entropy, hidden, weight, labels, num_shards=shards)
            peaks.append(peak_bytes(run))
    assert 0 <= peaks[0] - peaks[1] < 1024 * 2048 * 2


def test_nothing_is_written_to_grad_and_no_grad_computes_the_loss_alone() -> None:
    """The forward writes no ``.grad``; under ``no_grad`` only the logits' products are computed."""
    hidden, weight, labels, _ = some(torch.float32)
    loss = tiled_linear_cross_entropy(hidden, weight, labels, num_shards=4)
    assert hidden.grad is None
    assert weight.grad is None
    with torch.no_grad():
        alone = flops(lambda: tiled_linear_cross_entropy(hidden, weight, labels, num_shards=4))
        assert not tiled_linear_cross_entropy(hidden, weight, labels, num_shards=4).requires_grad
    assert alone == 2 * int((labels >= 0).sum()) * VOCAB * H
    assert loss.requires_grad


def test_backward_twice_and_accumulation() -> None:
    """``retain_graph`` gives the same gradients twice; a weighted sum of losses is differentiated as such."""
    hidden, weight, labels, _ = some()
    loss = tiled_linear_cross_entropy(hidden, weight, labels, num_shards=4)
    first = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(loss, [hidden, weight]), strict=True))
    weighted = [
        torch.autograd.grad(
            0.3 * f(hidden, weight, labels) + 0.7 * f(hidden * 2, weight, labels, reduction="sum"), [hidden, weight]
        )
        for f in (untiled, tiled_linear_cross_entropy)
    ]
    assert error(list(weighted[1]), list(weighted[0])) <= 1e-12


def test_token_logprobs() -> None:
    """``tiled_token_logprobs`` gives each label's log-probability and the gradients of a loss built on them (DPO's);
    zero where ignored.
    """
    hidden, weight, labels, _ = some()
    logprobs = F.linear(hidden, weight).log_softmax(-1).gather(-1, labels.clamp_min(0)[..., None]).squeeze(-1) * (
        labels >= 0
    )
    found = tiled_token_logprobs(hidden, weight, labels, num_shards=4)
    results = [
        torch.autograd.grad(-F.logsigmoid(0.1 * (lp[0] - lp[1]).sum()), [hidden, weight]) for lp in (logprobs, found)
    ]
    assert error([found.detach()], [logprobs.detach()]) <= 1e-12
    assert error(list(results[1]), list(results[0])) <= 1e-12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label_smoothing": 1.5}, r"label_smoothing=1.5 must be between 0 and 1"),
        ({"logit_softcap": 0.0}, r"logit_softcap=0.0 must be positive"),
        ({"z_loss": -1.0}, r"z_loss=-1.0 must be finite and at least 0"),
        ({"ignore_index": 1.5}, r"ignore_index=1.5 must be an integer"),
        ({"reduction": "max"}, r"reduction='max' must be"),
        ({"num_shards": 0}, r"num_shards=0 must be"),
        ({"reduction": "sum", "count": 3}, r"count=3 divides a mean"),
        ({"count": "local"}, r"count='local' must be a positive number"),
        ({"count": 0}, r"count=0 must be a positive number"),
        ({"labels": torch.zeros(2, 3, dtype=torch.long)}, r"shapes \[\[2, 19, 16\], \[37, 16\], \[2, 3\], \[37\]\]"),
        ({"weight": torch.zeros(5, 7)}, r"\[5, 7\].* must have \[\.\.\., H\], \[V, H\]"),
        ({"bias": torch.zeros(3)}, r"\[3\]\] and must have"),
        ({"labels": torch.zeros(2, 19)}, r"labels are torch.float32 and must be integers"),
    ],
)
def test_bad_input(change: dict[str, Any], message: str) -> None:
    """Values out of bounds and shapes that do not fit are refused with the bound."""
    hidden, weight, labels, bias = some()
    with pytest.raises(ValueError, match=message):
        tiled_linear_cross_entropy(**({"hidden": hidden, "weight": weight, "labels": labels, "bias": bias} | change))


def test_labels_that_are_changed_before_the_backward_pass() -> None:
    """Labels that the backward pass needs, and that were changed in place since, raise as in torch."""
    hidden, weight, labels, bias = some()
    loss = tiled_linear_cross_entropy(hidden, weight, labels, bias, reduction="none")
    labels.fill_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()


def test_create_graph() -> None:
    """A backward pass with ``create_graph=True`` is refused with the remedy."""
    hidden, weight, labels, bias = some()
    loss = tiled_linear_cross_entropy(hidden, weight, labels, bias)
    with pytest.raises(RuntimeError, match=r"cannot be differentiated \(create_graph=True\).*loss=False"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_a_transform() -> None:
    """Under ``torch.func`` the loss is the untiled one."""
    hidden, weight, labels, bias = (t.detach() for t in some())
    functions = partial(tiled_linear_cross_entropy, num_shards=4), untiled
    found, true = (torch.func.jvp(lambda x, f=f: f(x, weight, labels, bias), (hidden,), (hidden,)) for f in functions)
    torch.testing.assert_close(found, true, rtol=EXACT, atol=EXACT)


@pytest.mark.low_precision
def test_float16_over_many_tokens() -> None:
    """In float16 a mean over more tokens than its range holds has torch's gradients, in any number of tiles."""
    torch.manual_seed(0)
    hidden = torch.rand(80000, 2).half().requires_grad_()
    weight = torch.randn(3, 2).half().requires_grad_()
    labels = torch.zeros(80000, dtype=torch.long)
    scale = 65536.0  # a gradient scaler's
    exact = [hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
    true = torch.autograd.grad(F.cross_entropy(F.linear(*exact), labels) * scale, exact)
    full = torch.autograd.grad(untiled(hidden, weight, labels) * scale, [hidden, weight])
    for shards in (1, 16):
        loss = tiled_linear_cross_entropy(hidden, weight, labels, num_shards=shards) * scale
        found = torch.autograd.grad(loss, [hidden, weight])
        assert less_accurate(*map(named, (found, full, true)), torch.float16) == {}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_impossible_labels(smoothing: float) -> None:
    """A label whose logit is -inf has torch's loss, inf, and others have theirs."""
    hidden, weight, labels, bias = some()
    with torch.no_grad():
        bias[labels.flatten()[-1]] = -torch.inf
    options = {"reduction": "none", "label_smoothing": smoothing}
    found = tiled_linear_cross_entropy(hidden, weight, labels, bias, num_shards=3, **options)
    torch.testing.assert_close(found, untiled(hidden, weight, labels, bias, **options), equal_nan=True)
    assert bool(found.isinf().any())


def test_a_random_head() -> None:
    """A head with dropout draws the same in the forward and where the backward of ``"none"`` computes logits again."""
    hidden, weight, labels, _ = some()
    found = []
    for reduction in ("sum", "none"):
        torch.manual_seed(0)
        kind = CrossEntropy(reduction=reduction)
        loss = tiled_loss(lambda x, w: F.linear(F.dropout(x, 0.5), *w), hidden, labels, [weight], kind, 3).sum()
        torch.manual_seed(1)
        found.append([loss, *torch.autograd.grad(loss, [hidden, weight])])
    assert error(found[1], found[0]) <= 1e-12


@pytest.mark.low_precision
def test_weights_without_dimensions() -> None:
    """A head with a scale of no dimension in bfloat16 gets a gradient for it."""
    hidden, weight, labels, _ = some(torch.bfloat16)
    scale = torch.tensor(0.7, dtype=torch.bfloat16, requires_grad=True)
    kind = CrossEntropy()
    loss = tiled_loss(lambda x, w: F.linear(x, w[0]) * w[1], hidden, labels, [weight, scale], kind, 3)
    found = torch.autograd.grad(loss, scale)

    def full(hidden: Tensor, weight: Tensor, scale: Tensor) -> Any:
        logits = F.linear(hidden, weight) * scale
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return torch.autograd.grad(F.cross_entropy(wide.flatten(0, 1), labels.flatten()), scale)

    exact = [t.detach().double().requires_grad_() for t in (hidden, weight, scale)]
    assert less_accurate(*map(named, (found, full(hidden, weight, scale), full(*exact))), torch.bfloat16) == {}


@pytest.mark.low_precision
@pytest.mark.parametrize("grad", [False, True])
def test_autocast_keeps_no_casts(grad: bool) -> None:
    """Of several losses in one autocast context, no copy of the weights outlives its loss."""
    hidden, weight, labels, _ = some(torch.float32)
    with LiveBytes() as meter, torch.autocast("cpu", dtype=torch.bfloat16), torch.set_grad_enabled(grad):
        alive = []
        for _ in range(3):
            tiled_linear_cross_entropy(hidden, weight, labels)
            alive.append(meter.now)
    assert alive[2] == alive[0]
