"""Models of several kinds, and the losses of their steps, which do not depend on the engine or on tiles."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lt_tiled import ActivationCheckpointing
from tests.architectures import ARCHITECTURES
from tests.engines.cells import draw
from tests.models import Block, GatedMLP, H, PythonNorm, RoutedMLP, TinyLM, lm_loss, tiny_llama

# The loss of a step on a rank. Sequences are of other lengths on each rank and in each step.


def of_logits(model: Any, step: int, rank: int) -> Tensor:
    ids = draw((2, 24 + step + 5 * rank), rank)
    return lm_loss(model(ids), ids)


def of_labels(model: Any, step: int, rank: int, **inputs: Any) -> Tensor:
    """The loss of a model of transformers, with labels of which another part is ignored on each rank."""
    ids = draw((2, 40 + 6 * rank + step), rank) + 3
    labels = ids.clone()
    labels[0, : 3 + 9 * rank] = -100
    return model(input_ids=ids, labels=labels, **inputs).loss


def of_lengths(*lengths: int) -> Callable[..., Tensor]:
    """Return what takes the lengths in turn on each rank."""

    def loss(model: Any, step: int, rank: int) -> Tensor:
        ids = draw((1, lengths[(rank + step) % len(lengths)]), rank)
        return (model(ids) * torch.linspace(-1, 1, 32)).square().sum() / 2**17

    return loss


def of_calls(combine: Callable[[list[Tensor], Callable[[Tensor], Tensor]], Tensor]) -> Callable[..., Tensor]:
    """Return a loss of several forward passes, as DPO and contrastive losses have it."""

    def loss(model: Any, step: int, rank: int) -> Tensor:
        batches = [draw((2, length), 2 * step + rank) for length in (24, 20, 28)]
        return combine(batches, lambda ids: lm_loss(model(ids), ids))

    return loss


def no_gradient(ids: list[Tensor], loss: Callable[[Tensor], Tensor]) -> Tensor:
    """DPO's, with a reference that takes no gradient between the two calls."""
    chosen = loss(ids[0])
    with torch.no_grad():
        reference = loss(ids[1])
    return F.softplus(chosen - loss(ids[2]) - reference)


# Models


def frozen() -> nn.Module:
    """Embeddings, attention and the first MLP's down projection are frozen: no gradient reaches the first block."""
    model = TinyLM()
    for name, weight in model.named_parameters():
        weight.requires_grad_(not any(part in name for part in ("embed", "attention", "norm", "blocks.0.mlp.down")))
    return model


def unused() -> nn.Module:
    """A weight beside the blocks, and one inside of a tiled module, that no rank uses."""
    model = TinyLM()
    model.spare = nn.Linear(16, 16)
    model.blocks[0].mlp.spare = nn.Linear(16, 4)
    return model


class Gate(nn.Module):
    """Stands for attention, whose cost would hide that of the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(H, H), nn.Linear(H, H)

    def forward(self, n: Tensor) -> Tensor:
        return torch.tanh(self.q(n)) * self.k(n)


class Layer(nn.Module):
    """A block with norms around its MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.input_norm, self.attention, self.pre_mlp_norm = PythonNorm(), Gate(), nn.LayerNorm(H)
        self.mlp, self.post_mlp_norm = GatedMLP(), nn.RMSNorm(H)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.input_norm(x))
        return x + self.post_mlp_norm(self.mlp(self.pre_mlp_norm(x)))


class Layers(nn.Module):
    """Two of them between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, H), nn.Linear(H, 32)
        self.blocks = nn.ModuleList(Layer() for _ in range(2))
        self.early: list[Tensor] = []

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Mixing(GatedMLP):
    """Subtracts half of the mean over all tokens, which the self-check sees from two tokens on."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - 0.5 * x.mean(-2, keepdim=True))


class Routed(nn.Module):
    """A mixture of more experts than four tokens can choose."""

    def __init__(self, hidden: int, wide: int) -> None:
        super().__init__()
        self.moe = RoutedMLP(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x)[0]


def with_mlp(mlp: Callable[[int, int], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = TinyLM()
        model.blocks = nn.ModuleList(Block(mlp=mlp) for _ in range(2))
        return model

    return build


def of_architecture(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        architecture = ARCHITECTURES[name]
        # Units of FSDP cannot share a weight.
        return replace(architecture, fields={**architecture.fields, "tie_word_embeddings": False}).build(torch.float32)

    return build


def adapted(build: Callable[[], Any], **config: Any) -> Callable[[], nn.Module]:
    """Return what builds a model with LoRA."""

    def with_adapters() -> nn.Module:
        model = build()
        torch.manual_seed(0)
        return get_peft_model(model, LoraConfig(r=2, task_type="CAUSAL_LM", **{"init_lora_weights": False, **config}))

    return with_adapters


# Blocks that take, use or return something else, which under ZeRO-3 are leaf modules


class Unusual(Block):
    """A block and the way it is called."""

    @staticmethod
    def call(block: Any, x: Tensor, state: Tensor) -> Tensor:
        return block(x)


class Crosses(Unusual):
    """Adds a state that follows an argument which is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(H, H)

    def forward(self, x: Tensor, mask: Tensor | None = None, state: Tensor | None = None) -> Tensor:
        return super().forward(x if state is None else x + self.project(state))

    @staticmethod
    def call(block: Any, x: Tensor, state: Tensor) -> Tensor:
        return block(x, state=state)


class ReturnsDict(Unusual):
    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"hidden": super().forward(x)}

    @staticmethod
    def call(block: Any, x: Tensor, state: Tensor) -> Tensor:
        return block(x)["hidden"]


class OfBlocks(TinyLM):
    """Such blocks after an embedding, which may be frozen, run once or twice."""

    def __init__(self, kind: type[Unusual] = Unusual, frozen: bool = False, times: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(2))
        self.kind, self.times, self.state = kind, times, nn.Linear(H, H)
        self.embed.requires_grad_(not frozen)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        state = self.state(x)
        for block in [*self.blocks] * self.times:
            x = self.kind.call(block, x, state)
        return self.head(x + state)


class TakesIds(Unusual):
    """Embeds tokens by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, H)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(self.embed(ids))


class OfTokens(TinyLM):
    """Adds what blocks make of the tokens, which have no hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TakesIds() for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.head(self.embed(ids) + self.blocks[0](ids) + self.blocks[1](ids))


class UsesNormBefore(TinyLM):
    """Uses the norm of a block before the block runs."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.head(self.blocks[1](self.blocks[1].norm1(self.blocks[0](self.embed(ids)))))


def ties_blocks() -> nn.Module:
    """Two blocks share a weight."""
    model = TinyLM()
    first, second = model.blocks
    second.mlp.down.weight = first.mlp.down.weight  # type: ignore[union-attr]
    return model


def with_own_leaves(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return what builds a model whose MLPs are leaf modules of ZeRO-3 instead of its blocks."""

    def own_leaves() -> nn.Module:
        model = build()
        if "deepspeed" in sys.modules:
            from deepspeed.utils import set_z3_leaf_modules

            set_z3_leaf_modules(model, [GatedMLP])
        return model

    return own_leaves


@dataclass(frozen=True)
class Kind:
    """How a model is built and trained."""

    build: Callable[[], nn.Module]
    loss: Callable[[Any, int, int], Tensor] = of_logits
    policies: dict[str, Any] = field(default_factory=dict)
    """Besides tiles and activation checkpointing."""
    unused: bool = False
    """Whether a rank leaves weights unused."""
    untiled: bool = False
    """Whether something that ``auto`` finds runs untiled."""
    engines: tuple[str, ...] = ("ddp", "fsdp", "fsdp2", "zero1", "zero2", "zero3")


QWEN = of_architecture("Qwen 3 MoE")
LOSS = {"loss": 4}
HEAD = {"target_modules": ["q_proj", "lm_head"]}
EXPERTS = {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
ON_DISK = {"activation_checkpointing": ActivationCheckpointing(offload="disk", keep_last=0)}
CHECKED = {"tiling": 3, "activation_checkpointing": None}
TIED = ("ddp", "fsdp", "zero1", "zero2", "zero3")
"""Engines under which blocks and embeddings may share weights."""
PARAMETRIZED = ("ddp", "fsdp2", "zero1", "zero2")
"""Without lt_tiled either, PEFT trains no experts under FSDP1, and under ZeRO-3 only in leaf modules of DeepSpeed."""
KINDS = {
    # What trains.
    "frozen": Kind(frozen, policies=ON_DISK, unused=True),
    "unused": Kind(unused, policies=ON_DISK, unused=True),
    "tied": Kind(lambda: tiny_llama(tie_word_embeddings=True), of_labels, LOSS, engines=TIED),
    "LoRA": Kind(adapted(tiny_llama, target_modules=["q_proj", "up_proj", "down_proj"]), of_labels, ON_DISK),
    "LoRA on the head": Kind(adapted(tiny_llama, **HEAD), of_labels, LOSS),
    "DoRA on the head": Kind(adapted(tiny_llama, **HEAD, use_dora=True), of_labels, LOSS),
    "a copy of the head": Kind(
        adapted(tiny_llama, target_modules=["q_proj"], modules_to_save=["lm_head"]), of_labels, LOSS
    ),
    "LoRA on experts": Kind(adapted(QWEN, **EXPERTS), of_labels, unused=True, engines=PARAMETRIZED),
    "LoRA on all": Kind(
        adapted(of_architecture("Qwen 3 MoE"), target_modules="all-linear"),
        of_labels,
        unused=True,
        engines=("ddp", "zero3"),
    ),
    # Models of transformers, with the loss in tiles.
    "Llama": Kind(of_architecture("Llama"), of_labels, LOSS),
    "Gemma 2": Kind(of_architecture("Gemma 2"), of_labels, LOSS),
    "BERT": Kind(of_architecture("BERT"), of_labels, unused=True),
    "Mixtral": Kind(
        of_architecture("Mixtral"), lambda m, s, r: of_labels(m, s, r, output_router_logits=True), LOSS, unused=True
    ),
    # What differs between ranks.
    "other experts on each rank": Kind(with_mlp(Routed), of_lengths(4), unused=True, engines=("ddp", "fsdp2")),
    "tokens are mixed": Kind(with_mlp(Mixing), of_logits, CHECKED, untiled=True),
    "4096 and 512 tokens": Kind(Layers, of_lengths(4096, 512), {"tiling": True}, untiled=True),
    "4096 and 1 token": Kind(Layers, of_lengths(1, 4096), {"tiling": True}, untiled=True),
    "4096 and no tokens": Kind(Layers, of_lengths(4096, 0), {"tiling": True}, untiled=True),
    # Several forward passes before one backward pass.
    "two calls": Kind(TinyLM, of_calls(lambda ids, loss: loss(ids[0]) + 2 * loss(ids[1]))),
    "three calls": Kind(TinyLM, of_calls(lambda ids, loss: loss(ids[0]) + 2 * loss(ids[1]) + loss(ids[2]))),
    "product": Kind(TinyLM, of_calls(lambda ids, loss: loss(ids[0]) * loss(ids[1]))),
    "no gradient between": Kind(TinyLM, of_calls(no_gradient)),
    "first is unused": Kind(TinyLM, of_calls(lambda ids, loss: 0 * loss(ids[0]).detach() + loss(ids[1]))),
    "last is unused": Kind(TinyLM, of_calls(lambda ids, loss: loss(ids[0]) + 0 * loss(ids[1]).detach())),
    "blocks run twice": Kind(partial(OfBlocks, times=2), engines=("ddp", "zero2", "zero3")),
}
REFUSED_BY_ZERO3 = {
    "blocks.0 (TakesIds)": OfTokens,
    "blocks.1 (Block), norm before": UsesNormBefore,
    "blocks.1 (Block), tied": ties_blocks,
}
KINDS |= {name: Kind(build, policies=CHECKED, engines=()) for name, build in REFUSED_BY_ZERO3.items()}
for _build in (OfTokens, UsesNormBefore):
    KINDS[f"own leaves, {_build.__name__}"] = Kind(
        with_own_leaves(_build), policies=CHECKED, unused=True, engines=("zero3",)
    )
for _unusual in (Crosses, ReturnsDict, Unusual):
    for _frozen in (False, True):
        KINDS[f"{_unusual.__name__}, frozen embedding" if _frozen else _unusual.__name__] = Kind(
            partial(OfBlocks, _unusual, _frozen), unused=True, engines=("zero3",)
        )
