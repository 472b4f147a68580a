"""The engines' ranks."""

from tests.engines.conftest import on_ranks as on_ranks
