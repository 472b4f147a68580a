"""Predictions against the allocator of a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.longest import LLAMA_8B
from lt_tiled import ActivationCheckpointing, TiledSingleDeviceStrategy, Tiling
from lt_tiled.callbacks import MemoryMonitor
from lt_tiled.lm import CausalLM, TextFiles
from lt_tiled.planner.job import make_job
from lt_tiled.planner.simulate import plan
from tests.lit import trainer


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [8192, 32768, 131072])
@pytest.mark.parametrize("offload", [None, "cpu"])
def test_four_layers_of_llama_8b(tokens: int, offload: Any) -> None:
    """``max_memory_allocated`` of real steps is within 5 % of the prediction."""
    policies: dict[str, Any] = {
        "tiling": Tiling(),
        "activation_checkpointing": ActivationCheckpointing(offload=offload),
        "loss": True,
    }
    data, monitor = TextFiles(seq_len=tokens), MemoryMonitor()
    with torch.device("meta"):
        planned = CausalLM(LLAMA_8B)
    strategy = TiledSingleDeviceStrategy(**policies)
    options: dict[str, Any] = {"accelerator": "gpu", "precision": "bf16-true"}
    predicted = plan(make_job(planned, data, {"strategy": strategy, **options})).peak
    run = trainer(
        TiledSingleDeviceStrategy(**policies), max_steps=3, callbacks=[monitor], limit_val_batches=0, **options
    )
    run.fit(CausalLM(LLAMA_8B), datamodule=data)
    assert predicted == pytest.approx(monitor.peak, rel=0.05)
