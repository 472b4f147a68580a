"""Numbers with a bound in their type, so that the command line refuses others while it parses. To a type checker they are plain."""

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    NonNegativeFloat: TypeAlias = float
    NonNegativeInt: TypeAlias = int
    OpenUnitInterval: TypeAlias = float
    PositiveFloat: TypeAlias = float
    PositiveInt: TypeAlias = int
else:
    from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, OpenUnitInterval, PositiveFloat, PositiveInt

__all__ = ["NonNegativeFloat", "NonNegativeInt", "OpenUnitInterval", "PositiveFloat", "PositiveInt"]
