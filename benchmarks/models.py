"""Find out which causal models train with sequence parallelism: ``python -m benchmarks.models [NAME ...]``.

Each causal model of the installed transformers, or each one whose ``model_type`` is named, is built with tiny sizes,
random weights and float64. Two ranks take one step with their sequence shared, in tiles and with a tiled loss, and
compare the loss and all gradients with those of the model as transformers has it. Dropout and jitter are 0, and a model
that still draws random numbers is compared in evaluation mode. A model that computes a part in float32 is compared
twice: as it is, within :data:`ROUNDED`, and with float64 in the place of float32 in its code, within :data:`EXACT`.
"""

from __future__ import annotations

import copy
import sys
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import lt_tiled
from benchmarks.harness import Ranks
from benchmarks.tiny import tiny_model
from lt_tiled.errors import NothingFoundError
from lt_tiled.loss.transformers import find_losses
from lt_tiled.modules.targets import find_tileable
from tests.parity import worst_of_model
from tests.sequence_parallel.hybrids import wide
from tests.sequence_parallel.models import ids
from tests.sequence_parallel.runs import step, value_of
from tests.world import unchecked

EXACT = 1e-12  # the largest relative error of a loss or gradient in float64
ROUNDED = 1e-4  # the same where a model computes a part in float32


def examine(name: str) -> tuple[str, str]:
    """Return ``right``, ``refused``, ``wrong`` or ``cannot be built``, and why. Every rank calls this."""
    torch.manual_seed(0)
    try:
        model = tiny_model(name)
        # Two ranks have different numbers of tokens, more than a window. Ids below 4 mean something in some models.
        tokens = ids(2, 37).clamp_min(4)
        inputs = {"input_ids": tokens, "labels": tokens}
        with torch.no_grad():
            first, second = (value_of(copy.deepcopy(model)(**inputs)) for _ in range(2))
        model.train(torch.equal(first, second))
        true = step(copy.deepcopy(model), inputs)
    except Exception as problem:
        return "cannot be built", f"{type(problem).__name__}: {problem}"
    try:
        error = exact = worst_of_model(shared_step(model, inputs), true)
        if error > EXACT:
            with unchecked(), wide(model):
                exact = worst_of_model(shared_step(model, inputs), step(copy.deepcopy(model), inputs))
    except Exception as problem:
        # Only messages of lt_tiled are refusals.
        ours = "lt_tiled" in Path(traceback.extract_tb(problem.__traceback__)[-1].filename).parts
        refused = ours and isinstance(problem, ValueError | NothingFoundError)
        return "refused" if refused else "wrong", " ".join(f"{type(problem).__name__}: {problem}".split())
    right = error <= ROUNDED and exact <= EXACT
    return "right" if right else "wrong", f"off by {error:.0e}, in float64 by {exact:.0e}"


def shared_step(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return loss and gradients of a copy of a model whose sequence all ranks share, with what else it can take."""
    shared = copy.deepcopy(model)
    policies: dict[str, Any] = {}
    with suppress(NothingFoundError):
        policies["loss"] = bool(find_losses(shared))
    with suppress(NothingFoundError):
        find_tileable(shared, lt_tiled.Tiling(targets="mlp"))
        policies["tiling"] = 3
    with lt_tiled.prepare(shared, sequence_parallel=torch.distributed.get_world_size(), **policies):
        return step(shared, inputs)


def main() -> None:
    """Print a line for each model, and how many have each outcome."""
    names = sys.argv[1:] or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    unknown = set(names) - set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if unknown:
        sys.exit(f"{__doc__}\ntransformers has no such causal model: {' '.join(sorted(unknown))}")
    counts: Counter[str] = Counter()
    with Ranks() as ranks:
        for name in names:
            found = ranks("models", examine, name, timeout=240)
            outcome, reason = ("wrong", found) if isinstance(found, str) else found[0]
            if not isinstance(found, str) and found[1][0] != outcome:
                outcome, reason = "wrong", f"the ranks disagree: {found}"
            counts[outcome] += 1
            print(f"{name}: {outcome}  {reason}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))


if __name__ == "__main__":
    main()
