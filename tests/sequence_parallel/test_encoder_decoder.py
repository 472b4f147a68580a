"""Encoder-decoders share the sequences of both: their loss and gradients are those of one process, in float64."""

from __future__ import annotations

import copy
import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lt_tiled
from lt_tiled import ActivationCheckpointing, SequenceParallel
from tests.sequence_parallel.models import VOCAB, ids
from tests.sequence_parallel.runs import Counts, against_whole, step, worst
from tests.world import World

_BART = {
    **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4},
    **{"decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "dropout": 0.0},
    **{"attention_dropout": 0.0, "activation_dropout": 0.0, "vocab_size": VOCAB, "max_position_embeddings": 64},
    **{
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
    },
}
_GEMMA = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB, "sliding_window": 6, "dropout_rate": 0.0},
    **{"attention_dropout": 0.0, "pad_token_id": 0, "query_pre_attn_scalar": 8},
}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": VOCAB, "dropout_rate": 0.0}


def build(name: str, **fields: Any) -> Any:
    """A small encoder-decoder of transformers in float64."""
    import transformers

    given: dict[str, Any] = dict(_BART)
    if name == "t5gemma":
        given = {"encoder": dict(_GEMMA), "decoder": dict(_GEMMA), "vocab_size": VOCAB}
    elif name == "t5gemma2":
        vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        given = {"encoder": {"text_config": dict(_GEMMA), "vision_config": vision}, "decoder": dict(_GEMMA)}
    elif name == "t5":
        given = dict(_T5, decoder_start_token_id=0)
    elif name == "whisper":
        given |= {"num_mel_bins": 8, "max_source_positions": 19, "max_target_positions": 64}
    config = transformers.AutoConfig.for_model(name, **{**given, **fields})
    torch.manual_seed(0)
    kind = transformers.AutoModelForSpeechSeq2Seq if name == "whisper" else transformers.AutoModelForSeq2SeqLM
    attention = "eager" if name.startswith("t5gemma") else "sdpa"  # it has no other but flash
    return kind.from_config(config, attn_implementation=attention).double().train()


def inputs(name: str, encoder: int = 23, decoder: int = 17, padded: bool = False) -> dict[str, Any]:
    """Tokens of two sequences of other lengths, of which the first may have padding."""
    labels = ids(2, decoder, seed=1)
    if name == "whisper":
        features = torch.randn(2, 8, 38, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        return {"input_features": features, "labels": labels}
    given = {"input_ids": (x := ids(2, encoder)), "labels": labels}
    if padded:
        mask = torch.ones_like(x)
        mask[1, -5:] = 0
        given |= {"attention_mask": mask, "labels": labels.index_fill(1, torch.tensor([decoder - 1]), -100)}
    return given


def shared(name: str, given: dict[str, Any], **options: Any) -> tuple[float, int, str]:
    return against_whole(build(name), given, **options)


ERRORS = {"t5gemma": 1e-6}
"""Where a model computes a part in float32."""
NAMES = ["bart", "mbart", "pegasus", "marian", "m2m_100", "t5gemma", "whisper"]


@pytest.mark.parametrize("name", NAMES)
def test_unequal_lengths(name: str, four_ranks: World) -> None:
    """Four ranks share an encoder's tokens and a decoder's, of other lengths that four does not divide."""
    for error, exchanges, message in four_ranks(shared, name, inputs(name)):
        assert message == ""
        assert exchanges == 4
        assert error < ERRORS.get(name, 1e-12)


@pytest.mark.parametrize("lengths", [(18, 18), (9, 18), (18, 9)], ids=str)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["bart", "t5gemma"])
def test_lengths_that_could_be_mistaken(name: str, padded: bool, lengths: tuple[int, int], world: World) -> None:
    """Two ranks share sequences of equal lengths, or of which one is as long as a rank's part of the other."""
    for error, exchanges, message in world(shared, name, inputs(name, *lengths, padded)):
        assert message == ""
        assert exchanges == 4
        assert error < ERRORS.get(name, 1e-12)


@pytest.mark.parametrize("offload", [None, "disk"])
@pytest.mark.parametrize("keep", [None, "exchange", "attention", "attention_output"])
@pytest.mark.parametrize("name", ["bart", "t5gemma"])
def test_with_activation_checkpointing(name: str, keep: Any, offload: Any, world: World) -> None:
    """The recompute of a decoder's block attends to the encoder's tokens again, whatever the block keeps."""
    for error in world(checkpointed, name, ActivationCheckpointing(keep=keep, offload=offload)):
        assert error < ERRORS.get(name, 1e-12)


def checkpointed(name: str, policy: ActivationCheckpointing) -> float:
    model, given = build(name), inputs(name, padded=True)
    reference = copy.deepcopy(model)
    true = step(reference, given)
    with lt_tiled.prepare(model, sequence_parallel=2, activation_checkpointing=policy):
        return worst(step(model, given), true)


def collectives(name: str) -> dict[str, int]:
    model = build(name)
    policy = SequenceParallel(2, self_check=False)
    with lt_tiled.prepare(model, sequence_parallel=policy), Counts() as counts:
        model(**inputs(name)).loss.backward()
    return {name: count for name, count in counts.found.items() if count and name not in ("reads", "attention")}


def test_collectives(world: World) -> None:
    """Two layers of each exchange as those of a decoder alone do; attention to the encoder exchanges nothing."""
    assert world(collectives, "bart") == [{"all_to_all": 2 * 2 * 2 * 2, "all_gather": 2, "reduce_scatter": 2}] * 2


def evaluated(name: str) -> tuple[float, list[int], list[int]]:
    """The difference of losses in evaluation, and the tokens that each rank generates from inputs of its own, with a
    key-value cache and by a call that fills one.
    """
    model = build(name).eval()
    given, own = inputs(name), ids(1, 9 + dist.get_rank())
    found: list[Any] = []
    for policy in (None, 2):
        with lt_tiled.prepare(model, sequence_parallel=policy) if policy else nullcontext(), torch.no_grad():
            loss = model(**given).loss
            tokens = model.generate(input_ids=own, max_new_tokens=5, do_sample=False)[0].tolist()
            found.append((loss, [*tokens, *model(input_ids=own, decoder_input_ids=own).logits[0].argmax(-1).tolist()]))
    (true, tokens), (loss, generated) = found
    return abs(float(loss - true)), tokens, generated


def test_evaluation(world: World) -> None:
    """A loss in evaluation is shared, and ``generate`` runs on each rank as without sequence parallelism."""
    for error, tokens, generated in world(evaluated, "bart"):
        assert error < 1e-12
        assert tokens == generated


def refused(name: str, fields: dict[str, Any], options: dict[str, Any]) -> str:
    return against_whole(build(name, **fields), inputs(name), **options)[2]


@pytest.mark.parametrize(
    ("name", "fields", "options", "message"),
    [
        ("bart", {"encoder_layerdrop": 0.1}, {}, "leaves out blocks at random .encoder_layerdrop=0.1.* set it to 0"),
        ("t5", {}, {}, "adds a position bias to attention"),
        ("t5gemma2", {}, {}, "found blocks in text_model.layers, vision_tower.encoder.layers"),
        ("t5gemma2", {}, {"targets": "model.decoder.layers.*"}, "attention to both at once cannot be shared"),
    ],
)
def test_refused(name: str, fields: dict[str, Any], options: dict[str, Any], message: str, world: World) -> None:
    """What differs between ranks by chance, or cannot be cut, is refused by name."""
    for found in world(refused, name, fields, options):
        assert re.search(message, found)
