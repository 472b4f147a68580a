"""The tiled Function gives the untiled loss and gradients, row by row of what others get wrong."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from lt_tiled import TwoThreadsError, prepare, tile, untile
from lt_tiled.modules.patch import get_patch
from lt_tiled.tiling.call import LargestCall
from lt_tiled.tiling.patch import TiledPatch
from lt_tiled.tiling.recompute import RandomState
from lt_tiled.tiling.weights import _USED
from tests.interrupts import interrupted_at
from tests.models import Block, GatedMLP, H, PlainMLP, RoutedMLP, tiny_llama
from tests.parity import (
    EXACT,
    MIXED,
    TIMES,
    errors,
    gradients,
    less_accurate,
    randn,
    reference,
    spread,
    worst,
)
from tests.processes import LIMIT

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def check(
    module: nn.Module,
    *inputs: Tensor,
    loss: Callable[[Any], Tensor] = spread,
    call: Callable[..., Any] | None = None,
    part: nn.Module | None = None,
    device: str = "cpu",
    **tiling: object,
) -> None:
    """Assert that a module, or a part of it, in tiles gives the untiled loss and gradients."""
    run = partial(gradients, module, *inputs, loss=loss, call=call)
    true = run()
    tile(module.to(device) if part is None else part, **({"num_shards": 4} | tiling))
    for _ in range(2):  # the second call skips what the first has learnt
        assert worst(run(device=device), true) < EXACT


@pytest.mark.parametrize(
    "module", [GatedMLP(), GatedMLP(bias=True), GatedMLP(act=lambda x: F.relu(x).square()), PlainMLP(), nn.LayerNorm(H)]
)
def test_any_module_and_activation(module: nn.Module, device: str) -> None:
    """Gated or not, with bias or not, any callable as activation: loss and all gradients are the untiled ones."""
    check(copy.deepcopy(module).double(), randn(1, 37, H), device=device)


@pytest.mark.parametrize("shape", [(3, 21, H), (64, H), (2, 5, 7, H), (1, 64, H)])
def test_leading_shapes(shape: tuple[int, ...], device: str) -> None:
    """Batches larger than one, flat tokens and more leading dimensions give the untiled result."""
    check(GatedMLP(), randn(*shape), device=device)


def test_the_module_sees_its_own_rank() -> None:
    """Tiles of ``[B, S, H]`` reach the module as ``[1, t, H]``, those of ``[T, H]`` as ``[t, H]``."""
    seen: list[torch.Size] = []

    class Spy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.shape)
            return x * 2

    spy = tile(Spy(), num_shards=3, self_check=False)
    spy(torch.ones(2, 6, H))
    assert set(seen) == {(1, 4, H)}
    seen.clear()
    spy(torch.ones(12, H))
    assert set(seen) == {(4, H)}


@pytest.mark.parametrize("shards", [2, 3, 7, 36, 37, 1000])
def test_shard_counts(shards: int) -> None:
    """An uneven last tile, and more shards than tokens, give the untiled result."""
    check(GatedMLP(), randn(1, 37, H), num_shards=shards)


@pytest.mark.parametrize("tokens", [1, 5, 36, 100])
def test_tile_tokens(tokens: int) -> None:
    """Tiles said in tokens, of one token or longer than the input, give the untiled result."""
    check(GatedMLP(), randn(1, 37, H), num_shards="auto", tile_tokens=tokens)


@pytest.mark.parametrize("tokens", [0, 1, 2, 3])
def test_almost_no_tokens(tokens: int, device: str) -> None:
    """Inputs of no token and of one to three give the untiled result."""
    check(GatedMLP(), randn(2, tokens, H), device=device, num_shards=8)


def test_noncontiguous_input_and_gradient() -> None:
    """A transposed input, and a gradient that arrives transposed, give the untiled gradients."""
    x = torch.randn(H, 5, 8).transpose(0, 2).requires_grad_()
    assert not x.is_contiguous()
    check(GatedMLP(), x, loss=lambda y: spread(y.transpose(0, 1).contiguous()))


def test_expanded_gradient(device: str) -> None:
    """The gradient of a sum, one number seen through strides of zero, gives the untiled gradients."""
    check(GatedMLP(), randn(2, 9, H), loss=torch.sum, device=device)


@pytest.mark.parametrize("out", [1, 5, 3 * H])
def test_output_width_unlike_input_width(out: int) -> None:
    """The output may be of another width than the input, one included."""
    check(PlainMLP(out=out), randn(2, 19, H))


def test_input_without_gradient(device: str) -> None:
    """Behind a frozen embedding the weights get their gradients, and the input none."""
    check(GatedMLP(), randn(2, 19, H).detach(), device=device)


def test_frozen_weights(device: str) -> None:
    """Frozen weights stay where they are and get no gradient; the input and the others get theirs."""
    module = GatedMLP()
    module.up.requires_grad_(False)
    check(module, randn(2, 19, H), device=device)
    assert module.up.weight.grad is None


def test_all_weights_frozen() -> None:
    """With every weight frozen the input still gets its gradient."""
    check(GatedMLP().requires_grad_(False), randn(2, 19, H))


def test_nothing_wants_a_gradient() -> None:
    """With frozen weights and an input without gradient the output wants none."""
    module = tile(GatedMLP().requires_grad_(False), num_shards=3)
    assert not module(torch.randn(2, 9, H)).requires_grad


def test_weight_tied_to_the_outside() -> None:
    """A weight that is used outside the tiled module too gets the gradients of both."""
    mlp = GatedMLP()
    check(mlp, randn(2, 19, H), call=lambda x: mlp(F.linear(x, mlp.down.weight @ mlp.gate.weight)))


@pytest.mark.parametrize("flat", [True, False])
def test_router_logits(flat: bool) -> None:
    """A tuple with router logits in either layout comes back in its order and shape, and gradients flow through both
    outputs, whatever is computed from them.
    """
    module, x = RoutedMLP(flat=flat), randn(2, 19, H)
    whole = module(x)
    check(module, x)
    tiled = module(x)
    assert [t.shape for t in tiled] == [t.shape for t in whole]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(tiled, whole, strict=True))


def test_router_logits_for_inputs_of_either_rank() -> None:
    """One module may see ``[T, H]`` in one call and ``[B, S, H]`` in the next."""
    module = RoutedMLP()
    check(module, randn(24, H), randn(2, 12, H), call=lambda *inputs: [module(x) for x in inputs])


def test_one_output_unused() -> None:
    """A loss that reads only the router's logits gives the router its gradient and the experts none."""
    check(RoutedMLP(), randn(1, 20, H), loss=lambda out: spread(out[1]))


def test_pytree_output() -> None:
    """Dictionaries, nested tuples and integer tensors come back as they are untiled."""

    class Rich(GatedMLP):
        def forward(self, x: Tensor) -> dict[str, object]:
            y = super().forward(x)
            return {"hidden": y, "more": (y.sum(-1),), "best": y.argmax(-1)}

    module = Rich()
    x = randn(2, 19, H)
    whole = module(x)
    check(module, x)
    tiled = module(x)
    assert torch.equal(tiled["best"], whole["best"])
    assert tiled["more"][0].shape == whole["more"][0].shape


def test_per_token_and_whole_arguments() -> None:
    """Arguments with one entry per token are cut with the hidden states, others are seen whole, and both get their
    gradients.
    """

    class Modulated(GatedMLP):
        def forward(self, x: Tensor, scale: Tensor, *, shift: Tensor, keep: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x * scale) * keep[..., None] + shift

    module, keep = Modulated(), torch.arange(38).view(2, 19) % 3 > 0
    inputs = randn(2, 19, H), randn(2, 19, 1, seed=1), randn(H, seed=2)
    check(module, *inputs, call=lambda x, scale, shift: module(x, scale, shift=shift, keep=keep), num_shards=5)


def test_hidden_states_by_keyword() -> None:
    """Hidden states that are passed by keyword are tiled too."""
    module = GatedMLP()
    check(module, randn(2, 19, H), call=lambda x: module(x=x))
    assert get_patch(module, TiledPatch).largest == LargestCall(38, 4)


def by_hand(module: nn.Module, x: Tensor, size: int) -> Tensor:
    """The module on one tile after the other, in plain autograd."""
    return torch.cat([module(part) for part in x.split(size, dim=1)], dim=1)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_dropout(checkpointed: bool, device: str) -> None:
    """The recompute draws the forward's dropout masks: gradients equal those of plain autograd over the same tiles and
    seed.
    """
    module, x = PlainMLP(dropout=0.3), randn(1, 40, H)
    module.act = nn.Sequential(nn.GELU(), nn.Dropout(0.2))
    torch.manual_seed(7)
    true = gradients(module, x, call=lambda x: by_hand(module, x, 10), device=device)
    tiled = tile(copy.deepcopy(module), num_shards=4)
    for _ in range(2):
        torch.manual_seed(7)
        call = (lambda x: checkpoint(tiled, x, use_reentrant=False)) if checkpointed else tiled
        assert worst(gradients(tiled, x, call=call, device=device), true) < EXACT


def test_dropout_leaves_the_generator_as_untiled_backward_does(device: str) -> None:
    """The backward's replay of random numbers does not move the generators of the host and of the device."""
    module = tile(PlainMLP(dropout=0.3), num_shards=4).to(device)
    y = module(randn(1, 40, H).to(device))
    before = RandomState.now(y.device)
    y.sum().backward()
    assert RandomState.now(y.device).same_as(before)


def test_lora_dropout(device: str) -> None:
    """LoRA layers of PEFT inside a tiled module, their dropout included, get the gradients of plain autograd over the
    same tiles.
    """
    from peft import LoraConfig, inject_adapter_in_model

    module = inject_adapter_in_model(
        LoraConfig(r=4, lora_dropout=0.25, target_modules=["gate", "up", "down"]), GatedMLP()
    ).double()
    for name, p in module.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p)
    x = randn(1, 40, H, dtype=torch.float64)
    torch.manual_seed(7)
    true = gradients(module, x, call=lambda x: by_hand(module, x, 10), device=device)
    assert any("lora_A" in name for name in true)
    assert not any("base_layer" in name for name in true)
    tile(module, num_shards=4)
    for _ in range(2):
        torch.manual_seed(7)
        assert worst(gradients(module, x, device=device), true) < 1e-12


@pytest.mark.low_precision
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_in_the_recompute(dtype: torch.dtype, device: str) -> None:
    """The recompute runs under the forward's autocast: input gradients are bit for bit those of plain autograd over the
    same tiles, and all are as near to float64 as the untiled module's.
    """
    module = GatedMLP().float()
    x = randn(1, 400, H, dtype=torch.float32)

    def under_autocast(run):
        def call(x: Tensor) -> Tensor:
            with torch.autocast(device, dtype=dtype):
                return run(x)

        return call

    true = gradients(module, x, call=under_autocast(lambda x: by_hand(module, x, 100)), device=device)
    exact, untiled = reference(module, x), gradients(module, x, call=under_autocast(module), device=device)
    tiled = tile(copy.deepcopy(module), num_shards=4)
    for _ in range(2):
        found = gradients(tiled, x, call=under_autocast(tiled), device=device)
        assert torch.equal(found["input 0"], true["input 0"])
        assert less_accurate(found, untiled, exact, dtype) == {}
    assert not torch.equal(gradients(module, x, device=device)["input 0"], true["input 0"])


@pytest.mark.low_precision
def test_autocast_does_not_lose_weight_gradients_of_a_later_short_call() -> None:
    """In one autocast region a tiled call and then a call too short to tile both give the weights their gradients."""
    module = GatedMLP().float()
    tiled = tile(copy.deepcopy(module), tile_tokens=8)
    long, short = randn(1, 40, H, dtype=torch.float32), randn(1, 6, H, seed=1, dtype=torch.float32)

    def call(m: nn.Module, enabled: bool = True):
        def run(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                return m(a), m(b)

        return run

    exact = copy.deepcopy(module).double()
    true = gradients(exact, randn(1, 40, H), randn(1, 6, H, seed=1), call=call(exact, False))
    untiled = gradients(module, long, short, call=call(module))
    found = gradients(tiled, long, short, call=call(tiled))
    assert less_accurate(found, untiled, true, torch.bfloat16) == {}


@pytest.mark.low_precision
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_does_not_grow_with_the_tiles(dtype: torch.dtype) -> None:
    """At 256 tiles the gradients are as near to float64 as the untiled module's."""
    torch.manual_seed(0)
    module, x = GatedMLP(128, 384).to(dtype), randn(1, 2048, 128, dtype=dtype)
    true, untiled = reference(module, x), gradients(module, x)
    assert less_accurate(gradients(tile(module, num_shards=256), x), untiled, true, dtype) == {}


@pytest.mark.low_precision
@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_products_go_into_float32_sums(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA the products of the last projection go into its float32 sum, and gradients
    are as near to float64 as the untiled module's.
    """
    products, addmm = [], torch.addmm

    def counted(total: Tensor, left: Tensor, right: Tensor, *, out: Tensor, out_dtype: torch.dtype) -> Tensor:
        assert (total.dtype, left.dtype, right.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
        products.append(total)
        if left.is_cuda:
            return addmm(total, left, right, out=out, out_dtype=out_dtype)
        return addmm(total, left.float(), right.float(), out=out)

    mlp, x = GatedMLP(128, 384).bfloat16(), randn(1, 2048, 128, dtype=torch.bfloat16)
    true, untiled = reference(mlp, x), gradients(mlp, x, device=where)
    monkeypatch.setattr("lt_tiled.tiling.weights.ADDS_PRODUCTS", (where,))
    monkeypatch.setattr(torch, "addmm", counted)
    found = gradients(tile(mlp, num_shards=16), x, device=where)
    assert len(products) == 16
    assert less_accurate(found, untiled, true, torch.bfloat16) == {}


@pytest.mark.low_precision
def test_accumulate_param_sums_in_the_weights_dtype() -> None:
    """``accumulate="param"`` gives up that accuracy: its error is larger than with float32 sums."""
    torch.manual_seed(0)
    module, x = GatedMLP(32, 64).bfloat16(), randn(1, 4096, 32, dtype=torch.bfloat16)
    true = reference(module, x)
    wide = errors(gradients(tile(copy.deepcopy(module), num_shards=256), x), true)
    narrow = errors(gradients(tile(copy.deepcopy(module), num_shards=256, accumulate="param"), x), true)
    assert narrow["gate.weight"] > TIMES * wide["gate.weight"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: type) -> None:
    """Under ``no_grad`` and ``inference_mode`` the module tiles too, without a graph."""
    module = GatedMLP()
    x = torch.randn(2, 19, H)
    with mode():
        whole = module(x)
        tile(module, num_shards=4)
        tiled = module(x)
    assert not tiled.requires_grad
    assert torch.allclose(tiled, whole, atol=1e-6)
    assert get_patch(module, TiledPatch).largest == LargestCall(38, 4)


def test_eval_mode_with_gradients() -> None:
    """In evaluation mode with gradients on (dropout off) the gradients are the untiled ones."""
    check(PlainMLP(dropout=0.5).eval(), randn(2, 19, H))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_retain_graph_twice(checkpointed: bool) -> None:
    """Three backwards through one retained graph each give the whole gradient."""
    module, x = GatedMLP(), randn(1, 19, H)
    true = gradients(module, x)
    tile(module, num_shards=4)
    value = spread(checkpoint(module, x, use_reentrant=False) if checkpointed else module(x))
    for times in (1, 2, 3):
        value.backward(retain_graph=times < 3)
        found = {name: p.grad / times for name, p in module.named_parameters()}
        assert worst({"loss": value, "input 0": x.grad / times, **found}, true) < EXACT


def test_input_changed_before_the_backward_is_refused() -> None:
    """An input that was changed in place between forward and backward is torch's usual error."""
    module = tile(GatedMLP(), num_shards=3)
    x = randn(1, 9, H) * 1
    loss = module(x).sum()
    x.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.self_checks
def test_hooks_fire_once() -> None:
    """The tiled module's own hooks fire once per call and not per tile, and a weight's gradient hook once per
    backward.
    """
    module = tile(GatedMLP(), num_shards=4)
    counts = {"pre": 0, "post": 0, "full": 0, "weight": 0}

    def counter(name: str):
        def hook(*_: object) -> None:
            counts[name] += 1

        return hook

    module.register_forward_pre_hook(counter("pre"))
    module.register_forward_hook(counter("post"))
    module.register_full_backward_hook(counter("full"))
    module.up.weight.register_hook(counter("weight"))
    module(randn(1, 20, H)).sum().backward()
    assert counts == {"pre": 1, "post": 1, "full": 1, "weight": 1}


@pytest.mark.self_checks
def test_outer_saved_tensor_hooks_see_inputs_and_weights() -> None:
    """An offloader around the call packs the input and the weights, as untiled, and none of the tiles' intermediates,
    also not in a backward inside it.
    """
    module = tile(GatedMLP(), num_shards=4)
    packed: list[torch.Size] = []

    def pack(t: Tensor) -> Tensor:
        packed.append(t.shape)
        return t

    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            torch.autograd.backward(module(randn(1, 20, H)), torch.ones(1, 20, H))
    assert packed == [(1, 20, H), *(p.shape for p in module.parameters())] * 2


def test_gradient_accumulation() -> None:
    """Micro-batches of different lengths, some too short for their shard count, add up to the untiled gradients."""
    module, batches = GatedMLP(), [randn(1, n, H, seed=n) for n in (40, 3, 17, 1)]
    check(module, *batches, call=lambda *inputs: [module(x) for x in inputs], num_shards=8)


def test_unused_weight_has_no_gradient() -> None:
    """A weight that no tile uses has no gradient, as in the untiled module."""
    module = GatedMLP()
    module.spare = nn.Linear(H, H)
    tile(module, num_shards=3)
    module(randn(1, 9, H)).sum().backward()
    assert module.spare.weight.grad is None
    assert module.gate.weight.grad is not None


@pytest.mark.parametrize(("moment", "at_call"), [("forward", 4), ("backward", 6)])
def test_an_exception_leaves_the_module_usable(moment: str, at_call: int) -> None:
    """After an exception in a tile, in the forward or in the backward, the weights are in place and the next step is
    right.
    """
    module = GatedMLP()
    x = randn(1, 20, H)
    true = reference(module, x)
    tile(module, num_shards=4, self_check=False)
    weights, act, calls = dict(module.named_parameters()), module.act, itertools.count(1)  # no data to restore

    def failing(t: Tensor) -> Tensor:
        if (call := next(calls)) == at_call:
            raise ArithmeticError("backward" if torch.is_grad_enabled() and call > 4 else "forward")
        return act(t)

    module.act = failing
    with pytest.raises(ArithmeticError, match=moment):
        module(x).sum().backward()
    module.act = act
    assert all(weights[name] is p for name, p in module.named_parameters())
    assert worst(gradients(module, x), true) < EXACT


class PostNorm(nn.Module):
    """Saves something after its MLP, so that its recompute cannot stop early."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = GatedMLP()
        self.norm = nn.LayerNorm(H)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.mlp(x))


@pytest.mark.parametrize("kind", [Block, PostNorm])
@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_torch_checkpoint(reentrant: bool, kind: type[nn.Module]) -> None:
    """A block under torch's checkpoint, of either kind, gives the untiled gradients."""
    block = kind()
    check(block, randn(2, 11, H), call=lambda x: checkpoint(block, x, use_reentrant=reentrant), part=block.mlp)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("policy", ["products", "everything"])
def test_inside_a_selective_checkpoint(policy: str, early_stop: bool) -> None:
    """A selective checkpoint around a model with tiled MLPs, norms and loss keeps nothing of the tiles, and gives the
    untiled gradients.
    """

    def keep(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        products.append(op in (aten.mm.default, aten.addmm.default))
        kept = policy == "everything" or products[-1]
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    aten, products = torch.ops.aten, list[bool]()
    ids = torch.arange(2 * 24).view(2, 24) % 64
    model = tiny_llama()
    options = {"use_reentrant": False, "context_fn": lambda: create_selective_checkpoint_contexts(keep)}

    def step() -> dict[str, Tensor]:
        products.clear()
        return gradients(model, call=lambda: checkpoint(lambda: model(ids, labels=ids).loss, **options), loss=torch.sum)

    true = step()
    with prepare(model, tiling=3, activation_checkpointing=False, loss=3), set_checkpoint_early_stop(early_stop):
        assert all(worst(step(), true) < MIXED for _ in range(2))
    assert sum(products) == 2  # the output projections of the two attentions, which are not tiled


def test_two_calls_in_one_graph() -> None:
    """A module that is called twice before the backward (shared layers) gets the sum of both calls' gradients."""
    module = GatedMLP()
    check(module, randn(1, 20, H), call=lambda x: module(module(x)))


def test_freezing_between_steps() -> None:
    """Freezing a weight between two steps changes what gets a gradient, and all of it is right."""
    module, x = tile(GatedMLP(), num_shards=4), randn(1, 20, H)
    gradients(module, x)
    module.down.requires_grad_(False)
    found = gradients(module, x)
    assert worst(found, gradients(untile(module), x)) < EXACT


def test_output_changed_in_place() -> None:
    """The output may be changed in place by the caller, as Falcon does, and the gradients are right."""
    module = GatedMLP()
    check(module, randn(2, 19, H), call=lambda x: module(x * 1).add_(x))


def test_evaluation_mode_before_the_backward() -> None:
    """A model with dropout that is set to evaluation between forward and backward is refused."""
    module = tile(PlainMLP(dropout=0.3), num_shards=4)
    y = module(randn(1, 40, H))
    module.eval()
    with pytest.raises(RuntimeError, match="recompute of PlainMLP computes other values"):
        y.sum().backward()


@pytest.mark.parametrize("replaced", [False, True])
def test_untiled_before_the_backward_pass(replaced: bool) -> None:
    """A module that is untiled between its forward and its backward pass gets its gradients."""
    module, x = GatedMLP(), randn(1, 40, H)
    true = gradients(module, x)
    if replaced:
        module.forward = module.forward  # type: ignore[method-assign]  # as Liger sets it

    def call(x: Tensor) -> Any:
        y = tile(module, num_shards=4)(x)
        untile(module)
        return y

    assert worst(gradients(module, x, call=call), true) < EXACT


class Waits(GatedMLP):
    """Waits in a tile of one thread, in its forward pass or in its recompute."""

    waiter, in_recompute = 0, False

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.go = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        if threading.get_ident() == self.waiter and torch.is_grad_enabled() == self.in_recompute:
            self.inside.set()
            assert self.go.wait(LIMIT)
        return super().forward(x)


@pytest.mark.parametrize("in_recompute", [False, True], ids=["forward", "recompute"])
@pytest.mark.parametrize("second", ["call", "short call", "backward"])
def test_threads(second: str, in_recompute: bool) -> None:
    """While a thread runs a module, a call and a backward pass of another one raise, and no gradient is wrong."""
    m, x = Waits(), randn(1, 40, H)
    true = gradients(m, x)
    tile(m, num_shards=4)
    y, weights = m(x).sum(), list(m.parameters())

    def first() -> dict[str, Tensor]:
        m.waiter, m.in_recompute = threading.get_ident(), in_recompute
        return gradients(m, x)

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(first)
        assert m.inside.wait(LIMIT)
        try:
            with pytest.raises(TwoThreadsError, match=r"Waits is trained by two threads at once.*deepcopy"):
                y.backward() if second == "backward" else m(x[:, :1] if second == "short call" else x)
        finally:
            m.go.set()
        assert worst(found.result(), true) < EXACT
    assert worst(gradients(m, x), true) < EXACT
    assert all(a is b for a, b in zip(m.parameters(), weights, strict=True))


@pytest.mark.slow
def test_interrupted_anywhere() -> None:
    """Ctrl-C at every third line of a step leaves the module as it was, and the next step is right."""
    m, x = GatedMLP(), randn(1, 40, H)
    true = gradients(m, x)
    tile(m, num_shards=2)
    gradients(m, x)
    attributes = [part.__dict__.keys() for part in m.modules()]
    weights, names = [id(p) for p in m.parameters()], [set(keys) for keys in attributes]

    def steps() -> int:
        for count, line in enumerate(range(1, 100_000, 3)):
            if not interrupted_at(line, lambda: gradients(m, x)):
                return count
            m.zero_grad(set_to_none=True)
            assert [id(p) for p in m.parameters()] == weights
            assert attributes == names
            assert not _USED  # or other threads could not run it any more
            assert worst(gradients(m, x), true) < EXACT
        raise AssertionError("the step has no end")

    # In a thread of its own: Ctrl-C inside of torch's own contexts may leave that thread's hooks of saved tensors on.
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(steps).result() > 20


@pytest.mark.self_checks
def test_user_hook_inside(caplog: pytest.LogCaptureFixture) -> None:
    """A module runs untiled while a user's hook is on a module inside it, with one warning; then tiled again."""
    m, x = GatedMLP(), randn(1, 40, H)
    seen: list[int] = []
    tile(m, num_shards=4)
    caplog.clear()
    handle = m.down.register_forward_hook(lambda module, args, output: seen.append(output.shape[1]))
    for _ in range(2):
        m(x).sum().backward()
    assert seen == [40, 40]
    assert caplog.text.count("GatedMLP runs untiled, because Linear inside it has a hook") == 1
    handle.remove()
    m.register_forward_hook(lambda module, args, output: seen.append(output.shape[1]))
    m(x).sum().backward()
    assert seen == [40, 40, 40]
    patch = get_patch(m, TiledPatch)
    assert patch is not None
    assert patch.largest == LargestCall(40, 4)


def test_a_sparse_gradient() -> None:
    """An embedding with a sparse gradient in a tiled module gets the sum of all tiles, sparse."""

    class Embeds(GatedMLP):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, H, sparse=True)

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            return super().forward(x) + self.table(ids)

    torch.manual_seed(0)
    m, x, ids = Embeds(), randn(1, 40, H), torch.randint(9, (1, 40))
    m(x, ids).square().sum().backward()
    true, m.table.weight.grad = m.table.weight.grad.to_dense(), None
    tile(m, num_shards=4)(x, ids).square().sum().backward()
    assert m.table.weight.grad.is_sparse
    assert worst({"table": m.table.weight.grad.to_dense()}, {"table": true}) < EXACT
