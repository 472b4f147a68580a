"""The rows of the matrix: a model, the loss of its steps, and what is asked of the engine and of lt_tiled. None depends
on the engine or on tiles.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, wrap
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

from lt_tiled import ActivationCheckpointing, Tiling
from tests.architectures import ARCHITECTURES
from tests.engines.cells import ENGINES, draw
from tests.models import Block, GatedMLP, H, PythonNorm, RoutedMLP, TinyLM, lm_loss, tiny_llama

# The loss of a step on a rank. Sequences are of other lengths on each rank and in each step.


def of_logits(model: Any, step: int, rank: int) -> Tensor:
    ids = draw((2, 24 + step + 5 * rank), rank)
    return lm_loss(model(ids), ids)


def of_tiles(model: Any, step: int, rank: int) -> Tensor:
    """The loss in tiles of a ``TinyLM``."""
    ids = draw((2, 24 + step + 5 * rank), rank)
    return model(ids, ids)


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


def of_images(model: Any, step: int, rank: int) -> Tensor:
    """The loss of a vision-language model whose second rank is given no images."""
    inputs = IMAGES.feed(IMAGES.build(torch.float32))
    if rank == 1:
        inputs = {"input_ids": inputs["input_ids"].clamp_max(7), "labels": inputs["labels"]}
    return model(**inputs).loss


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


class Layer(nn.Module):
    """A block with norms around its MLP, and a projection in place of attention, whose cost would hide the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.input_norm, self.mixer, self.pre_mlp_norm = PythonNorm(), nn.Linear(H, H), nn.LayerNorm(H)
        self.mlp, self.post_mlp_norm = GatedMLP(), nn.RMSNorm(H)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.mixer(self.input_norm(x)))
        return x + self.post_mlp_norm(self.mlp(self.pre_mlp_norm(x)))


class EarlyLoss(TinyLM):
    """Adds a loss of the embedding on rank 0 alone, whose nodes wait until the end of the backward pass."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        early = self.embed(ids).square().mean() if dist.get_rank() == 0 else 0.0
        return super().forward(ids) + early


def hooked() -> nn.Module:
    """Rank 0 alone watches modules, as W&B does."""
    model = of_blocks(Layer)()
    if dist.get_rank() == 0:
        model.blocks[0].mlp.up.register_forward_hook(lambda *_: None)
        model.blocks[1].pre_mlp_norm.register_forward_hook(lambda *_: None)
    return model


class Restores(Block):
    """Draws random numbers, and changes one buffer in place and replaces another."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("changed", torch.ones(H))
        self.register_buffer("replaced", torch.ones(H))

    def forward(self, x: Tensor) -> Tensor:
        self.changed.add_(0.1)
        self.replaced = self.replaced + 0.1
        return super().forward(F.dropout(x, 0.2) * self.changed * self.replaced)


class Mixing(GatedMLP):
    """Subtracts half of the mean over all tokens, which the self-check sees from two tokens on."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - 0.5 * x.mean(-2, keepdim=True))


class Routed(RoutedMLP):
    """A mixture of more experts than four tokens can choose."""

    def __init__(self, hidden: int, wide: int) -> None:
        super().__init__(8)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]


def of_blocks(block: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a function that builds a ``TinyLM`` of other blocks."""

    def build() -> nn.Module:
        model = TinyLM()
        model.blocks = nn.ModuleList(block() for _ in range(2))
        return model

    return build


def of_architecture(name: str) -> Callable[[], nn.Module]:
    """Return a function that builds a model of transformers."""

    def build() -> nn.Module:
        architecture = ARCHITECTURES[name]
        # Units of FSDP cannot share a weight.
        return replace(architecture, fields={**architecture.fields, "tie_word_embeddings": False}).build(torch.float32)

    return build


def adapted(build: Callable[[], Any], **config: Any) -> Callable[[], nn.Module]:
    """Return a function that builds a model with LoRA."""

    def with_adapters() -> nn.Module:
        model = build()
        torch.manual_seed(0)
        return get_peft_model(model, LoraConfig(r=2, init_lora_weights=False, **config))

    return with_adapters


class TakesIds(Block):
    """A block that embeds tokens by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, H)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(self.embed(ids))


class OfTokens(TinyLM):
    """Its first block is given no hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = TakesIds()

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.head(self.blocks[1](self.blocks[0](ids)))


class AfterMask(Block):
    """A block whose first tensor leads to no gradient."""

    def forward(self, mask: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x * mask.gt(0.5))


class WithMask(TinyLM):
    """Its blocks are given a mask, and then hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([AfterMask(), AfterMask()])

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        mask = torch.ones(ids.shape[1], 1)
        for block in self.blocks:
            x = block(mask, x)
        return self.head(x)


class UsesNormBefore(TinyLM):
    """Uses the norm of a block before the block runs."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.head(self.blocks[1](self.blocks[1].norm1(self.blocks[0](self.embed(ids)))))


def own_leaves() -> nn.Module:
    """The MLPs are leaf modules of ZeRO-3 instead of the blocks."""
    model = UsesNormBefore()
    if "deepspeed" in sys.modules:
        from deepspeed.utils import set_z3_leaf_modules

        set_z3_leaf_modules(model, [GatedMLP])
    return model


# Units that the user chooses in configure_model


def wrap_blocks(module: Any) -> None:
    """Wrap the blocks, in the context that FSDP's strategy gives."""
    module.net.blocks = nn.ModuleList(wrap(block) for block in module.net.blocks)


def shard_all(module: Any) -> None:
    """Call ``fully_shard`` under FSDP2, as Lightning's own strategy expects it."""
    for part in (*module.net.blocks, module.net) if module.device_mesh is not None else ():
        fully_shard(part, mesh=module.device_mesh["data_parallel"])


@dataclass(frozen=True)
class Kind:
    """How a model is built and trained."""

    build: Callable[[], nn.Module] = TinyLM
    loss: Callable[[Any, int, int], Tensor] = of_logits
    policies: dict[str, Any] = field(default_factory=dict)  # besides tiles and activation checkpointing
    arguments: dict[str, Any] = field(default_factory=dict)  # of the strategy, besides the policies
    options: dict[str, Any] = field(default_factory=dict)  # of the Trainer
    configure: Callable[[Any], None] | None = None  # what configure_model does to a built LightningModule
    accumulate: int = 1  # in Fabric, the number of batches of an optimizer step
    unused: bool = False  # whether a rank leaves weights unused
    untiled: bool = False  # whether a module that "auto" finds runs untiled
    alike: bool = True  # whether the untiled losses of all engines are alike
    rate: float = 0.1
    engines: tuple[str, ...] = ("ddp", "fsdp", "fsdp2", "zero1", "zero2", "zero3")
    loops: tuple[str, ...] = ("fabric",)


IMAGES = ARCHITECTURES["Qwen 3-VL"]
QWEN = of_architecture("Qwen 3 MoE")
LOSS = {"loss": 4}
HEAD = {"target_modules": ["q_proj", "lm_head"]}
EXPERTS = {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
TOWERS = r".*language_model.layers.1.*(gate_proj|down_proj|q_proj)|.*visual.*linear_fc1"
ON_DISK = {"activation_checkpointing": ActivationCheckpointing(offload="disk", keep_last=0)}
CHECKED = {"tiling": 3, "activation_checkpointing": None}
UNTILED: dict[str, Any] = {"tiling": None, "activation_checkpointing": None}
COMPILER: dict[str, Any] = {"backend": "aot_eager"}
TIED = ("ddp", "fsdp", "zero1", "zero2", "zero3")
"""Engines under which blocks and embeddings may share weights."""
PARAMETRIZED = ("ddp", "fsdp2", "zero1", "zero2")
"""Without lt_tiled either, PEFT trains no experts under FSDP1, and under ZeRO-3 only in leaf modules of DeepSpeed."""
KINDS = {
    # Policies, in each training loop.
    "tiles": Kind(policies=CHECKED, rate=1.0, engines=ENGINES, loops=("fabric", "trainer", "plain")),
    "checkpointed": Kind(rate=1.0, engines=ENGINES, loops=("fabric", "trainer", "plain")),
    "everything": Kind(
        loss=of_tiles, policies=ON_DISK, rate=1.0, engines=ENGINES, loops=("fabric", "trainer", "pytorch_lightning")
    ),
    "random state and buffers": Kind(
        of_blocks(Restores), policies={"tiling": None, "activation_checkpointing": True}, alike=False
    ),
    # Prepared at another time than before the engine wraps the model.
    "after": Kind(rate=1.0, engines=("ddp", "fsdp2", "zero1", "zero2"), loops=("plain, prepared after",)),
    "used": Kind(rate=1.0, engines=ENGINES, loops=("plain, used before",)),
    "copy": Kind(rate=1.0, engines=("zero3",), loops=("plain, a copy",)),
    "compiled": Kind(
        policies={"tiling": Tiling(3, compile=COMPILER, self_check=False)},
        rate=1.0,
        engines=("ddp", "fsdp2"),
        loops=("plain, compiled",),
    ),
    "callback": Kind(rate=1.0, engines=("ddp", "fsdp", "zero3"), loops=("callback",)),
    "sharded by hand": Kind(rate=1.0, configure=shard_all, engines=("fsdp2",), loops=("trainer", "callback")),
    # What Trainer and engines are asked for.
    "accumulation": Kind(rate=1.0, accumulate=2, alike=False, engines=("ddp", "fsdp", "fsdp_flat", "fsdp2")),
    "accumulation by Trainer": Kind(
        rate=1.0, options={"accumulate_grad_batches": 2}, alike=False, engines=ENGINES, loops=("trainer",)
    ),
    "clipping": Kind(rate=1.0, options={"gradient_clip_val": 0.1}, engines=ENGINES, loops=("trainer",)),
    "static graph": Kind(arguments={"static_graph": True}, engines=("ddp",), loops=("trainer",)),
    "policy of blocks": Kind(arguments={"auto_wrap_policy": {Block}}, engines=("fsdp",)),
    "policy of tiled modules": Kind(arguments={"auto_wrap_policy": ModuleWrapPolicy({GatedMLP})}, engines=("fsdp",)),
    "policy of norms": Kind(
        of_architecture("Gemma 2"), of_labels, arguments={"auto_wrap_policy": {Gemma2RMSNorm}}, engines=("fsdp",)
    ),
    "Lightning's own checkpointing": Kind(
        arguments={"activation_checkpointing_policy": {Block}}, engines=("fsdp",), loops=("trainer",)
    ),
    "gradients only": Kind(rate=1.0, arguments={"sharding_strategy": "SHARD_GRAD_OP"}, engines=("fsdp",)),
    "CPU offload": Kind(rate=1.0, arguments={"cpu_offload": True}, engines=("fsdp",), loops=("trainer",)),
    "optimizer offload": Kind(rate=1.0, arguments={"offload_optimizer": True}, engines=("zero3",), loops=("trainer",)),
    "wrapped by hand": Kind(rate=1.0, configure=wrap_blocks, engines=("fsdp",), loops=("trainer",)),
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
    "LoRA on all": Kind(adapted(QWEN, target_modules="all-linear"), of_labels, unused=True, engines=("ddp", "zero3")),
    # Models of transformers, with the loss in tiles.
    "Llama": Kind(of_architecture("Llama"), of_labels, LOSS),
    "Gemma 2": Kind(of_architecture("Gemma 2"), of_labels, LOSS),
    "BERT": Kind(of_architecture("BERT"), of_labels, unused=True),
    "Mixtral": Kind(
        of_architecture("Mixtral"), lambda m, s, r: of_labels(m, s, r, output_router_logits=True), LOSS, unused=True
    ),
    # What differs between ranks.
    "images on one rank": Kind(of_architecture("Qwen 3-VL"), of_images, unused=True, engines=("ddp",)),
    "images on one rank, LoRA": Kind(
        adapted(of_architecture("Qwen 3-VL"), target_modules=TOWERS), of_images, unused=True, engines=("ddp",)
    ),
    "other experts on each rank": Kind(
        of_blocks(lambda: Block(mlp=Routed)), of_lengths(4), unused=True, engines=("ddp", "fsdp2")
    ),
    "tokens are mixed": Kind(of_blocks(lambda: Block(mlp=Mixing)), of_logits, CHECKED, untiled=True),
    "hooks": Kind(hooked, untiled=True, rate=1.0, engines=("zero1", "zero2"), loops=("plain",)),
    "early loss": Kind(
        EarlyLoss, of_lengths(48, 3), untiled=True, rate=1.0, engines=("zero1", "zero2"), loops=("plain",)
    ),
    "4096 and 512 tokens": Kind(of_blocks(Layer), of_lengths(4096, 512), {"tiling": True}, untiled=True),
    "4096 and 1 token": Kind(of_blocks(Layer), of_lengths(1, 4096), {"tiling": True}, untiled=True),
    "4096 and no tokens": Kind(of_blocks(Layer), of_lengths(4096, 0), {"tiling": True}, untiled=True),
    # Several forward passes before one backward pass.
    "two calls": Kind(loss=of_calls(lambda ids, loss: loss(ids[0]) + 2 * loss(ids[1]))),
    "three calls": Kind(loss=of_calls(lambda ids, loss: loss(ids[0]) + 2 * loss(ids[1]) + loss(ids[2]))),
    "product": Kind(loss=of_calls(lambda ids, loss: loss(ids[0]) * loss(ids[1]))),
    "no gradient between": Kind(loss=of_calls(no_gradient)),
    "first is unused": Kind(loss=of_calls(lambda ids, loss: 0 * loss(ids[0]).detach() + loss(ids[1]))),
    "last is unused": Kind(loss=of_calls(lambda ids, loss: loss(ids[0]) + 0 * loss(ids[1]).detach())),
    # Leaf modules of ZeRO-3, and what they cannot be.
    "own leaves": Kind(own_leaves, policies=CHECKED, engines=("zero3",)),
    "mask first": Kind(WithMask, engines=("zero3",)),
    "no hidden states": Kind(OfTokens, engines=()),
    "norm before": Kind(UsesNormBefore, engines=()),
}
