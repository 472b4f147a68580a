"""Numbers with a bound in their type, so that the command line refuses others while it parses. To a type checker they
are plain.
"""

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    NonNegativeFloat: TypeAlias = float
    NonNegativeInt: TypeAlias = int
    OpenUnitInterval: TypeAlias = float
    PositiveFloat: TypeAlias = float
    PositiveInt: TypeAlias = int
else:
    from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, OpenUnitInterval, PositiveFloat, PositiveInt

__all__ = ["NonNegativeFloat", "NonNegativeInt", "OpenUnitInterval", "PositiveFloat", "PositiveInt", "make_plain"]


def make_plain(hyperparameters: MutableMapping[str, Any]) -> None:
    """Turn such numbers into Python's own, in place: ``torch.load(weights_only=True)`` refuses a checkpoint that holds
    others.
    """
    for name, value in hyperparameters.items():
        for kind in (int, float):
            if isinstance(value, kind) and not isinstance(value, bool):
                hyperparameters[name] = kind(value)
