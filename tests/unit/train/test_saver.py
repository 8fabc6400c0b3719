"""Asynchronous saves when disks, writers, worlds and scripts fail."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import run_kit
from kit.checkpoint_states import flip
from kit.run_kit import Job, dataset, job, parts_of, steps_of_job
from torch import nn
from torch.utils.data import DataLoader

import checkpoints
from checkpoints import (
    EverySeconds,
    EverySteps,
    LatestN,
    LocalStorage,
    SaveOutcome,
    SaveStatus,
    engine,
)
from checkpoints.storage import PatientStorage, ReadableFile
from checkpoints.testing import FaultyStorage, MemoryStorage
from elastic.errors import CheckpointRequired, ConfigError, GroupAborted, TrainingError
from elastic.groups.pending import open_works
from elastic.groups.world import World
from elastic.hangs.page import THREAD_NAME as BUSY_THREAD
from elastic.telemetry.events import CheckpointSaved, CheckpointSkipped, Event
from elastic.telemetry.log import get_logger
from elastic.train import checkpointing
from elastic.train.checkpointing import CheckpointManager, LastSave
from elastic.train.folder import Checkpoints, checkpoints_from
from elastic.train.rollback import StepCopies
from elastic.train.run import Run
from elastic.train.state import JobState

LONG_S = 90.0


class EventRecorder:
    """A journal that records events."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.errors: list[Event] = []

    def emit(self, event: Event, *, level: int = logging.INFO) -> None:
        self.events.append(event)
        if level >= logging.ERROR:
            self.errors.append(event)

    @property
    def saved(self) -> list[int]:
        return [e.step for e in self.events if isinstance(e, CheckpointSaved)]

    @property
    def skipped(self) -> list[str]:
        return [e.reason for e in self.events if isinstance(e, CheckpointSkipped)]


@contextmanager
def run_of(policy: Checkpoints | None, *, error: str = "") -> Iterator[tuple[Run, EventRecorder]]:
    """One process, which ends with ``error`` if given."""
    journal = EventRecorder()
    with run_kit.run_of(policy, error=error, journal=journal) as run:
        yield run, journal


def steps_of(storage: checkpoints.Root) -> list[int]:
    return sorted(info.step for info in checkpoints.list_checkpoints(storage))


# -- settings -----------------------------------------------------------------------------------


def test_numbers_are_shorthand_for_policies() -> None:
    assert Checkpoints("f").saving == EverySteps(50)
    assert Checkpoints("f", when=7).saving == EverySteps(7)
    assert Checkpoints("f", when=EverySeconds(9)).saving == EverySeconds(9)
    assert Checkpoints("f").keeping == LatestN(3)
    assert Checkpoints("f", keep=LatestN(2)).keeping == Checkpoints("f", keep=2).keeping
    assert checkpoints_from("f", {}, when=7, keep=2) == Checkpoints("f", when=7, keep=2)
    assert checkpoints_from(None, {"ELASTIC_CHECKPOINTS": "f"}, when=7) == Checkpoints("f", when=7)
    assert checkpoints_from(None, {}) is None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"when": 0}, "when=0 must be at least 1"),
        ({"when": "10 minutes"}, "when='10 minutes' is neither an integer nor a policy"),
        ({"when": True}, "when=True is neither"),
        ({"keep": 2.5}, "keep=2.5 is neither"),
        ({"keep": 0}, "keep=0 must be at least 1"),
    ],
)
def test_invalid_options_are_rejected_with_their_value(arguments: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Checkpoints("f", **arguments)
    assert expected in str(caught.value)


def test_contradictory_options_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"without a checkpoint folder"):
        checkpoints_from(None, {}, when=5)
    with pytest.raises(ConfigError, match=r"keep=5 in addition to checkpoints="):
        checkpoints_from(Checkpoints("a"), {}, keep=5)


def test_run_steps_sets_the_folder_and_the_policies(tmp_path: Path) -> None:
    with run_of(None) as (run, _):
        script = job(run)
        run.state["pass"] = 0  # in a script that counts its passes
        for step in run.steps(script.loader, checkpoints=tmp_path, when=2, keep=10):
            for x, y in step:
                script.update(x, y)
        for step in run.steps(script.loader, checkpoints=tmp_path, when=EverySteps(5)):
            for x, y in step:
                script.update(x, y)
    assert steps_of(tmp_path) == [2, 4, 10, 12]


def test_run_steps_rejects_a_folder_that_is_set_too_late(tmp_path: Path) -> None:
    with run_of(None) as (run, _):
        script = job(run)
        with pytest.raises(TrainingError, match=r"is set after the state was restored"):
            for _ in run.epochs(1):
                run.steps(script.loader, checkpoints=tmp_path)
        with pytest.raises(ConfigError, match="without a checkpoint folder"):
            run.steps(script.loader, when=5)
    with run_of(Checkpoints(tmp_path)) as (run, _):
        script = job(run)
        with pytest.raises(TrainingError, match=r"but this job saves to"):
            run.steps(script.loader, checkpoints=tmp_path / "other")
        with pytest.raises(ConfigError, match=r"when=5, keep=None in addition to"):
            run.steps(script.loader, checkpoints=Checkpoints(tmp_path), when=5)


def test_run_steps_accepts_all_settings_in_one_object(tmp_path: Path) -> None:
    with run_of(None) as (run, _):
        script = job(run)
        run.state["pass"] = 0  # in a script that counts its passes
        for step in run.steps(script.loader, checkpoints=Checkpoints(tmp_path, when=4, keep=10)):
            for x, y in step:
                script.update(x, y)
        for step in run.steps(script.loader, checkpoints=Checkpoints(tmp_path, when=5, keep=10)):
            for x, y in step:
                script.update(x, y)
    assert steps_of(tmp_path) == [4, 10, 12]


# -- disks and writers --------------------------------------------------------------------------


def test_a_transient_disk_failure_loses_one_checkpoint(tmp_path: Path) -> None:
    full = threading.Event()

    def before(label: str) -> None:
        if full.is_set() and label.startswith("write") and "safetensors" in label:
            raise OSError(28, "No space left on device")

    storage = FaultyStorage(LocalStorage(tmp_path), before=before)
    with run_of(Checkpoints(storage, when=3, keep=10)) as (run, journal):
        script, saver = job(run), parts_of(run).session.checkpoints
        script.train(3, stop_after=4)
        assert saver.wait(LONG_S)
        full.set()
        script.train(3, stop_after=3)
        assert saver.wait(LONG_S)
        full.clear()
        script.train(3, stop_after=3)
    assert journal.saved == [3, 9, 10]
    (reason,) = journal.skipped
    assert "failed" in reason and "No space left" in reason


def test_the_engine_stops_being_busy_when_a_share_stays_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "COMMIT_PATIENCE_S", 0.2)
    rank = Rank(MemoryStorage(), 0, 2)
    rank.save(1)
    waiting = rank.saver.engine
    assert waiting is not None and waiting.finish_writing(LONG_S)
    seen = [waiting.is_busy]
    until_s = time.monotonic() + LONG_S
    while seen[-1] and time.monotonic() < until_s:
        seen.append(waiting.is_busy)
    assert seen[0] and not seen[-1]
    assert waiting.in_flight == 1, "it may still be completed"
    rank.saver.close(0.0)


# -- restores ------------------------------------------------------------------------------------


class ReadCounter(LocalStorage):
    """Counts the bytes that are read of tensor files, and notes what is opened of a checkpoint
    without signs of life, for which the hang detector waits."""

    read_bytes = 0
    unwatched: frozenset[str] = frozenset()

    def open(self, path: str) -> ReadableFile:
        source = super().open(path)
        read_at = source.read_at
        if BUSY_THREAD not in [thread.name for thread in threading.enumerate()]:
            self.unwatched |= {path}

        def counted(offset: int, into: memoryview) -> int:
            self.read_bytes += len(into)
            return read_at(offset, into)

        if path.endswith(".safetensors"):
            source.read_at = counted  # type: ignore[method-assign]
        return source


def test_a_rank_stops_reading_once_its_world_is_over(tmp_path: Path) -> None:
    """The next world would otherwise wait for it for as long as its part takes."""
    state = JobState(seed=0)
    state.track("layers", nn.ModuleList(nn.Linear(100, 100) for _ in range(10)))
    saved = checkpoints.save(tmp_path, state.saved_tree(), step=1, nonce="aa")
    storage = ReadCounter(tmp_path)
    saver = CheckpointManager(Checkpoints(storage), EventRecorder())
    open_works().abort()  # on the link's thread
    with pytest.raises(GroupAborted):
        saver.load(saved.name, state)
    open_works()
    assert storage.read_bytes < saved.bytes_written / 3


def test_a_restore_reads_every_byte_once_and_goes_back_past_damage(tmp_path: Path) -> None:
    """Nothing verifies a checkpoint before it is loaded: rank 0 alone would take hours."""
    with run_of(Checkpoints(tmp_path, when=2, keep=10)) as (run, journal):
        script = job(run)
        script.train(3, stop_after=6)
    assert journal.saved == [2, 4, 6]
    storage = ReadCounter(tmp_path)
    with run_of(Checkpoints(storage, when=100, keep=10)) as (run, _):
        script = job(run)
        script.train(3, stop_after=1)
        assert steps_of_job(run) == 7
    size_bytes = share_of_newest(tmp_path).stat().st_size
    assert 0.9 < storage.read_bytes / size_bytes < 1.1
    assert not any(path.startswith("step-000000006") for path in storage.unwatched)

    for _ in range(3):  # the last save of that run, and two before
        share = share_of_newest(tmp_path)
        flip(share, -1)
        share.parent.rename(tmp_path / f"damaged {share.parent.name}")
    for damaged in list(tmp_path.glob("damaged *")):
        damaged.rename(tmp_path / damaged.name.removeprefix("damaged "))
    with run_of(Checkpoints(tmp_path, when=100, keep=10)) as (run, journal):
        script = job(run)
        script.train(3, stop_after=1)
        assert steps_of_job(run) == 3
    assert [reason.count("do not match their checksum") for reason in journal.skipped] == [1, 1, 1]

    for share in tmp_path.glob("step-*/*.safetensors"):
        flip(share, -2)
    with run_of(Checkpoints(tmp_path), error="CheckpointRequired") as (run, _):
        script = job(run)
        with pytest.raises(CheckpointRequired, match=r"none of the 5 checkpoints"):
            script.train(3, stop_after=1)


def share_of_newest(folder: Path) -> Path:
    name = checkpoints.list_checkpoints(folder)[0].name
    return folder / name / "00000-of-00001.safetensors"


# -- scripts that fail --------------------------------------------------------------------------


def batch_norm_job(run: Run) -> Job:
    torch.manual_seed(0)
    model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.track(optimizer=optimizer)
    loader = run.loader(DataLoader(dataset(), batch_size=10, shuffle=True), global_batch=10)
    return Job(run, model, optimizer, loader)


def fail(script: Job, where: str, at: int) -> None:
    """Train until step ``at``, and raise an exception in it, as a script does."""
    done = 0
    for _ in script.run.epochs(2):
        for x, y in script.loader:
            loss = nn.functional.mse_loss(script.model(x), y)
            if (done, where) == (at, "after forward"):
                raise ValueError("boom")
            script.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            script.optimizer.step()
            if (done, where) == (at, "after update"):
                raise ValueError("boom")
            done += 1


def test_an_exception_before_the_update_saves_the_previous_step(
    tmp_path: Path,
) -> None:
    with run_of(Checkpoints(tmp_path), error="ValueError: boom") as (run, _):
        script = batch_norm_job(run)
        with pytest.raises(ValueError, match="boom"):
            fail(script, "after forward", at=4)
    newest = checkpoints.list_checkpoints(tmp_path)[0]
    assert newest.step == 4
    state = checkpoints.load(tmp_path, newest.name).state
    with run_of(None) as (run, _):
        uninterrupted = batch_norm_job(run)
        uninterrupted.train(2, stop_after=4)
        for name, value in uninterrupted.model.module.state_dict().items():
            assert torch.equal(state["model"]["model"][name], value), name


def test_an_exception_after_the_update_saves_the_step_before(tmp_path: Path) -> None:
    """Code that follows an update in the script, such as a scheduler, did not run."""
    with run_of(Checkpoints(tmp_path), error="ValueError: boom") as (run, journal):
        script = batch_norm_job(run)
        run._parts.session.progress.step_copies = StepCopies.ALWAYS  # also on a slow machine
        with pytest.raises(ValueError, match="boom"):
            fail(script, "after update", at=4)
    assert steps_of(tmp_path) == [4]
    assert journal.skipped == []


# -- worlds -------------------------------------------------------------------------------------


def world(rank: int, size: int, generation: int) -> World:
    return World(
        generation=generation,
        rank=rank,
        size=size,
        local_rank=0,
        local_size=1,
        nonce=f"aa{generation}",
        lineage=(),
        node=f"n{rank}",
        is_launched=True,
    )


class Rank:
    """A saver in a world, without training."""

    def __init__(self, storage: checkpoints.Storage, rank: int, size: int) -> None:
        self.journal = EventRecorder()
        self.saver = CheckpointManager(Checkpoints(storage, when=1), self.journal)
        self.job = JobState(seed=0)
        self.saver.resume(None, 1, 0)
        self.saver.begin_world(world(rank, size, 1), self.job)

    def save(self, step: int) -> None:
        self.job.progress.step = step
        self.saver.save(self.job)

    def next_world(self, rank: int, size: int, *, broken: bool) -> None:
        lineage, generation, committed = self.saver.origin
        self.saver.end_world(broken=broken)
        ancestor = checkpoints.Ancestor(generation + 1, self.job.progress.step)
        self.saver.inherit((*lineage, ancestor), generation + 1, committed)
        self.saver.begin_world(world(rank, size, generation + 1), self.job)


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    storage = MemoryStorage()
    created = [Rank(storage, rank, 2) for rank in range(2)]
    yield created
    for rank in created:
        rank.saver.close(0.0)


def storage_of(rank: Rank) -> checkpoints.Storage:
    assert rank.saver.policy is not None
    folder = rank.saver.policy.folder
    assert isinstance(folder, MemoryStorage)
    return folder


def test_a_save_of_a_broken_world_is_abandoned_and_collected(ranks: list[Rank]) -> None:
    survivor, _ = ranks
    survivor.save(5)  # its peer is gone, and never writes its share
    survivor.saver.end_world(broken=True)  # noticed between two steps, as in a planned change
    survivor.next_world(0, 1, broken=False)
    assert survivor.saver.wait(LONG_S)
    assert survivor.journal.saved == [] and "stale" in survivor.journal.skipped[0]
    survivor.saver.save(survivor.job, wait_s=LONG_S)
    assert survivor.saver.wait(LONG_S)
    # The same step, in the world that it is in.
    assert survivor.journal.saved == [5], survivor.journal.skipped
    (name,) = [name for name in storage_of(survivor).list("") if "step-" in name]
    assert ".g2." in name


def test_a_save_is_completed_after_a_planned_change(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.save(5)
    for number, rank in enumerate(ranks):
        rank.next_world(number, 2, broken=False)
    assert all(rank.saver.wait(LONG_S) for rank in ranks)
    assert [rank.journal.saved for rank in ranks] == [[5], [5]]


def test_a_superseded_world_does_not_commit(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.saver.is_superseded = lambda: True
        rank.save(5)
    assert all(rank.saver.wait(LONG_S) for rank in ranks)
    assert steps_of(storage_of(ranks[0])) == []


def test_a_world_without_permission_to_train_does_not_commit(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.saver.is_permitted = lambda: False
        rank.save(5)
    assert all(rank.saver.wait(LONG_S) for rank in ranks)
    assert steps_of(storage_of(ranks[0])) == []


# -- the last save ------------------------------------------------------------------------------


@pytest.fixture
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointing, "LAST_SAVE_PEERS_S", 0.3)
    monkeypatch.setattr(checkpointing, "PEERS_FACTOR", 0.0)
    monkeypatch.setattr(checkpointing, "LAST_SAVE_TURN_S", 0.05)


def test_the_last_save_is_complete_although_a_peer_is_gone(
    ranks: list[Rank], short_timeouts: None
) -> None:
    rank = ranks[1]
    rank.job.progress.step = 7
    assert LastSave(rank.saver, rank.job, LONG_S).together()
    (info,) = checkpoints.list_checkpoints(storage_of(rank))
    assert (info.step, info.world_size) == (7, 1)


def test_one_remaining_rank_writes_the_last_save(
    ranks: list[Rank], short_timeouts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than it takes the first rank to begin, also on a slow machine.
    monkeypatch.setattr(checkpointing, "LAST_SAVE_TURN_S", 2.0)
    for rank in ranks:
        rank.job.progress.step = 7
        rank.saver.end_world(broken=True)
    saves = [LastSave(rank.saver, rank.job, LONG_S) for rank in ranks]
    threads = [threading.Thread(target=save.together) for save in saves]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert steps_of(storage_of(ranks[0])) == [7]


def test_a_replica_that_writes_nothing_accepts_the_last_step_of_an_earlier_generation(
    ranks: list[Rank],
) -> None:
    """A rank died after the last step, while its save in generation 1 was being committed."""
    for rank in ranks:
        rank.save(5)
    assert all(rank.saver.wait(LONG_S) for rank in ranks)
    joined = ranks[1]
    joined.next_world(1, 2, broken=True)
    joined.saver.writers.is_writer = False
    assert joined.job.progress.step == 5
    assert LastSave(joined.saver, joined.job, 5.0).together()
    joined.job.progress.step = 6
    assert not LastSave(joined.saver, joined.job, 0.2).together()


def test_all_ranks_write_their_shares_of_a_joint_last_save(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.job.progress.step = 7
    saves = [LastSave(rank.saver, rank.job, LONG_S) for rank in ranks]
    done: list[bool] = []
    threads = [threading.Thread(target=lambda s=s: done.append(s.together())) for s in saves]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert done == [True, True]
    (info,) = checkpoints.list_checkpoints(storage_of(ranks[0]))
    assert (info.step, info.world_size) == (7, 2)


@pytest.mark.parametrize(("callbacks_left", "committed"), [((1, 0), []), ((1, 1), [7])])
def test_shares_from_before_and_after_a_callback_never_form_a_checkpoint(
    ranks: list[Rank], callbacks_left: tuple[int, int], committed: list[int]
) -> None:
    """A callback fails on one rank only, or on both."""
    for rank, left in zip(ranks, callbacks_left, strict=True):
        rank.job.progress.step, rank.job.progress.callbacks_left = 7, left
        assert LastSave(rank.saver, rank.job, LONG_S).share()
    for rank in ranks:
        rank.saver.close(LONG_S)
    assert steps_of(storage_of(ranks[0])) == committed


def test_ranks_that_write_nothing_end_with_a_step_of_an_earlier_generation(
    ranks: list[Rank], short_timeouts: None
) -> None:
    """A rank dies after the last step was saved: the next world does not save it again."""
    for rank in ranks:
        rank.save(7)
    assert all(rank.saver.wait(LONG_S) for rank in ranks)
    ranks[0].saver.poll()
    reader = Rank(storage_of(ranks[0]), 1, 2)
    reader.job.progress.step = 7
    reader.next_world(1, 2, broken=True)
    reader.saver.writers.is_writer = False
    assert LastSave(reader.saver, reader.job, LONG_S).together()
    reader.job.progress.step = 8
    assert not LastSave(reader.saver, reader.job, 0.1).together()
    reader.saver.close(0.0)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EACCES, errno.ENOTDIR])
def test_a_folder_that_cannot_be_listed_ends_the_wait(ranks: list[Rank], number: int) -> None:
    def fail(label: str) -> None:
        if label == "list ":
            raise OSError(number, "injected", label)

    storage = FaultyStorage(storage_of(ranks[0]), before=fail)
    reader = Rank(PatientStorage(storage, patience_s=0.1), 1, 2)
    reader.saver.writers.is_writer = False
    reader.job.progress.step = 7
    assert not LastSave(reader.saver, reader.job, LONG_S).together()
    assert "cannot be listed: injected" in reader.journal.skipped[-1]
    reader.saver.close(0.0)


def test_a_long_wait_for_the_last_checkpoint_is_announced(
    ranks: list[Rank], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointing, "LAST_SAVE_QUIET_S", 0.0)
    monkeypatch.setattr(get_logger(), "propagate", True)
    reader = ranks[1]
    reader.saver.writers.is_writer = False
    reader.job.progress.step = 7
    with caplog.at_level(logging.INFO, "elastic"):
        assert not LastSave(reader.saver, reader.job, 0.3).together()
    (line,) = {message for message in caplog.messages if "waiting for" in message}
    assert "the checkpoint of step 7" in line and "UTC" in line


def test_the_last_save_waits_for_a_free_buffer() -> None:
    gate = threading.Event()

    def hang(label: str) -> None:
        if label.startswith("write"):
            gate.wait(LONG_S)

    storage = MemoryStorage()
    rank = Rank(FaultyStorage(storage, before=hang), 0, 1)
    for step in (1, 2):
        rank.save(step)
    rank.job.progress.step = 3
    rank.saver.save(rank.job, wait_s=0.0)
    assert "use all buffers" in rank.journal.skipped[-1]
    threading.Timer(0.1, gate.set).start()
    assert LastSave(rank.saver, rank.job, LONG_S).together()
    assert steps_of(storage) == [1, 2, 3]
    rank.saver.close(0.0)


def test_the_last_save_is_repeated_while_the_storage_fails_transiently() -> None:
    failures = iter(range(4))

    def fail(label: str) -> None:
        if label.startswith("write"):
            for _ in failures:
                raise OSError(errno.EIO, "injected", label)

    storage = MemoryStorage()
    rank = Rank(PatientStorage(FaultyStorage(storage, before=fail), patience_s=0.0), 0, 1)
    rank.job.progress.step = 7
    assert LastSave(rank.saver, rank.job, LONG_S).together()
    assert steps_of(storage) == [7] and next(failures, None) is None
    rank.saver.close(0.0)


def test_a_save_superseded_by_the_end_of_the_job_is_repeated() -> None:
    """The last node has to leave just after the job was paused and saved."""
    storage = MemoryStorage()
    rank = Rank(storage, 0, 1)
    rank.saver.is_superseded = lambda: True  # by the world without members
    rank.save(5)
    rank.saver.wait(LONG_S)
    rank.saver.poll()
    assert "stale" in rank.journal.skipped[-1] and steps_of(storage) == []
    assert LastSave(rank.saver, rank.job, LONG_S).together()
    assert steps_of(storage) == [5]
    rank.saver.close(0.0)


def test_a_hanging_disk_delays_the_end_only_by_the_budget() -> None:
    gate = threading.Event()

    def hang(label: str) -> None:
        if label.startswith("write"):
            gate.wait(LONG_S)

    rank = Rank(FaultyStorage(MemoryStorage(), before=hang), 0, 1)
    rank.job.progress.step = 7
    assert not LastSave(rank.saver, rank.job, 0.2).together()
    rank.saver.close(0.0)
    assert "closed" in rank.journal.skipped[-1]
    gate.set()


def test_two_consecutive_failed_saves_cause_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = CheckpointManager(Checkpoints(tmp_path / "ckpt"), EventRecorder())
    monkeypatch.setattr(get_logger(), "propagate", True)
    ends = [
        SaveStatus.FAILED,
        SaveStatus.COMMITTED,
        SaveStatus.FAILED,
        SaveStatus.FAILED,
        SaveStatus.FAILED,
    ]
    with caplog.at_level(logging.WARNING, "elastic"):
        for step, status in enumerate(ends, start=1):
            outcome = SaveOutcome(
                step=step, name=f"step {step}", status=status, reason="disk is full"
            )
            saver.report(outcome)
    messages = {id(r): r.getMessage() for r in caplog.records if "were not saved" in r.getMessage()}
    assert list(messages.values()) == [
        "the last 2 checkpoints were not saved (step 4: disk is full); training continues, but a "
        "restart would go back to step 2"
    ]
    saver.close(0.0)


def test_a_save_that_a_later_one_supersedes_is_no_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a job, saves that lack a share are abandoned after the last step is saved."""
    journal = EventRecorder()
    saver = CheckpointManager(Checkpoints(tmp_path / "ckpt"), journal)
    monkeypatch.setattr(get_logger(), "propagate", True)
    with caplog.at_level(logging.WARNING, "elastic"):
        saver.report(SaveOutcome(step=84, name="step 84", status=SaveStatus.COMMITTED))
        for step in (76, 80, 84):
            abandoned = SaveStatus.ABANDONED
            saver.report(
                SaveOutcome(step=step, name=f"step {step}", status=abandoned, reason="end")
            )
    assert caplog.records == []
    assert len(journal.skipped) == 3, "the journal has all outcomes"
    saver.close(0.0)
