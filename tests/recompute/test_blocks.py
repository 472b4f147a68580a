"""Checkpointed blocks: found, recomputed once, and the same results."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import (
    DynamicCache,
    MambaConfig,
    MambaForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    XLMConfig,
    XLMWithLMHeadModel,
)

from lt_tiled import ActivationCheckpointing, TiledSingleDeviceStrategy, Tiling, prepare
from lt_tiled.recompute.blocks import find_checkpointable
from tests.lit import LitTiny, trainer
from tests.meters import LiveBytes, flops, peak_bytes
from tests.models import Block, H, TinyLM, lm_loss, tiny_llama
from tests.parity import EXACT, MIXED, gradients, randn, reference, step_of, worst

IDS = torch.arange(2 * 24).view(2, 24) % 32


def found(model: nn.Module, targets: str | list[str] = "auto") -> list[str]:
    return [path for path, _ in find_checkpointable(model, ActivationCheckpointing(targets))]


FINDS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "layers of Hugging Face": (tiny_llama, ["model.layers.0", "model.layers.1"]),
    "one layer of torch": (lambda: nn.Sequential(nn.TransformerEncoderLayer(H, 2, 32, batch_first=True)), ["0"]),
    "repeated children of a ModuleList": (lambda: TinyLM(3), ["blocks.0", "blocks.1", "blocks.2"]),
    "repeated children of a Sequential, and no bare projections": (
        lambda: nn.Sequential(nn.Linear(H, H), nn.Linear(H, H), Block(), Block()),
        ["2", "3"],
    ),
    "repeated children next to known layers": (  # as in Llama 3.2's vision tower
        lambda: nn.ModuleDict({"tower": TinyLM(2).blocks, "text": tiny_llama()}),
        ["tower.0", "tower.1", "text.model.layers.0", "text.model.layers.1"],
    ),
    "no stages that hold known layers": (
        lambda: nn.ModuleList([tiny_llama(), tiny_llama()]),
        [f"{i}.model.layers.{j}" for i in "01" for j in "01"],
    ),
    "the one layer of a ModuleList": (lambda: TinyLM(1), ["blocks.0"]),  # which ALBERT calls many times
}


@pytest.mark.parametrize("name", FINDS)
def test_auto_finds(name: str) -> None:
    """``auto`` finds the blocks of any kind of model."""
    build, paths = FINDS[name]
    assert found(build()) == paths


def test_named_blocks() -> None:
    """Class names and globs name blocks."""
    assert found(TinyLM(3), ["blocks.0", "blocks.2"]) == ["blocks.0", "blocks.2"]
    assert found(TinyLM(2), "Block") == ["blocks.0", "blocks.1"]


def test_nothing_found() -> None:
    """No blocks is an error that says how to name them and how to turn checkpointing off."""
    with pytest.raises(ValueError, match=r"found no blocks in Block.*targets=.*activation_checkpointing=False"):
        found(Block())
    with pytest.raises(ValueError, match=r"ActivationCheckpointing target 'Layer' matches no module of TinyLM"):
        found(TinyLM(), "Layer")


def loss(model: nn.Module, device: str = "cpu") -> dict[str, Tensor]:
    return gradients(model, IDS, loss=lambda logits: lm_loss(logits, IDS.to(device)), device=device)


@pytest.mark.parametrize("tiling", [None, Tiling(4)])
def test_results_are_the_same(tiling: Tiling | None, device: str) -> None:
    """Loss and gradients of a model with checkpointed blocks, tiled or not, are the plain ones."""
    torch.manual_seed(0)
    model = TinyLM().double()
    true = reference(model, IDS, loss=lambda logits: lm_loss(logits, IDS))
    with prepare(model.to(device), activation_checkpointing=True, tiling=tiling):
        for _ in range(2):
            assert worst(loss(model, device), true) < EXACT


def test_dropout_is_replayed(device: str) -> None:
    """Dropout in a checkpointed block draws the same masks in the recompute."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(H, H), nn.Dropout(0.5)) for _ in range(2))).double()
    x = randn(2, 9, H, dtype=torch.float64)
    torch.manual_seed(3)
    true = gradients(model, x, device=device)
    with prepare(model, activation_checkpointing=True):
        torch.manual_seed(3)
        assert worst(gradients(model, x, device=device), true) < 1e-12


def test_only_block_inputs_are_kept() -> None:
    """Between forward and backward a checkpointed model holds one hidden state per block and four fingerprints of what
    the block saves, not the blocks' insides.
    """
    model = nn.Sequential(*(Block() for _ in range(4)))
    x = randn(1, 512, H)
    with prepare(model, activation_checkpointing=True), LiveBytes() as meter:
        y = model(x)
        held = meter.now
    assert y.requires_grad
    inputs = 4 * x.nbytes  # three between the blocks, and the output
    assert inputs < held < inputs + 4 * 4 * 4 * 512


def test_tensors_in_keywords_and_containers_are_packed() -> None:
    """Hidden states that reach a block by keyword or in a tuple pass the saved-tensor hooks, as positional ones do."""

    class Wrapped(Block):
        def forward(self, *, pair: tuple[Tensor, None]) -> Tensor:  # type: ignore[override]
            return super().forward(pair[0])

    model = nn.ModuleList([Wrapped(), Wrapped()])
    packed: list[torch.Size] = []
    with prepare(model, activation_checkpointing=True):
        x = randn(1, 8, H)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t):
            y = model[1](pair=(model[0](pair=(x, None)), None))
        y.sum().backward()
    assert [shape for shape in packed if shape.numel()] == [x.shape] * 2  # torch 2.11 saves an empty tensor, too
    assert x.grad is not None


def test_no_grad_runs_the_block_as_it_is() -> None:
    """Without gradients a checkpointed block costs what it costs plain."""
    model = TinyLM()
    with torch.no_grad():
        plain = peak_bytes(lambda: model(IDS))
        with prepare(model, activation_checkpointing=True):
            assert peak_bytes(lambda: model(IDS)) == plain


def test_a_model_that_checkpoints_itself_does_it_once(caplog: pytest.LogCaptureFixture) -> None:
    """With ``gradient_checkpointing_enable`` called before or after, blocks are recomputed once, with a
    warning, and the flag is restored.
    """
    model = tiny_llama().train()
    ids = IDS[:, :16]

    def run() -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    plain = flops(run)
    model.gradient_checkpointing_enable()
    theirs = flops(run)
    assert theirs > plain
    with prepare(model, activation_checkpointing=True) as prepared:
        assert "recomputes its own layers" in caplog.text
        assert flops(run) == theirs
        model.gradient_checkpointing_enable()
        assert flops(run) == theirs
        prepared.release()
    assert model.model.layers[0].gradient_checkpointing is True
    assert flops(run) == theirs


def test_checkpoint_wrapper_keeps_its_blocks(caplog: pytest.LogCaptureFixture) -> None:
    """Blocks inside torch's ``checkpoint_wrapper`` are recomputed once, by it."""
    model = TinyLM(2)
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    with prepare(model, activation_checkpointing=ActivationCheckpointing("Block")):
        lm_loss(model(IDS), IDS).backward()
    assert "Block is left to the activation checkpointing that its model applies itself" in caplog.text


def recurrent_gemma() -> nn.Module:
    sizes = {"vocab_size": 32, "hidden_size": H, "intermediate_size": 32, "num_attention_heads": 2, "lru_width": H}
    return RecurrentGemmaForCausalLM(RecurrentGemmaConfig(**sizes, num_hidden_layers=3, pad_token_id=None))


def xlm() -> nn.Module:
    sizes = {"vocab_size": 32, "emb_dim": H, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 24}
    return XLMWithLMHeadModel(XLMConfig(**sizes, n_langs=1, dropout=0.0, attention_dropout=0.0))


@pytest.mark.parametrize("build", [tiny_llama, recurrent_gemma, xlm])
def test_the_cache_is_left_out_in_training(build: Callable[[], Any]) -> None:
    """A model called with its cache on, as Hugging Face's default is, gives the plain loss and gradients, and makes no
    cache, also if it passes the cache to its layers by position, as RecurrentGemma does. XLM, which always makes one,
    is right.
    """
    torch.manual_seed(0)
    model = build().double()
    inputs = {"input_ids": IDS, "labels": IDS}
    true = step_of(model, inputs)
    with prepare(model, activation_checkpointing=True):
        for _ in range(2):
            assert worst(step_of(model, inputs), true) < MIXED
        if build is tiny_llama:
            assert model.config.use_cache
            assert model(input_ids=IDS).past_key_values is None


@pytest.mark.parametrize("case", ["filled", "asked for", "own"])
def test_gradients_through_a_cache(case: str) -> None:
    """A cache that was filled before, that the caller asks for or passes in, gives the gradients without activation
    checkpointing, as in prefix tuning and truncated backpropagation through time.
    """
    torch.manual_seed(0)
    model = tiny_llama().double()
    with torch.no_grad():
        prefix = [(layer.keys, layer.values) for layer in model(input_ids=IDS[:, :8]).past_key_values.layers]

    def call(_: Tensor) -> Tensor:
        if case == "filled":
            return model(input_ids=IDS[:, 8:16], past_key_values=DynamicCache(prefix), labels=IDS[:, 8:16]).loss
        first = model(input_ids=IDS[:, :8], past_key_values=DynamicCache() if case == "own" else None, use_cache=True)
        later = {"input_ids": IDS[:, 8:16], "labels": IDS[:, 8:16], "past_key_values": first.past_key_values}
        loss = model(**later, use_cache=True).loss
        return loss + first.logits.square().mean()

    true = gradients(model, IDS, call=call)
    with prepare(model, tiling=4, activation_checkpointing=True):
        for _ in range(2):
            assert worst(gradients(model, IDS, call=call), true) < MIXED


class Configured(nn.Module):
    """A module of the user's that holds the model's config, as a LightningModule may."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.config = net, net.config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.net(*args, **kwargs)


@pytest.mark.parametrize("by_position", [False, True])
def test_what_the_caller_of_an_inner_model_asks_for(by_position: bool) -> None:
    """A cache that a module around the model asks for, or passes by position, is kept."""
    net, cache = tiny_llama(), DynamicCache()
    with prepare(model := Configured(net), activation_checkpointing=True):
        if by_position:
            model(IDS[:, :8], None, None, cache)
        else:
            cache = model(IDS[:, :8], use_cache=True).past_key_values
    assert cache.get_seq_length() == 8


@pytest.mark.parametrize("gradients_on", [True, False])
def test_a_recurrent_cache_in_evaluation(gradients_on: bool) -> None:
    """Mamba, whose cache has no length, runs in evaluation mode as without activation checkpointing."""
    sizes = {"vocab_size": 32, "hidden_size": H, "state_size": 4, "num_hidden_layers": 2}
    model = MambaForCausalLM(MambaConfig(**sizes)).eval()
    with torch.no_grad():
        true = model(IDS[:, :8]).logits
    with prepare(model, activation_checkpointing=True), torch.set_grad_enabled(gradients_on):
        assert torch.allclose(model(IDS[:, :8]).logits, true)


class Makes(Block):
    """A block that makes tensors."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.linspace(0.5, 1.5, H) * torch.ones(()).exp())


class DefaultDtype(LitTiny):
    """A model whose blocks make tensors of the default dtype, which Lightning sets in ``training_step`` alone."""

    def configure_model(self) -> None:
        super().configure_model()
        self.net.blocks = nn.ModuleList([Makes(), Makes()])


@pytest.mark.parametrize("tiling", [None, 4])
@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_the_default_dtype_of_the_recompute(precision: Any, tiling: int | None) -> None:
    """Under ``64-true`` and ``bf16-true`` a block that makes tensors of the default dtype trains as without
    checkpointing: bit for bit if it is not tiled.
    """
    weights = []
    for checkpointed in (None, True):
        strategy = TiledSingleDeviceStrategy(activation_checkpointing=checkpointed, tiling=tiling)
        run = trainer(strategy, precision=precision, max_steps=2, limit_val_batches=0)
        run.fit(model := DefaultDtype())
        weights.append([p.detach() for p in model.parameters()])
    assert {w.dtype for w in weights[1]} == {torch.float64 if precision == "64-true" else torch.bfloat16}
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_generation_keeps_its_cache() -> None:
    """Generation, which runs without gradients, uses the cache and gives the plain tokens."""
    model = tiny_llama().eval()
    plain = model.generate(IDS[:1, :8], max_new_tokens=8, do_sample=False)
    with prepare(model, activation_checkpointing=True, tiling=Tiling(2)):
        assert torch.equal(model.generate(IDS[:1, :8], max_new_tokens=8, do_sample=False), plain)


def test_copies_and_pickles() -> None:
    """A deep copy of a checkpointed model uses its own weights; a pickled one comes back plain."""
    model = TinyLM()
    with prepare(model, activation_checkpointing=True, tiling=Tiling(4)):
        twin, back = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        with torch.no_grad():
            for p in twin.parameters():
                p.mul_(1.5)
        loss(twin)
        assert not torch.allclose(twin(IDS), model(IDS))
        assert torch.allclose(back(IDS), model(IDS), atol=1e-6)
        assert "lt_tiled" not in repr(vars(back.blocks[0])["forward"])


@pytest.mark.self_checks
def test_a_hook_around_the_backward_sees_no_tile() -> None:
    """Saved-tensors hooks around forward and backward see the block inputs, and no intermediate of a tile."""
    packed: list[tuple[int, ...]] = []
    model = TinyLM(3)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(tuple(t.shape)) or t, lambda t: t)
    with prepare(model, tiling=Tiling(4), activation_checkpointing=True), hooks:
        lm_loss(model(IDS), IDS).backward()
    assert packed.count((2, 24, H)) >= 3
    assert not any(48 in shape[-1:] for shape in packed)  # intermediate_size


class Touching(nn.Module):
    """A block that writes its weight anew with the same values in each forward pass, as some adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.mul_(1.0)
        return x + torch.tanh(self.up(x))


def test_a_weight_that_is_written_with_the_same_values() -> None:
    """A new version of a weight is no change if the values are the same; new values are refused in each step."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Touching(), Touching()).double(), randn(2, 8, H, dtype=torch.float64)
    true = gradients(model, x)
    with prepare(model, tiling=None, activation_checkpointing=True):
        for _ in range(3):
            assert worst(gradients(model, x), true) <= EXACT
        loss = model(x).square().sum()
        with torch.no_grad():
            model[0].up.weight.mul_(1.001)
        with pytest.raises(RuntimeError, match=r"0 \(Touching\) computes other values"):
            loss.backward()
        model(x)
        loss = model(x).square().sum()
        with torch.no_grad():
            model[0].up.weight.copy_(model[0].up.weight.roll(1, 0))
        with pytest.raises(RuntimeError, match=r"0 \(Touching\) computes other values"):
            loss.backward()
