"""The attention functions of transformers get masks and positions of all tokens, and are restored."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import lt_tiled
from lt_tiled import SequenceParallel
from tests.sequence_parallel.models import GPT, HeadsOnly, causal, ids, packed, padded
from tests.sequence_parallel.runs import against_whole, step, worst
from tests.world import RanksFailed, World


def varlen_like(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention with the arguments of flash attention: a mask ``[B, S]`` of padding, and documents in position ids."""
    tokens = key.shape[2]
    assert attention_mask is None or attention_mask.shape[1] == tokens
    assert position_ids is None or position_ids.shape[-1] == tokens
    place = torch.arange(tokens)
    distance = place[:, None] - place
    seen = distance >= 0
    if sliding_window is not None:
        seen = seen & (distance < sliding_window)
    if attention_mask is not None:
        seen = seen & attention_mask[:, None, None].bool()
    elif position_ids is not None:
        document = (position_ids == 0).cumsum(-1)
        seen = seen & (document[:, None, :, None] == document[:, None, None])
    groups = module.num_key_value_groups
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    seen = seen | (distance == 0)  # padding attends to itself, so that nothing is nan
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling)
    return out.transpose(1, 2), None


def errors_of_flash(name: str, fields: dict[str, Any], given: str) -> float:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as TABLE

    make = {"packed": packed, "left": padded(True), "right": padded(False)}[given]
    inputs = make(ids(1 if given == "packed" else 2, 37))
    TABLE["flash_attention_2"] = varlen_like
    try:
        models = [causal(name, **fields)() for _ in range(2)]
        for model in models:
            model.config._attn_implementation = "flash_attention_2"  # the package itself is not installed
            lt_tiled.prepare(model, loss=True)
        true = step(models[0], inputs)
        with lt_tiled.prepare(models[1], sequence_parallel=4):
            return worst(step(models[1], inputs), true)
    finally:
        del TABLE["flash_attention_2"]


@pytest.mark.table("mistral-.*-packed")
@pytest.mark.parametrize("given", ["packed", "left", "right"])
@pytest.mark.parametrize(("name", "fields"), [("llama", {}), ("mistral", {"sliding_window": 6})])
def test_flash_attention(name: str, fields: dict[str, Any], given: str, four_ranks: World) -> None:
    """Attention that reads padding and position ids gets those of all tokens."""
    for error in four_ranks(errors_of_flash, name, fields, given):
        assert error < 1e-12


FLEX: dict[str, tuple[str, dict[str, Any], Any]] = {
    "packed": ("llama", {}, packed),
    "padded": ("llama", {}, padded(True)),
    "sliding window": ("mistral", {"sliding_window": 6}, padded(False)),
}


def errors_of_flex(name: str) -> float:
    """The error of a loss without gradients, which torch's flex attention has not on a CPU."""
    architecture, fields, given = FLEX[name]
    model, losses = causal(architecture, **fields)().train(), []
    model.set_attn_implementation("flex_attention")
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        for policies in ({}, {"sequence_parallel": 4}):
            with lt_tiled.prepare(model, loss=True, **policies):
                losses.append(model(**given(ids(2, 37))).loss)
    return float((losses[1] - losses[0]).abs() / losses[0])


@pytest.mark.parametrize("name", FLEX)
def test_flex_attention(name: str, four_ranks: World) -> None:
    """Flex attention of transformers gets block masks of all tokens."""
    for error in four_ranks(errors_of_flex, name):
        assert error < 1e-12


def softmax_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention in matrix products, with keys and values for each query head."""
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    return (query @ key.mT).masked_fill(~mask, -torch.inf).softmax(-1) @ value


class Softmax(HeadsOnly):
    """A model with an attention function of its own."""

    def __init__(self, attention: Any) -> None:
        super().__init__(16, 4)
        for block in self.blocks:
            block.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        for block in self.blocks:
            x = block(x, mask)
        return x


def errors_of_own_attention(shared: bool) -> float:
    torch.manual_seed(0)
    attention = lt_tiled.shared_attention(softmax_attention) if shared else softmax_attention
    model = Softmax(attention).double()
    inputs = {"x": torch.randn(2, 13, 16, dtype=torch.float64)}
    true = step(model, inputs)
    with lt_tiled.prepare(model, sequence_parallel=4):
        return worst(step(model, inputs), true)


def test_own_attention(four_ranks: World) -> None:
    """A function of the model's own attends to all tokens through ``shared_attention``."""
    for error in four_ranks(errors_of_own_attention, True):
        assert error < 1e-12


def test_own_attention_that_is_not_shared(four_ranks: World) -> None:
    """Without it, the model is refused on all ranks."""
    with pytest.raises(RanksFailed, match="The size of tensor a"):
        four_ranks(errors_of_own_attention, False)


class LocalMask(GPT):
    """Cuts the mask to the tokens that a block is given."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.forward = lambda x, mask=None, block=block: type(block).forward(
                block, x, torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            )


def refusal(build: str) -> str:
    model = {"local mask": LocalMask, "multihead": lambda: nn.Sequential(*_encoder())}[build]()
    x = ids(2, 16) if build == "local mask" else torch.randn(2, 16, 8)
    policy = SequenceParallel(dist.get_world_size())
    with lt_tiled.prepare(model, sequence_parallel=policy):
        try:
            model(x)
        except ValueError as error:
            return str(error)
    return "nothing was refused"


def _encoder() -> list[nn.Module]:
    return [nn.TransformerEncoderLayer(8, 4, 16, batch_first=True, dropout=0.0) for _ in range(2)]


@pytest.mark.parametrize(
    ("build", "message"),
    [("local mask", "which is not that of all 16 tokens"), ("multihead", "has another output when 4 ranks share")],
)
def test_refused(build: str, message: str, four_ranks: World) -> None:
    """A mask of the rank's tokens, and attention that cannot be shared, raise on all ranks."""
    for found in four_ranks(refusal, build):
        assert message in found


class Biased(GPT):
    """A GPT with another mask for each of its four heads, and no dimension of rows."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        mask = torch.stack([(distance >= 0) & (distance < 3 + head) for head in range(4)])
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def biased() -> tuple[float, int, str]:
    torch.manual_seed(0)
    return against_whole(Biased().double(), {"input_ids": ids(2, 37)})


def test_masks_of_heads(world: World) -> None:
    """A mask ``[heads, S, S]`` is cut to the rank's heads."""
    for error, _, message in world(biased):
        assert message == ""
        assert error < 1e-12


def test_fewer_heads_than_ranks(four_ranks: World) -> None:
    """More ranks than query heads are refused, with the size that is possible."""
    for message in four_ranks(too_few_heads):
        assert re.search(r"sequence_parallel=4 needs as many query heads .* LlamaForCausalLM has 2: use", message)


def too_few_heads() -> str:
    model, x = causal("llama", num_attention_heads=2)(), ids(1, 16)
    return against_whole(model, {"input_ids": x, "labels": x})[2]
