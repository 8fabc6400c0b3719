"""Straggler detection: the comparison of ranks, and the state kept between windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from elastic.hangs.page import StepDurations, StepPart
from elastic.hangs.stragglers import (
    Comparison,
    RankKey,
    RankWindow,
    StragglerPolicy,
    StragglerVerdict,
    Streak,
    advance,
    compare,
)

POLICY = StragglerPolicy()


def window(
    rank: int,
    compute_s: float = 0.1,
    data_s: float = 0.01,
    *,
    samples: int = 80,
    collective_s: float = 0.0,
) -> RankWindow:
    """A window of ten steps, with one rank per node."""
    return RankWindow(
        rank=rank,
        node_id=f"id-n{rank}",
        node=f"n{rank}",
        local_rank=0,
        times=StepDurations(
            generation=3,
            window=1,
            steps=10,
            samples=samples,
            data_s=data_s,
            compute_s=compute_s,
            collective_s=collective_s,
            checkpoint_s=0.0,
            script_s=0.0,
        ),
    )


def slow_ranks(ranks: Sequence[RankWindow], policy: StragglerPolicy = POLICY) -> list[int]:
    return [c.window.rank for c in compare(ranks, policy) if c.is_slow]


def of_rank(ranks: Sequence[RankWindow], rank: int) -> Comparison:
    return next(c for c in compare(ranks, POLICY) if c.window.rank == rank)


@pytest.mark.parametrize(
    ("slow", "cause", "typical_s"),
    [
        (window(2, compute_s=0.2), StepPart.COMPUTE, 0.1),
        (window(2, data_s=0.09), StepPart.DATA, 0.01),
        # Both take longer: the cause is the larger excess.
        (window(2, compute_s=0.15, data_s=0.2), StepPart.DATA, 0.01),
    ],
)
def test_compare_finds_rank_and_cause(slow: RankWindow, cause: StepPart, typical_s: float) -> None:
    ranks = [window(0), window(1), slow, window(3)]
    assert slow_ranks(ranks) == [2]
    found = of_rank(ranks, 2)
    assert found.cause is cause
    typical = {
        StepPart.COMPUTE: found.typical_compute_s,
        StepPart.DATA: found.typical_data_s,
    }
    assert typical[cause] == pytest.approx(typical_s)
    assert found.factor == pytest.approx(slow.times.own_s / 0.11)
    assert found.lag_s == pytest.approx(slow.times.own_s - 0.11)


def test_the_reason_states_rank_factor_and_cause() -> None:
    ranks = [window(0), window(1), window(2, compute_s=0.21, data_s=0.01)]
    reason = of_rank(ranks, 2).sentence(3)
    assert reason.startswith("rank 2 on n2 took 2 times as long per sample as the median of all")
    assert "in 3 windows in a row" in reason
    assert "210 ms of compute in a step, where 100 ms are typical" in reason
    assert "the others wait 110 ms in each step of 220 ms" in reason


def test_uniformly_slow_ranks_are_no_stragglers() -> None:
    assert slow_ranks([window(rank, compute_s=10.0) for rank in range(4)]) == []


def test_half_of_the_ranks_on_slower_machines_are_no_stragglers() -> None:
    """It is unknown which half is the normal one."""
    assert slow_ranks([window(rank, compute_s=0.1 + 0.1 * (rank % 2)) for rank in range(8)]) == []


def test_a_slow_node_of_eight_ranks_is_found_rank_by_rank() -> None:
    ranks = [window(rank, compute_s=0.2 if rank < 8 else 0.1) for rank in range(32)]
    assert slow_ranks(ranks) == list(range(8))


def test_waits_checkpoints_and_script_time_are_not_compared() -> None:
    """Rank 0 evaluates, logs and writes checkpoints; and a rank that waits is not slow."""
    first = window(0)
    for times in (
        replace(first.times, collective_s=5.0),
        replace(first.times, checkpoint_s=5.0),
        replace(first.times, script_s=5.0),
    ):
        assert slow_ranks([replace(first, times=times), window(1), window(2)]) == []


def test_uneven_shares_are_compared_per_sample() -> None:
    """Twice the samples take twice as long; a rank that is slow per sample is found."""
    even = [window(0), window(1), window(2, 0.2, 0.02, samples=160), window(3)]
    assert slow_ranks(even) == []
    slow = [window(0), window(1), window(2, 0.4, 0.02, samples=160), window(3)]
    assert slow_ranks(slow) == [2]


def test_a_small_share_with_fixed_costs_is_no_straggler() -> None:
    """It is slow per sample, but as fast as the others per step."""
    ranks = [window(0), window(1), window(2, 0.08, samples=40), window(3)]
    assert of_rank(ranks, 2).factor > POLICY.factor
    assert slow_ranks(ranks) == []


def test_a_rank_without_samples_is_not_compared() -> None:
    """It had no work; the others are not slow in comparison."""
    idle = [window(rank, 0.001, 0.0, samples=0) for rank in (3, 4, 5)]
    assert slow_ranks([window(0), window(1), window(2), *idle]) == []
    unsampled = [window(rank, samples=0) for rank in range(3)]
    assert slow_ranks([*unsampled, window(3, 0.3, samples=0)]) == [3]


def test_a_negligible_difference_makes_no_straggler() -> None:
    """Ten times as slow, in a step dominated by the network."""
    ranks = [window(rank, 0.001, 0.0, collective_s=1.0) for rank in range(3)]
    assert slow_ranks([*ranks, window(3, 0.01, 0.0, collective_s=1.0)]) == []


def test_the_slower_of_two_ranks_is_reported_as_uncertain() -> None:
    ranks = [window(0), window(1, compute_s=0.2)]
    assert slow_ranks(ranks) == [1]
    found = of_rank(ranks, 1)
    assert not found.has_majority
    assert "as the other rank" in found.sentence(3)
    assert found.sentence(3).endswith("with two ranks, either may be the abnormal one")
    assert of_rank([*ranks, window(2)], 1).has_majority


def test_fewer_than_two_measured_ranks_are_not_compared() -> None:
    assert compare([window(0, 100.0)], POLICY) == ()
    assert compare([], POLICY) == ()
    assert compare([window(rank, 0.0, 0.0) for rank in range(3)], POLICY) == ()


def test_the_policy_sets_the_factor() -> None:
    ranks = [window(0), window(1), window(2, compute_s=0.2)]
    assert slow_ranks(ranks, StragglerPolicy(factor=2.5)) == []


FAST = [window(0), window(1), window(2)]
SLOW = [window(0), window(1), window(2, compute_s=0.3)]


def run(*windows: Sequence[RankWindow]) -> list[StragglerVerdict]:
    streaks: Mapping[RankKey, Streak] = {}
    verdicts = []
    for ranks in windows:
        verdicts.append(advance(streaks, ranks, POLICY))
        streaks = verdicts[-1].streaks
    return verdicts


def test_a_straggler_is_reported_once_after_three_slow_windows() -> None:
    verdicts = run(SLOW, SLOW, SLOW, SLOW)
    assert [[c.window.rank for c in v.found] for v in verdicts] == [[], [], [2], []]
    assert not any(v.recovered for v in verdicts)


def test_isolated_slow_windows_are_ignored() -> None:
    verdicts = run(SLOW, SLOW, FAST, SLOW, SLOW, FAST, SLOW)
    assert not any(v.found for v in verdicts)


def test_a_straggler_recovers_after_three_fast_windows() -> None:
    verdicts = run(SLOW, SLOW, SLOW, FAST, FAST, SLOW, FAST, FAST, FAST, FAST)
    recovered = [[c.window.rank for c in v.recovered] for v in verdicts]
    assert recovered == [[]] * 8 + [[2]] + [[]]
    assert [bool(v.found) for v in verdicts] == [False, False, True] + [False] * 7


def test_a_streak_follows_the_node_when_ranks_are_renumbered() -> None:
    moved = [window(0), window(1), window(2, compute_s=0.3)]
    moved = [
        RankWindow(rank=5 - w.rank, node_id=w.node_id, node=w.node, local_rank=0, times=w.times)
        for w in moved
    ]
    (found,) = run(SLOW, SLOW, moved)[-1].found
    assert (found.window.rank, found.window.node) == (3, "n2")


def test_the_streak_of_an_absent_rank_is_kept() -> None:
    left_out = run(SLOW, SLOW, SLOW, FAST[:2])[-1]
    assert left_out.streaks["id-n2", 0].is_straggler
