"""Tiled modules of a grammar: equal to the untiled module, or refused with its name and a remedy. Nothing else."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings

from tests.property.grammar import Case, Values, cases, differences, refused, run

pytestmark = [pytest.mark.slow, pytest.mark.self_checks]

EXAMPLES = settings(
    max_examples=40,
    derandomize=True,  # the same ones in each run
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def untiled(case: Case) -> Values:
    """Return what the untiled module gives; drop the case if torch itself refuses it."""
    try:
        return run(case, tiled=False)
    except Exception:
        assume(False)
        raise


@EXAMPLES
@given(cases(position_wise=False))
def test_equal_or_refused(case: Case) -> None:
    """Any module in any surroundings gives the untiled results, or an error with its name and a remedy."""
    true = untiled(case)
    try:
        found = run(case, tiled=True)
    except Exception as error:
        if not refused(error):
            raise
        return
    assert not differences(found, true)


@EXAMPLES
@given(cases(position_wise=True))
def test_position_wise_modules_are_not_refused(case: Case) -> None:
    """A module that works position by position gives the untiled results."""
    true = untiled(case)
    assert not differences(run(case, tiled=True), true)
