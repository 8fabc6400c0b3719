"""Logged metrics: one row per step despite faults, written outside the step."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from logging.handlers import BufferingHandler
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kit.manual_clock import ManualClock
from kit.run_kit import STEPS_PER_EPOCH, Job, job, process, undo_step

from elastic.errors import ConfigError, TrainingError
from elastic.groups.world import World
from elastic.telemetry.events import Event, Metrics
from elastic.testing.waiting import PATIENCE_S
from elastic.train.metrics import (
    METRICS_EVENT_S,
    WRITTEN,
    DeviceReads,
    MetricsLog,
    Row,
    Rows,
    TensorBoard,
)


class Tracker:
    """A user-defined writer of three methods. Several processes share its curves."""

    def __init__(self, curve: dict[str, dict[int, float]]) -> None:
        self.curve = curve
        self.calls: list[tuple[str, int]] = []
        self.is_closed = False
        self.threads: set[str] = set()

    def rewind(self, step: int) -> None:
        self.calls.append(("rewind", step))
        for points in self.curve.values():
            for later in [s for s in points if s > step]:
                del points[later]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.threads.add(threading.current_thread().name)
        self.calls.append(("log", step))
        for name, value in values.items():
            self.curve.setdefault(name, {})[step] = value

    def close(self) -> None:
        self.is_closed = True


class Process:
    """A rank as its metrics see it."""

    def __init__(self, tracker: Tracker | None = None) -> None:
        self.clock = ManualClock(100.0)
        self.seen: list[Metrics] = []
        self.at = 0
        self.log = MetricsLog(self, lambda: self.at, clock=self.clock)
        if tracker is not None:
            self.log.add_writer(tracker)

    def emit(self, event: Event, *, level: int = logging.INFO) -> None:
        assert isinstance(event, Metrics)
        assert level == logging.DEBUG, "curves are not logged"
        self.seen.append(event)

    def enter(self, rank: int, step: int) -> None:
        self.at = step
        self.log.enter_world(world(rank), step)

    def train(self, steps: int, who: float = 0.0, step_s: float = 0.1) -> None:
        for _ in range(steps):
            self.at += 1
            self.log.log({"loss": self.at + who})
            self.clock.advance(step_s)
            self.log.commit(self.at)


def world(rank: int, size: int = 2) -> World:
    return World(
        generation=1,
        nonce="",
        lineage=(),
        rank=rank,
        size=size,
        local_rank=0,
        local_size=1,
        node=f"node-{rank}",
        is_launched=True,
    )


def test_rank_0_writes_each_step_once_on_a_separate_thread() -> None:
    tracker = Tracker({})
    rank_0, rank_1 = Process(tracker), Process(other := Tracker({}))
    for rank, process_ in enumerate((rank_0, rank_1)):
        process_.enter(rank, 0)
        process_.train(100)
        process_.log.leave_world("close")
        process_.log.close()
    assert tracker.curve["loss"] == {step: float(step) for step in range(1, 101)}
    assert tracker.calls[0] == ("rewind", 0)
    assert tracker.threads == {"elastic-metrics"}
    assert tracker.is_closed
    assert not other.calls


def test_the_next_rank_0_leaves_no_gap_and_no_duplicates() -> None:
    curve: dict[str, dict[int, float]] = {}
    first, second = Process(one := Tracker(curve)), Process(two := Tracker(curve))
    first.enter(0, 0)
    second.enter(1, 0)
    first.train(57)
    second.train(56, who=0.5)
    # Killed: what it has not flushed is lost with it.
    assert first.log._thread is not None
    assert first.log._thread.drain(PATIENCE_S)
    assert 0 < max(curve["loss"]) < 57
    second.log.leave_world("fault")
    second.enter(0, 55)  # step 56 was interrupted on another rank, and is repeated
    second.train(10, who=0.25)
    second.log.leave_world("close")
    assert sorted(curve["loss"]) == list(range(1, 66))
    assert {step: v - step for step, v in curve["loss"].items() if step > 55} == dict.fromkeys(
        range(56, 66), 0.25
    )
    assert two.calls[0] == ("rewind", 55)
    for process_ in (first, second):
        process_.log.close()
    assert one.is_closed


def test_an_interrupted_step_writes_nothing() -> None:
    rank_0 = Process(tracker := Tracker({}))
    rank_0.enter(0, 0)
    rank_0.train(3)
    rank_0.at = 4
    rank_0.log.log({"loss": 99.0})
    rank_0.log.leave_world("fault")
    assert tracker.curve == {"loss": {1: 1.0, 2: 2.0, 3: 3.0}}
    rank_0.enter(0, 3)
    rank_0.train(1)
    rank_0.log.leave_world("close")
    assert tracker.curve["loss"][4] == 4.0
    rank_0.log.close()


def test_values_logged_after_a_step_are_written_with_the_step() -> None:
    rank_0 = Process(tracker := Tracker({}))
    rank_0.enter(0, 0)
    rank_0.train(20)
    rank_0.log.log({"accuracy": 0.5, "loss": 7.0})  # after the epoch: step 20 is committed
    rank_0.train(20)
    rank_0.log.leave_world("close")
    assert tracker.curve["accuracy"] == {20: 0.5}
    assert tracker.curve["loss"][20] == 7.0, "the last value of a step counts"
    assert [step for call, step in tracker.calls if call == "log"] == list(range(1, 41))
    rank_0.log.close()


def test_a_journal_does_not_grow_with_the_steps() -> None:
    rank_0 = Process()
    rank_0.enter(0, 0)
    for _ in range(2000):
        rank_0.at += 1
        rank_0.log.log({"loss": rank_0.log.means.add(1 / rank_0.at)})
        if rank_0.at == 30:
            rank_0.log.log({"accuracy": 0.25})
        rank_0.clock.advance(0.02)
        rank_0.log.commit(rank_0.at)
    rank_0.log.leave_world("close")
    most = 2000 * 0.02 / METRICS_EVENT_S + 2
    assert 4 < len(rank_0.seen) <= most
    steps = [event.step for event in rank_0.seen]
    assert steps == sorted(set(steps))
    assert steps[-1] == 2000
    assert all(event.values["loss"] == 1 / event.step for event in rank_0.seen)
    assert [e.values["accuracy"] for e in rank_0.seen if "accuracy" in e.values] == [0.25]
    assert {event.means for event in rank_0.seen} == {("loss",)}


class SlowDevice:
    """A device whose copies complete when the test sets ``is_done``."""

    def __init__(self) -> None:
        self.is_done = False
        self.waits = 0

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.waits += 1
        self.is_done = True


def test_values_on_a_device_are_read_later_without_waiting() -> None:
    device = SlowDevice()
    reads = DeviceReads(lambda: device)
    rows = [Row(1, 0.0, {"lr": 0.1}), Row(2, 0.0, {"loss": torch.tensor(3.0)})]
    assert [row.step for row in reads.finish(rows)] == [1]
    rows.append(Row(3, 0.0, {"loss": torch.tensor(4.0)}))
    assert [row.step for row in reads.finish(rows)] == [1]
    device.is_done = True
    assert [row.step for row in reads.finish(rows)] == [1, 2]
    assert rows[1].values == {"loss": 3.0}
    assert isinstance(rows[2].values["loss"], torch.Tensor), "its copy may not have begun"
    assert [row.step for row in reads.finish(rows)] == [1, 2, 3]
    assert device.waits == 0
    rows.append(Row(4, 0.0, {"loss": torch.tensor(5.0)}))
    assert reads.finish(rows, wait=True)[-1].values == {"loss": 5.0}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("0.5", "'0.5', a str, is not a number"),
        (None, "None, a NoneType, is not a number"),
        (1j, "1j, a complex, is not a number"),
        (torch.zeros(2, 3), "a tensor of shape (2, 3)"),
        (np.zeros(2), "a ndarray of several values"),
    ],
)
def test_a_value_that_is_no_number_is_rejected_by_name(value: object, says: str) -> None:
    with process() as run, pytest.raises(ConfigError) as refused:
        run.log({"train/loss": value})  # type: ignore[dict-item]
    assert f"run.log(train/loss=…): {says}" in refused.value.message


def test_numbers_of_all_types_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_TENSORBOARD", "off")
    tracker = Tracker({})
    with process() as run:
        run.log_to(tracker)
        script = job(run)
        for x, y in script.loader:
            script.update(x, y)
            total = torch.ones((), requires_grad=True) * 2
            run.log(a=1, b=True, c=np.float32(0.5), d=total, e=torch.ones(1, 1), f=float("nan"))
            with pytest.raises(
                TrainingError, match=r"run\.log_to\(\) was called after run\.log\(\)"
            ):
                run.log_to(tracker)
    points = {name: values[1] for name, values in tracker.curve.items()}
    assert str(points) == "{'a': 1.0, 'b': 1.0, 'c': 0.5, 'd': 2.0, 'e': 1.0, 'f': nan}"


def test_a_failing_writer_affects_neither_training_nor_other_writers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Tracker):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            raise ValueError("no such project")

    tracker, rank_0 = Tracker({}), Process(Broken({}))
    rank_0.log.add_writer(tracker)
    logger = logging.getLogger("elastic")
    logger.addHandler(caplog.handler)
    try:
        rank_0.enter(0, 0)
        rank_0.train(50)
        rank_0.log.leave_world("close")
    finally:
        logger.removeHandler(caplog.handler)
    rank_0.log.close()
    assert len(tracker.curve["loss"]) == 50
    assert caplog.text.count("Broken: ValueError: no such project") == 1


def test_a_writer_of_batches_is_called_once_for_many_steps() -> None:
    class Batches(Tracker):
        def log_batch(self, rows: Rows) -> None:
            self.calls.append(("log_batch", len(rows)))
            for step, values in rows:
                super().log(step, values)

        def log(self, step: int, values: Mapping[str, float]) -> None:
            raise AssertionError("one by one")

    class Flaky(Tracker):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            if step == 7:
                raise ValueError("no such step")
            super().log(step, values)

    tracker, rank_0 = Batches({}), Process(flaky := Flaky({}))
    rank_0.log.add_writer(tracker)
    rank_0.enter(0, 0)
    rank_0.train(100)
    rank_0.log.leave_world("close")
    rank_0.log.close()
    assert sorted(tracker.curve["loss"]) == list(range(1, 101))
    batches = [count for call, count in tracker.calls if call == "log_batch"]
    assert sum(batches) == 100
    assert len(batches) <= 25, "each flush is one"
    assert sorted(flaky.curve["loss"]) == [s for s in range(1, 101) if s != 7], "one step is lost"


def test_repeated_logging_within_one_step_keeps_one_row() -> None:
    """For example in an evaluation: memory does not grow with the number of calls."""
    rank_0 = Process(tracker := Tracker({}))
    rank_0.enter(0, 0)
    for number in range(10_000):
        rank_0.log.log({"loss": float(number)})
    assert len(rank_0.log._logged) < 1000
    rank_0.log.leave_world("close")
    rank_0.log.close()
    assert tracker.curve == {"loss": {0: 9999.0}}


def test_a_hung_writer_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    class Hanging(Tracker):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            released.wait(PATIENCE_S)
            super().log(step, values)

    monkeypatch.setattr("elastic.train.metrics.METRICS_DRAIN_S", 0.05)
    rank_0 = Process(tracker := Hanging({}))
    rank_0.enter(0, 0)
    rank_0.train(50)
    rank_0.log.leave_world("change")
    rank_0.enter(1, 50)
    released.set()  # by now another process writes, so that this one must not
    rank_0.log.close()
    assert [call for call, _ in tracker.calls].count("log") <= 1


# In a script, with TensorBoard's own reader ------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("ELASTIC_TENSORBOARD", str(tmp_path / "tensorboard"))
    yield tmp_path / "tensorboard"


def curve(folder: Path, name: str = "loss") -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [(scalar.step, scalar.value) for scalar in events.Scalars(name)]


def train(script: Job, epochs: int, *, stop_after: int | None = None, offset: float = 0.0) -> None:
    script.run.untracked("done")
    done = 0
    for epoch in script.run.epochs(epochs):
        for x, y in script.loader:
            loss = F.mse_loss(script.model(x), y)
            script.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            script.optimizer.step()
            script.run.log(loss=loss + offset)
            done += 1
            if done == stop_after:
                return
        script.run.log(epoch=epoch)


def test_a_resumed_job_replaces_the_repeated_steps(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with process(tmp_path / "saved") as run:
        train(job(run), 3)
    whole = curve(folder)
    assert [step for step, _ in whole] == list(range(1, 3 * STEPS_PER_EPOCH + 1))

    resumed = tmp_path / "again"
    monkeypatch.setenv("ELASTIC_TENSORBOARD", str(resumed))
    for stop_after in (5, 8):  # killed later than its last checkpoint
        with process(tmp_path / "saved2", clean=False) as run:
            train(job(run), 3, stop_after=stop_after, offset=100.0)
    with process(tmp_path / "saved2") as run:
        train(job(run), 3)
    steps = [step for step, _ in curve(resumed)]
    assert steps == list(range(1, 3 * STEPS_PER_EPOCH + 1)), "no step twice, none missing"
    redone = [value for step, value in curve(resumed) if step > 9]
    assert redone == [value for step, value in whole if step > 9], "the last value of a step"
    ends = [(STEPS_PER_EPOCH * (i + 1), float(i)) for i in range(3)]
    assert curve(resumed, "epoch") == ends


def test_an_unwritable_folder_causes_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `runs` in a pod with a read-only root file system: training continues, in every world."""
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "runs"
    monkeypatch.setenv("ELASTIC_TENSORBOARD", str(folder))
    logger, kept = logging.getLogger("elastic"), BufferingHandler(1000)
    logger.addHandler(kept)
    try:
        with process(tmp_path / "saved") as run:
            train(job(run), 1)
        writer = TensorBoard(folder)
        for step in (3, 5):  # where worlds begin
            writer.rewind(step)
            writer.log(step + 1, {"loss": 1.0})
    finally:
        logger.removeHandler(kept)
    said = [r.getMessage() for r in kept.buffer if r.levelno >= logging.WARNING]
    warning, of_the_writer = [line for line in said if "run.log" in line]
    assert of_the_writer == warning, "once for each"
    assert f"folder {folder} is not writable (Not a directory)" in warning
    assert "Set ELASTIC_TENSORBOARD to" in warning
    folder.parent.unlink()  # a folder that becomes available is used from the next world on
    writer.rewind(0)
    writer.log(1, {"loss": 1.0})
    writer.close()
    assert curve(folder) == [(1, 1.0)]


def test_unrecorded_rows_of_a_killed_writer_are_not_duplicated(folder: Path) -> None:
    killed = TensorBoard(folder)
    killed.rewind(0)
    killed.log_batch([(step, {"loss": float(step)}) for step in range(1, 6)])
    noted = (folder / WRITTEN).read_bytes()
    killed.log_batch([(step, {"loss": float(step)}) for step in range(6, 11)])
    (folder / WRITTEN).write_bytes(noted)  # killed in between
    following = TensorBoard(folder)
    following.rewind(12)
    following.log_batch([(step, {"loss": step + 0.5}) for step in range(6, 13)])
    following.close()
    killed.close()
    assert curve(folder) == [
        *((step, float(step)) for step in range(1, 6)),
        *((step, step + 0.5) for step in range(6, 13)),
    ]


def test_files_are_in_order_although_the_next_writers_clock_is_behind(tmp_path: Path) -> None:
    ahead = tmp_path / "events.out.tfevents.9000000000.other.1.0"
    ahead.write_bytes(b"")
    writer = TensorBoard(tmp_path)
    writer.rewind(0)
    writer.log(1, {"loss": 1.0})
    writer.close()
    assert sorted(p.name for p in tmp_path.glob("events*"))[0] == ahead.name
    assert curve(tmp_path) == [(1, 1.0)]


def test_the_row_of_an_undone_step_is_replaced(folder: Path) -> None:
    with process() as run:
        script = job(run)
        for index, (x, y) in enumerate(script.loader):
            script.update(x, y)
            run.log(loss=float(index))
            if index == 2:
                undo_step(run)
                break
        train(script, 1)
    assert [step for step, _ in curve(folder)] == list(range(1, STEPS_PER_EPOCH + 1))


def test_a_folder_without_tensorboard_is_rejected(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic.train.metrics.is_installed", lambda: False, raising=True)
    with process() as run, pytest.raises(ConfigError, match="pip install tensorboard"):
        run.log(loss=1.0)
