"""The step at which a planned world takes over."""

from __future__ import annotations

import pytest

from elastic.membership.view import StepRate, switch_step


@pytest.mark.parametrize(
    ("step_time_s", "since_s", "expected"),
    [
        (10.0, 0.0, 102),  # slow steps: the smallest lead that reaches all ranks in time
        (0.02, 0.0, 125),  # fast steps: as many as fit into the announcement
        (0.02, 0.1, 130),  # the job has made more steps since
        (0.02, 60.0, 200),  # an evaluation: the job has made none
        (0.02, -1.0, 125),
        (0.0, 5.0, 102),  # the first step: its duration is unknown
    ],
)
def test_the_switch_step_is_the_earliest_that_reaches_all_ranks(
    step_time_s: float, since_s: float, expected: int
) -> None:
    assert switch_step(StepRate(7, 100, step_time_s, at_s=50.0), 50.0 + since_s) == expected
