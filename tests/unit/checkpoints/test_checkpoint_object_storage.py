"""Checkpoints in object stores: the put of the manifest commits, despite crashes around it."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from kit.checkpoint_states import odd_state, same, save_all, small_state
from kit.manual_clock import ManualClock
from kit.run_kit import job, process

import checkpoints
from checkpoints import retention
from checkpoints.commit import commit, is_waiting
from checkpoints.engine import poll_pause_s
from checkpoints.names import CheckpointName
from checkpoints.objects import FsspecObjects, ObjectStorage, Upload, storage_for
from checkpoints.storage import LocalStorage, PatientStorage, Storage
from checkpoints.testing import FaultyObjects, FaultyStorage, SimulatedCrash, StorageFault


def in_memory() -> FsspecObjects:
    fs = fsspec.filesystem("memory", global_store=False, skip_instance_cache=True)
    return FsspecObjects(fs, "/bucket/prefix")


def prepared() -> FsspecObjects:
    objects = in_memory()
    for step in (0, 1):
        save_all(ObjectStorage(objects), small_state(step), step=step)
    return objects


def save_both(storage: Storage) -> checkpoints.SaveResult:
    """Step 2 by both writers of a world, with retention, so that something is removed, too."""
    keep = checkpoints.LatestN(2)
    for rank in (0, 1):
        saved = checkpoints.save(
            storage, small_state(2), step=2, nonce="aa", rank=rank, world_size=2, keep=keep
        )
    return saved


def assert_all_listed_are_complete(storage: Storage) -> list[int]:
    steps = []
    for info in checkpoints.list_checkpoints(storage):
        assert same(checkpoints.load(storage, info.name).state, small_state(info.step))
        steps.append(info.step)
    assert 1 in steps  # the previous one is never damaged
    found = checkpoints.latest(storage)
    assert found.checkpoint is not None and found.checkpoint.step == max(steps)
    assert found.skipped == ()
    return steps


def test_every_kind_of_tensor_is_restored() -> None:
    storage = ObjectStorage(in_memory())
    name = save_all(storage, odd_state(), step=1, world_size=3)
    assert same(checkpoints.load(storage, name).state, odd_state())
    assert sorted(storage.list(name)) == [
        *(f"0000{rank}-of-00003.safetensors" for rank in range(3)),
        "manifest.json",
    ]


def test_the_manifest_is_the_last_object_of_a_commit() -> None:
    objects = FaultyObjects(in_memory())
    save_all(ObjectStorage(objects), small_state(1), step=1, world_size=2)
    writes = [call for call in objects.calls if call.startswith("write ") and "step-" in call]
    assert writes[-2:] == [
        "write step-000000001.g0.aa/manifest.json",
        "write .committed-step-000000001.g0.aa",  # for listings
    ]
    assert sum(call.endswith("/manifest.json") for call in writes) == 1


@pytest.mark.parametrize("fault", [StorageFault.DIE_BEFORE, StorageFault.DIE_AFTER])
@pytest.mark.parametrize("level", [FaultyObjects, FaultyStorage])
def test_crashes_at_any_request_leave_complete_checkpoints(level: Any, fault: StorageFault) -> None:
    at, count, outcomes = 0, 1, builtins.set[bool]()
    while at < count:
        objects = prepared()
        faulty = _wrapped(level, objects, at, fault)
        storage = ObjectStorage(objects)
        try:
            save_both(faulty[0])
            count = len(faulty[1].calls)
            assert at == count, "the fault was not injected"
        except SimulatedCrash:
            count = at + 2
            outcomes.add(2 in assert_all_listed_are_complete(storage))
            checkpoints.collect_garbage(storage, generation=1, nonce="bb")
            assert [e for e in storage.list("") if e.startswith(".tmp-")] == [], faulty[1].calls
            assert_all_listed_are_complete(storage)
            save_all(storage, small_state(3), step=3, generation=1, nonce="bb")
            assert checkpoints.list_checkpoints(storage)[0].step == 3
        at += 1
    assert at > 40
    assert outcomes == {True, False}  # some died before the commit, some after


def _wrapped(
    level: Any, objects: FsspecObjects, at: int, fault: StorageFault
) -> tuple[Storage, Any]:
    if level is FaultyObjects:
        faulty = FaultyObjects(objects, at=at, fault=fault)
        return ObjectStorage(faulty), faulty
    storage = FaultyStorage(ObjectStorage(objects), at=at, fault=fault)
    return storage, storage


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (StorageFault.NO_SPACE, checkpoints.DiskFull),
        (StorageFault.IO_ERROR, checkpoints.WriteFailed),
        (StorageFault.REFUSED, checkpoints.NotWritable),
    ],
)
def test_an_error_at_any_request(fault: StorageFault, error: type[checkpoints.SaveError]) -> None:
    counted = FaultyObjects(prepared())
    save_both(ObjectStorage(counted))
    failed = 0
    for at, call in enumerate(counted.calls):
        objects = prepared()
        try:
            faulty = ObjectStorage(FaultyObjects(objects, at=at, fault=fault))
            saved = save_both(PatientStorage(faulty, patience_s=0.0))  # as if it lasted
        except error as caught:
            failed += 1
            assert caught.hint
        else:
            assert saved.committed, call
        if 2 not in assert_all_listed_are_complete(ObjectStorage(objects)):
            save_all(ObjectStorage(objects), small_state(3), step=3, world_size=2)
            left = [e for e in ObjectStorage(objects).list("") if e.startswith(".tmp-step")]
            assert left == [], call
    assert failed > 15


class Uploads(FaultyObjects):
    """Records how its uploads ended."""

    def __init__(self, inner: FsspecObjects, *, at: int) -> None:
        super().__init__(inner, at=at, fault=StorageFault.IO_ERROR)
        self.begun: list[Part] = []

    def upload(self, key: str) -> Part:
        self.begun.append(Part(super().upload(key)))
        return self.begun[-1]


class Part:
    def __init__(self, inner: Upload) -> None:
        self.end = ""
        self._inner = inner
        self.write = inner.write

    def finish(self) -> None:
        self._inner.finish()
        self.end = "finished"

    def abandon(self) -> None:
        self._inner.abandon()
        self.end = "abandoned"


def test_an_upload_that_fails_at_any_write_or_at_its_end_is_abandoned() -> None:
    counted = FaultyObjects(in_memory())
    save_all(ObjectStorage(counted), small_state(1), step=1)
    writes = [call.startswith("write ") and "safetensors" in call for call in counted.calls]
    of_tensors = [at for at, is_one in enumerate(writes) if is_one]
    assert len(of_tensors) >= 2
    for at in of_tensors:
        objects = Uploads(in_memory(), at=at)
        with pytest.raises(checkpoints.WriteFailed):
            failing = PatientStorage(ObjectStorage(objects), patience_s=0.0)
            save_all(failing, small_state(1), step=1)
        assert [part.end for part in objects.begun] == ["abandoned"]


def test_a_request_that_fails_once_fails_no_save() -> None:
    counted = FaultyObjects(prepared())
    save_both(ObjectStorage(counted))
    for at, call in enumerate(counted.calls):
        objects = prepared()
        faulty = ObjectStorage(FaultyObjects(objects, at=at, fault=StorageFault.IO_ERROR))
        assert save_both(PatientStorage(faulty, clock=ManualClock())).committed, call
        assert 2 in assert_all_listed_are_complete(ObjectStorage(objects)), call


def test_committers_racing_at_any_request_both_succeed() -> None:
    """A second committer runs to completion before the first one's n-th request, for all n."""
    name = CheckpointName(5, 0, "aa")
    at, calls = 0, 1
    while at < calls:
        objects = in_memory()
        save = _saver(name)
        save(ObjectStorage(objects), 0)
        raced = FaultyObjects(objects, before=_race(objects, name, at))
        assert save(ObjectStorage(raced), 1).committed, raced.calls[at]
        storage = ObjectStorage(objects)
        assert same(checkpoints.load(storage, str(name)).state, small_state(5))
        assert set(storage.list("")) - {"LATEST", ".summaries.json"} == {str(name)}
        at, calls = at + 1, len(raced.calls)
    assert at > 40


def _saver(name: CheckpointName) -> Callable[[Storage, int], checkpoints.SaveResult]:
    def save(storage: Storage, rank: int) -> checkpoints.SaveResult:
        return checkpoints.save(
            storage, small_state(5), step=5, nonce=name.nonce, rank=rank, world_size=2
        )

    return save


def _race(objects: FsspecObjects, name: CheckpointName, at: int) -> Callable[[str], None]:
    seen: list[str] = []

    def race(label: str) -> None:
        seen.append(label)
        other = ObjectStorage(objects)
        if len(seen) - 1 != at or name.attempt not in other.list(""):
            return
        if "part-00001-of-00002.json" in other.list(name.attempt):
            commit(other, name, 2)

    return race


def test_garbage_collection_keeps_entries_with_an_owner() -> None:
    storage = ObjectStorage(in_memory())
    for generation, nonce in ((1, "old"), (2, "mine"), (3, "new")):
        checkpoints.save(
            storage, {}, step=5, generation=generation, nonce=nonce, rank=0, world_size=2
        )
    collected = checkpoints.collect_garbage(storage, generation=2, nonce="mine")
    assert collected.removed == (".tmp-step-000000005.g1.old",)
    assert len(collected.retained) == 2


class Store(MemoryFileSystem):  # type: ignore[misc]
    """A store whose first conditional puts raise the given errors."""

    cachable = False

    def __init__(self, *errors: Exception) -> None:
        super().__init__(global_store=False)
        self.errors = list(errors)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> None:
        if mode == "create" and self.errors:
            raise self.errors.pop(0)
        super().pipe_file(path, value, mode=mode, **more)


@pytest.mark.parametrize(
    "error",
    [
        TypeError("pipe_file() got an unexpected keyword argument 'mode'"),
        OSError(5, "An error occurred (NotImplemented) when calling the PutObject operation"),
        OSError(5, "An error occurred (ConditionalRequestConflict) when calling PutObject"),
    ],
)
def test_unsupported_or_conflicting_conditional_puts_are_handled(error: Exception) -> None:
    objects = FsspecObjects(Store(error), "/bucket")
    objects.put("one", b"first", only_new=True)
    assert objects.get("one", 0, 5) == b"first"
    objects = FsspecObjects(Store(error), "/bucket")
    objects.put("one", b"first")
    with pytest.raises(FileExistsError):
        objects.put("one", b"second", only_new=True)
    assert objects.get("one", 0, 5) == b"first"
    storage = ObjectStorage(FsspecObjects(Store(error), "/bucket"))
    assert save_both(storage).committed


def test_other_errors_of_a_conditional_put_are_raised() -> None:
    objects = FsspecObjects(Store(OSError(5, "disk failure")), "/bucket")
    with pytest.raises(OSError, match="disk failure"):
        objects.put("one", b"first", only_new=True)
    assert objects.list("") == {}


def test_an_engine_saves_to_a_url() -> None:
    root = f"memory://engine-{checkpoints.new_nonce()}"
    with checkpoints.Engine(root, keep=checkpoints.LatestN(2)) as engine:
        for step in range(4):
            handle = engine.save_async(
                small_state(step), step=step, world=checkpoints.WriterGroup(nonce="aa")
            )
            outcome = handle.wait(30)
            assert outcome is not None and outcome.status is checkpoints.SaveStatus.COMMITTED
    assert [info.step for info in checkpoints.list_checkpoints(root)] == [3, 2]
    newest = checkpoints.latest(root).checkpoint
    assert newest is not None
    assert same(checkpoints.load(root, newest.name).state, small_state(3))


def test_a_job_saves_to_a_url_and_resumes_from_it() -> None:
    root = f"memory://job-{checkpoints.new_nonce()}"
    with process(root) as run:
        script = job(run)
        assert script.train(stop_after=8) == 8
        weights = script.weights()
    newest = checkpoints.latest(root).checkpoint
    assert newest is not None and newest.step == 8
    with process(root) as run:
        script = job(run)
        for _ in run.epochs(2):
            next(iter(script.loader))
            assert torch.equal(script.weights(), weights)
            break


def test_urls_and_paths_are_distinguished(tmp_path: Path) -> None:
    assert isinstance(storage_for(f"file://{tmp_path}"), LocalStorage)
    assert storage_for(f"file://{tmp_path}").place == str(tmp_path)
    for path in (str(tmp_path), tmp_path, "a:b/c", "./s3:/x"):
        assert isinstance(storage_for(path), LocalStorage)
    assert storage_for("memory://jobs/one").place == "memory://jobs/one"


def test_a_path_that_people_write_is_the_folder_that_they_mean(tmp_path: Path) -> None:
    for root, folder in (
        ("~/runs", Path.home() / "runs"),
        (Path("~/runs"), Path.home() / "runs"),
        ("file://localhost/runs/a", Path("/runs/a")),
        ("file:///runs/a%20b", Path("/runs/a b")),
        ("file:/runs/a", Path("/runs/a")),
        (Path("file:///runs/a"), Path("/runs/a")),
    ):
        storage = storage_for(root)
        assert isinstance(storage, LocalStorage) and storage.folder == str(folder)
    for url in (
        Path("s3://bucket/job"),
        "s3:/bucket/job",
        "file://other-host/runs",
        "~no user/runs",
    ):
        with pytest.raises(checkpoints.ArgumentError):
            storage_for(url)


def test_a_writer_that_waits_for_others_sends_few_requests() -> None:
    waited_s, polls = 0.0, 0
    while waited_s < 60:
        waited_s += poll_pause_s(waited_s)
        polls += 1
    assert polls < 45
    lists: list[str] = []
    storage = ObjectStorage(FaultyObjects(prepared(), before=lists.append))
    name = CheckpointName(9, 0, "aa")
    checkpoints.save(storage, small_state(9), step=9, nonce="aa", rank=0, world_size=2)
    lists.clear()
    assert is_waiting(storage.list(name.attempt), 2)  # a poll
    assert len(lists) == 1, "regardless of the number of checkpoints"


def test_a_save_sends_as_many_requests_beside_many_checkpoints_as_beside_few() -> None:
    """Each of them is billed. Also a save that knows nothing of the ones before."""
    requests: list[str] = []
    objects = FaultyObjects(in_memory(), before=requests.append)
    counts: list[int] = []
    keep = checkpoints.LatestN(100) | checkpoints.BestN(1, "loss")
    with checkpoints.Engine(ObjectStorage(objects), keep=keep) as engine:
        for step in range(1, 21):
            requests.clear()
            state = {"loss": 1.0, **small_state(step)}
            engine.save_async(state, step=step, world=checkpoints.WriterGroup(nonce="aa")).wait()
            counts.append(len(requests))
    assert counts[2] == counts[-1]
    counts.clear()
    for step in range(21, 61):
        requests.clear()
        checkpoints.save(
            ObjectStorage(objects), {}, step=step, nonce="aa", keep=checkpoints.LatestN(100)
        )
        counts.append(len(requests))
    assert counts[0] == counts[-1]
    for step in range(61, 64):  # as other processes, with a policy that asks for all manifests
        requests.clear()
        retention._READ.clear()
        checkpoints.save(ObjectStorage(objects), {}, step=step, nonce="aa", keep=keep)
        assert len(requests) == counts[-1]
    requests.clear()
    assert len(ObjectStorage(objects).list("")) == 65  # with LATEST and the summaries
    assert len(requests) == 1


def test_a_mark_of_a_removed_checkpoint_is_removed() -> None:
    """A committer may be paused before it puts the mark, until the checkpoint is removed again."""
    objects = prepared()
    storage = ObjectStorage(objects)
    objects.put(".committed-step-000000007.g0.aa", b"")
    assert ".tmp-removed-step-000000007.g0.aa" in storage.list("")
    assert [info.step for info in checkpoints.list_checkpoints(storage)] == [1, 0]
    checkpoints.collect_garbage(storage, generation=1, nonce="bb")
    assert ".committed-step-000000007.g0.aa" not in objects.list("")


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_checkpoint_that_another_process_removes_is_noticed(is_interrupted: bool) -> None:
    """Also by a storage that has listed it before."""
    objects = prepared()
    storage = ObjectStorage(objects)
    newest = checkpoints.list_checkpoints(storage)[0].name
    other = ObjectStorage(objects)
    other.rename(newest, f".tmp-removed-{newest}")
    if not is_interrupted:
        other.remove_folder(f".tmp-removed-{newest}")
        assert newest not in storage.list("")
    latest = checkpoints.latest(storage).checkpoint
    assert latest is not None and latest.step == 0
    assert newest not in storage.list("")
    checkpoints.save(storage, small_state(2), step=2, nonce="aa")
    assert [entry for entry in other.list("") if newest in entry] == []


def test_a_url_scheme_without_a_driver_is_rejected_by_name() -> None:
    with pytest.raises(checkpoints.ArgumentError, match="nonsense"):
        checkpoints.latest("nonsense://bucket/prefix")
