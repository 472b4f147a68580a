"""What is said about DeepSpeed's own behavior."""

from __future__ import annotations

import logging

from tests.lit import LitTiny, trainer
from tests.world import World


def warned(batches: int) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("lt_tiled").addHandler(handler)
    try:
        run = trainer("tiled_deepspeed_stage_1", devices=2, accumulate_grad_batches=batches, max_steps=1)
        run.fit(model := LitTiny())
        run.validate(model, verbose=False)
    finally:
        logging.getLogger("lt_tiled").removeHandler(handler)
    return [message for message in said if "divide the loss" in message]


def test_accumulation_under_deepspeed_is_told(deepspeed_world: World) -> None:
    """That Lightning and DeepSpeed both divide the loss is said once, on rank 0, where gradients are accumulated."""
    assert deepspeed_world(warned, 1) == [[], []]
    (first,), other = deepspeed_world(warned, 2)
    assert "accumulate_grad_batches=2: gradients are 2 times smaller" in first
    assert other == []
