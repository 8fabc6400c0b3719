"""The interval between two saves to memory: its guarantees for any costs and ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st
from kit.manual_clock import ManualClock

from elastic.train import memory
from elastic.train.memory import (
    AGAIN_STEPS,
    LONGEST_STEPS,
    MEMORY_LONGEST_S,
    UNMEASURED_STEPS,
    ChosenInterval,
    MemoryCosts,
    MemoryInterval,
    choose,
    combine,
)

seconds = st.floats(min_value=0.0, max_value=1e4)
maybe = st.none() | seconds
fractions = st.floats(min_value=1e-4, max_value=1.0)
measured = st.builds(
    MemoryCosts,
    every_steps=st.none() | st.integers(1, LONGEST_STEPS),
    wait_s=maybe,
    write_s=maybe,
    step_s=maybe,
)


@given(measured, fractions)
def test_an_interval_limits_the_overhead_or_the_lost_time(
    costs: MemoryCosts, overhead: float
) -> None:
    chosen = choose(costs, overhead)
    assert chosen.every_steps >= 1 and chosen.reason
    if costs.wait_s is None or costs.step_s is None:
        assert chosen.every_steps == (costs.every_steps or UNMEASURED_STEPS)
        return
    steps, step_s = chosen.every_steps, max(costs.step_s, 1e-6)
    assert steps <= LONGEST_STEPS and (steps == 1 or steps * step_s <= MEMORY_LONGEST_S * 1.0001)
    is_affordable = costs.wait_s <= overhead * steps * step_s * 1.0001
    is_written = steps == 1 or (costs.write_s or 0.0) <= steps * step_s
    is_longest = steps == LONGEST_STEPS or (steps + 1) * step_s > MEMORY_LONGEST_S
    assert (is_affordable and is_written) or is_longest
    if not is_longest and steps != costs.every_steps:  # one step less would not suffice
        shorter_s = (steps - 1) * step_s
        assert (
            steps == 1
            or costs.wait_s > overhead * shorter_s * 0.9999
            or (costs.write_s or 0.0) > (shorter_s - step_s) * 0.9999
        )


@given(st.lists(measured, min_size=1, max_size=8), fractions)
def test_a_choice_is_stable_until_the_measured_costs_change(
    ranks: list[MemoryCosts], overhead: float
) -> None:
    costs = combine(ranks)
    steps = choose(costs, overhead).every_steps
    again = combine(
        [MemoryCosts(every_steps=steps, **_without_interval(rank)) for rank in reversed(ranks)]
    )
    assert choose(again, overhead).every_steps == steps


def _without_interval(costs: MemoryCosts) -> dict[str, float | None]:
    return {"wait_s": costs.wait_s, "write_s": costs.write_s, "step_s": costs.step_s}


@dataclass
class Rank:
    """A rank, with the durations of its steps and saves."""

    step_s: float
    save_s: float
    is_writer: bool = True
    clock: ManualClock = field(default_factory=ManualClock)
    changes: list[int] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.interval = MemoryInterval(None, overhead=0.01, clock=self.clock, changed=self._changed)

    def _changed(self, chosen: ChosenInterval, before: int) -> None:
        self.changes.append(chosen.every_steps)

    def cross(self, step: int) -> None:
        self.interval.meter.reached(step)
        is_due = self.interval.is_due(step)
        if is_due:
            self.saved.append(step)
            self.clock.advance(self.save_s if self.is_writer else 0.0)
        self.interval.meter.left(has_saved=is_due, is_writer=self.is_writer)
        self.clock.advance(self.step_s)


@contextmanager
def gathering(size: int) -> Iterator[None]:
    """``all_gather_json`` among threads that are named by their rank."""
    values: dict[int, Any] = {}
    barrier = threading.Barrier(size)

    def gather(value: Any) -> list[Any]:
        values[int(threading.current_thread().name)] = value
        barrier.wait(timeout=60)
        told = [values[rank] for rank in range(size)]
        barrier.wait(timeout=60)
        return told

    with patch.object(memory, "all_gather_json", gather):
        yield


def train(ranks: list[Rank], steps: range) -> int:
    """Returns the number of agreements between the ranks."""
    agreements = 0
    for rank in ranks:
        rank.interval.enter_world(len(ranks))
    with gathering(len(ranks)):
        for step in steps:
            needs = {rank.interval.needs_agreement for rank in ranks}
            assert len(needs) == 1, "all ranks call a collective, or none"
            if needs == {True}:
                agreements += 1
                threads = [
                    threading.Thread(target=rank.interval.agree, args=(step,), name=str(number))
                    for number, rank in enumerate(ranks)
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            assert len({rank.interval.every_steps for rank in ranks}) == 1
            for rank in ranks:
                rank.cross(step)
    return agreements


rank_costs = st.tuples(st.floats(0.001, 10.0), st.floats(0.0, 1.0))


@given(
    st.lists(st.lists(rank_costs, min_size=1, max_size=3), min_size=1, max_size=3),
    st.integers(1, 150),
    st.booleans(),
)
def test_all_ranks_of_each_world_save_the_same_steps(
    worlds: list[list[tuple[float, float]]], length: int, are_replicas: bool
) -> None:
    """Survivors come last: rank 0 of a later world is a new process that has measured nothing.

    ``are_replicas``: only rank 0 writes.
    """
    survivors: list[Rank] = []
    step = 0
    for joining in worlds:
        ranks = [Rank(*costs) for costs in joining] + survivors
        for number, rank in enumerate(ranks):
            rank.is_writer = number == 0 or not are_replicas
        in_use = survivors[0].interval.every_steps if survivors else UNMEASURED_STEPS
        for rank in ranks:
            rank.saved.clear()
        agreements = train(ranks, range(step, step + length))
        assert agreements <= 3 + length // AGAIN_STEPS
        assert all(rank.saved == ranks[0].saved for rank in ranks)
        if length < UNMEASURED_STEPS and not survivors:
            assert ranks[0].interval.every_steps == in_use
        survivors, step = ranks[-2:], max(0, step + length - 3)
