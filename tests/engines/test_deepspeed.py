"""What is said, and what is not, about DeepSpeed's own behavior."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
from lightning.pytorch import Callback

import lt_tiled
from tests.engines.cells import strategy
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


def deprecations(engine: str) -> tuple[list[str], list[bool]]:
    """What the functions that DeepSpeed calls warn of in a run; and if they are ignored before, in and after it."""
    said = "`torch.distributed.all_gather_into_tensor` is deprecated."
    ignored: list[bool] = []

    def look() -> None:
        ignored.append(any(kind == "ignore" and text and text.match(said) for kind, text, *_ in warnings.filters))

    class Look(Callback):
        def on_train_end(self, *_: Any) -> None:
            look()

    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()  # a run before may have left its filter, if nothing released its strategy
        warnings.simplefilter("always")
        chosen = strategy(lt_tiled, engine, tiling=4)
        look()
        trainer(chosen, devices=2, callbacks=[Look()]).fit(LitTiny())
        look()
    return [str(warning.message) for warning in caught if "_tensor` is deprecated" in str(warning.message)], ignored


@pytest.mark.parametrize("engine", ["zero2", "zero3"])
def test_deprecations_of_deepspeed(engine: str, deepspeed_world: World) -> None:
    """What DeepSpeed calls warns of nothing during a run, and the filter for that is gone after it."""
    assert deepspeed_world(deprecations, engine) == [([], [False, True, False])] * 2
