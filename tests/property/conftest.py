"""How many examples the property-based tests draw, and that they leave nothing behind."""

from __future__ import annotations

import tempfile

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.configuration import set_hypothesis_home_dir

EXAMPLES = 40
"""Examples of each test without ``--examples``: the same ones in each run."""


def pytest_configure(config: pytest.Config) -> None:
    folder = tempfile.TemporaryDirectory(prefix="hypothesis")  # removed at exit: it holds caches
    config.add_cleanup(folder.cleanup)
    set_hypothesis_home_dir(folder.name)
    examples = config.getoption("--examples")
    settings.register_profile(
        "lt_tiled",
        max_examples=examples or EXAMPLES,
        derandomize=examples is None,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    settings.load_profile("lt_tiled")
