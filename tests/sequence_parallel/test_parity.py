"""Loss and gradients of shared sequences are those of one process, for each kind of model, layer and batch."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lt_tiled import ActivationCheckpointing, Tiling
from tests.architectures import ARCHITECTURES
from tests.parity import EXACT
from tests.sequence_parallel.cases import CASES, Case
from tests.sequence_parallel.runs import shared, shared_on_second
from tests.world import World

TILED = 3e-7
"""Where weight gradients are added over tiles, or a model computes a part, in float32."""


@pytest.mark.table(
    "(one key head|7 heads|packed|router loss|hand-written|qwen3_next, uneven|bamba, one group|gpt_oss)-4"
    "|(lfm2, few tokens|rope of each kind of layer|positions from the mask|LoRA|other ignore_index)-4"
    "|(fewer tokens than ranks|packed apart|window, packed|labels on one rank|padded left|no labels|cache by default)-2"
    "|(rope, dynamic|rope, longrope|loss of the user's|bias of each head|named module|named module, checkpointed)-2"
    "|hand-written, (own attention|window)-2|nn.TransformerEncoderLayer-2|a block twice-2"
    "|(code between blocks|qwen3_next, no labels|nemotron_h|nemotron_h, padded right|mamba2, padded)-2"
    "|(qwen3_next|bamba|lfm2|gpt_oss), padded-2|positions from ids-2|flash, packed-4"
    "|flash, padded left-2|shifted labels-4|qwen3_next, uneven-2"
    "|(torch's attention by another name|as many tokens as a head has channels)-2"
)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, size: int, four_ranks: World) -> None:
    """Groups of two and of four ranks have the loss and gradients of plain data parallelism over groups."""
    for error, exchanges, refused in four_ranks(shared, name, size):
        assert refused == ""
        assert exchanges
        assert error < EXACT


def kept(offload: Any) -> dict[str, Any]:
    return {"activation_checkpointing": ActivationCheckpointing(keep="attention", offload=offload)}


POLICIES: dict[str, dict[str, Any]] = {
    "checkpointed": {"activation_checkpointing": True},
    "tiled": {"tiling": Tiling(3, self_check=False), "activation_checkpointing": True},
    "kept": kept(None),
    "kept in memory": kept("cpu"),
    "kept on disk": kept("disk"),
}
COMBINED = [
    "packed",
    "router loss",
    "hand-written",
    "named module",
    "LoRA",
    "qwen3_next",
    "bamba",
    "lfm2",
    "gpt_oss",
]


@pytest.mark.table(
    "packed-tiled|(hand-written|gpt_oss)-kept on disk|router loss-checkpointed"
    "|(qwen3_next|bamba|lfm2)-kept in memory|LoRA-tiled|named module-kept"
)
@pytest.mark.parametrize("policies", POLICIES)
@pytest.mark.parametrize("name", COMBINED)
def test_with_policies(name: str, policies: str, four_ranks: World) -> None:
    """Tiles, activation checkpointing, what it keeps and where that is leave loss and gradients as they are."""
    for error, _, refused in four_ranks(shared, name, 2, POLICIES[policies]):
        assert refused == ""
        assert error < (TILED if policies == "tiled" else EXACT)


@pytest.mark.table("packed-tiled|hand-written-kept on disk")
@pytest.mark.parametrize("policies", ["tiled", "kept on disk"])
@pytest.mark.parametrize("name", ["packed", "hand-written"])
def test_on_a_second_device(name: str, policies: str, second_world: World) -> None:
    """On a device that is no CPU, shared sequences have the gradients of whole ones there."""
    for error, _, refused in second_world(shared_on_second, name, POLICIES[policies]):
        assert refused == ""
        assert error < (TILED if policies == "tiled" else EXACT)


# Architectures of other tests

_ENCODER = "is an encoder-decoder, .* use a decoder-only model"
_BLOCKS = r"needs one list of blocks: name the modules to share in SequenceParallel\(targets=...\)"
_CHECKED = r"(cannot run on a part of its tokens|has another (output|gradient)).* Use sdpa|no attention saw all tokens"
_CHECKED += "|The state of Mamba 1 has no heads"
REFUSED = dict.fromkeys(["BART", "T5"], _ENCODER)
REFUSED |= dict.fromkeys(["LeViT", "Swin", "wav2vec 2.0"], _BLOCKS)
REFUSED["Llama 4 (text)"] = "scales attention by positions that it counts from its own tokens"
REFUSED["Llama 3.2 (image and text)"] = "needs self-attention of all .* use another attention"
for _name in ("BLOOM", "DeBERTa V2", "Doge", "FNet", "Jamba", "Longformer", "Mamba", "MiniMax", "Qwen 3-VL", "RWKV"):
    REFUSED[_name] = _CHECKED


def shared_architecture(name: str) -> tuple[float, int, str]:
    model = ARCHITECTURES[name].build()
    inputs = ARCHITECTURES[name].feed(model)
    return shared(Case(lambda: model, lambda _: inputs))


@pytest.mark.table(
    "GPT-2|BERT|Falcon|DeepSeek V3|GLM-4|ViT|LLaVA|ALBERT|Cohere|T5|Llama 3.2.*|BLOOM|Swin|Doge|Mamba|wav2vec 2.0"
)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(name: str, world: World) -> None:
    """Architectures of transformers are shared as one process computes them, or are refused with a remedy."""
    for error, exchanges, refused in world(shared_architecture, name):
        if name in REFUSED:
            assert re.search(REFUSED[name], refused)
        else:
            assert refused == ""
            assert exchanges
            assert error < max(TILED, ARCHITECTURES[name].error)
