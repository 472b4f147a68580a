"""Numbers with bounds, which the command line checks while parsing. Type checkers see plain numbers."""

import math
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    NonNegativeFloat: TypeAlias = float
    NonNegativeInt: TypeAlias = int
    OpenUnitInterval: TypeAlias = float
    PositiveFloat: TypeAlias = float
    PositiveInt: TypeAlias = int
else:
    try:
        from jsonargparse.typing import NonNegativeInt, OpenUnitInterval, PositiveInt, restricted_number_type
    except ImportError:  # offline images with torch, Lightning and transformers alone have no command line
        NonNegativeFloat = OpenUnitInterval = PositiveFloat = float
        NonNegativeInt = PositiveInt = int
    else:
        NonNegativeFloat = restricted_number_type("NonNegativeFiniteFloat", float, [(">=", 0), ("<", math.inf)])
        PositiveFloat = restricted_number_type("PositiveFiniteFloat", float, [(">", 0), ("<", math.inf)])

__all__ = ["NonNegativeFloat", "NonNegativeInt", "OpenUnitInterval", "PositiveFloat", "PositiveInt", "make_plain"]


def make_plain(hyperparameters: MutableMapping[str, Any]) -> None:
    """Convert such numbers to Python's own in place, because ``torch.load(weights_only=True)`` rejects others."""
    for name, value in hyperparameters.items():
        for kind in (int, float):
            if isinstance(value, kind) and not isinstance(value, bool):
                hyperparameters[name] = kind(value)
