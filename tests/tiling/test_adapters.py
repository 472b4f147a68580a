"""Adapters of PEFT on tiled models, added before and after preparation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lt_tiled import Tiling, prepare
from lt_tiled.report import Report
from tests.architectures import ARCHITECTURES
from tests.models import tiny_llama
from tests.parity import MIXED, step_of, worst

IDS = torch.arange(96).view(2, 48) % 64
TILES = Tiling(tile_tokens=20)
MLP = ["gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "LoRA": {"target_modules": MLP},
    "LoRA on attention alone": {"target_modules": ["q_proj", "v_proj"]},
    "LoRA with biases": {"target_modules": MLP, "lora_bias": True},
    "rsLoRA on some layers": {"target_modules": MLP, "layers_to_transform": [1], "use_rslora": True},
    "DoRA": {"target_modules": MLP, "use_dora": True},
    "modules_to_save": {"target_modules": ["q_proj"], "modules_to_save": ["mlp"]},
    "a saved projection": {"target_modules": ["gate_proj"], "modules_to_save": ["up_proj", "lm_head"]},
}


def run(model: nn.Module, inputs: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    return step_of(model, inputs or {"input_ids": IDS, "labels": IDS})


def adapted(model: nn.Module, **fields: Any) -> Any:
    """The model with adapters that do something: PEFT begins them at zero."""
    torch.manual_seed(1)
    found = get_peft_model(model, LoraConfig(**{"r": 4, "task_type": "CAUSAL_LM", **fields}))
    with torch.no_grad():
        for name, p in found.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    return found


@pytest.mark.table(".*-before")
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_parity(name: str, after: bool) -> None:
    """Adapters added before or after preparation give the untiled loss, the untiled gradients, and gradients for the
    same weights.
    """
    torch.manual_seed(0)
    base = tiny_llama().double()
    true = run(adapted(copy.deepcopy(base), **ADAPTERS[name]))
    model = base if after else adapted(base, **ADAPTERS[name])
    with prepare(model, tiling=TILES, activation_checkpointing=True):
        model = adapted(base, **ADAPTERS[name]) if after else model
        assert worst(run(model), true) <= MIXED
        assert all(row.tiles > 1 for row in Report.of(model).tiled if "original_module" not in row.path)
    assert not Report.of(model).tiled


def test_adapters_in_a_method() -> None:
    """LoRA on the two halves of BERT's MLP, which is a method of the layer, gives the untiled gradients."""
    architecture = ARCHITECTURES["BERT"]
    base, halves = architecture.build(), ["intermediate.dense", "output.dense"]
    true = run(adapted(copy.deepcopy(base), target_modules=halves, task_type=None), architecture.feed(base))
    model = adapted(base, target_modules=halves, task_type=None)
    with prepare(model, tiling=TILES, activation_checkpointing=True):
        assert worst(run(model, architecture.feed(base)), true) <= MIXED
        assert {(row.kind, row.tiles > 1) for row in Report.of(model).tiled} == {("BertLayer.feed_forward_chunk", True)}


def test_quantised_base() -> None:
    """LoRA on a base whose weights are eight-bit integers (torchao) gives the untiled loss and gradients."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    torch.manual_seed(0)
    base = tiny_llama(hidden_size=64, intermediate_size=192)
    quantize_(base, Int8WeightOnlyConfig(), filter_fn=lambda module, path: path.endswith("proj"))
    true = run(adapted(copy.deepcopy(base), target_modules=MLP))
    model = adapted(base, target_modules=MLP)
    with prepare(model, tiling=TILES, activation_checkpointing=True):
        assert worst(run(model), {name: value.double() for name, value in true.items()}) <= 1e-5
        assert all(row.tiles > 1 for row in Report.of(model).tiled)


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize(
    "fields", [{"target_modules": "all-linear"}, {"target_modules": [], "target_parameters": EXPERTS}]
)
def test_experts(fields: dict[str, Any]) -> None:
    """LoRA on the weights of experts, which PEFT parametrizes anew in each forward pass, gives the untiled loss and
    gradients.
    """
    architecture = ARCHITECTURES["Qwen 3 MoE"]
    model = adapted(architecture.build(), **fields)
    inputs = architecture.feed(model)
    true = run(model, inputs)
    with prepare(model, tiling=TILES, activation_checkpointing=True):
        for _ in range(3):
            assert worst(run(model, inputs), true) <= MIXED


def test_frozen_model_of_which_one_part_trains() -> None:
    """With everything frozen but one norm, that norm's gradient is the untiled one, and no other weight has any."""
    model = tiny_llama().double().requires_grad_(False)
    model.model.layers[0].post_attention_layernorm.weight.requires_grad_()
    true = run(model)
    with prepare(model, tiling=TILES, activation_checkpointing=True):
        assert worst(run(model), true) <= MIXED
    assert len(true) == 2
