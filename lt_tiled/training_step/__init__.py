"""One training step outside of a training loop, for ``verify``, the planner and the callbacks."""

from lt_tiled.training_step.batch import first_batch, length_of, tensors_of, to_meta, tokens_of, with_length
from lt_tiled.training_step.ranks import raising_on_all, ranks_fail_together
from lt_tiled.training_step.step import (
    create_optimizer_state,
    nothing,
    run_step,
    silence,
    stepped_on,
    training_loss,
)

__all__ = [
    "create_optimizer_state",
    "first_batch",
    "length_of",
    "nothing",
    "raising_on_all",
    "ranks_fail_together",
    "run_step",
    "silence",
    "stepped_on",
    "tensors_of",
    "to_meta",
    "tokens_of",
    "training_loss",
    "with_length",
]
