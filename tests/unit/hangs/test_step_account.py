"""The accounting of a rank's time: sums that add up, few records, negligible overhead."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path

import pytest
from kit.manual_clock import ManualClock

from elastic.groups.world import World
from elastic.hangs.page import Phase, PhaseRecorder
from elastic.telemetry.events import Event, RankTimes
from elastic.telemetry.journal import Journal
from elastic.testing.slowness import is_within
from elastic.train.current import StepAccount
from elastic.train.hooks import Hook, Hooks, Left
from elastic.tuning.intervals import STEP_SUMS_S, STEP_TIMES_S

MAX_US = 50.0  # per step, all telemetry
CLOCK_S = 1e-6  # tolerance of sums of readings of one clock

WORLD = World(
    generation=1,
    nonce="",
    lineage=(),
    rank=0,
    size=1,
    local_rank=0,
    local_size=1,
    node="a",
    is_launched=False,
)


class Job:
    """A clock, the time spent in each phase, and an account of it."""

    def __init__(self) -> None:
        self.clock = ManualClock(100.0)
        self.passed = [0.0] * len(Phase)
        self.commits = [(0.0, self.passed)]
        self.seen: list[RankTimes] = []
        self.levels: set[int] = set()
        self.account = StepAccount(self, clock=self.clock, times=self)
        self.step = 0

    def seconds(self) -> list[float]:
        return self.passed.copy()

    def at_commit(self) -> tuple[float, list[float]]:
        return self.commits[-1]

    def emit(self, event: Event, *, level: int = logging.INFO) -> None:
        assert isinstance(event, RankTimes)
        self.seen.append(event)
        self.levels.add(level)

    def spend(self, phase: Phase, seconds: float) -> None:
        self.passed[phase] += seconds
        self.clock.advance(seconds)

    def commit(self, **seconds: float) -> None:
        for name, took_s in seconds.items():
            self.spend(Phase[name], took_s)
        self.step += 1
        self.commits.append((self.clock.monotonic(), self.passed.copy()))
        self.account.commit(self.step)


def parts(event: RankTimes) -> float:
    return (
        event.productive_s + event.data_s + event.checkpoint_s + event.evaluation_s + event.open_s
    )


def test_a_window_ends_after_the_first_step_and_then_every_few_seconds() -> None:
    job = Job()
    job.account.enter_world(replace(WORLD, generation=3), 0)
    for _ in range(200):
        job.commit(DATA=0.01, COMPUTE=0.05, COLLECTIVE=0.03, OPTIMIZER=0.01)
    first, *others = job.seen
    assert (first.ended, first.steps, first.step, first.generation) == ("first-step", 1, 1, 3)
    assert [e.ended for e in others] == ["due"] * 3
    assert others[0].duration_s == pytest.approx(STEP_TIMES_S, abs=0.1)
    assert others[0].data_s == pytest.approx(0.1 * others[0].duration_s)
    assert others[0].productive_s == pytest.approx(0.9 * others[0].duration_s)
    assert others[0].collective_s == pytest.approx(0.3 * others[0].duration_s)
    assert sum(e.steps for e in job.seen) == others[-1].step
    assert job.levels == {logging.DEBUG}, "an event of every rank every few seconds is no log line"


def test_parts_add_up_when_a_world_ends_with_a_fault() -> None:
    job = Job()
    job.account.enter_world(WORLD, 0)
    job.commit(DATA=0.2, COMPUTE=1.0)
    job.commit(DATA=0.1, COMPUTE=1.0, CHECKPOINT=0.5, EVALUATION=0.4)
    for phase in (Phase.DATA, Phase.COMPUTE, Phase.COLLECTIVE):
        job.spend(phase, 2.0)
    job.account.leave_world("fault")
    fault = job.seen[-1]
    assert (fault.ended, fault.steps, fault.step) == ("fault", 1, 2)
    assert fault.open_s == pytest.approx(4.0)  # the wait for the batch counts as data time
    assert (fault.data_s, fault.checkpoint_s, fault.evaluation_s) == (2.1, 0.5, 0.4)
    assert fault.productive_s == pytest.approx(1.0)
    assert all(parts(e) == pytest.approx(e.duration_s) for e in job.seen)


def test_an_unseen_commit_counts_when_the_world_ends() -> None:
    """The account samples the steps; the recorder knows when the last one was committed."""
    job = Job()
    hooks = Hooks(job.account, clock=job.clock)
    hooks.enter_world(WORLD, 0)
    job.commit(COMPUTE=1.0)  # seen by the account itself
    for _ in range(3):
        job.spend(Phase.COMPUTE, STEP_SUMS_S / 8)
        job.step += 1
        job.commits.append((job.clock.monotonic(), job.passed.copy()))
        hooks.commit(job.step)
    job.spend(Phase.COMPUTE, 2.0)
    hooks.leave_world("fault")
    first, last = job.seen
    assert (first.steps, last.steps, last.step) == (1, 3, 4)
    assert last.productive_s == pytest.approx(3 * STEP_SUMS_S / 8)
    assert last.open_s == pytest.approx(2.0)


class SeesEachStep(Hook):
    """Records the calls."""

    def __init__(self) -> None:
        self.calls: list[int | str] = []

    def enter_world(self, world: World, step: int) -> None:
        self.calls.append(f"begin {step}")

    def commit(self, step: int) -> None:
        self.calls.append(step)

    def leave_world(self, reason: Left) -> None:
        self.calls.append(reason)


class SeesSomeSteps(SeesEachStep):
    SEES_EACH_STEP = False


def test_a_hook_sees_every_step_or_a_sample_of_steps() -> None:
    job = Job()
    each, some = SeesEachStep(), SeesSomeSteps()
    hooks = Hooks(job.account, each, some, clock=job.clock)
    hooks.enter_world(WORLD, 10)
    for step in range(11, 17):
        job.clock.advance(STEP_SUMS_S / 4)
        hooks.commit(step)
    hooks.leave_world("fault")
    hooks.enter_world(WORLD, 15)
    hooks.commit(16)
    hooks.leave_world("pause")
    assert each.calls == ["begin 10", *range(11, 17), "fault", "begin 15", 16, "pause"]
    assert some.calls == ["begin 10", 11, 15, 16, "fault", "begin 15", 16, "pause"]


def test_recorded_phases_are_summed_on_demand() -> None:
    recorder = PhaseRecorder()
    recorder.account()
    asked_s = time.monotonic()
    before = recorder.seconds()
    turns = 5000  # many more than the buffer holds
    began_s = time.monotonic()
    for number in range(turns):
        recorder.enter(Phase.COMPUTE)
        recorder.committed(number + 1)
        recorder.enter(Phase.EVALUATION)
    ended_s = time.monotonic()
    after = recorder.seconds()
    answered_s = time.monotonic()
    spent = [b - a for a, b in zip(before, after, strict=True)]
    assert min(spent[Phase.COMPUTE], spent[Phase.EVALUATION], spent[Phase.SCRIPT]) > 0
    assert ended_s - began_s - CLOCK_S <= sum(spent) <= answered_s - asked_s + CLOCK_S
    committed_s, committed = recorder.at_commit()
    assert began_s <= committed_s <= ended_s
    since_commit_s = sum(after) - sum(committed)
    assert ended_s - committed_s - CLOCK_S <= since_commit_s <= answered_s - committed_s + CLOCK_S
    assert len(recorder._noted) == 0


def test_nothing_is_reported_without_an_active_world() -> None:
    job = Job()
    job.commit(COMPUTE=9.0)
    job.account.leave_world("close")
    job.account.enter_world(WORLD, 0)
    job.account.leave_world("pause")
    job.clock.advance(60.0)
    job.account.leave_world("change")
    assert job.seen == []


def test_the_recorder_adds_up_phases_without_an_agent() -> None:
    recorder = PhaseRecorder()
    recorder.enter(Phase.DATA)
    assert recorder.seconds()[Phase.DATA] == 0.0
    recorder.account()
    recorder.enter(Phase.COMPUTE)
    before = recorder.seconds()
    ends_s = time.monotonic() + 0.02
    while time.monotonic() < ends_s:
        pass
    recorder.enter(Phase.DATA)
    spent = [b - a for a, b in zip(before, recorder.seconds(), strict=True)]
    assert spent[Phase.COMPUTE] >= 0.02
    assert sum(spent) == pytest.approx(spent[Phase.COMPUTE] + spent[Phase.DATA])


def test_accounting_costs_less_than_50_us_per_step(tmp_path: Path) -> None:
    """CPU time of this thread, the best of several rounds: the machine is shared."""
    recorder = PhaseRecorder()
    journal = Journal(folder=tmp_path, identity={"node": "a", "rank": 0})
    account = StepAccount(journal, times=recorder)
    recorder.account()
    account.enter_world(WORLD, 0)
    rounds, steps = [], 500
    for turn in range(7):
        began_ns = time.thread_time_ns()
        for number in range(steps):
            for phase in (Phase.CHECKPOINT, Phase.SCRIPT, Phase.COMPUTE, Phase.COLLECTIVE):
                recorder.enter(phase)
            recorder.enter(Phase.OPTIMIZER)
            recorder.committed(number)
            account.commit(turn * steps + number)
            recorder.enter(Phase.DATA)
        rounds.append((time.thread_time_ns() - began_ns) / steps / 1000)
    assert is_within(min(rounds), MAX_US), f"{min(rounds):.1f} us per step"
