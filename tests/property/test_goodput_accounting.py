"""Goodput accounts for all time: its parts match a made-up run, and always add up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.telemetry.goodput import Activity, Goodput, goodput_of_run
from elastic.telemetry.reader import JournalRecord, merge, run_of

STEP_S = 0.5
LAPS = ("leave_s", "wait_s", "build_s", "agree_s", "paused_s")


@dataclass
class Process:
    """A writer of one process's journal, with its own clock."""

    node: str
    role: str
    writer: str
    at_s: float
    skew_s: float = 0.0
    records: list[JournalRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.write(
            "journal-opened", role=self.role, run_id="run", boot_id=f"boot {self.node}", schema=1
        )

    def write(self, event: str, *, after_s: float = 0.0, **more: Any) -> None:
        self.at_s += after_s
        data = {"node": self.node, "event": event, **more}
        self.records.append(
            JournalRecord(
                name=event,
                writer=self.writer,
                seq=len(self.records),
                time_s=1e9 + self.at_s + self.skew_s,
                monotonic_s=self.at_s,
                line=data,
            )
        )


@dataclass(frozen=True)
class World:
    """The events of one world on every node."""

    steps: int
    data_s: float
    checkpoint_s: float
    evaluation_s: float
    detection_s: float  # of the fault that ends it
    lost_steps: int  # that the next world repeats
    laps: tuple[float, ...]
    first_step_s: float  # in addition to a usual step


times = st.floats(0.0, 20.0).map(lambda s: round(s, 3))
worlds = st.builds(
    World,
    steps=st.integers(3, 50),
    data_s=times,
    checkpoint_s=times,
    evaluation_s=times,
    detection_s=times,
    lost_steps=st.integers(0, 2),
    laps=st.tuples(*[times] * len(LAPS)),
    first_step_s=times,
)


def goodput_and_truth(
    story: list[World], nodes: int, skews: list[float]
) -> tuple[Goodput, dict[str, float]]:
    """The goodput of a run in which all nodes step together, and its true time per activity."""
    truth: dict[str, float] = dict.fromkeys((a.value for a in Activity), 0.0)
    records: list[JournalRecord] = []
    for number in range(nodes):
        process = Process(f"n{number}", "worker", f"w{number}", 0.0, skews[number])
        play(process, story, truth if number == 0 else {})
        records += process.records
    leader = Process("n0", "agent", "agent", 0.0, skews[0])
    formed = [r for r in records if r.name == "world-joined" and r.writer == "w0"]
    for record in formed:
        leader.write(
            "world-formed",
            after_s=record.monotonic_s - leader.at_s,
            generation=record.whole("generation"),
            cause="lost",
            reason="made up",
        )
    return goodput_of_run(run_of(merge([*records, *leader.records]))), truth


def play(process: Process, story: list[World], truth: dict[str, float]) -> None:
    def spend(activity: Activity, took_s: float) -> float:
        truth[activity.value] = truth.get(activity.value, 0.0) + took_s
        return took_s

    process.at_s += spend(Activity.STARTUP, 7.0)
    step = 0
    for number, world in enumerate(story):
        generation, is_last = number + 1, number + 1 == len(story)
        process.write("world-joined", generation=generation, step=step, duration_s=0.0)
        if number:
            before = story[number - 1]
            leave_s, wait_s, build_s, agree_s, paused_s = before.laps
            spend(Activity.ABORT, leave_s)
            spend(Activity.RENDEZVOUS, wait_s)
            spend(Activity.REBUILD, build_s)
            spend(Activity.STATE_TRANSFER, agree_s)
            spend(Activity.WAITING_FOR_NODES, paused_s)
            named = dict(zip(LAPS, before.laps, strict=True))
            process.write("recovered", duration_s=sum(before.laps), generation=generation, **named)
        lost = 0 if is_last else world.lost_steps
        first_s = STEP_S + spend(Activity.FIRST_STEP, world.first_step_s)
        rest_s = (world.steps - 1) * STEP_S
        spend(Activity.PRODUCTIVE, (world.steps - lost) * STEP_S)
        spend(Activity.RECOMPUTED, lost * STEP_S)
        common = {"generation": generation, "checkpoint_s": 0.0, "evaluation_s": 0.0}
        process.write(
            "rank-times",
            after_s=first_s,
            **{**common, "step": step + 1, "steps": 1, "duration_s": first_s},
            productive_s=first_s,
            data_s=0.0,
            open_s=0.0,
            ended="first-step",
        )
        windows = (world.steps - 1) // 2  # of one step each; the rest is in the last window
        for number_of_step in range(windows):
            process.write(
                "rank-times",
                after_s=STEP_S,
                **{**common, "step": step + 2 + number_of_step, "steps": 1, "duration_s": STEP_S},
                productive_s=STEP_S,
                data_s=0.0,
                open_s=0.0,
                ended="due",
            )
        rest_s -= windows * STEP_S
        open_s = 0.0
        if not is_last:
            open_s = spend(Activity.DETECTION, STEP_S + world.detection_s)
        beside_s = spend(Activity.DATA, world.data_s)
        beside_s += spend(Activity.CHECKPOINT, world.checkpoint_s)
        beside_s += spend(Activity.EVALUATION, world.evaluation_s)
        duration_s = rest_s + beside_s + open_s
        process.write(
            "rank-times",
            after_s=duration_s,
            generation=generation,
            step=step + world.steps,
            steps=world.steps - 1 - windows,
            duration_s=duration_s,
            productive_s=rest_s,
            data_s=world.data_s,
            checkpoint_s=world.checkpoint_s,
            evaluation_s=world.evaluation_s,
            open_s=open_s,
            ended="close" if is_last else "fault",
        )
        step += world.steps - lost
        if not is_last:
            process.at_s += sum(world.laps)
    process.write("run-closed", after_s=spend(Activity.SHUTDOWN, 2.0), clean=True)


@given(
    story=st.lists(worlds, min_size=1, max_size=5),
    nodes=st.integers(1, 4),
    skews=st.lists(st.sampled_from([0.0, 0.01, 60.0, -3600.0]), min_size=4, max_size=4),
)
def test_each_part_matches_the_time_the_run_spent(
    story: list[World], nodes: int, skews: list[float]
) -> None:
    found, truth = goodput_and_truth(story, nodes, skews)
    assert found.breakdown.total_s == pytest.approx(found.duration_s, rel=1e-6)
    assert found.duration_s == pytest.approx(sum(truth.values()), abs=0.02)
    for activity in Activity:
        spent_s = found.breakdown.seconds.get(activity, 0.0)
        assert spent_s == pytest.approx(truth[activity.value], abs=0.01 * found.duration_s), (
            activity
        )
    assert found.steps == sum(w.steps for w in story) - sum(w.lost_steps for w in story[:-1])
    assert found.recomputed_steps == sum(w.lost_steps for w in story[:-1])
    for node in found.nodes:
        assert node.breakdown.total_s == pytest.approx(node.end_s - node.start_s, rel=1e-6)
    # Every change of the world is an incident with exactly its own cost.
    assert [i.generations for i in found.incidents] == [
        (generation,) for generation in range(2, len(story) + 1)
    ]
    for incident, world in zip(found.incidents, story, strict=False):
        following = story[incident.generations[0] - 1]
        cost_s = STEP_S + world.detection_s + sum(world.laps) + following.first_step_s
        assert incident.breakdown.total_s == pytest.approx(
            cost_s + world.lost_steps * STEP_S, abs=0.01 * found.duration_s
        )


names = st.sampled_from(
    [
        "journal-opened",
        "node-arrived",
        "world-formed",
        "world-entered",
        "workers-starting",
        "world-joined",
        "state-restored",
        "rank-times",
        "world-fault",
        "recovered",
        "worker-died",
        "run-closed",
        "node-leaving",
        "job-ended",
        "node-parked",
        "journal-closed",
        "straggler-found",
        "straggler-recovered",
        "made-up",
    ]
)
odd: st.SearchStrategy[Any] = st.one_of(
    st.floats(-10.0, 1e6),
    st.integers(-5, 10**6),
    st.sampled_from([None, "", "x", True, float("inf"), float("nan"), [], {}, "first-step"]),
)
FIELDS = (
    *("generation", "step", "steps", "duration_s", "productive_s", "data_s", "checkpoint_s"),
    *("evaluation_s", "open_s", "ended", "leave_s", "wait_s", "build_s", "agree_s", "wrap_s"),
    *(
        "rank",
        "lag_s",
        "clean",
        "after_generation",
        "run_id",
        "boot_id",
        "role",
        "cause",
        "reason",
        "lost",
    ),
)
lines = st.builds(
    lambda name, node, writer, at_s, data: JournalRecord(
        name=name,
        writer=f"{node}-{writer}",
        seq=-1,
        time_s=at_s + 1e9,
        monotonic_s=at_s,
        line={**data, "node": node, "event": name},
    ),
    names,
    st.sampled_from(["a", "b", "c"]),
    st.integers(0, 2),
    st.floats(0.0, 1000.0),
    st.dictionaries(st.sampled_from(FIELDS), odd),
)


@given(st.lists(lines, max_size=60))
def test_parts_add_up_for_any_lines_in_any_order(records: list[JournalRecord]) -> None:
    found = goodput_of_run(run_of(merge(records)))
    assert found.breakdown.total_s == pytest.approx(found.duration_s, rel=0.01, abs=1e-6)
    assert all(took_s >= 0 for took_s in found.breakdown.seconds.values())
    assert 0.0 <= found.breakdown.goodput <= 1.0
    for incident in found.incidents:
        assert Activity.PRODUCTIVE not in incident.breakdown.seconds
