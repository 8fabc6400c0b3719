"""How the leader judges published step times, and what a node publishes."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from kit.manual_clock import ManualClock
from kit.membership_nodes import node, world
from kit.memory_store import MemoryStore

from elastic.agent.judges import StragglerJudge
from elastic.agent.node import NodeContext, NodeStatus, RunSecret, StepTimesReport
from elastic.agent.roster import read
from elastic.errors import RecordError
from elastic.hangs.page import RankStepTimes, StepDurations
from elastic.membership.records import Keys, NodeState, NodeStepTimes, WorldRecord, decode, encode
from elastic.store.keyvalue import Entry
from elastic.telemetry.events import Event, StragglerFound, StragglerRecovered
from elastic.tuning.options import AgentOptions
from elastic.wire.handshake import SecretKey

KEYS = Keys.of("/elastic", "job")
WORLD = replace(world("n1", "n2", "n3"), generation=7)
PRESENT = WORLD.node_ids


class Journal:
    def __init__(self) -> None:
        self.events: list[tuple[int, Event]] = []

    def emit(self, event: Event, *, level: int = logging.INFO) -> None:
        self.events.append((level, event))


def context(journal: Journal, action: str = "report", nproc: int = 1) -> NodeContext:
    record = node("n1", NodeState.READY, in_process=True, running=WORLD)
    return NodeContext(
        store=MemoryStore(),
        keys=KEYS,
        secret=RunSecret(SecretKey.generate(), KEYS.root),
        options=AgentOptions(straggler_action=action, straggler_factor=1.5),
        status=NodeStatus(replace(record, nproc=nproc), KEYS, 0.0),
        clock=ManualClock(),
        journal=journal,
    )


def times(window: int, compute_s: float = 0.1, generation: int = 7) -> StepDurations:
    return StepDurations(
        generation=generation,
        window=window,
        steps=10,
        samples=80,
        data_s=0.01,
        compute_s=compute_s,
        collective_s=0.02,
        checkpoint_s=0.0,
        script_s=0.005,
    )


class Leader:
    def __init__(self, action: str = "report") -> None:
        self.journal = Journal()
        self.judge = StragglerJudge(context(self.journal, action))
        self.window = 0

    def receives(self, name: str, *of_ranks: StepDurations, of: WorldRecord = WORLD) -> None:
        ranks = tuple(RankStepTimes(local_rank=i, times=t) for i, t in enumerate(of_ranks))
        record = NodeStepTimes(node_id=f"id-{name}", ranks=ranks)
        self.judge.put(KEYS.step_times_of(f"id-{name}"), record)
        self.judge.judge(of, PRESENT)

    def windows(self, count: int, *, slow: str = "", generation: int = 7) -> None:
        """All nodes of the world complete this many windows."""
        of = replace(WORLD, generation=generation)
        for _ in range(count):
            self.window += 1
            for name in ("n1", "n2", "n3"):
                compute_s = 0.3 if name == slow else 0.1
                self.receives(name, times(self.window, compute_s, generation), of=of)

    @property
    def events(self) -> list[Event]:
        return [event for _, event in self.journal.events]


def test_a_straggler_is_reported_with_its_times_and_recovers() -> None:
    leader = Leader()
    leader.windows(2, slow="n2")
    assert leader.events == []
    leader.windows(3, slow="n2")
    ((level, found),) = leader.journal.events
    assert level == logging.WARNING
    assert isinstance(found, StragglerFound)
    assert (found.generation, found.rank, found.node) == (7, 1, "n2")
    assert (found.cause, found.windows) == ("compute", 3)
    assert (found.data_s, found.compute_s, found.collective_s) == (0.01, 0.3, 0.02)
    assert (found.checkpoint_s, found.script_s) == (0.0, 0.005)
    assert (found.typical_data_s, found.typical_compute_s, found.lag_s) == (0.01, 0.1, 0.2)
    assert found.factor == pytest.approx(0.31 / 0.11, abs=1e-3)
    assert found.reason.startswith("rank 1 on n2 took 2.8 times as long per sample")
    leader.windows(2)
    assert len(leader.events) == 1
    leader.windows(1)
    recovered = leader.events[-1]
    assert isinstance(recovered, StragglerRecovered)
    assert (recovered.rank, recovered.node, recovered.factor) == (1, "n2", 1.0)


def test_a_window_counts_once_and_only_when_all_ranks_have_reported() -> None:
    leader = Leader()
    leader.windows(2, slow="n2")
    for _ in range(5):
        leader.receives("n2", times(2, 0.3))  # the watch may deliver it again
        leader.receives("n1", times(3))
        leader.receives("n2", times(3, 0.3))
    assert leader.events == [], "n3 has not ended its window"
    leader.receives("n3", times(3))
    assert len(leader.events) == 1


def test_windows_of_another_world_are_not_compared() -> None:
    leader = Leader()
    leader.windows(2, slow="n2")
    for window in (3, 4, 5, 6):
        for name in ("n1", "n2", "n3"):
            leader.receives(name, times(window, 0.3 if name == "n2" else 0.1, generation=6))
    assert leader.events == []


def test_a_streak_continues_in_the_next_world() -> None:
    leader = Leader()
    leader.windows(2, slow="n2")
    leader.windows(1, slow="n2", generation=8)
    (found,) = leader.events
    assert isinstance(found, StragglerFound)
    assert found.generation == 8


def test_stragglers_are_excluded_only_by_the_exclude_action() -> None:
    leader = Leader("report")
    leader.windows(3, slow="n2")
    assert leader.judge.stragglers() == {}
    leader = Leader("exclude")
    leader.windows(3, slow="n2")
    (found,) = leader.events
    assert isinstance(found, StragglerFound)
    assert leader.judge.stragglers() == {"id-n2": found.reason}
    leader.windows(3)
    assert leader.judge.stragglers() == {}, "it has recovered"


def test_one_of_two_ranks_is_never_excluded() -> None:
    leader = Leader("exclude")
    two = replace(world("n1", "n2"), generation=7)
    for window in (1, 2, 3):
        leader.receives("n1", times(window), of=two)
        leader.receives("n2", times(window, 0.3), of=two)
    assert len(leader.events) == 1
    assert leader.judge.stragglers() == {}


def test_a_straggler_without_a_key_is_forgotten() -> None:
    leader = Leader("exclude")
    leader.windows(3, slow="n2")
    assert "id-n2" in leader.judge.stragglers()
    leader.receives("n1", times(9))
    assert "id-n2" in leader.judge.stragglers(), "it waits outside of the world"
    leader.judge.put(KEYS.step_times_of("id-n1"), _record("id-n1", 10))
    leader.judge.judge(WORLD, ("id-n1", "id-n3"))
    assert leader.judge.stragglers() == {}


def _record(node_id: str, window: int) -> NodeStepTimes:
    ranks = (RankStepTimes(local_rank=0, times=times(window)),)
    return NodeStepTimes(node_id=node_id, ranks=ranks)


def test_nothing_is_judged_when_turned_off() -> None:
    leader = Leader("off")
    leader.windows(5, slow="n2")
    assert leader.events == []


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (b'"steps":10', b'"steps":0', "steps=0"),
        (b'"data_s":0.01', b'"data_s":-1.0', "data_s=-1"),
        (b'"samples":80', b'"samples":"80"', "samples='80'"),
        (b'"version":3', b'"version":4', "version 4"),
    ],
)
def test_an_invalid_record_is_rejected(old: bytes, new: bytes, expected: str) -> None:
    record = encode(_record("id-n2", 3))
    broken = record.replace(old, new)
    assert broken != record
    error = read(KEYS, Entry(KEYS.step_times_of("id-n2"), broken, 1, 1))
    assert isinstance(error, RecordError)
    assert expected in str(error)


def test_after_a_store_restart_only_its_records_count() -> None:
    leader = Leader()
    leader.windows(2, slow="n2")
    leader.judge.reset()
    leader.receives("n1", times(3))
    leader.receives("n2", times(3, 0.3))
    assert leader.events == []
    leader.judge.delete(KEYS.step_times_of("id-n1"))
    leader.receives("n3", times(3))
    assert leader.events == [], "n1's record is gone"
    leader.receives("n1", times(3))
    assert len(leader.events) == 1


def test_a_node_publishes_once_per_window_for_all_workers() -> None:
    at = context(Journal(), nproc=2)
    report = StepTimesReport(at)
    lease = at.store.lease(4.0, on_lost=lambda: None)
    key = KEYS.step_times_of("id-n1")

    def revision() -> int:
        report.publish(lease)
        entry = at.store.get(key)
        return entry.mod_revision if entry is not None else 0

    report.on_report(101, 1, times(1))
    assert revision() == 0, "the other worker has not ended its window"
    report.on_report(100, 0, times(1, 0.2))
    first = revision()
    entry = at.store.get(key)
    assert entry is not None
    assert entry.lease_id == lease.id
    assert decode(NodeStepTimes, key, entry.value).ranks == (
        RankStepTimes(local_rank=0, times=times(1, 0.2)),
        RankStepTimes(local_rank=1, times=times(1)),
    )
    assert revision() == first, "nothing new"
    report.on_report(100, 0, times(2))
    assert revision() == first
    report.on_ended(101)
    report.on_report(102, 1, times(1))
    assert revision() > first
    lease.close()
