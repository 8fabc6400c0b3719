"""Groups that cannot be built: which members are excluded, and after how many builds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from elastic.membership.budget import FailedBuilds

MEMBERS = ("a", "b", "c", "d")
WAITED_FOR_B = {"a": ("b",), "c": ("b",)}


def after(*builds: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The members that are excluded after the last of these failed builds."""
    counter = FailedBuilds()
    return [counter.failed(MEMBERS, reports) for reports in builds][-1]


def test_three_consecutive_failed_builds_exclude_a_member() -> None:
    assert after(WAITED_FOR_B) == ()
    assert after(WAITED_FOR_B, WAITED_FOR_B) == ()
    assert after(WAITED_FOR_B, WAITED_FOR_B, WAITED_FOR_B) == ("b",)


def test_an_exclusion_resets_the_count() -> None:
    assert after(*[WAITED_FOR_B] * 4) == ()


@pytest.mark.parametrize("other", [{}, {"a": ("c",)}])
def test_a_build_broken_by_other_members_or_none_resets_the_count(
    other: Mapping[str, Sequence[str]],
) -> None:
    assert after(WAITED_FOR_B, other, WAITED_FOR_B, WAITED_FOR_B) == ()


def test_a_broken_connection_counts_whichever_end_reports_it() -> None:
    """The end that opens the connection knows its peer; the other one is only released."""
    b_misses_c, c_misses_b = {"b": ("c",)}, {"c": ("b",)}
    assert after(b_misses_c, c_misses_b, b_misses_c) == ("c",)
    assert after(c_misses_b, b_misses_c, c_misses_b) == ("b",)
    assert after(b_misses_c, {"b": ("d",)}, c_misses_b, b_misses_c) == ()
    # b is missed by d alone, not by c, whom it has missed twice.
    assert after(b_misses_c, b_misses_c, {"d": ("b",)}) == ()


def test_late_reports_of_a_world_that_nobody_has_run_keep_the_count() -> None:
    """The leader's own worker was released by a peer, and reported that first."""
    counter = FailedBuilds()
    counter.failed(MEMBERS, WAITED_FOR_B)
    counter.failed(MEMBERS, {}, has_run=False)
    counter.failed(MEMBERS, WAITED_FOR_B, has_run=False)
    assert counter.failed(MEMBERS, {"d": ()}, has_run=False) == ()
    assert counter.failed(MEMBERS, WAITED_FOR_B, has_run=False) == ("b",)


@pytest.mark.parametrize(
    ("reports", "excluded"),
    [
        ({"a": ("c", "d"), "b": ("c", "d")}, ("c", "d")),  # neither arrived
        ({"a": ("b",), "b": ("a", "c"), "c": ("b",)}, ("b",)),  # named by most
        ({"a": ("b",), "b": ("a",)}, ("b",)),  # mutual: the junior one is excluded
        ({"a": ("a", "x")}, ()),  # itself, or a non-member
        ({"a": ("b", "b"), "b": ("c",), "d": ("c",)}, ("c",)),  # duplicates count once
    ],
)
def test_waiting_members_are_not_excluded(
    reports: Mapping[str, Sequence[str]], excluded: tuple[str, ...]
) -> None:
    assert after(reports, reports, reports) == excluded
