"""``python -m benchmarks.models``: its verdicts, and what it writes."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import models
from benchmarks.models import BEGIN, DOCS, END, Verdict, examine, sheet_of, written
from tests.world import World


@pytest.mark.parametrize(
    ("name", "verdict", "reason"),
    [
        ("llama", "right", ""),
        ("qwen3_5_text", "right", ""),
        ("bloom", "refused", "cannot run on those of one rank"),
        ("gemma4_assistant", "cannot be built", "hidden_size_per_layer_input must be 0"),
    ],
)
def test_verdict(name: str, verdict: str, reason: str, world: World) -> None:
    """A model is right, refused with the message that users see, or cannot be built."""
    for found in world(examine, name):
        assert found.verdict == verdict
        assert reason in found.reason


def with_wrong_gradient(name: str) -> Verdict:
    """The verdict on a model of which one gradient of the shared step is off by a millionth."""

    def shared_step(model: Any, inputs: Any, policies: Any) -> Any:
        found = step(model, inputs, policies)
        last = list(found)[-1]
        return found | {last: found[last] * (1 + 1e-6)}

    step = models.shared_step
    models.shared_step = shared_step
    try:
        return examine(name)
    finally:
        models.shared_step = step


def test_wrong_gradient(world: World) -> None:
    """One gradient that is off by a millionth makes a model wrong."""
    for found in world(with_wrong_gradient, "llama"):
        assert found.verdict == "wrong"
        assert found.error_in_float64 == pytest.approx(1e-6, rel=1e-3)


def test_written() -> None:
    """The page says of each model that was built whether it works, and if not, why, in a few words."""
    message = "TinyLM has another gradient of its input when 2 ranks share the sequence."
    verdicts = [
        Verdict("llama", "LlamaForCausalLM", "right", error=1e-16, tiled="LlamaMLP"),
        Verdict("tiny", "TinyLM", "refused", reason=message),
        Verdict("broken", "", "cannot be built", reason="KeyError: 'x'"),
    ]
    assert len(sheet_of(verdicts).rows) == 3
    page = written(f"before\n{BEGIN}old\n{END}after\n", verdicts)
    assert page.startswith("before\n")
    assert page.endswith(f"{END}after\n")
    assert "| llama | `LlamaForCausalLM` | LlamaMLP | yes |" in page
    assert "| tiny | `TinyLM` | - | no: the self-check finds another result |" in page
    assert "old" not in page
    assert "broken" not in page
    assert BEGIN in DOCS.read_text()
