"""The background engine: staged state is saved correctly despite training and disk errors."""

from __future__ import annotations

import collections
import errno
import functools
import linecache
import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from kit.checkpoint_states import odd_state, same, small_state
from kit.manual_clock import ManualClock

import checkpoints
from checkpoints import retention, save_plan, saving
from checkpoints.engine import THREAD_NAME, Engine
from checkpoints.names import CheckpointName, failure_file
from checkpoints.saving import SaveStatus, WriterGroup
from checkpoints.storage import LocalStorage, PatientStorage
from checkpoints.testing import FaultyStorage, MemoryStorage, SimulatedCrash, StorageFault
from elastic.testing.waiting import eventually

LONG_S = 90.0
ALONE = WriterGroup(nonce="aa")


def save(
    engine: Engine, state: object, step: int, world: WriterGroup = ALONE
) -> checkpoints.SaveOutcome:
    outcome = engine.save_async(state, step=step, world=world).wait(LONG_S)
    assert outcome is not None
    return outcome


def test_training_may_change_tensors_as_soon_as_save_async_returns() -> None:
    gate = threading.Event()

    def hold(label: str) -> None:
        if label.startswith("create"):
            assert gate.wait(LONG_S)

    storage = MemoryStorage()
    with Engine(FaultyStorage(storage, before=hold)) as engine:
        state = small_state(7)
        handle = engine.save_async(state, step=7, world=ALONE, data_position=[1])
        state["model"]["weight"].fill_(99)
        state["optimizer"]["lr"] = 99
        gate.set()
        outcome = handle.wait(LONG_S)
    assert outcome is not None and outcome.status is SaveStatus.COMMITTED
    assert same(checkpoints.load(storage, outcome.name).state, small_state(7))


def test_an_asynchronous_save_writes_the_same_bytes_as_a_synchronous_one(tmp_path: Path) -> None:
    checkpoints.save(tmp_path / "a", odd_state(), step=1, nonce="aa", clock=lambda: 5.0)
    with Engine(tmp_path / "b", clock=lambda: 5.0) as engine:
        name = save(engine, odd_state(), 1).name
    for file in ("manifest.json", "00000-of-00001.safetensors"):
        assert (tmp_path / "a" / name / file).read_bytes() == (
            tmp_path / "b" / name / file
        ).read_bytes()


def test_buffers_grow_when_the_optimizer_gets_state() -> None:
    storage = MemoryStorage()
    with Engine(storage) as engine:
        engine.reserve({"weight": torch.zeros(3)})
        for step, state in enumerate((small_state(0), odd_state(), small_state(2))):
            assert same(checkpoints.load(storage, save(engine, state, step).name).state, state)


def test_every_writer_reports_the_commit_of_the_last_one() -> None:
    storage = MemoryStorage()
    engines = [Engine(storage) for _ in range(3)]
    handles = [
        engine.save_async(small_state(4), step=4, world=WriterGroup(nonce="bb", rank=rank, size=3))
        for rank, engine in enumerate(engines)
    ]
    endings = [handle.wait(LONG_S) for handle in handles]
    assert [e.status for e in endings if e] == [SaveStatus.COMMITTED] * 3
    assert all(engine.close() for engine in engines)
    assert same(checkpoints.load(storage, handles[0].name).state, small_state(4))


@pytest.mark.parametrize("fault", [StorageFault.NO_SPACE, StorageFault.REFUSED])
def test_a_disk_error_is_reported_and_the_next_save_succeeds(fault: StorageFault) -> None:
    storage = MemoryStorage()
    checkpoints.save(storage, small_state(1), step=1, nonce="aa")
    with Engine(FaultyStorage(storage, at=6, fault=fault)) as engine:
        failed = save(engine, small_state(2), 2)
    assert failed.status is SaveStatus.FAILED and isinstance(failed.error, checkpoints.SaveError)
    assert failed in engine.outcomes()
    assert [c.step for c in checkpoints.list_checkpoints(storage)] == [1]
    with Engine(storage) as engine:
        assert save(engine, small_state(3), 3).status is SaveStatus.COMMITTED


def test_an_error_of_any_call_that_passes_fails_no_save() -> None:
    def attempt(at: int | None) -> tuple[MemoryStorage, list[str]]:
        storage = MemoryStorage()
        faulty = FaultyStorage(storage, at=at, fault=StorageFault.IO_ERROR)
        with Engine(PatientStorage(faulty, clock=ManualClock())) as engine:
            for step in (1, 2):
                outcome = save(engine, small_state(step), step)
                assert outcome.status is SaveStatus.COMMITTED, (faulty.calls[-1], outcome.reason)
        return storage, faulty.calls

    _, calls = attempt(None)
    for at, label in enumerate(calls):
        storage, _ = attempt(at)
        listed = checkpoints.list_checkpoints(storage)
        assert [info.step for info in listed] == [2, 1], label
        for info in listed:
            assert same(checkpoints.load(storage, info.name).state, small_state(info.step))


def test_a_commit_that_fails_for_long_is_repeated_until_the_deadline() -> None:
    failures = iter(range(5))

    def fail(label: str) -> None:
        if label.startswith("rename .tmp-step") and label.endswith("g0.aa"):
            for _ in failures:
                raise OSError(errno.EIO, "injected", label)

    storage = FaultyStorage(MemoryStorage(), before=fail)
    with Engine(PatientStorage(storage, patience_s=0.0)) as engine:
        assert save(engine, small_state(1), 1).status is SaveStatus.COMMITTED
    assert next(failures, None) is None, "all were injected"


def test_shares_that_can_never_form_a_checkpoint_fail_with_the_reason() -> None:
    storage = FaultyStorage(MemoryStorage())
    of_two = [WriterGroup(nonce="aa", rank=rank, size=2) for rank in range(2)]
    state = {"a": torch.ones(2), "b": torch.ones(2)}
    other = {"b": torch.ones(2), "a": torch.ones(2)}
    checkpoints.save(storage, other, step=1, nonce="aa", rank=1, world_size=2)
    with Engine(storage, deadline_s=LONG_S) as engine:
        outcome = save(engine, state, 1, of_two[0])
        assert outcome.status is SaveStatus.FAILED
        assert "writer 1 saved different tensors than writer 0" in outcome.reason
        late = save(engine, other, 1, of_two[1])
        assert "writer 0 could not write its part" in late.reason, "it is told"
        for rank, world in enumerate(of_two):  # the next save is not affected
            handle = engine.save_async(state, step=2, world=world)
            assert rank == 0 or handle.wait(LONG_S)
    assert [info.step for info in checkpoints.list_checkpoints(storage)] == [2]


def test_a_retention_policy_that_raises_fails_no_save() -> None:
    def keep(newest_first: object) -> list[Any]:
        raise ZeroDivisionError("a bug")

    with Engine(MemoryStorage(), keep=keep) as engine:
        outcome = save(engine, small_state(1), 1)
    assert outcome.status is SaveStatus.COMMITTED
    assert "choosing the checkpoints to keep failed: ZeroDivisionError('a bug')" in outcome.notes[0]


def test_an_exception_does_not_wait_for_writers_that_may_be_gone() -> None:
    storage = MemoryStorage()
    with pytest.raises(KeyError), Engine(storage, deadline_s=1e9) as engine:
        handle = engine.save_async(small_state(1), step=1, world=WriterGroup(nonce="aa", size=2))
        raise KeyError
    assert handle.outcome is not None and handle.outcome.status is SaveStatus.ABANDONED
    last = checkpoints.save(storage, small_state(1), step=1, nonce="aa", rank=1, world_size=2)
    assert last.committed, "this writer's share was written"


def test_an_interrupt_at_any_line_of_a_save_leaks_no_buffer() -> None:
    """As KeyboardInterrupt in a notebook, which goes on afterwards."""
    gate, folder = threading.Event(), Path(checkpoints.__file__).parent
    own_files = [str(folder / f"{module}.py") for module in ("engine", "save_plan", "saving")]
    gate.set()
    lines, at = 0, 0

    def hold(label: str) -> None:
        assert gate.wait(LONG_S)

    storage = FaultyStorage(MemoryStorage(), before=hold)

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if frame.f_code.co_filename not in own_files:
            return None
        # CPython checks for signals only after calls and jumps, so never between the body of a
        # `with` and its exit, which is a second visit of that line.
        source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and not source.startswith("with "):
            lines += 1
            if lines == at:
                raise KeyboardInterrupt
        return trace

    with Engine(storage, deadline_s=LONG_S) as engine:
        while lines >= at:
            lines, at, before = 0, at + 1, sys.gettrace()
            sys.settrace(trace)
            try:
                engine.save_async(small_state(1), step=at, world=ALONE, wait_s=LONG_S)
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(before)
        assert at > 200, "it was interrupted at every line"
        assert engine.wait(LONG_S)
        engine.outcomes()
        drained = threading.Event()
        engine.submit(drained.set)
        assert drained.wait(LONG_S)
        gate.clear()
        for step in (at + 1, at + 2):
            assert engine.has_free_buffer
            engine.save_async(small_state(1), step=step, world=ALONE)
        gate.set()
        assert engine.wait(LONG_S)
        assert [o.status for o in engine.outcomes()] == [SaveStatus.COMMITTED] * 2


def test_a_slow_save_is_not_abandoned_while_it_makes_progress() -> None:
    now_s = [0.0]

    def pass_time(label: str) -> None:
        now_s[0] += 50.0 if label.startswith("write") else 0.0

    storage = FaultyStorage(MemoryStorage(), before=pass_time)
    state = {f"layer {i}": torch.ones(3) for i in range(20)}
    with Engine(storage, deadline_s=60.0, monotonic=lambda: now_s[0]) as engine:
        first = engine.save_async(state, step=1, world=ALONE)
        second = engine.save_async(state, step=2, world=ALONE)  # queued for longer than 60 s
        for handle in (first, second):
            while (outcome := handle.wait(0.01)) is None:
                engine.outcomes()
            assert outcome.status is SaveStatus.COMMITTED and outcome.write_s > 1000


def test_a_storage_that_turned_out_to_be_slow_gets_more_time() -> None:
    now_s = [0.0]

    def pass_time(label: str) -> None:
        if label.startswith("sync .tmp-step") and label.endswith(".safetensors"):
            now_s[0] += 100.0
            engine.outcomes()  # as the training thread does meanwhile

    storage = FaultyStorage(MemoryStorage(), before=pass_time)
    with Engine(storage, deadline_s=60.0, monotonic=lambda: now_s[0]) as engine:
        assert save(engine, small_state(1), 1).status is SaveStatus.ABANDONED
        assert save(engine, small_state(2), 2).status is SaveStatus.COMMITTED


def test_a_save_waits_for_a_slower_writer_while_that_makes_progress() -> None:
    now_s = [0.0]
    disk = MemoryStorage()
    storage = FaultyStorage(disk)
    with Engine(storage, deadline_s=60.0, monotonic=lambda: now_s[0]) as engine:
        handle = engine.save_async(
            small_state(1), step=1, world=WriterGroup(nonce="aa", rank=0, size=2)
        )
        eventually(lambda: handle.is_written, "this writer's share")
        share = ".tmp-step-000000001.g0.aa/00001-of-00002.safetensors"
        for size in range(5):
            sink = disk.create(share)
            sink.write(b"x" * size)
            sink.close()
            now_s[0] += 50.0
            storage.calls.clear()
            eventually(lambda: f"size {share}" in storage.calls, "a look at writer 1")
        assert handle.outcome is None
        now_s[0] += 200.0
        (outcome,) = engine.outcomes()
    assert outcome.status is SaveStatus.ABANDONED
    assert outcome.reason.endswith("waiting for writer 1")


def test_a_save_on_a_hung_disk_is_abandoned_and_never_commits_later() -> None:
    now_s = [0.0]
    gate, reached = threading.Event(), threading.Event()

    def hang(label: str) -> None:
        if label.startswith("write"):
            reached.set()
            assert gate.wait(LONG_S)

    storage = MemoryStorage()
    engine = Engine(
        FaultyStorage(storage, before=hang), deadline_s=60.0, monotonic=lambda: now_s[0]
    )
    first = engine.save_async(small_state(1), step=1, world=ALONE)
    assert reached.wait(LONG_S)
    engine.save_async(small_state(2), step=2, world=ALONE)
    third = engine.save_async(small_state(3), step=3, world=ALONE)
    assert third.outcome is not None and third.outcome.status is SaveStatus.SKIPPED
    assert engine.skipped == 1 and first.outcome is None
    now_s[0] = 61.0
    endings = [(o.step, o.status) for o in engine.outcomes()]
    assert endings == [
        (3, SaveStatus.SKIPPED),
        (1, SaveStatus.ABANDONED),
        (2, SaveStatus.ABANDONED),
    ]
    assert not engine.close(timeout_s=0)
    gate.set()
    eventually(lambda: not engine.is_alive, "the end of the writer thread")
    assert checkpoints.list_checkpoints(storage) == ()


def test_a_rank_of_several_never_skips_a_save_alone() -> None:
    gate = threading.Event()

    def hang(label: str) -> None:
        assert gate.wait(LONG_S)

    of_two = WriterGroup(nonce="aa", rank=0, size=2)
    engine = Engine(FaultyStorage(MemoryStorage(), before=hang), deadline_s=0.3)
    for step in (1, 2):
        engine.save_async(small_state(step), step=step, world=of_two)
    third = engine.save_async(small_state(3), step=3, world=of_two)
    assert third.outcome is not None and third.outcome.stall_s >= 0.3  # waited, unlike one writer
    now_s = [0.0]
    storage = FaultyStorage(MemoryStorage(), before=hang)
    patient = Engine(storage, deadline_s=LONG_S, monotonic=lambda: now_s[0])
    for step in (1, 2):
        patient.save_async(small_state(step), step=step, world=of_two)
    skips = patient.save_async(small_state(4), step=4, world=of_two, wait_s=0.0)
    assert skips.outcome is not None and skips.outcome.stall_s < LONG_S, "it waits for no buffer"
    gate.set()
    engine.close()
    now_s[0] += 2 * LONG_S  # the other writer never comes
    patient.close()
    with (
        Engine(MemoryStorage(), busy="skip") as engine,
        pytest.raises(checkpoints.ArgumentError, match=r"2 writers.*has_free_buffer.*wait_s=0\.0"),
    ):
        engine.save_async(small_state(1), step=1, world=of_two)


def test_the_removal_of_older_checkpoints_is_not_counted_as_write_time() -> None:
    now_s = [0.0]

    def pass_time(label: str) -> None:
        now_s[0] += 100.0 if label.startswith("remove_folder") else 1.0

    storage = FaultyStorage(MemoryStorage(), before=pass_time)
    keep = checkpoints.LatestN(1)
    with Engine(storage, keep=keep, deadline_s=1e6, monotonic=lambda: now_s[0]) as engine:
        save(engine, small_state(1), 1)
        outcome = save(engine, small_state(2), 2)
    assert 1.0 < outcome.write_s < 100.0 < outcome.took_s
    assert len(checkpoints.list_checkpoints(storage)) == 1


def test_a_save_with_a_missing_writer_is_abandoned_at_its_deadline() -> None:
    with Engine(MemoryStorage(), deadline_s=0.3) as engine:
        outcome = save(engine, small_state(1), 1, WriterGroup(nonce="cc", rank=0, size=2))
    assert outcome.status is SaveStatus.ABANDONED


def test_a_stale_world_does_not_commit() -> None:
    storage = MemoryStorage()
    with Engine(storage, fence=lambda: False) as engine:
        assert save(engine, small_state(1), 1).status is SaveStatus.STALE
    assert checkpoints.list_checkpoints(storage) == ()


def test_a_superseded_world_does_not_commit_and_the_next_one_does() -> None:
    storage = MemoryStorage()
    over = WriterGroup(nonce="aa", fence=lambda: False)
    with Engine(storage) as engine:
        assert save(engine, small_state(1), 1, over).status is SaveStatus.STALE
        assert (
            save(engine, small_state(1), 1, WriterGroup(nonce="bb")).status is SaveStatus.COMMITTED
        )


def test_retention_reads_no_manifest_twice() -> None:
    """The cost of a save does not grow with the number of checkpoints."""
    storage = FaultyStorage(MemoryStorage())
    best = checkpoints.BestN(2, "loss") | checkpoints.EveryNSeconds(1.0) | checkpoints.LatestN(30)
    wall_s = iter(range(0, 10_000, 100))

    def state(loss: float) -> dict[str, Any]:
        return {"loss": loss, "layers": [{"weight": torch.ones(2)}], "model": small_state(1)}

    for step in range(10):  # of an earlier run
        checkpoints.save(
            storage, state(-1.0 if step == 3 else 1.0), step=step, nonce="older", keep=None
        )
    read_per_save = []
    with Engine(storage, keep=best, clock=lambda: float(next(wall_s))) as engine:
        for step in range(10, 40):
            before = len(storage.calls)
            assert save(engine, state(1.0), step, WriterGroup(nonce="aa")).notes == ()
            calls = storage.calls[before:]
            read_per_save.append(sum(c.startswith("open step-") for c in calls))
            assert calls.count("list ") == 1, "an object store then lists each checkpoint"
    # LatestN keeps 30 and the first save reads what it has not written. Nothing is read later.
    assert read_per_save[0] > 0 and set(read_per_save[1:]) == {0}
    assert 3 in [info.step for info in checkpoints.list_checkpoints(storage)], "the best one"


def test_a_writer_for_each_save_reads_only_manifests_without_a_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests: list[str] = []

    def opened(storage: LocalStorage, path: str) -> Any:
        manifests.extend([path] * path.endswith("manifest.json"))
        return open_file(storage, path)

    open_file = LocalStorage.open
    monkeypatch.setattr(LocalStorage, "open", opened)
    keep = checkpoints.BestN(1, "loss") | checkpoints.LatestN(30)
    for step in range(1, 21):
        if step % 2:
            with Engine(tmp_path, keep=keep) as engine:
                assert save(engine, {"loss": step}, step, WriterGroup(nonce="aa")).notes == ()
        else:
            checkpoints.save(tmp_path, {"loss": step}, step=step, nonce="aa", keep=keep)
    assert not manifests
    retention._READ.clear()  # as in another process
    changed = "step-000000007.g0.aa/manifest.json"
    os.utime(tmp_path / changed, (1, 1))  # a file that has changed is read again
    checkpoints.save(tmp_path, {"loss": 21}, step=21, nonce="aa", keep=keep)
    assert manifests == [changed]
    (tmp_path / ".summaries.json").write_text("torn")
    retention._READ.clear()
    checkpoints.save(tmp_path, {"loss": 22}, step=22, nonce="aa", keep=keep)
    assert len(set(manifests[1:])) == len(manifests[1:]) == 21


@pytest.mark.parametrize("damage", ["manifest", "file", "missing"])
def test_a_summary_does_not_stand_for_a_checkpoint_that_was_damaged_since(
    tmp_path: Path, damage: str
) -> None:
    """It would count for the policy, in the place of a valid one."""
    for step in (1, 2, 3):
        checkpoints.save(tmp_path, small_state(step), step=step, nonce="aa")
    newest = tmp_path / "step-000000003.g0.aa"
    path = newest / ("manifest.json" if damage == "manifest" else "00000-of-00001.safetensors")
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-9])
    retention._READ.clear()  # as in another process
    checkpoints.save(tmp_path, small_state(4), step=4, nonce="aa", keep=checkpoints.LatestN(2))
    valid = [info.step for info in checkpoints.list_checkpoints(tmp_path)]
    assert valid == [4, 2]


def test_another_run_that_saves_into_the_same_folder_is_reported() -> None:
    """Each would silently remove the other's checkpoints."""
    storage = MemoryStorage()
    checkpoints.save(storage, small_state(1), step=1, nonce="older")
    with Engine(storage) as first, Engine(storage) as second:
        assert save(first, small_state(2), 2, WriterGroup(nonce="aa")).notes == ()
        assert save(second, small_state(3), 3, WriterGroup(nonce="bb")).notes == ()
        (note,) = save(first, small_state(4), 4, WriterGroup(nonce="aa")).notes
        assert note.startswith("step-000000003.g0.bb was saved by another run")
        assert save(first, small_state(5), 5, WriterGroup(nonce="cc")).notes == (), "its own world"
        assert "another run" in save(second, small_state(6), 6, WriterGroup(nonce="bb")).notes[0]


def test_a_writer_that_saves_alone_is_not_reported_as_another_run() -> None:
    """A rank that fails saves the complete state, and the others may commit an earlier step after
    it."""
    storage = MemoryStorage()
    with Engine(storage) as failing, Engine(storage) as other:
        for engine in (failing, other):
            assert save(engine, small_state(1), 1, WriterGroup(nonce="aa")).notes == ()
        assert save(failing, small_state(3), 3, WriterGroup(nonce="aax01")).notes == ()
        assert save(other, small_state(2), 2, WriterGroup(nonce="aa")).notes == ()


def test_a_run_that_starts_over_in_a_folder_keeps_its_last_checkpoint() -> None:
    """Checkpoints of an earlier run with larger steps count as newer: without a note, none of this
    run would be kept."""
    storage = MemoryStorage()
    for step in (100, 200, 300):
        checkpoints.save(storage, small_state(step), step=step, nonce="older")
    for step in (1, 2):
        saved = checkpoints.save(storage, small_state(step), step=step, nonce="aa")
        assert saved.name in [c.name for c in checkpoints.list_checkpoints(storage)]
        (note,) = saved.notes
        assert note.startswith("step-000000300.g0.older of another run counts as newer than")
    assert [c.step for c in checkpoints.list_checkpoints(storage)] == [300, 200, 100, 2]
    assert checkpoints.latest(storage).checkpoint == checkpoints.list_checkpoints(storage)[0]


def test_the_first_save_copies_before_anything_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training does not read the state tensor by tensor, which takes ten times as long as a copy
    of 100,000 small tensors."""
    training = threading.current_thread()

    def on_the_writer_thread(function: Any) -> Any:
        def called(*arguments: Any) -> Any:
            assert threading.current_thread() is not training, function.__name__
            return function(*arguments)

        return called

    names = ("flatten", "share_of", "spec_of", "plain_form", "chunks_of", "escaped", "unused_name")
    for name in names:
        monkeypatch.setattr(save_plan, name, on_the_writer_thread(getattr(save_plan, name)))
    storage = MemoryStorage()
    state = {
        "model": torch.nn.Linear(2, 2).state_dict(),
        "optimizer": {"state": {0: {"step": torch.ones(()), "tied": torch.ones(3)[1:]}}},
        "milestones": collections.Counter([2, 2]),
    }
    with Engine(storage) as engine:
        engine.reserve(state)
        outcome = save(engine, state, 1)
    assert outcome.status is SaveStatus.COMMITTED
    assert same(checkpoints.load(storage, outcome.name).state, state)


def test_a_save_waits_for_a_free_buffer_for_at_most_wait_s() -> None:
    gate = threading.Event()

    def hold(label: str) -> None:
        if label.startswith("create"):
            assert gate.wait(LONG_S)

    with Engine(FaultyStorage(MemoryStorage(), before=hold)) as engine:
        for step in (1, 2):
            engine.save_async(small_state(step), step=step, world=ALONE)
        assert not engine.has_free_buffer
        late = engine.save_async(small_state(3), step=3, world=ALONE, wait_s=0.05)
        assert late.outcome is not None and late.outcome.status is SaveStatus.SKIPPED
        assert late.outcome.stall_s >= 0.05
        threading.Timer(0.05, gate.set).start()
        patient = engine.save_async(small_state(4), step=4, world=ALONE, wait_s=LONG_S)
        outcome = patient.wait(LONG_S)
        assert outcome is not None and outcome.status is SaveStatus.COMMITTED
        assert outcome.took_s >= outcome.stall_s


def test_buffers_can_be_allocated_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated: list[str] = []

    def recording_empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        allocated.append(threading.current_thread().name)
        return torch.empty(shape, dtype=dtype)

    monkeypatch.setattr(saving, "empty", recording_empty)
    with Engine(MemoryStorage()) as engine:
        engine.reserve(small_state(0), background=True)
        reserved = threading.Event()
        engine.submit(reserved.set)
        assert reserved.wait(LONG_S)
        for step in (1, 2):
            assert save(engine, small_state(step), step).status is SaveStatus.COMMITTED
    assert allocated == [THREAD_NAME] * 2, "and the saves reuse them"


def test_a_save_at_interpreter_shutdown_starts_no_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: object) -> None:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr("checkpoints.saving.ThreadPoolExecutor.submit", refused)
    state = {"large": torch.arange(1_000_000.0)}
    with Engine(tmp_path) as engine:
        outcome = engine.save_async(state, step=1, world=WriterGroup(nonce="aa")).wait(60)
    assert outcome is not None and outcome.status is SaveStatus.COMMITTED
    assert same(checkpoints.load(tmp_path, outcome.name).state, state)


def test_a_bug_on_the_writer_thread_ends_the_saves_in_flight_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    storage = MemoryStorage()
    with Engine(storage) as engine:
        of_two = WriterGroup(nonce="aa", rank=0, size=2)
        waiting = engine.save_async(small_state(1), step=1, world=of_two)
        assert engine.finish_writing(LONG_S)
        engine.submit(functools.partial(list.pop, []))
        outcome = waiting.wait(LONG_S)
        assert outcome is not None and outcome.status is SaveStatus.ABANDONED
        assert "bug on the writer thread: IndexError" in outcome.reason
        assert save(engine, small_state(2), 2).status is SaveStatus.COMMITTED
    assert [args.exc_type for args in reported] == [IndexError]
    assert storage.list(CheckpointName(1, 0, "aa").attempt) == [failure_file(0, 2)]


def test_a_task_runs_on_the_writer_thread() -> None:
    threads: list[str] = []
    with Engine(MemoryStorage()) as engine:
        engine.submit(lambda: threads.append(threading.current_thread().name))
        assert save(engine, small_state(1), 1).status is SaveStatus.COMMITTED
    assert threads == [THREAD_NAME]


def test_the_death_of_the_writer_thread_is_raised_to_its_owner() -> None:
    engine = Engine(FaultyStorage(MemoryStorage(), at=5, fault=StorageFault.DIE_BEFORE))
    handle = engine.save_async(small_state(1), step=1, world=ALONE)
    handle.wait(LONG_S)
    eventually(lambda: not engine.is_alive, "the end of the writer thread")
    with pytest.raises(RuntimeError, match="thread died") as caught:
        engine.outcomes()
    assert isinstance(caught.value.__cause__, SimulatedCrash)


def test_an_invalid_state_raises_and_leaks_no_buffer() -> None:
    storage: Any = MemoryStorage()
    with Engine(storage) as engine:
        for _ in range(3):
            with pytest.raises(checkpoints.StateError):
                engine.save_async({"model": object()}, step=1, world=ALONE)
        assert save(engine, small_state(1), 1).status is SaveStatus.COMMITTED


def test_close_finishes_pending_saves_and_joins_the_thread() -> None:
    storage = MemoryStorage()
    others = set(threading.enumerate())
    engine = Engine(storage, busy="wait")
    assert others == set(threading.enumerate()), "no thread before the first save"
    for step in range(6):
        engine.save_async(small_state(step), step=step, world=ALONE)
    (thread,) = (t for t in threading.enumerate() if t.name == THREAD_NAME and t not in others)
    assert engine.close()
    assert [o.status for o in engine.outcomes()] == [SaveStatus.COMMITTED] * 6
    assert not thread.is_alive() and not engine.is_alive
    with pytest.raises(RuntimeError, match="closed"):
        engine.save_async(small_state(9), step=9, world=ALONE)
