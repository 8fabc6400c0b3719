"""The limit of a collective: never below what was measured, and tight once enough was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.errors import ConfigError
from elastic.tuning.collective_limit import (
    CollectiveLimitPolicy,
    LongPhase,
    Measured,
    collective_limit,
)
from elastic.tuning.worker_intervals import COLLECTIVE_FLOOR_S, COLLECTIVE_TIMEOUT_S

STEPS = st.lists(st.floats(min_value=0, max_value=10_000), max_size=60)
PHASES = st.dictionaries(st.sampled_from(LongPhase), st.floats(min_value=0, max_value=10_000))
EXPECTED = st.frozensets(st.sampled_from(LongPhase))


def limit_s(measured: Measured) -> float:
    return collective_limit(measured).limit_s


@given(steps=STEPS, phases=PHASES, expected=EXPECTED)
def test_the_limit_is_between_floor_and_ceiling_and_above_all_that_was_measured(
    steps: list[float], phases: dict[LongPhase, float], expected: frozenset[LongPhase]
) -> None:
    limit, reason = collective_limit(
        Measured(step_times_s=steps, phases_s=phases, expected=expected)
    )
    assert COLLECTIVE_FLOOR_S <= limit <= COLLECTIVE_TIMEOUT_S
    longest = max([*steps[3:], *phases.values()], default=0)
    assert limit >= min(longest, COLLECTIVE_TIMEOUT_S)
    assert reason


@given(steps=STEPS, phases=PHASES, more=st.floats(min_value=0, max_value=10_000))
def test_a_slower_step_or_a_longer_phase_never_tightens(
    steps: list[float], phases: dict[LongPhase, float], more: float
) -> None:
    """Once enough steps are measured."""
    steps = [*([1.0] * 23), *steps]
    before = limit_s(Measured(step_times_s=steps, phases_s=phases))
    assert limit_s(Measured(step_times_s=[*steps, more], phases_s=phases)) >= before
    longer = {**phases, LongPhase.EVALUATION: phases.get(LongPhase.EVALUATION, 0) + more}
    assert limit_s(Measured(step_times_s=steps, phases_s=longer)) >= before


@given(steps=STEPS, phases=PHASES, expected=EXPECTED)
def test_what_is_expected_and_was_never_measured_has_the_whole_limit(
    steps: list[float], phases: dict[LongPhase, float], expected: frozenset[LongPhase]
) -> None:
    measured = Measured(step_times_s=steps, phases_s=phases, expected=expected)
    if expected - phases.keys():
        assert limit_s(measured) == COLLECTIVE_TIMEOUT_S


def test_the_first_steps_say_nothing_of_the_others() -> None:
    compiling = [90.0, 30.0, 5.0]
    assert limit_s(Measured(step_times_s=[*compiling, *[0.1] * 19])) == COLLECTIVE_TIMEOUT_S
    limit, reason = collective_limit(Measured(step_times_s=[*compiling, *[0.1] * 20]))
    assert (limit, reason) == (COLLECTIVE_FLOOR_S, "the floor")


def test_an_evaluation_widens_the_limit_by_its_own_length() -> None:
    steps = [1.0] * 30
    measured = Measured(step_times_s=steps, phases_s={LongPhase.EVALUATION: 180.0})
    limit, reason = collective_limit(measured)
    assert limit == 3 * 180 + 1
    assert "evaluation" in reason and "180" in reason


def test_a_limit_that_would_be_above_the_ceiling_says_so() -> None:
    limit, reason = collective_limit(Measured(step_times_s=[200.0] * 30))
    assert limit == COLLECTIVE_TIMEOUT_S and "4e+03" in reason


def test_numbers_that_contradict_each_other_are_refused_with_both() -> None:
    with pytest.raises(ConfigError) as refused:
        CollectiveLimitPolicy(floor_s=100, ceiling_s=50)
    assert "floor_s=100 and ceiling_s=50" in refused.value.message
