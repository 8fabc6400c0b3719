"""The background engine: staged state is saved correctly despite training and disk errors."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_states import odd_state, same, small_state

import checkpoints
from checkpoints.saving import staging
from checkpoints.saving.engine import THREAD_NAME, Engine
from checkpoints.saving.outcome import SaveStatus, WriterGroup
from checkpoints.testing.faults import FaultyStorage, SimulatedCrash, StorageFault
from checkpoints.testing.memory_storage import MemoryStorage
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


@pytest.mark.parametrize(
    "fault", [StorageFault.NO_SPACE, StorageFault.IO_ERROR, StorageFault.REFUSED]
)
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


def test_an_error_at_any_call_leaves_only_complete_checkpoints() -> None:
    def attempt(at: int | None, fault: StorageFault) -> tuple[MemoryStorage, int]:
        storage = MemoryStorage()
        faulty = FaultyStorage(storage, at=at, fault=fault)
        with Engine(faulty) as engine:
            for step in (1, 2):
                save(engine, small_state(step), step)
        return storage, len(faulty.calls)

    _, count = attempt(None, StorageFault.IO_ERROR)
    for at in range(count):
        storage, _ = attempt(at, StorageFault.IO_ERROR)
        listed = checkpoints.list_checkpoints(storage)
        assert listed, f"one failed call, at {at}, cannot fail both saves"
        for info in listed:
            assert same(checkpoints.load(storage, info.name).state, small_state(info.step))


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
    skips = engine.save_async(small_state(4), step=4, world=of_two, wait_s=0.0)
    assert skips.outcome is not None and skips.outcome.stall_s < 0.3
    gate.set()
    engine.close()
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

    monkeypatch.setattr(staging, "empty", recording_empty)
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

    monkeypatch.setattr("checkpoints.saving.tensor_file.ThreadPoolExecutor.submit", refused)
    state = {"large": torch.arange(1_000_000.0)}
    with Engine(tmp_path) as engine:
        outcome = engine.save_async(state, step=1, world=WriterGroup(nonce="aa")).wait(60)
    assert outcome is not None and outcome.status is SaveStatus.COMMITTED
    assert same(checkpoints.load(tmp_path, outcome.name).state, state)


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
    (thread,) = (t for t in threading.enumerate() if t.name == THREAD_NAME and t not in others)
    for step in range(6):
        engine.save_async(small_state(step), step=step, world=ALONE)
    assert engine.close()
    assert [o.status for o in engine.outcomes()] == [SaveStatus.COMMITTED] * 6
    assert not thread.is_alive() and not engine.is_alive
    with pytest.raises(RuntimeError, match="closed"):
        engine.save_async(small_state(9), step=9, world=ALONE)
