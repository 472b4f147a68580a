"""Real training runs with every byte booked, and predictions of the same."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model

from lt_tiled.lm import CausalLM, TextFiles
from lt_tiled.planner import simulate
from lt_tiled.planner.job import Job, make_job
from lt_tiled.planner.ledger import Ledger
from lt_tiled.planner.search import plan
from tests.lit import trainer

LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SMALL = {**LLAMA, "vocab_size": 256, "hidden_size": 64, "intermediate_size": 192}
"""The model of real steps: its weights and the activations of ``TOKENS`` tokens take as many bytes as each other."""
MIXTRAL = {**SMALL, "model_type": "mixtral", "num_local_experts": 4}
TWO = {**SMALL, "num_hidden_layers": 2}
_NO_GROUPS = {key: value for key, value in TWO.items() if key != "num_key_value_heads"}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {**TWO, "model_type": "qwen3", "head_dim": 16},
    "gemma3": {
        **TWO,
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": 256,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mistral": {**TWO, "model_type": "mistral", "sliding_window": 256},
    "phi": {**TWO, "model_type": "phi"},
    "phi3": {**TWO, "model_type": "phi3", "pad_token_id": 0},
    "gpt_neox": {**_NO_GROUPS, "model_type": "gpt_neox"},
    "olmo2": {**TWO, "model_type": "olmo2"},
    "mixtral": {**TWO, "model_type": "mixtral", "num_local_experts": 4},
    "falcon": {key: value for key, value in _NO_GROUPS.items() if key != "intermediate_size"}
    | {"model_type": "falcon"},
    "LoRA": TWO,
}
"""Models with a small geometry."""
TOKENS = 960


class Adapted(CausalLM):
    """With LoRA on attention and MLP, and frozen otherwise."""

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            targets = ["q_proj", "v_proj", "down_proj"]
            self.model = get_peft_model(self.model, LoraConfig(r=8, target_modules=targets, task_type="CAUSAL_LM"))


class Resizing(Ledger):
    """Sees storages that FSDP empties and fills again, too."""

    def __enter__(self) -> Resizing:
        original = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            if (allocation := self._live.get(storage._cdata)) is not None:
                self.now += size - allocation.nbytes
                allocation.nbytes = size
                self.peak = max(self.peak, self.now)
            return original(storage, size)

        self._patch = mock.patch.object(torch.UntypedStorage, "resize_", resize)
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        self._patch.stop()


class Watch(pl.Callback):
    """Reads the peak of the second step, which is like all that follow."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def on_train_batch_start(self, run: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        if index == 1:
            self.ledger.restart_peak()

    def on_train_batch_end(
        self, run: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        if index == 1:
            self.peak = self.ledger.peak


def measured(strategy: Any, module: type[CausalLM] = CausalLM, tokens: int = TOKENS, **kwargs: Any) -> int:
    """The peak of live bytes of a real step, from before the model was made."""
    with Resizing() as ledger:
        watch = Watch(ledger)
        run = trainer(
            strategy(),
            devices=dist.get_world_size() if dist.is_initialized() else 1,
            callbacks=[watch],
            max_steps=2,
            limit_val_batches=0,
        )
        run.fit(module(**kwargs), datamodule=TextFiles(seq_len=tokens))
    return watch.peak


def predicted(strategy: Any, devices: int = 1, module: type[CausalLM] = CausalLM, **kwargs: Any) -> int:
    """The same without a run."""
    with torch.device("meta"):
        model = module(**kwargs)
    return (
        make_job(model, TextFiles(seq_len=TOKENS), {"strategy": strategy(), "accelerator": "cpu", "devices": devices})
        .simulate()
        .peak
    )


def assert_two_stand_for_all(job: Job, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that a simulation of two tiles of each size has the parts, the peak and the FLOPs of one of all."""

    def figures() -> Any:
        run = plan(job, tokens).simulation
        return run.parts_at(run.peak_at), run.peak, run.forward_flops, run.flops, len(run.allocations)

    *two, few = figures()
    monkeypatch.setattr(simulate, "first_two_tiles", lambda ledger: nullcontext())
    *every, many = figures()
    assert two == every
    assert few < many
