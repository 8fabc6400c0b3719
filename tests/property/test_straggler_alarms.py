"""No alarm for equal ranks, however noisy, and no slow rank without one."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.hangs.page import StepDurations, StepPart, summarize
from elastic.hangs.stragglers import RankKey, RankWindow, StragglerPolicy, Streak, advance

POLICY = StragglerPolicy()
SEEDS = range(60)  # fixed, so that no test fails by chance
STEPS = 20  # of a window
# The distributions of a rank's step time, drawn for each step; all have a mean of about 1.
DISTRIBUTIONS: dict[str, Callable[[random.Random], float]] = {
    "normal": lambda rng: max(0.1, rng.gauss(1.0, 0.2)),
    "uniform": lambda rng: rng.uniform(0.5, 1.5),
    "with pauses": lambda rng: rng.uniform(0.9, 1.1) + (50.0 if rng.random() < 0.005 else 0.0),
    "lognormal": lambda rng: rng.lognormvariate(0.0, 0.25),
}


def one_window(
    rng: random.Random,
    draw: Callable[[random.Random], float],
    size: int,
    number: int,
    slow: Mapping[int, tuple[StepPart, float]],
) -> list[RankWindow]:
    """Steps as the workers would measure them: shares differ by one sample, some work is fixed."""
    ranks = []
    for rank in range(size):
        steps = []
        for _ in range(STEPS):
            samples = 16 + (rank + number) % 2
            parts = [0.02 * draw(rng), samples / 16 * 0.1 * draw(rng), 0.0, 0.0, 0.0]
            if rank in slow:
                part, times = slow[rank]
                own_s = parts[0] + parts[1]
                parts[part] += (times - 1.0) * own_s
            steps.append((parts[0] + parts[1], samples, tuple(parts)))
        times_of_steps = summarize(steps, 3, number)
        ranks.append(
            RankWindow(
                rank=rank,
                node_id=f"id-n{rank}",
                node=f"n{rank}",
                local_rank=0,
                times=times_of_steps,
            )
        )
    return ranks


def found_in(
    seed: int,
    distribution: str,
    size: int,
    windows: int,
    slow: Mapping[int, tuple[StepPart, float]],
) -> list[tuple[int, StepPart]]:
    rng = random.Random(seed)
    streaks: Mapping[RankKey, Streak] = {}
    found: list[tuple[int, StepPart]] = []
    for number in range(windows):
        ranks = one_window(rng, DISTRIBUTIONS[distribution], size, number, slow)
        verdict = advance(streaks, ranks, POLICY)
        streaks = verdict.streaks
        found += [(c.window.rank, c.cause) for c in verdict.found]
    return found


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_equal_ranks_are_never_stragglers(distribution: str) -> None:
    for seed in SEEDS:
        size = 1 + seed % 12
        assert found_in(seed, distribution, size, windows=12, slow={}) == [], seed


@pytest.mark.parametrize("part", [StepPart.DATA, StepPart.COMPUTE])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_only_the_slower_rank_is_found(distribution: str, part: StepPart) -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        size = rng.randint(2, 12)
        victim, times = rng.randrange(size), rng.uniform(2.0, 20.0)
        found = found_in(seed, distribution, size, windows=8, slow={victim: (part, times)})
        assert found == [(victim, part)], seed


@st.composite
def window_of_job(draw: st.DrawFn) -> list[RankWindow]:
    """Any records that a leader can read."""
    seconds = st.floats(0, 1e6)
    size = draw(st.integers(0, 6))
    return [
        RankWindow(
            rank=rank,
            node_id=f"id-n{rank}",
            node=f"n{rank}",
            local_rank=0,
            times=StepDurations(
                generation=1,
                window=1,
                steps=draw(st.integers(1, 1000)),
                samples=draw(st.integers(0, 10**6)),
                data_s=draw(seconds),
                compute_s=draw(seconds),
                collective_s=draw(seconds),
                checkpoint_s=draw(seconds),
                script_s=draw(seconds),
            ),
        )
        for rank in range(size)
    ]


@given(ranks=window_of_job())
def test_any_records_have_a_verdict(ranks: list[RankWindow]) -> None:
    streaks: Mapping[RankKey, Streak] = {}
    found = []
    for _ in range(POLICY.windows):
        verdict = advance(streaks, ranks, POLICY)
        streaks = verdict.streaks
        found += list(verdict.found)
    # Stragglers are always a minority, and above the factor.
    assert 2 * len(found) <= max(1, len(ranks))
    for comparison in found:
        assert comparison.factor >= POLICY.factor
        assert comparison.sentence(POLICY.windows)
