"""Find out which causal models train with sequence parallelism: ``python -m benchmarks.models [NAME ...] [--write]``.

Each causal model of the installed transformers, or each one whose ``model_type`` is named, is built with tiny sizes,
random weights and float64. Two ranks take one training step with their sequence shared, everything else as it is by
default, and compare the loss and all gradients with the step of the model as transformers has it. ``--write`` writes
the table into docs/models.md.

Ranks draw different random numbers, so dropout and jitter are 0, and a model that still draws some in training is
compared in evaluation mode.

A model may compute a part in float32 whatever its weights are, and then sums of float32 are formed in another order.
Such a model is compared twice: as it is, within :data:`ROUNDED`, and with float64 in the place of float32 in its own
code, within :data:`EXACT`, which shows that nothing but this rounding differs.
"""

from __future__ import annotations

import argparse
import copy
import logging
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import lt_tiled
from benchmarks.sheet import Cell, Sheet
from benchmarks.tiny import tiny_model
from lt_tiled import SequenceParallel, Tiling
from lt_tiled.errors import NothingFoundError
from lt_tiled.loss.transformers import find_losses
from lt_tiled.modules.targets import find_tileable
from tests.sequence_parallel.hybrids import wide
from tests.sequence_parallel.models import ids
from tests.sequence_parallel.runs import step, value_of, worst
from tests.world import RanksFailed, World, unchecked

DOCS = Path(__file__).parents[1] / "docs" / "models.md"
TOKENS = 37
"""The sequence length: two ranks have different numbers of tokens, and more than a window."""
EXACT = 1e-12
"""The largest relative error of a loss or gradient in float64."""
ROUNDED = 1e-4
"""The same where a model computes a part in float32."""
SECONDS = 240.0
"""The longest that a model may take."""
BEGIN, END = "<!-- sequence parallelism: begin -->\n", "<!-- sequence parallelism: end -->"
CAUSES = {
    "no attention saw|cannot run on those": "attention in its own code, or none",
    "has an?other": "the self-check finds another result",
    "needs one list of blocks": "several lists of blocks, of which `targets` must name one",
}
"""Patterns of messages, and what the table says of them."""
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Verdict:
    """What was found for one model."""

    name: str
    """Its ``model_type``."""
    kind: str
    """Its class."""
    verdict: str
    """``right``, ``refused``, ``wrong`` or ``cannot be built``."""
    reason: str = ""
    error: float | None = None
    """The largest relative error of the model as it is."""
    error_in_float64: float | None = None
    """The same where all of its code computes in float64, if it does not by itself."""
    tiled: str = "-"
    """The classes of its MLPs."""


def examine(name: str) -> Verdict:
    """Return the verdict on a model. Every rank of the process group calls this."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _examine(name)
    finally:
        logging.disable(disabled)


def _examine(name: str) -> Verdict:
    torch.manual_seed(0)
    try:
        model = tiny_model(name)
        tokens = ids(2, TOKENS).clamp_min(4)  # those below mean something in some configurations
        inputs = {"input_ids": tokens, "labels": tokens}
        model.train(not draws_random_numbers(model, inputs))
        true = step(copy.deepcopy(model), inputs)
    except Exception as problem:
        return Verdict(name, "", "cannot be built", reason=f"{type(problem).__name__}: {problem}")
    kind, policies, tiled = type(model).__name__, policies_of(model), tiled_classes(model)
    try:
        error = worst(shared_step(model, inputs, policies), true)
        if error <= EXACT:
            return Verdict(name, kind, "right", "", error, None, tiled)
        with unchecked(), wide(model):
            reference = step(copy.deepcopy(model), inputs)
            exact = worst(shared_step(model, inputs, policies), reference)
    except Exception as problem:
        return Verdict(name, kind, *_failure(problem), tiled=tiled)
    right = error <= ROUNDED and exact <= EXACT
    return Verdict(name, kind, "right" if right else "wrong", "", error, exact, tiled)


def _failure(problem: Exception) -> tuple[str, str]:
    """Return the verdict on a step that raised an error, and the reason: only messages of lt_tiled are refusals."""
    ours = "lt_tiled" in Path(traceback.extract_tb(problem.__traceback__)[-1].filename).parts
    if ours and isinstance(problem, ValueError | NothingFoundError):
        return "refused", " ".join(str(problem).split())
    return "wrong", f"{type(problem).__name__}: {problem}"


def draws_random_numbers(model: nn.Module, inputs: Inputs) -> bool:
    """Whether two calls of a model in training mode differ, because it draws random numbers other than dropout."""
    with torch.no_grad():
        outputs = [copy.deepcopy(model)(**inputs) for _ in range(2)]
    return not torch.equal(value_of(outputs[0]), value_of(outputs[1]))


def policies_of(model: nn.Module) -> dict[str, Any]:
    """Return which policies apply to a model: tiles as far as it has an MLP, and a tiled loss if it computes one."""
    policies: dict[str, Any] = {}
    if tiled_classes(model) != "-":
        policies["tiling"] = 3
    with suppress(NothingFoundError):
        policies["loss"] = bool(find_losses(model))
    return policies


def tiled_classes(model: nn.Module) -> str:
    """Return the classes of a model's MLPs."""
    try:
        found = find_tileable(model, Tiling(targets="mlp"))
    except NothingFoundError:
        return "-"
    return ", ".join(sorted({part.kind for part in found}))


def shared_step(model: nn.Module, inputs: Inputs, policies: dict[str, Any]) -> dict[str, Tensor]:
    """Return loss and gradients of a copy of a model whose sequence all ranks share."""
    shared = copy.deepcopy(model)
    policy = SequenceParallel(torch.distributed.get_world_size())
    with lt_tiled.prepare(shared, sequence_parallel=policy, **policies):
        return step(shared, inputs)


def census(names: Sequence[str]) -> Iterator[Verdict]:
    """Yield the verdict on each model, from two ranks that examine them one after the other."""
    world = World(2)
    try:
        for name in names:
            yield _of_both(world, name)
    finally:
        world.close()


def _of_both(world: World, name: str) -> Verdict:
    try:
        verdicts: list[Verdict] = world(examine, name, timeout=SECONDS)
    except RanksFailed as error:
        return Verdict(name, "", "wrong", reason=str(error).strip().splitlines()[-1])
    severity = ("right", "cannot be built", "refused", "wrong")
    return max(verdicts, key=lambda verdict: severity.index(verdict.verdict))


def main() -> None:
    """Run the command."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="model_type of a model; all of them by default")
    parser.add_argument("--write", action="store_true", help="write the table into docs/models.md")
    args = parser.parse_args()
    if args.names and args.write:
        parser.error("--write writes the table of all models: leave the names out")
    names = args.names or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if unknown := set(names) - set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        parser.error(f"{' '.join(sorted(unknown))}: transformers has no such causal model")
    console, start = Console(width=None if sys.stdout.isatty() else 200), time.perf_counter()
    verdicts = []
    for verdict in census(names):
        verdicts.append(verdict)
        console.print(f"{len(verdicts)} of {len(names)}: {verdict.name} {verdict.verdict}", style="dim")
    console.print(sheet_of(verdicts).table(), "")
    counts = Counter(verdict.verdict for verdict in verdicts)
    console.print(f"{', '.join(f'{n} {what}' for what, n in counts.items())} in {time.perf_counter() - start:.0f} s")
    if args.write:
        DOCS.write_text(written(DOCS.read_text(), verdicts))


def sheet_of(verdicts: Sequence[Verdict]) -> Sheet:
    """Return the table for the terminal."""
    headings = ["model", "class", "MLP in tiles", "verdict", "error", "in float64", "reason"]
    sheet = Sheet("models", "Two ranks share the sequence of each model", headings)
    for found in verdicts:
        good = {"right": True, "wrong": False}.get(found.verdict)
        errors = ["" if error is None else f"{error:.0e}" for error in (found.error, found.error_in_float64)]
        sheet.add(found.name, found.kind, found.tiled, Cell(found.verdict, good), *errors, found.reason)
    return sheet


def written(text: str, verdicts: Sequence[Verdict]) -> str:
    """Return a page with the table of these models between its marks."""
    lines = ["| model | class | MLP in tiles | sequence parallelism |", "|---|---|---|---|"]
    for found in verdicts:
        if found.verdict != "cannot be built":
            answer = "yes" if found.verdict == "right" else f"no: {in_few_words(found)}"
            lines.append(f"| {found.name} | `{found.kind}` | {found.tiled} | {answer} |")
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    return head + begin + "\n".join(lines) + "\n" + end + tail


def in_few_words(found: Verdict) -> str:
    """Return the cause of a refusal: in the words of :data:`CAUSES`, or the message up to its first stop."""
    for pattern, words in CAUSES.items():
        if match := re.search(pattern, found.reason):
            return match.expand(words)
    return re.split("[:.] ", found.reason.removeprefix(f"{found.kind} "))[0]


if __name__ == "__main__":
    main()
