"""Models of several kinds under every engine: chains in blocks, norms after the MLP, mixtures of experts, images and
text.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import lt_tiled
from lt_tiled import Tiling
from lt_tiled.report import Report
from tests.architectures import ARCHITECTURES
from tests.engines.cells import draw, launch, policies, set_up, step_on, train
from tests.engines.conftest import OnRanks
from tests.models import GatedMLP, RoutedMLP, TinyLM
from tests.parity import near
from tests.world import World

KINDS = ["Llama", "Gemma 2", "BERT", "Mixtral"]
TILED = Tiling(3, self_check=False)
ENGINES = ["ddp", "fsdp", "fsdp_flat", "fsdp2", "zero2", "zero3"]


def built(kind: str, tied: bool) -> Any:
    """A model; units of FSDP cannot share a weight, and DDP wants none that is unused, as BERT's second bias is where
    they do not.
    """
    architecture = ARCHITECTURES[kind]
    return replace(architecture, fields={**architecture.fields, "tie_word_embeddings": tied}).build(torch.float32)


def losses(
    engine: str, kind: str, tiling: Tiling | None, inputs: dict[str, Any], loss: bool = False
) -> tuple[list[float], bool]:
    """The losses of two steps on other tokens on each rank, and whether all that is tiled ran in tiles."""
    rank = dist.get_rank()
    fabric = launch(engine, tiling=tiling, activation_checkpointing=True, loss=loss)
    net = built(kind, tied=engine == "ddp")
    model, optimizer = set_up(fabric, net, engine)
    found = []
    for step in range(2):  # in the second one, the gradients of the first count
        ids = torch.randint(3, 64, (2, 40 + 6 * rank), generator=torch.Generator().manual_seed(10 * step + rank))
        value = model(input_ids=ids, labels=ids, **inputs).loss
        found.append(step_on(fabric, optimizer, value))
    rows = Report.of(net).tiled
    fabric.strategy.release()
    return found, bool(rows) and all(row.tiles > 1 for row in rows)


@pytest.mark.self_checks
@pytest.mark.table("Llama-zero3|BERT-fsdp|Gemma 2-fsdp2|Mixtral-(fsdp_flat|zero2)")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
def test_losses(on_ranks: OnRanks, engine: str, kind: str) -> None:
    """Tiled and checkpointed, with other lengths on each rank, two steps have the losses of the engine's own untiled
    run.
    """
    untiled = on_ranks.once(losses, engine, kind, None, {})
    tiled = on_ranks(losses, engine, kind, TILED, {})
    for (true, *_), (found, all_tiled, _) in zip(untiled, tiled, strict=True):
        assert found == near(true)
        assert all_tiled


@pytest.mark.table("ddp|zero3")
@pytest.mark.parametrize("engine", ENGINES)
def test_recorded_router_logits(on_ranks: OnRanks, engine: str) -> None:
    """With recorded router logits, and the auxiliary loss of them, the losses are the untiled ones too."""
    untiled = on_ranks.once(losses, engine, "Mixtral", None, {"output_router_logits": True})
    tiled = on_ranks(losses, engine, "Mixtral", TILED, {"output_router_logits": True})
    for (true, *_), (found, all_tiled, _) in zip(untiled, tiled, strict=True):
        assert found == near(true)
        assert all_tiled


def images_on_one_rank(kind: str, frozen: bool, tiling: Tiling | None) -> tuple[dict[str, Tensor], bool]:
    """The gradients of a step with images on rank 0 alone, averaged by DDP."""
    architecture = ARCHITECTURES[kind]
    net: Any = architecture.build(torch.float32)
    inputs = architecture.feed(net)
    if frozen:
        for name, weight in net.named_parameters():
            weight.requires_grad_("language_model" in name)
        torch.manual_seed(0)
        targets = r".*language_model.layers.1.*(gate_proj|down_proj|q_proj)|.*(visual|vision_tower).*(fc1|linear_fc1)"
        net = get_peft_model(net, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    if dist.get_rank():
        image = next(m for m in net.modules() if hasattr(m, "config")).config.image_token_id
        inputs = {
            "input_ids": inputs["input_ids"].masked_fill(inputs["input_ids"] == image, 7),
            "labels": inputs["labels"],
        }
    chosen = lt_tiled.fabric.TiledDDPStrategy(tiling=tiling, activation_checkpointing=True, find_unused_parameters=True)
    fabric = launch(chosen)
    model = fabric.setup_module(net)
    fabric.backward(model(**inputs).loss)
    rows = Report.of(net).tiled
    fabric.strategy.release()
    tiled = [row.tiles > 1 for row in rows if dist.get_rank() == 0 or "language" in row.path]
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}, bool(tiled) and all(tiled)


@pytest.mark.self_checks
@pytest.mark.table("Qwen.*")
@pytest.mark.parametrize("frozen", [False, True], ids=["all trains", "frozen tower, LoRA on some layers"])
@pytest.mark.parametrize("kind", ["Qwen 3-VL", "Gemma 3 (image and text)"])
def test_images_on_one_rank(world: World, kind: str, frozen: bool) -> None:
    """Under DDP with images on one rank and none on the other, both towers are tiled, and both ranks' gradients are the
    untiled ones.
    """
    untiled = world(images_on_one_rank, kind, frozen, None)
    tiled = world(images_on_one_rank, kind, frozen, TILED)
    for (true, _), (found, all_tiled) in zip(untiled, tiled, strict=True):
        assert all_tiled
        assert found.keys() == true.keys()
        assert any("vis" in name for name in found)
        scale = max(float(value.norm()) for value in true.values())
        assert max(float((found[n] - true[n]).norm()) / max(float(true[n].norm()), 1e-3 * scale) for n in true) <= 1e-4


def with_units(wrap: str, tiling: Tiling | None) -> list[float]:
    """The losses of three steps of a Gemma 2 whose modules with names that end in ``wrap`` are FSDP units."""
    net = built("Gemma 2", tied=False)
    classes = {type(m) for path, m in net.named_modules() if path.endswith(wrap)}
    chosen = lt_tiled.fabric.TiledFSDPStrategy(tiling=tiling, auto_wrap_policy=classes)
    fabric = launch(chosen)
    try:
        model = fabric.setup_module(net)
        optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), 0.1))
        ids, found = torch.arange(96).view(2, 48) % 64, []
        for _ in range(3):
            loss = model(input_ids=ids, labels=ids).loss
            found.append(step_on(fabric, optimizer, loss))
        return found
    finally:
        fabric.strategy.release()


@pytest.mark.self_checks
@pytest.mark.table("feedforward_layernorm")
@pytest.mark.parametrize("wrap", ["mlp", "feedforward_layernorm"])
def test_norms_and_mlps_as_units(world: World, wrap: str) -> None:
    """An MLP, or the norms next to it, as FSDP units of their own: the losses are the untiled ones."""
    assert world(with_units, wrap, TILED)[0] == near(world(with_units, wrap, None)[0])


@pytest.mark.table("zero3-Gemma 2")
@pytest.mark.parametrize("kind", ["Llama", "Gemma 2"])
@pytest.mark.parametrize("engine", ENGINES)
def test_loss_of_the_model_in_tiles(on_ranks: OnRanks, engine: str, kind: str) -> None:
    """With ``loss=True`` the losses of two steps are those of the engine's own untiled run with full logits."""
    untiled = on_ranks.once(losses, engine, kind, None, {})
    tiled = on_ranks(losses, engine, kind, TILED, {}, True)
    for (true, *_), (found, all_tiled, _) in zip(untiled, tiled, strict=True):
        assert found == near(true)
        assert all_tiled


class ByKeyword(nn.Module):
    """Calls its MLP with a keyword, and with a tensor that wants no gradient beside the hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(_KeywordBlock() for _ in range(2))
        self.head = nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, mask=(ids % 3 > 0).float()[..., None])
        return self.head(x)


class _KeywordBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.mlp = _MaskedMLP()

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        return x + self.mlp(mask=mask, hidden=self.norm(x))


class _MaskedMLP(GatedMLP):
    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return super().forward(hidden) * mask


def keyword_losses(engine: str, mode: str) -> list[float]:
    fabric = launch(engine, **policies(mode, ""))
    model, optimizer = set_up(fabric, ByKeyword(), engine)
    losses = train(fabric, model, optimizer, (draw((2, 24 + step), fabric.global_rank) for step in range(3)))
    fabric.strategy.release()
    return losses


@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_arguments_by_keyword(engine: str, on_ranks: OnRanks) -> None:
    """Hidden states passed by keyword train as untiled DDP does, also where ZeRO-3 looks at positional arguments
    alone.
    """
    plain = on_ranks.once(keyword_losses, "ddp", "untiled")
    assert on_ranks(keyword_losses, engine, "checkpointed") == [near(losses) for losses in plain]


class _Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = RoutedMLP(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x)[0]


class Mixture(TinyLM):
    """Its MLPs are mixtures of more experts than four tokens can choose."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.mlp = _Routed()


def mixture(engine: str) -> list[float]:
    options = {"find_unused_parameters": True} if engine == "ddp" else {}
    fabric = launch(engine, tiling=2, **options)
    net = Mixture()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    losses = train(fabric, model, optimizer, (draw((1, 4), 5 * fabric.global_rank + step) for step in range(3)))
    fabric.strategy.release()
    return losses


@pytest.mark.self_checks
def test_ranks_choose_different_experts_under_fsdp2(world: World) -> None:
    """Experts that have tokens on one rank alone train under FSDP2 as under DDP."""
    plain = world(mixture, "ddp")
    assert world(mixture, "fsdp2") == [near(losses) for losses in plain]


def losses_with_expert_adapters(engine: str, targets: str, options: dict[str, Any]) -> list[float]:
    """The losses of two steps with LoRA on the weights of experts, or on all linear modules."""
    fabric = launch(engine, loss=None, **options)
    net = built("Qwen 3 MoE", tied=False)
    torch.manual_seed(0)
    experts = {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    chosen = experts if targets == "experts" else {"target_modules": "all-linear"}
    net = get_peft_model(net, LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False, **chosen))
    model, optimizer = set_up(fabric, net, engine)
    found = []
    for step in range(2):
        ids = torch.randint(3, 64, (2, 40), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        found.append(step_on(fabric, optimizer, model(input_ids=ids, labels=ids).loss))
    fabric.strategy.release()
    return found


# Without lt_tiled either, PEFT trains no experts under FSDP1, and under ZeRO-3 only in the leaf modules of DeepSpeed.
@pytest.mark.table("experts-ddp|all-linear-zero3")
@pytest.mark.parametrize(
    ("targets", "engine"),
    [
        *[("experts", engine) for engine in ("ddp", "fsdp2", "zero2")],
        *[("all-linear", engine) for engine in ("ddp", "fsdp2", "zero2", "zero3")],
    ],
)
def test_adapters_of_experts(on_ranks: OnRanks, targets: str, engine: str) -> None:
    """LoRA on the weights of experts, which PEFT parametrizes anew in each forward pass, trains as without lt_tiled,
    with activation checkpointing and with tiles.
    """
    untiled = {"tiling": None, "activation_checkpointing": None}
    true = on_ranks.once(losses_with_expert_adapters, engine, targets, untiled)
    for tiling in (None, TILED):
        options = {"tiling": tiling, "activation_checkpointing": True}
        found = on_ranks(losses_with_expert_adapters, engine, targets, options)
        for one, other in zip(found, true, strict=True):
            assert one == near(other)
