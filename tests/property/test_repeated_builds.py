"""Worlds without a step: a job whose groups are never built ends within a bounded time, and no
earlier; a step resets the count; a new leader continues it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st
from kit.membership_nodes import NOW, node, proposal, seen, view, world

from elastic.agent.accounting import BUILD_BACKOFF_CAP_S, Broken, FailureAccounting
from elastic.membership.budget import StopJob
from elastic.membership.records import FailureReport, NodeState
from elastic.membership.view import StepRate, classify_members
from elastic.tuning.options import AgentOptions

LONGEST_S = 40.0  # of an attempt to build a group
BEFORE = world("n1", "n2", generation=8, mode="in-process")


@dataclass
class Outage:
    """Two nodes whose workers cannot connect to each other, and that both have a live agent."""

    options: AgentOptions
    now_s: float = NOW
    generation: int = 8
    worlds: int = 0
    step: int = 100

    def __post_init__(self) -> None:
        self.accounting = FailureAccounting(self.options)
        self.accounting.observe(self._step_rate)

    @property
    def _step_rate(self) -> StepRate:
        return StepRate(8, self.step, 1.0, self.now_s)

    def attempt(self, took_s: float) -> StopJob | None:
        """Another world, whose group could not be built within that time."""
        self.generation += 1
        self.worlds += 1
        if (retry_at_s := self.accounting.retry_at_s) is not None:
            self.now_s = max(self.now_s, retry_at_s)
        formed_s, self.now_s = self.now_s, self.now_s + took_s
        group = replace(BEFORE, generation=self.generation)
        members = [
            seen(node(n, NodeState.READY, in_process=True, running=BEFORE)) for n in ("n1", "n2")
        ]
        report = FailureReport(
            node_id="id-n2",
            generation=self.generation,
            error="GroupBuildFailed: rank 0 does not answer at 10.0.0.1:4711",
            unreachable=("id-n1",),
        )
        v = view(group, *members, failure_reports=(report,))
        broken = Broken(
            members=classify_members(v, group),
            proposal=proposal(replace(v, failing_since_s=NOW - 99)),
            since_s=formed_s,
            failures=(),
        )
        return self.accounting.count(broken, self._step_rate, self.now_s)

    def change_leader(self) -> None:
        """The new one knows what is in the world's record."""
        records = self.accounting.records(self.now_s, self.now_s)
        self.accounting = FailureAccounting(self.options)
        last = replace(BEFORE, generation=self.generation, breakages=records, time_s=self.now_s)
        self.accounting.remember(last, self.now_s, self.now_s)


durations = st.lists(st.floats(0.05, LONGEST_S), min_size=1, max_size=8)


@given(
    budget=st.integers(1, 12),
    window_s=st.floats(10.0, 3600.0),
    durations=durations,
    terms=st.sets(st.integers(0, 200)),
)
def test_a_group_that_is_never_built_ends_the_job_in_time_and_no_earlier(
    budget: int, window_s: float, durations: list[float], terms: set[int]
) -> None:
    options = AgentOptions(failure_budget=budget, failure_window_s=window_s)
    outage, stop = Outage(options), None
    # (The pauses of the first ten attempts add up to 121 s, the others are of 30 s.)
    most_s = max(window_s, (budget + 1) * (LONGEST_S + BUILD_BACKOFF_CAP_S))
    while stop is None:
        assert outage.now_s - NOW <= most_s
        if outage.worlds in terms:
            outage.change_leader()
        stop = outage.attempt(durations[outage.worlds % len(durations)])
    assert outage.worlds > budget
    assert outage.now_s - NOW >= window_s
    assert stop.exit_code == 70
    assert f"{outage.worlds} worlds in a row" in stop.reason
    assert "n2 cannot reach n1: GroupBuildFailed: rank 0" in stop.reason
    (record,) = outage.accounting.records(outage.now_s, outage.now_s)
    assert record.attempts == outage.worlds, "one incident"


def test_a_budget_of_one_ends_with_the_second_attempt() -> None:
    outage = Outage(AgentOptions(failure_budget=1, failure_window_s=20.0))
    assert outage.attempt(30.0) is None
    stop = outage.attempt(30.0)
    assert stop is not None and "2 worlds in a row" in stop.reason


@given(durations=durations)
def test_steps_between_failed_builds_reset_the_count(durations: list[float]) -> None:
    outage = Outage(AgentOptions(failure_budget=3, failure_window_s=20.0))
    for number in range(30):
        took_s = durations[number % len(durations)]
        is_reset = outage.worlds % 3 == 0
        outage.step += 50 * is_reset
        outage.generation += is_reset  # a world that was built
        assert outage.attempt(took_s) is None
