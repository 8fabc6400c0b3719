"""Groups that cannot be built: who is at fault, and from when on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from elastic.membership.escalation import FailedBuilds

MEMBERS = ("a", "b", "c", "d")
WAITED_FOR_B = {"a": ("b",), "c": ("b",)}


def after(*builds: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Who is left out after the last of these failed builds."""
    row = FailedBuilds()
    return [row.failed(MEMBERS, reports) for reports in builds][-1]


def test_three_failed_builds_in_a_row() -> None:
    assert after(WAITED_FOR_B) == ()
    assert after(WAITED_FOR_B, WAITED_FOR_B) == ()
    assert after(WAITED_FOR_B, WAITED_FOR_B, WAITED_FOR_B) == ("b",)


def test_then_the_row_begins_anew() -> None:
    assert after(*[WAITED_FOR_B] * 4) == ()


@pytest.mark.parametrize("other", [{}, {"a": ("c",)}])
def test_a_build_that_others_broke_or_nobody_ends_the_row(
    other: Mapping[str, Sequence[str]],
) -> None:
    assert after(WAITED_FOR_B, other, WAITED_FOR_B, WAITED_FOR_B) == ()


@pytest.mark.parametrize(
    ("reports", "guilty"),
    [
        ({"a": ("c", "d"), "b": ("c", "d")}, ("c", "d")),  # neither ever came
        ({"a": ("b",), "b": ("a", "c"), "c": ("b",)}, ("b",)),  # the most say so
        ({"a": ("b",), "b": ("a",)}, ("b",)),  # each other: the junior one goes
        ({"a": ("a", "x")}, ()),  # itself, or a stranger
        ({"a": ("b", "b"), "b": ("c",), "d": ("c",)}, ("c",)),  # twice is once
    ],
)
def test_the_waiting_ones_are_not_punished(
    reports: Mapping[str, Sequence[str]], guilty: tuple[str, ...]
) -> None:
    assert after(reports, reports, reports) == guilty
