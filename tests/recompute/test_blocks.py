"""Checkpointed blocks: found, recomputed once, and the same results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, RecurrentGemmaConfig, RecurrentGemmaForCausalLM, SwinConfig, SwinModel

from lt_tiled import ActivationCheckpointing, Tiling, prepare
from lt_tiled.recompute.blocks import find_checkpointable
from tests.meters import LiveBytes, flops
from tests.models import Block, H, TinyLM, lm_loss, tiny_llama
from tests.parity import EXACT, MIXED, gradients, randn, reference, step_of, worst

IDS = torch.arange(2 * 24).view(2, 24) % 32


def found(model: nn.Module, targets: str | list[str] = "auto") -> list[str]:
    return [path for path, _ in find_checkpointable(model, ActivationCheckpointing(targets))]


def swin() -> nn.Module:
    with torch.device("meta"):
        return SwinModel(SwinConfig(embed_dim=16, depths=[1, 2], num_heads=[1, 2]))


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
    "layers of stages, and a stage of one": (
        swin,
        ["encoder.layers.0", *(f"encoder.layers.1.blocks.{j}" for j in (0, 1))],
    ),
}


@pytest.mark.parametrize("name", FINDS)
def test_auto_finds(name: str) -> None:
    """``auto`` finds the blocks of any kind of model."""
    build, paths = FINDS[name]
    assert found(build()) == paths


def test_named_blocks() -> None:
    """Class names and globs name blocks. No blocks is an error that says how to name them, and how to go on without."""
    assert found(TinyLM(3), ["blocks.0", "blocks.2"]) == ["blocks.0", "blocks.2"]
    assert found(TinyLM(2), "Block") == ["blocks.0", "blocks.1"]
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
    """Hidden states that reach a block by keyword or in a tuple pass the saved-tensor hooks, as positional ones do; a
    size stays one.
    """

    class Wrapped(Block):
        def forward(self, *, pair: tuple[Tensor, None], size: torch.Size) -> Tensor:  # type: ignore[override]
            return super().forward(pair[0]) * size.numel()

    model = nn.ModuleList([Wrapped(), Wrapped()])
    packed: list[torch.Size] = []
    with prepare(model, activation_checkpointing=True):
        x = randn(1, 8, H)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t):
            y = model[1](pair=(model[0](pair=(x, None), size=x.shape), None), size=x.shape)
        y.sum().backward()
    assert [shape for shape in packed if shape.numel()] == [x.shape] * 2  # torch 2.11 saves an empty tensor, too
    assert x.grad is not None


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


def recurrent_gemma() -> nn.Module:
    sizes = {"vocab_size": 32, "hidden_size": H, "intermediate_size": 32, "num_attention_heads": 2, "lru_width": H}
    return RecurrentGemmaForCausalLM(RecurrentGemmaConfig(**sizes, num_hidden_layers=3, pad_token_id=None))


@pytest.mark.parametrize("build", [tiny_llama, recurrent_gemma])
def test_the_cache_is_left_out_in_training(build: Callable[[], Any]) -> None:
    """A model called with its cache on, as Hugging Face's default is, gives the plain loss and gradients, and makes no
    cache, also if it passes the cache to its layers by position, as RecurrentGemma does.
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
