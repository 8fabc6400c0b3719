"""A committer is suspended between its check of the parts and the commit, while others remove the
parts: in any order of resumption, listed checkpoints are complete."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from kit.checkpoint_states import same, save_all, small_state

import checkpoints
from checkpoints.commit import IncompleteAttempt, commit, is_committed
from checkpoints.names import CheckpointName
from checkpoints.objects import FsspecObjects, ObjectStorage
from checkpoints.retention import remove_committed
from checkpoints.storage import LocalStorage, Storage
from checkpoints.testing import FaultyObjects, SimulatedCrash, StorageFault

NAME = CheckpointName(5, 1, "aa")
MANIFEST_PUT = f"write {NAME}/manifest.json"
DEADLINE_S = 90.0

Remover = Callable[[Storage], object]


def prepared() -> FsspecObjects:
    """An older checkpoint, and an attempt that is complete except for the commit."""
    fs = fsspec.filesystem("memory", global_store=False, skip_instance_cache=True)
    objects = FsspecObjects(fs, "/bucket/prefix")
    save_all(ObjectStorage(objects), small_state(4), step=4, generation=1, nonce="aa")
    attempt(ObjectStorage(objects))
    return objects


def attempt(storage: Storage) -> None:
    for rank in (0, 1):
        checkpoints.save(
            storage,
            small_state(5),
            step=5,
            generation=1,
            nonce="aa",
            rank=rank,
            world_size=2,
            fence=lambda: False,
        )
    assert not is_committed(storage, NAME)


class SuspendedCommitter:
    """A committer that is suspended before it puts the manifest, until it is resumed."""

    def __init__(self, objects: FsspecObjects) -> None:
        self.failed: Exception | None = None
        self._is_suspended, self._may_resume = threading.Event(), threading.Event()
        self._storage = ObjectStorage(FaultyObjects(objects, before=self._suspend))
        self._thread = threading.Thread(target=self._commit, name="committer", daemon=True)
        self._thread.start()
        assert self._is_suspended.wait(DEADLINE_S)

    def _suspend(self, label: str) -> None:
        if label == MANIFEST_PUT:
            self._is_suspended.set()
            assert self._may_resume.wait(DEADLINE_S)

    def _commit(self) -> None:
        try:
            commit(self._storage, NAME, 2)
        except (IncompleteAttempt, OSError) as error:
            self.failed = error

    def resume(self) -> None:
        self._may_resume.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


def assert_listed_are_complete(storage: Storage) -> list[int]:
    listed = [name for name in storage.list("") if name.startswith("step-")]
    infos = checkpoints.list_checkpoints(storage)
    assert sorted(listed) == sorted(info.name for info in infos)
    for info in infos:
        assert same(checkpoints.load(storage, info.name).state, small_state(info.step))
    found = checkpoints.latest(storage)
    assert found.skipped == ()
    assert is_committed(storage, NAME) == (str(NAME) in listed)
    return sorted(info.step for info in infos)


def assert_no_leftovers(storage: Storage) -> None:
    checkpoints.collect_garbage(storage, generation=9, nonce="zz")
    left = [name for name in storage.list("") if name.startswith(".tmp-")]
    assert left == []
    assert_listed_are_complete(storage)


def remove_attempt(storage: Storage) -> None:
    storage.remove_folder(NAME.attempt)


def remove_committed_one(storage: Storage) -> None:
    remove_committed(storage, NAME)


def overtake(storage: Storage) -> None:
    """Its own world commits a later step, and removes earlier attempts."""
    save_all(storage, small_state(6), step=6, generation=1, nonce="aa")


def commit_and_prune(storage: Storage) -> None:
    """Another committer was faster, and the checkpoint has been pruned since."""
    commit(storage, NAME, 2)
    save_all(storage, small_state(6), step=6, generation=2, nonce="bb")
    assert str(NAME) in checkpoints.prune(storage, checkpoints.LatestN(1))


@pytest.mark.parametrize("remove", [remove_attempt, overtake, commit_and_prune])
def test_a_committer_suspended_before_its_put_lists_no_removed_parts(
    remove: Remover,
) -> None:
    objects = prepared()
    storage = ObjectStorage(objects)
    committer = SuspendedCommitter(objects)
    remove(storage)
    committer.resume()
    assert isinstance(committer.failed, FileNotFoundError), "and it reports its failure"
    steps = assert_listed_are_complete(storage)
    assert 5 not in steps
    assert_no_leftovers(storage)


@pytest.mark.parametrize("is_committed_before", [False, True])
def test_a_committer_may_resume_at_any_request_of_a_removal(is_committed_before: bool) -> None:
    remove = remove_committed_one if is_committed_before else remove_attempt
    counted = prepared()
    if is_committed_before:
        commit(ObjectStorage(counted), NAME, 2)
    reference = FaultyObjects(counted)
    remove(ObjectStorage(reference))
    assert len(reference.calls) > 5
    outcomes = set()
    for at in range(len(reference.calls)):
        objects = prepared()
        committer = SuspendedCommitter(objects)
        if is_committed_before:
            commit(ObjectStorage(objects), NAME, 2)
        removing = FaultyObjects(objects, before=at_request(at, committer.resume))
        with contextlib.suppress(FileNotFoundError):
            remove(ObjectStorage(removing))
        committer.resume()
        storage = ObjectStorage(objects)
        steps = assert_listed_are_complete(storage)
        if committer.failed is None and not is_committed_before:
            assert 5 in steps, f"reported as committed, but missing: {removing.calls[at:]}"
        outcomes.add(5 in steps)
        assert_no_leftovers(storage)
    # The removal of a committed checkpoint wins; an attempt committed in time remains.
    assert outcomes == ({False} if is_committed_before else {True, False})


def test_a_removal_may_occur_at_any_request_of_a_committer() -> None:
    at, calls = 0, 1
    while at < calls:
        objects = prepared()
        storage = ObjectStorage(objects)
        remove = functools.partial(remove_attempt, storage)
        committing = FaultyObjects(objects, before=at_request(at, remove))
        is_reported = True
        try:
            commit(ObjectStorage(committing), NAME, 2)
        except (IncompleteAttempt, OSError):
            is_reported = False
        assert (5 in assert_listed_are_complete(storage)) == is_reported, committing.calls[at]
        assert_no_leftovers(storage)
        at, calls = at + 1, len(committing.calls)
    assert at > 15


def at_request(number: int, do: Callable[[], object]) -> Callable[[str], None]:
    seen: list[str] = []

    def before(label: str) -> None:
        seen.append(label)
        if len(seen) - 1 == number:
            do()

    return before


def test_a_committer_that_dies_after_its_late_put_publishes_nothing() -> None:
    objects = prepared()
    storage = ObjectStorage(objects)

    def remove_late(label: str) -> None:
        if label == MANIFEST_PUT:
            remove_attempt(storage)

    counted = FaultyObjects(prepared())
    commit(ObjectStorage(counted), NAME, 2)
    at = counted.calls.index(MANIFEST_PUT)
    dying = FaultyObjects(objects, at=at, fault=StorageFault.DIE_AFTER, before=remove_late)
    with pytest.raises(SimulatedCrash):
        commit(ObjectStorage(dying), NAME, 2)
    assert objects.stat(f"{NAME}/manifest.json").size > 0
    assert assert_listed_are_complete(storage) == [4]
    # Retention ignores it, too; otherwise it would remove a good checkpoint instead.
    save_all(storage, small_state(6), step=6, generation=1, nonce="aa")
    assert checkpoints.prune(storage, checkpoints.LatestN(2)) == ()
    assert assert_listed_are_complete(storage) == [4, 6]
    assert_no_leftovers(storage)


def test_a_committer_on_disk_publishes_no_partly_removed_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path)
    save_all(storage, small_state(4), step=4, generation=1, nonce="aa")
    attempt(storage)
    (tmp_path / NAME.attempt / "manifest.json").write_bytes(b"{}")  # written before the rename
    late: list[OSError] = []
    real = shutil.rmtree

    def half_way(path: Path) -> None:
        """The committer resumes when one file has been removed."""
        if not late and path.exists():
            os.unlink(path / "00000-of-00002.safetensors")
            try:
                storage.rename(NAME.attempt, str(NAME))
            except OSError as error:
                late.append(error)
        real(path)

    monkeypatch.setattr(shutil, "rmtree", half_way)
    remove_attempt(storage)
    assert [type(error) for error in late] == [FileNotFoundError]
    assert assert_listed_are_complete(storage) == [4]
    assert_no_leftovers(storage)
