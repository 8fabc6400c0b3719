"""A fault at every storage call of a save: what is listed afterwards is whole, the old stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_states import same, save_all, small_state

import checkpoints
from checkpoints.storage.local import LocalStorage
from checkpoints.storage.protocol import Storage
from checkpoints.testing.faults import FaultyStorage, SimulatedCrash, StorageFault
from checkpoints.testing.memory_storage import MemoryStorage

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


def _assert_all_listed_are_whole(root: Storage) -> list[int]:
    steps = []
    for info in checkpoints.list_checkpoints(root):
        assert same(checkpoints.load(root, info.name).state, small_state(info.step))
        steps.append(info.step)
    assert 1 in steps  # the one before is never harmed
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
def test_dying_at_any_call(fault: StorageFault) -> None:
    outcomes = set()
    for at, call in enumerate(_calls()):
        root = _prepared()
        with pytest.raises(SimulatedCrash):
            _save_both(FaultyStorage(root, at=at, fault=fault))
        outcomes.add(2 in _assert_all_listed_are_whole(root))
        # The successor finishes or clears what is left, and then saves as if nothing had been.
        checkpoints.collect_garbage(root, generation=1, nonce="bb")
        assert _leftovers(root) == [], call
        _assert_all_listed_are_whole(root)
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
def test_a_refusal_at_any_call(fault: StorageFault, error: type[checkpoints.SaveError]) -> None:
    failed = 0
    for at, call in enumerate(_calls()):
        root = _prepared()
        try:
            saved = _save_both(FaultyStorage(root, at=at, fault=fault))
        except error as caught:
            failed += 1
            assert caught.hint
        else:
            # Only tidying up and reads that can be done without may fail and not fail the save.
            assert saved.committed, call
        if 2 not in _assert_all_listed_are_whole(root):
            # The failure is over: the same world saves the next step, and clears up.
            save_all(root, small_state(3), step=3, world_size=2)
            assert [e for e in _leftovers(root) if "step" in e] == [], call
    assert failed > 20


def test_a_failed_save_gives_its_space_back(tmp_path: Path) -> None:
    storage = FaultyStorage(LocalStorage(tmp_path), at=8, fault=StorageFault.NO_SPACE)
    with pytest.raises(checkpoints.DiskFull, match="no space"):
        checkpoints.save(storage, small_state(1), step=1, nonce="aa")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failed_writer_leaves_the_others_parts_alone(tmp_path: Path, rank: int) -> None:
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
    assert sorted(path.name for path in attempt.iterdir()) == before
    # Tried again, it completes: nothing of the failed try is in the way.
    again = checkpoints.save(tmp_path, small_state(1), step=1, nonce="aa", rank=rank, world_size=2)
    assert again.committed


def _failing_at(root: Path, chosen: Callable[[str], bool]) -> FaultyStorage:
    def before(call: str) -> None:
        if chosen(call):
            raise OSError(5, "injected", call)

    return FaultyStorage(LocalStorage(root), before=before)


def test_trouble_while_tidying_up_does_not_fail_a_committed_save(tmp_path: Path) -> None:
    for step in (0, 1):
        save_all(tmp_path, small_state(step), step=step)
    storage = _failing_at(tmp_path, lambda call: "LATEST" in call)
    saved = checkpoints.save(storage, small_state(2), step=2, nonce="aa")
    assert saved.committed
    assert "removing older checkpoints failed" in saved.notes[0]


def test_a_read_error_is_told_apart_from_damage(tmp_path: Path) -> None:
    name = save_all(tmp_path, small_state(1), step=1)
    storage = _failing_at(tmp_path, lambda call: call.startswith("read ") and "safetensors" in call)
    with pytest.raises(checkpoints.ReadFailed, match="injected"):
        checkpoints.load(storage, name)
    found = checkpoints.latest(storage)
    assert found.checkpoint is None
    assert "injected" in found.skipped[0].reason
