"""Tiled modules of a grammar: equal to the untiled module, or refused with its name and a remedy. Nothing else."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings

from tests.property.grammar import Case, cases, differences, refused, run


@pytest.mark.slow
@pytest.mark.self_checks
@settings(
    max_examples=80,
    derandomize=True,  # the same ones in each run
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(cases())
def test_equal_or_refused(case: Case) -> None:
    """Any module in any surroundings gives the untiled results, or an error with its name and a remedy. One that works
    position by position is not refused.
    """
    try:
        true = run(case, tiled=False)
    except Exception:  # torch itself refuses the case
        assume(False)
        raise
    try:
        found = run(case, tiled=True)
    except Exception as error:
        if case.position_wise or not refused(error):
            raise
        return
    assert not differences(found, true)
