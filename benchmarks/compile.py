"""What ``torch.compile`` does to each setting: ``python -m benchmarks --only compile``.

A small Llama takes steps of SGD on two lengths, compiled with inductor from an empty cache: the error of the last
step's loss and gradients against the plain model, the graphs that the compiler made, and the time of steps. Errors and
graphs are the same in every run on a CPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.sheet import Cell, Sheet, machine, reason
from lt_tiled import ActivationCheckpointing, Tiling, prepare

SIZES: dict[str, Any] = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 224, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
LENGTHS = (512, 384)
LATER = (448, 512, 320, 384, 512)
NEAR = 1e-5
TILES = Tiling(num_shards=4)
RECOMPUTE = ActivationCheckpointing()
OFFLOADED = ActivationCheckpointing(offload="cpu")
SETTINGS: dict[str, dict[str, Any] | None] = {
    "without lt_tiled": None,
    "tiles, recompute": {"tiling": TILES, "activation_checkpointing": RECOMPUTE},
    "tiles, keep": {"tiling": TILES, "activation_checkpointing": ActivationCheckpointing(keep="attention_output")},
    "tiles, offload": {"tiling": TILES, "activation_checkpointing": OFFLOADED},
}
COMPILED = ("nothing", "blocks", "model", "tiles")


def compile() -> list[Sheet]:
    """One row for each setting and what is compiled."""
    headings = ["setting", "compiled", "error", "graphs", "first step", "first of another length", "later steps"]
    sheet = Sheet("compile", "compiled models", headings)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS))
    true, _ = steps(deepcopy(model))
    for name, setting in SETTINGS.items():
        for what in COMPILED:
            if what == "tiles" and (setting is None or not setting["tiling"]):
                continue
            try:
                sheet.add(name, what, *row(deepcopy(model), setting, what, true))
            except Exception as error:  # one that fails is a row, and the others run
                sheet.add(name, what, Cell(reason(error), False), *[""] * 4)
    sheet.notes = [
        f"Llama, {SIZES['num_hidden_layers']} layers of {SIZES['hidden_size']}, {LENGTHS[0]} tokens at most, float32,"
        f" inductor, {machine(torch.device('cpu'))}. ✗ above {NEAR:g}. Graphs are those after two lengths, with those"
        " that later lengths added. Milliseconds; later steps are the median of five."
    ]
    return [sheet]


def row(model: nn.Module, setting: dict[str, Any] | None, what: str, true: dict[str, Tensor]) -> list[Cell | str]:
    """Return the cells of a setting."""
    torch._dynamo.reset()
    counters.clear()
    if setting is not None and what == "tiles":
        setting = {**setting, "tiling": replace(TILES, compile=True)}
    with fresh_cache(), nullcontext() if setting is None else prepare(model, **setting):
        if what == "blocks":
            for block in model.model.layers:  # type: ignore[union-attr]
                block.compile()
        elif what == "model":
            model.compile()
        graphs: list[int] = []
        found, times = steps(model, lambda: graphs.append(counters["stats"]["unique_graphs"]))
    error = max(float((found[k] - value).norm() / value.norm()) for k, value in true.items())
    early, all_of_them = graphs[len(LENGTHS) - 1], graphs[-1]
    first, second, *later = (1000 * each for each in times)
    count = f"{early}" if early == all_of_them else f"{early} + {all_of_them - early}"
    median = statistics.median(later)
    return [Cell(f"{error:.0e}", error < NEAR), count, f"{first:,.0f}", f"{second:,.0f}", f"{median:,.0f}"]


def steps(model: Any, each: Callable[[], Any] = lambda: None) -> tuple[dict[str, Tensor], list[float]]:
    """Return the loss and the gradients of the last step, and the seconds of each."""
    optimizer, times = torch.optim.SGD(model.parameters(), 0.05), []
    for length in (*LENGTHS, *LATER):
        ids = torch.randint(SIZES["vocab_size"], (1, length), generator=torch.Generator().manual_seed(length))
        optimizer.zero_grad()
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        times.append(time.perf_counter() - start)
        optimizer.step()
        each()
    gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters()}
    return {"loss": loss.detach(), **gradients}, times
