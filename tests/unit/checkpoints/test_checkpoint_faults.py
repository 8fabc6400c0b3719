"""A fault at each storage call of a save: listed checkpoints are complete, older ones remain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from kit.checkpoint_states import same, save_all, small_state

import checkpoints
from checkpoints.storage import LocalStorage, PatientStorage, Storage
from checkpoints.testing import FaultyStorage, MemoryStorage, SimulatedCrash, StorageFault

DEADLY = (StorageFault.DIE_BEFORE, StorageFault.DIE_AFTER, StorageFault.TEAR)


def _save_both(storage: Storage) -> checkpoints.SaveResult:
    """Step 2 by both writers of a world, with retention, so that something is removed too."""
    keep = checkpoints.LatestN(2)
    checkpoints.save(storage, small_state(2), step=2, nonce="aa", rank=0, world_size=2, keep=keep)
    return checkpoints.save(
        storage, small_state(2), step=2, nonce="aa", rank=1, world_size=2, keep=keep
    )


def _prepared() -> MemoryStorage:
    storage = MemoryStorage()
    for step in (0, 1):
        save_all(storage, small_state(step), step=step)
    return storage


def _assert_all_listed_are_complete(root: Storage) -> list[int]:
    steps = []
    for info in checkpoints.list_checkpoints(root):
        assert same(checkpoints.load(root, info.name).state, small_state(info.step))
        steps.append(info.step)
    assert 1 in steps  # the previous one is never damaged
    found = checkpoints.latest(root)
    assert found.checkpoint is not None
    assert found.checkpoint.step == max(steps)
    assert found.skipped == ()
    return steps


def _leftovers(root: Storage) -> list[str]:
    return [entry for entry in root.list("") if entry.startswith(".tmp-")]


def _calls() -> list[str]:
    storage = FaultyStorage(_prepared())
    assert _save_both(storage).committed
    assert len(storage.calls) > 40
    return storage.calls


@pytest.mark.parametrize("fault", DEADLY)
def test_a_crash_at_any_call_leaves_only_complete_checkpoints(fault: StorageFault) -> None:
    outcomes = set()
    for at, call in enumerate(_calls()):
        root = _prepared()
        with pytest.raises(SimulatedCrash):
            _save_both(FaultyStorage(root, at=at, fault=fault))
        outcomes.add(2 in _assert_all_listed_are_complete(root))
        # The successor finishes or removes leftovers, and then saves normally.
        checkpoints.collect_garbage(root, generation=1, nonce="bb")
        assert _leftovers(root) == [], call
        _assert_all_listed_are_complete(root)
        save_all(root, small_state(3), step=3, generation=1, nonce="bb")
        assert max(info.step for info in checkpoints.list_checkpoints(root)) == 3
    assert outcomes == {True, False}  # some died before the commit, some after


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (StorageFault.NO_SPACE, checkpoints.DiskFull),
        (StorageFault.IO_ERROR, checkpoints.WriteFailed),
        (StorageFault.REFUSED, checkpoints.NotWritable),
    ],
)
def test_an_error_at_any_call(fault: StorageFault, error: type[checkpoints.SaveError]) -> None:
    failed = 0
    for at, call in enumerate(_calls()):
        root = _prepared()
        try:
            faulty = FaultyStorage(root, at=at, fault=fault)
            saved = _save_both(PatientStorage(faulty, patience_s=0.0))  # as if it lasted
        except error as caught:
            failed += 1
            assert caught.hint
        else:
            # Only cleanup and optional reads may fail without failing the save.
            assert saved.committed, call
        if 2 not in _assert_all_listed_are_complete(root):
            # After the failure, the same world saves the next step and removes leftovers.
            save_all(root, small_state(3), step=3, world_size=2)
            assert [e for e in _leftovers(root) if "step" in e] == [], call
    assert failed > 20


def test_a_failed_save_frees_its_disk_space(tmp_path: Path) -> None:
    storage = FaultyStorage(LocalStorage(tmp_path), at=8, fault=StorageFault.NO_SPACE)
    with pytest.raises(checkpoints.DiskFull, match="no space"):
        checkpoints.save(storage, small_state(1), step=1, nonce="aa")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failed_writer_does_not_remove_parts_of_other_writers(tmp_path: Path, rank: int) -> None:
    checkpoints.save(tmp_path, small_state(1), step=1, nonce="aa", rank=1 - rank, world_size=2)
    attempt = tmp_path / ".tmp-step-000000001.g0.aa"
    before = sorted(path.name for path in attempt.iterdir())
    with pytest.raises(checkpoints.WriteFailed):
        checkpoints.save(
            _failing_at(tmp_path, lambda call: call.startswith("write ")),
            small_state(1),
            step=1,
            nonce="aa",
            rank=rank,
            world_size=2,
        )
    record = f"failed-{rank:05d}-of-00002.json"  # for the other writer
    assert sorted(path.name for path in attempt.iterdir()) == sorted([*before, record])
    # A retry succeeds: the failed try left nothing in its way.
    again = checkpoints.save(tmp_path, small_state(1), step=1, nonce="aa", rank=rank, world_size=2)
    assert again.committed


def _failing_at(root: Path, chosen: Callable[[str], bool]) -> FaultyStorage:
    def before(call: str) -> None:
        if chosen(call):
            raise OSError(5, "injected", call)

    return FaultyStorage(LocalStorage(root), before=before)


def test_a_cleanup_error_does_not_fail_a_committed_save(tmp_path: Path) -> None:
    for step in (0, 1):
        save_all(tmp_path, small_state(step), step=step)
    storage = _failing_at(tmp_path, lambda call: "LATEST" in call)
    saved = checkpoints.save(storage, small_state(2), step=2, nonce="aa")
    assert saved.committed
    assert "writing LATEST failed" in saved.notes[0]
    assert [info.step for info in checkpoints.list_checkpoints(tmp_path)] == [2, 1, 0]


def test_a_read_error_is_distinguished_from_damage(tmp_path: Path) -> None:
    name = save_all(tmp_path, small_state(1), step=1)
    storage = PatientStorage(
        _failing_at(tmp_path, lambda call: call.startswith("read ") and "safetensors" in call),
        patience_s=0.0,
    )
    with pytest.raises(checkpoints.ReadFailed, match="injected"):
        checkpoints.load(storage, name)
    found = checkpoints.latest(storage)
    assert found.checkpoint is None
    assert "injected" in found.skipped[0].reason
