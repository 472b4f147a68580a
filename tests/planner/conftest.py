"""The engines' ranks."""

from tests.engines.conftest import _known_runs as _known_runs
from tests.engines.conftest import on_ranks as on_ranks
