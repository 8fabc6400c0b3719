"""The interval of saves to memory if the script sets none: chosen from measured costs."""

from __future__ import annotations

import pytest
from kit.manual_clock import ManualClock

from elastic.errors import ConfigError
from elastic.train.folder import Checkpoints
from elastic.train.memory import (
    AGAIN_STEPS,
    LONGEST_STEPS,
    MEMORY_LONGEST_S,
    ChosenInterval,
    CostMeter,
    MemoryCosts,
    MemoryInterval,
    choose,
    combine,
)


@pytest.mark.parametrize(
    ("costs", "steps"),
    [
        (MemoryCosts(), 10),
        (MemoryCosts(every_steps=4), 4),
        (MemoryCosts(wait_s=0.012), 10),
        (MemoryCosts(step_s=0.180), 10),
        (MemoryCosts(wait_s=0.012, step_s=0.180), 7),
        (MemoryCosts(wait_s=0.0, step_s=0.180), 1),
        (MemoryCosts(wait_s=0.0, step_s=0.0), 1),
        (MemoryCosts(wait_s=0.0, step_s=0.1, write_s=0.45), 6),
        (MemoryCosts(wait_s=0.012, step_s=0.180, write_s=0.45), 7),
        (MemoryCosts(wait_s=60.0, step_s=2.0), MEMORY_LONGEST_S / 2.0),
        (MemoryCosts(wait_s=60.0, step_s=400.0), 1),
        (MemoryCosts(wait_s=1.0, step_s=0.001), LONGEST_STEPS),
    ],
)
def test_the_shortest_interval_within_one_percent_is_chosen(costs: MemoryCosts, steps: int) -> None:
    assert choose(costs, 0.01).every_steps == steps


def test_the_reason_names_the_costs() -> None:
    assert choose(MemoryCosts(wait_s=0.012, step_s=1.8), 0.01).reason == (
        "a save costs 12 ms, a step 1.8 s"
    )
    assert "written in 4 s" in choose(MemoryCosts(wait_s=0.0, step_s=1.0, write_s=4), 0.01).reason
    longest = choose(MemoryCosts(wait_s=30.0, step_s=1.0), 0.01)
    assert longest.reason.endswith("saves take 9% of the time: a longer interval would lose more")


def test_noise_does_not_change_an_affordable_interval() -> None:
    assert choose(MemoryCosts(every_steps=8, wait_s=0.07, step_s=1.0), 0.01).every_steps == 8
    assert choose(MemoryCosts(every_steps=8, wait_s=0.09, step_s=1.0), 0.01).every_steps == 9
    assert choose(MemoryCosts(every_steps=8, wait_s=0.03, step_s=1.0), 0.01).every_steps == 3


def test_the_slowest_rank_counts_and_a_new_rank_has_no_measurements() -> None:
    told = combine(
        [
            MemoryCosts(),
            MemoryCosts(every_steps=7, wait_s=0.01, step_s=0.2),
            MemoryCosts(every_steps=7, wait_s=0.03, write_s=0.5, step_s=0.3),
        ]
    )
    assert told == MemoryCosts(every_steps=7, wait_s=0.03, write_s=0.5, step_s=0.2)


def boundary(
    meter: CostMeter,
    clock: ManualClock,
    step: int,
    *,
    waits_s: float = 0.0,
    saves_s: float | None = None,
) -> None:
    meter.reached(step)
    clock.advance(waits_s)
    meter.waited()
    if saves_s is not None:
        clock.advance(saves_s)
    meter.left(has_saved=saves_s is not None)


def test_the_cost_of_a_save_is_its_start_and_the_next_boundary_wait() -> None:
    clock = ManualClock()
    meter = CostMeter(clock)
    for step in range(8):
        saves_s = 0.25 if step % 2 == 0 else None
        boundary(meter, clock, step, waits_s=0.5 if step % 2 else 0.0, saves_s=saves_s)
        clock.advance(2.0)
    costs = meter.costs(2)
    assert costs == MemoryCosts(every_steps=2, wait_s=0.75, step_s=2.0)


def test_first_steps_and_the_first_save_of_a_world_are_not_counted() -> None:
    clock = ManualClock()
    meter = CostMeter(clock)
    for world in range(2):
        meter.enter_world()
        for step in range(5):
            boundary(meter, clock, step, saves_s=9.0 if step == 0 else 0.25)
            clock.advance(60.0 if step < 2 else 2.0 + world)
    costs = meter.costs(1)
    assert costs.wait_s == 0.25 and costs.step_s == 2.5, "of both worlds"


def test_the_step_time_is_correct_if_boundaries_are_steps_apart() -> None:
    clock = ManualClock()
    meter = CostMeter(clock)
    for step in range(0, 24, 4):
        boundary(meter, clock, step)
        clock.advance(2.0)
    assert meter.costs(None).step_s == 0.5


def test_one_pause_does_not_change_the_median() -> None:
    clock = ManualClock()
    meter = CostMeter(clock)
    for step in range(12):
        boundary(meter, clock, step, saves_s=5.0 if step == 6 else 0.25)
        clock.advance(30.0 if step == 5 else 2.0)
    assert meter.costs(1) == MemoryCosts(every_steps=1, wait_s=0.25, step_s=2.0)


def run(
    interval: MemoryInterval, clock: ManualClock, steps: range, *, save_s: float, step_s: float
) -> list[int]:
    """Train on one rank; returns the steps that were saved."""
    saved = []
    for step in steps:
        if interval.needs_agreement:
            interval.agree(step)
        interval.meter.reached(step)
        if is_due := interval.is_due(step):
            saved.append(step)
            clock.advance(save_s)
        interval.meter.left(has_saved=is_due)
        clock.advance(step_s)
    return saved


def test_the_interval_is_set_after_two_saves_and_follows_the_costs() -> None:
    clock = ManualClock()
    told: list[tuple[int, int, str]] = []

    def changed(chosen: ChosenInterval, before: int) -> None:
        told.append((before, chosen.every_steps, chosen.reason))

    interval = MemoryInterval(None, overhead=0.01, clock=clock, changed=changed)
    assert run(interval, clock, range(1, 50), save_s=0.012, step_s=0.18) == [
        *(10, 20),
        *(28, 35, 42, 49),
    ]
    assert told == [(10, 7, "a save costs 12 ms, a step 180 ms")]
    run(interval, clock, range(50, 50 + 3 * AGAIN_STEPS), save_s=0.1, step_s=0.18)
    assert told[1:] == [(7, 56, "a save costs 100 ms, a step 180 ms")]
    interval.enter_world(1)
    assert run(interval, clock, range(400, 450), save_s=0.1, step_s=0.18) == [448]
    assert len(told) == 2, "the survivors of a world keep its interval"


def test_a_configured_interval_is_kept() -> None:
    clock = ManualClock()
    interval = MemoryInterval(5, overhead=0.01, clock=clock, changed=lambda *_: pytest.fail())
    saved = run(interval, clock, range(1, 300), save_s=60.0, step_s=0.1)
    assert saved == list(range(5, 300, 5)) and not interval.needs_agreement


@pytest.mark.parametrize("overhead", [0.0, -0.01, 1.5, float("nan")])
def test_an_invalid_overhead_fraction_is_rejected(overhead: float) -> None:
    with pytest.raises(ConfigError, match="memory_overhead="):
        Checkpoints("folder", memory_overhead=overhead)


def test_settings_of_scripts_are_converted() -> None:
    assert Checkpoints("f", memory=3).memory_steps == 3
    for memory in (None, True, False):
        assert Checkpoints("f", memory=memory).memory_steps is None


def test_a_rank_that_writes_nothing_counts_saves_without_costs() -> None:
    clock = ManualClock()
    writer, other = CostMeter(clock), CostMeter(clock)
    for step in range(1, 4):
        for meter in (writer, other):
            meter.reached(step)
            meter.waited()
            clock.advance(0.5)
            meter.left(has_saved=True, is_writer=meter is writer)
    assert writer.saves == other.saves == 2
    assert writer.costs(None).wait_s == 0.5
    assert other.costs(None).wait_s is None
