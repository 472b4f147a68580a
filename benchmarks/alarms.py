"""Whether rounding raises a false alarm: ``python -m benchmarks --only alarms``, twenty minutes on one core.

Small models train with activation checkpointing, and each recompute sums in another order than its forward pass did:
products, outputs of experts, or, in compiled blocks, what another library computes. The table has the worst fingerprint
of all steps: its share of rows that differ, the units in the last place by which a row is off, and those of the row
behind the few that may differ. That one decides.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import mkldnn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from benchmarks.sheet import Cell, Sheet
from lt_tiled import Tiling, prepare
from lt_tiled.recompute import compare

HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
SIZE: dict[str, Any] = {**HEADS, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}


class Case(NamedTuple):
    """How a model computes. Experts are tiled: untiled ones save as many rows as the router gives them tokens."""

    weights: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    tf32: bool = False
    compiled: bool = False
    experts: bool = False


CASES = {
    "float32": Case(),
    "TF32": Case(tf32=True),
    "float16 autocast, scaled loss": Case(autocast=torch.float16),
    "bfloat16 autocast": Case(autocast=torch.bfloat16),
    "bfloat16 weights": Case(torch.bfloat16),
    "bfloat16 weights, compiled blocks": Case(torch.bfloat16, compiled=True),
    "bfloat16 weights, 4 of 8 experts": Case(torch.bfloat16, experts=True),
}


class Linear(torch.autograd.Function):
    """A linear layer that sums in float32, as kernels of GPUs do, from that feature on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, first: int, tf32: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        factors = [each.float().roll(-first, -1) for each in (x, weight)]
        if tf32:  # rounds to 10 bits
            factors = [(each.view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32) for each in factors]
        return (factors[0] @ factors[1].T).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = (each.float() for each in ctx.saved_tensors)
        of_weight = given.float().flatten(0, -2).T @ x.flatten(0, -2)
        return (given.float() @ weight).to(given.dtype), of_weight.to(given.dtype), None, None


def computing(case: Case, recompute: bool) -> ExitStack:
    """Compute in the order of the forward pass, or in another one."""

    def linear(x: Tensor, weight: Tensor, bias: None = None) -> Any:
        dtype = case.autocast if torch.is_autocast_enabled("cpu") else case.weights
        with torch.autocast("cpu", enabled=False):
            return Linear.apply(x.to(dtype), weight.to(dtype), 21 if recompute else 0, case.tf32)

    stack, nonzero = ExitStack(), Tensor.nonzero
    other = mkldnn.flags(enabled=not recompute) if case.compiled else patch.object(F, "linear", linear)
    stack.enter_context(other)
    if case.experts and recompute:  # the loop over experts begins with the last
        stack.enter_context(patch.object(Tensor, "nonzero", lambda found: nonzero(found).flip(0)))
    return stack


def alarms(steps: int) -> list[Sheet]:
    """One row for each case."""
    headings = ["", "steps refused", "rows that differ", "units of a row", "of the row that decides"]
    sheet = Sheet("alarms", f"{steps} steps whose recompute sums in another order", headings)
    sheet.notes = [f"{steps} steps with 1,024 tokens each. A row differs above {compare.TOLERANCE:g} units."]
    for name, case in CASES.items():
        refused, (share, most, decides) = train(case, steps)
        sheet.add(name, Cell(str(refused), refused == 0), f"{share:.2%}", f"{most:.2f}", f"{decides:.2f}")
    return [sheet]


def train(case: Case, steps: int) -> tuple[int, list[float]]:
    """Return how many steps were refused, the largest share of rows, and the units."""
    torch.manual_seed(0)
    experts = MixtralConfig(**SIZE, num_local_experts=8, num_experts_per_tok=4)
    model: Any = MixtralForCausalLM(experts) if case.experts else LlamaForCausalLM(LlamaConfig(**SIZE))
    model.to(case.weights).config._experts_implementation = "eager"
    for layer in model.model.layers if case.compiled else ():
        layer.compile()
    prepare(model, tiling=Tiling(2) if case.experts else None, activation_checkpointing=True, loss=False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=case.autocast == torch.float16)
    refused, worst, real = 0, torch.zeros(3), compare.rows_that_differ

    def noted(before: Tensor, now: Tensor, eps: float) -> Tensor:
        scale = before.nan_to_num(0, 0, 0).square().mean(-1, keepdim=True).sqrt() * eps
        units = ((before - now).abs() / scale).nan_to_num(0.0).sort(-1, descending=True).values  # [samples, rows]
        share = (units > compare.TOLERANCE).float().mean(-1)
        decides = units[:, min(compare.FEW, units.shape[-1] // 32)]
        worst.copy_(torch.stack([share, units[:, 0], decides], 1).amax(0).maximum(worst))
        return real(before, now, eps)

    for step in range(steps):
        start, stride = torch.randint(1, 8, (2, 4, 1), generator=torch.Generator().manual_seed(step))
        ids = (start + stride * torch.arange(256)) % 64  # [4, 256], which a model learns
        with computing(case, False), torch.autocast("cpu", case.autocast, enabled=case.autocast is not None):
            loss = scaler.scale(model(input_ids=ids, labels=ids, use_cache=False).loss)
        try:
            with computing(case, True), patch.object(compare, "rows_that_differ", noted):
                loss.backward()
            scaler.step(optimizer)
            scaler.update()
        except RuntimeError:
            refused += 1
        optimizer.zero_grad()
    return refused, worst.tolist()
