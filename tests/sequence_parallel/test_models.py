"""Every architecture of the table shares its sequences as one process computes them, or is refused with a remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.architectures import ARCHITECTURES
from tests.models import H
from tests.sequence_parallel.models import GPT, causal, ids
from tests.sequence_parallel.runs import against_whole
from tests.world import World

_ENCODER = "is an encoder-decoder, .* use a decoder-only model"
_BLOCKS = r"needs one list of blocks: name the modules to share in SequenceParallel\(targets=...\)"
_CHECKED = (
    r"(cannot run on those of one rank|has another (output|gradient)|no attention saw all tokens).* Use (the )?sdpa"
)
_SHAPES = "needs self-attention of all .* use another attention"
_HEADS = "needs as many query heads .* use sequence_parallel=1 or less"
REFUSED = {
    "BART": _ENCODER,
    "BLOOM": _CHECKED,
    "DeBERTa V2": _CHECKED,
    "Doge": _CHECKED,
    "FNet": _CHECKED,
    "Gemma 2": _CHECKED,
    "GPT-J": _CHECKED,
    "GPT-Neo": _CHECKED,
    "Hiera": _CHECKED,
    "Jamba": _CHECKED,
    "LeViT": _BLOCKS,
    "Llama 3.2 (image and text)": _SHAPES,
    "Longformer": _CHECKED,
    "MPT": _CHECKED,
    "Mamba": _CHECKED,
    "MiniMax": _CHECKED,
    "Qwen 3-VL": _CHECKED,
    "RWKV": _CHECKED,
    "Swin": _BLOCKS,
    "T5": _ENCODER,
    "T5Gemma": _ENCODER,
    "Whisper": _ENCODER,
    "wav2vec 2.0": _BLOCKS,
    "wav2vec 2.0-BERT": _CHECKED,
}
"""Why, and the remedy."""
NEAR = 3e-7
"""Where a model computes a part in float32; elsewhere errors are those of float64."""


def shared(name: str) -> tuple[float, int, str]:
    """The error of a step whose sequences all ranks share, its exchanges, or why the architecture is refused."""
    architecture = ARCHITECTURES[name]
    model = architecture.build()
    return against_whole(model, architecture.feed(model))


@pytest.mark.table("Llama|GPT-2|BERT|Falcon|Gemma 3|DeepSeek V3|Mixtral|GLM-4|OPT|ViT|LLaVA|ALBERT|Cohere")
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in REFUSED])
def test_shared(name: str, world: World) -> None:
    """The loss and all gradients of two ranks are those of one, and attention exchanged heads for tokens."""
    for error, exchanges, message in world(shared, name):
        assert message == ""
        assert exchanges
        assert error < max(NEAR, ARCHITECTURES[name].error)


@pytest.mark.table("T5|Llama 3.2.*|BLOOM|Swin|Doge|Qwen 3-VL|wav2vec.*")
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, world: World) -> None:
    """What cannot be shared raises a ``ValueError`` with a remedy on all ranks."""
    for _, _, message in world(shared, name):
        assert re.search(REFUSED[name], message)


def falcon(padded: bool) -> tuple[float, int, str]:
    """Falcon with alibi, which its masks hold as a bias for each head."""
    from transformers import FalconConfig, FalconForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    torch.manual_seed(0)
    model = FalconForCausalLM(FalconConfig(**sizes, alibi=True, hidden_dropout=0.0, attention_dropout=0.0)).double()
    mask = torch.ones_like(x := ids(2, 37))
    mask[0, :10] = not padded
    return against_whole(model, {"input_ids": x, "attention_mask": mask, "labels": x.where(mask.bool(), -100)})


@pytest.mark.parametrize("padded", [False, True])
def test_bias_of_each_head(padded: bool, world: World) -> None:
    """Where blocks call torch's attention themselves, each rank's heads get their part of a mask for each head."""
    for error, exchanges, message in world(falcon, padded):
        assert message == ""
        assert exchanges == 2
        assert error < 1e-12


def mean_of_own(logits: Tensor, labels: Tensor, vocab_size: int, shift_labels: Any = None, **_: Any) -> Tensor:
    """A user's loss, which divides by the labels that it is given."""
    targets = F.pad(labels[..., 1:], (0, 1), value=-100) if shift_labels is None else shift_labels
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def with_loss_function() -> tuple[float, int, str]:
    model: Any = causal("llama")()
    model.loss_function = mean_of_own
    x = ids(2, 37)
    return against_whole(model, {"input_ids": x, "labels": x.where(torch.arange(37) > 15, -100)})


def test_own_loss_function(world: World) -> None:
    """A user's loss function gets the logits of all tokens: it may divide by the labels that it is given."""
    for error, exchanges, message in world(with_loss_function):
        assert message == ""
        assert exchanges
        assert error < 1e-12


def with_ignore_index() -> tuple[float, int, str]:
    return against_whole(causal("llama")(), {"input_ids": (x := ids(2, 37)), "labels": x, "ignore_index": 3})


def test_other_ignore_index(world: World) -> None:
    """The last label of a sequence is the ``ignore_index`` of the call; otherwise one rank fails, and others wait."""
    for error, _, message in world(with_ignore_index):
        assert message == ""
        assert error < 1e-12


def asked_for(option: str) -> str:
    return against_whole(causal("llama")(), {"input_ids": (x := ids(2, 24)), "labels": x, option: True})[2]


@pytest.mark.parametrize("option", ["output_attentions", "output_hidden_states"])
def test_outputs(option: str, world: World) -> None:
    """Outputs of which each rank would have a part are refused."""
    for message in world(asked_for, option):
        assert re.search(f"{option}.*set it to False", message)


def trained_with_cache(positions: bool) -> tuple[float, int, str]:
    given = {"position_ids": torch.arange(24)[None]} if positions else {}
    return against_whole(causal("llama")().train(), {"input_ids": ids(2, 24)} | given)


@pytest.mark.parametrize("positions", [False, True])
def test_own_loss(positions: bool, world: World) -> None:
    """A model in training that is called as it is loaded, with its cache on by default, shares its sequences too."""
    for error, exchanges, message in world(trained_with_cache, positions):
        assert message == ""
        assert exchanges == 2
        assert error < 1e-12


class Convolved(GPT):
    """A GPT whose first block mixes each token with the one before it outside of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].mlp = Convolution()


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Conv1d(H, H, 2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.weights(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


class Attended(GPT):
    """A GPT whose first block calls ``nn.MultiheadAttention``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].attention = Multihead()


class Multihead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(H, 4, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


def said_of(build: Callable[[], nn.Module]) -> str:
    return against_whole(build().double(), {"input_ids": (x := ids(2, 24)), "labels": x})[2]


@pytest.mark.parametrize(
    ("build", "pattern"),
    [
        (Convolved, r"blocks.0 has another (output|gradient)"),
        (Attended, r"blocks.0 has another (output|gradient)"),
    ],
)
def test_hand_written(build: Callable[[], nn.Module], pattern: str, world: World) -> None:
    """Blocks that mix tokens outside of attention, or in attention that cannot be exchanged, are refused."""
    for message in world(said_of, build):
        assert re.search(pattern, message)
