"""Models of several kinds under every engine: norms after the MLP, mixtures of experts, images and text, adapters."""

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
from tests.engines.cells import draw, launch, set_up, step_on, train
from tests.engines.conftest import OnRanks
from tests.models import RoutedMLP, TinyLM
from tests.parity import near
from tests.world import World

KINDS: dict[str, dict[str, Any]] = {"Llama": {}, "Gemma 2": {}, "BERT": {}, "Mixtral": {"output_router_logits": True}}
"""Models, and what they are given besides tokens and labels."""
TILED = Tiling(3, self_check=False)
ENGINES = ["ddp", "fsdp", "fsdp_flat", "fsdp2", "zero2", "zero3"]


def built(kind: str, tied: bool) -> Any:
    """A model; units of FSDP cannot share a weight, and DDP wants none that is unused, as BERT's second bias is where
    they do not.
    """
    architecture = ARCHITECTURES[kind]
    return replace(architecture, fields={**architecture.fields, "tie_word_embeddings": tied}).build(torch.float32)


def losses(engine: str, kind: str, tiled: bool) -> tuple[list[float], bool]:
    """The losses of two steps on other tokens on each rank, and whether all that is tiled ran in tiles."""
    rank = dist.get_rank()
    policies: dict[str, Any] = {"tiling": TILED, "loss": kind != "BERT"} if tiled else {"tiling": None}
    fabric = launch(engine, activation_checkpointing=True, **policies)
    net = built(kind, tied=engine == "ddp")
    model, optimizer = set_up(fabric, net, engine)
    found = []
    for step in range(2):  # in the second one, the gradients of the first count
        ids = torch.randint(3, 64, (2, 40 + 6 * rank), generator=torch.Generator().manual_seed(10 * step + rank))
        value = model(input_ids=ids, labels=ids, **KINDS[kind]).loss
        found.append(step_on(fabric, optimizer, value))
    rows = Report.of(net).tiled
    fabric.strategy.release()
    return found, bool(rows) and all(row.tiles > 1 for row in rows)


@pytest.mark.self_checks
@pytest.mark.table("Llama-zero3|BERT-fsdp|Gemma 2-(fsdp2|zero3)|Mixtral-(ddp|fsdp_flat|zero3)")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
def test_losses(on_ranks: OnRanks, engine: str, kind: str) -> None:
    """Tiled and checkpointed, with the loss in tiles and other lengths on each rank, two steps have the losses of the
    engine's own untiled run; those of Mixtral with the auxiliary loss of its router's logits.
    """
    untiled, tiled = on_ranks(losses, engine, kind, False), on_ranks(losses, engine, kind, True)
    for (true, _), (found, all_tiled) in zip(untiled, tiled, strict=True):
        assert found == near(true)
        assert all_tiled


def images_on_one_rank(frozen: bool, tiling: Tiling | None) -> tuple[dict[str, Tensor], bool]:
    """The gradients of a step with images on rank 0 alone, averaged by DDP."""
    architecture = ARCHITECTURES["Qwen 3-VL"]
    net: Any = architecture.build(torch.float32)
    inputs = architecture.feed(net)
    if frozen:
        for name, weight in net.named_parameters():
            weight.requires_grad_("language_model" in name)
        torch.manual_seed(0)
        targets = r".*language_model.layers.1.*(gate_proj|down_proj|q_proj)|.*visual.*linear_fc1"
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
@pytest.mark.parametrize("frozen", [False, True], ids=["all trains", "frozen tower, LoRA on some layers"])
def test_images_on_one_rank(world: World, frozen: bool) -> None:
    """Under DDP with images on one rank and none on the other, both towers are tiled, and both ranks' gradients are the
    untiled ones.
    """
    untiled = world(images_on_one_rank, frozen, None)
    tiled = world(images_on_one_rank, frozen, TILED)
    for (true, _), (found, all_tiled) in zip(untiled, tiled, strict=True):
        assert all_tiled
        assert found.keys() == true.keys()
        assert any("vis" in name for name in found)
        scale = max(float(value.norm()) for value in true.values())
        assert max(float((found[n] - true[n]).norm()) / max(float(true[n].norm()), 1e-3 * scale) for n in true) <= 1e-4


def with_norms_as_units(tiling: Tiling | None) -> list[float]:
    """The losses of three steps of a Gemma 2 whose norms next to MLPs are FSDP units of their own."""
    net = built("Gemma 2", tied=False)
    classes = {type(m) for path, m in net.named_modules() if path.endswith("feedforward_layernorm")}
    fabric = launch("fsdp", tiling=tiling, auto_wrap_policy=classes)
    model, optimizer = set_up(fabric, net, "fsdp_flat", lambda ps: torch.optim.SGD(ps, 0.1))
    ids = torch.arange(96).view(2, 48) % 64
    found = [step_on(fabric, optimizer, model(input_ids=ids, labels=ids).loss) for _ in range(3)]
    fabric.strategy.release()
    return found


@pytest.mark.self_checks
def test_norms_as_units(world: World) -> None:
    """Norms in the tiles of an MLP may be FSDP units: the losses are the untiled ones."""
    assert world(with_norms_as_units, TILED)[0] == near(world(with_norms_as_units, None)[0])


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


def losses_with_adapters(engine: str, targets: str, options: dict[str, Any]) -> list[float]:
    """The losses of two steps with LoRA on the weights of experts, or on all linear modules."""
    fabric = launch(engine, loss=None, **options)
    torch.manual_seed(0)
    experts = {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    chosen = experts if targets == "experts" else {"target_modules": "all-linear"}
    config = LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False, **chosen)
    model, optimizer = set_up(fabric, get_peft_model(built("Qwen 3 MoE", tied=False), config), engine)
    batches = [draw((2, 40), 10 * step + dist.get_rank()) for step in range(2)]
    found = [step_on(fabric, optimizer, model(input_ids=ids, labels=ids).loss) for ids in batches]
    fabric.strategy.release()
    return found


# Without lt_tiled either, PEFT trains no experts under FSDP1, and under ZeRO-3 only in the leaf modules of DeepSpeed.
@pytest.mark.table("experts-ddp|all-linear-zero3")
@pytest.mark.parametrize(
    ("targets", "engine"),
    [*[("experts", engine) for engine in ("ddp", "fsdp2", "zero2")], ("all-linear", "zero3")],
)
def test_adapters_of_experts(on_ranks: OnRanks, targets: str, engine: str) -> None:
    """LoRA on the weights of experts, which PEFT parametrizes anew in each forward pass, trains as without lt_tiled,
    with activation checkpointing and with tiles.
    """
    untiled, checkpointed = (
        {"tiling": None, "activation_checkpointing": checkpointing} for checkpointing in (None, True)
    )
    true = on_ranks(losses_with_adapters, engine, targets, untiled)
    for options in (checkpointed, {"tiling": TILED, "activation_checkpointing": True}):
        assert on_ranks(losses_with_adapters, engine, targets, options) == [near(each) for each in true]
