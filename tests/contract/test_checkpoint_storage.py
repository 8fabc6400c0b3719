"""The contract of all checkpoint storages: disk, memory and object stores."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from kit.renames import refuse_renames
from s3_server import S3Server, s3_server

from checkpoints import objects as fsspec_store
from checkpoints.memory import NodeMemory
from checkpoints.objects import FolderStorage, FsspecObjects, ObjectStorage, open_url
from checkpoints.storage import LocalStorage, Storage
from checkpoints.testing import FaultyObjects, FaultyStorage, MemoryStorage, StorageFault

NAME = "step-000000001.g2.ab"
ATTEMPT = f".tmp-{NAME}"
PART_BYTES = 5 << 20  # the minimum of S3
REMOVED = f".tmp-removed-{NAME}"
DISKS = ["local", "folder", "memory", "faulty without a fault", "node memory"]
OBJECTS = [
    "objects in memory",
    "objects on disk",
    "folder without renames of folders",
    "folder without renames",
    # tests/integration/test_checkpoint_objects.py saves and loads there.
    pytest.param("objects in s3", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


def make(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Storage:
    if kind == "local":
        return LocalStorage(tmp_path / "a" / "root")
    if kind.startswith("folder"):
        if kind != "folder":
            patch = request.getfixturevalue("monkeypatch")
            refuse_renames(patch, errno.ENOSYS, of_files=kind == "folder without renames")
        return FolderStorage(tmp_path / "a" / "root")
    if kind == "node memory":
        return NodeMemory(tmp_path / "own", limit_bytes=1 << 20)
    if kind == "objects in memory":
        fs = fsspec.filesystem("memory", global_store=False, skip_instance_cache=True)
        return ObjectStorage(FsspecObjects(fs, "/a/root"))
    if kind == "objects on disk":
        fs = fsspec.filesystem("file", auto_mkdir=True)
        return ObjectStorage(FsspecObjects(fs, str(tmp_path / "root")))
    if kind == "objects in s3":
        s3: S3Server = request.getfixturevalue("s3")
        bucket = s3.bucket(f"bucket-{len(s3.requests)}")
        return ObjectStorage(open_url(f"s3://{bucket}/a/root", **s3.options))
    inner = MemoryStorage()
    return inner if kind == "memory" else FaultyStorage(inner)


@pytest.fixture(params=[*DISKS, *OBJECTS])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return make(request.param, tmp_path, request)


@pytest.fixture(params=DISKS)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return make(request.param, tmp_path, request)


@pytest.fixture(params=OBJECTS)
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return make(request.param, tmp_path, request)


def _put(storage: Storage, path: str, data: bytes) -> None:
    sink = storage.create(path)
    sink.write(data)
    sink.sync()
    sink.close()


def _get(storage: Storage, path: str, offset: int = 0, count: int = 100) -> bytes:
    source = storage.open(path)
    buffer = bytearray(count)
    done = source.read_at(offset, memoryview(buffer))
    source.close()
    return bytes(buffer[:done])


def _attempt(storage: Storage) -> None:
    storage.make_folder("")
    storage.make_folder(ATTEMPT)
    _put(storage, f"{ATTEMPT}/file", b"data")
    _put(storage, f"{ATTEMPT}/.manifest-1.json", b"manifest")
    storage.rename(f"{ATTEMPT}/.manifest-1.json", f"{ATTEMPT}/manifest.json")


def test_files_are_written_read_and_replaced(storage: Storage) -> None:
    storage.make_folder("")
    storage.make_folder(ATTEMPT)
    storage.make_folder(ATTEMPT)
    _put(storage, f"{ATTEMPT}/file", b"long content")
    _put(storage, f"{ATTEMPT}/file", b"content")
    assert _get(storage, f"{ATTEMPT}/file") == b"content"
    assert _get(storage, f"{ATTEMPT}/file", 3, 2) == b"te"
    assert _get(storage, f"{ATTEMPT}/file", 5) == b"nt"
    assert _get(storage, f"{ATTEMPT}/file", 9) == b""
    assert storage.size(f"{ATTEMPT}/file") == 7
    source = storage.open(f"{ATTEMPT}/file")
    assert source.size() == 7
    source.close()
    assert storage.list(ATTEMPT) == ["file"]
    assert storage.list("") == [ATTEMPT]
    storage.sync_folder(ATTEMPT)
    storage.sync_folder("")
    assert storage.modified_s(ATTEMPT) >= 0
    assert isinstance(storage.modified_s(f"{ATTEMPT}/file"), float)


def test_missing_paths_raise_file_not_found(storage: Storage) -> None:
    storage.make_folder("")
    for missing in ("missing", ATTEMPT, NAME, f"{NAME}/manifest.json"):
        reads = (storage.list, storage.size, storage.modified_s, storage.open)
        for call in (*reads, storage.remove):
            with pytest.raises((FileNotFoundError, NotADirectoryError)):
                call(missing)
        storage.remove_folder(missing)
    for old, new in (("missing", "other"), (ATTEMPT, NAME), (NAME, REMOVED)):
        with pytest.raises(FileNotFoundError):
            storage.rename(old, new)
    assert storage.list("") == []


def test_a_missing_folder_on_disk_raises_file_not_found(disk: Storage) -> None:
    disk.make_folder("")
    for call in (disk.create, disk.sync_folder):
        with pytest.raises(FileNotFoundError):
            call("missing/file")


def test_an_attempt_is_committed_and_later_removed(storage: Storage) -> None:
    _attempt(storage)
    assert sorted(storage.list(ATTEMPT)) == ["file", "manifest.json"]
    assert storage.list("") == [ATTEMPT]
    storage.rename(ATTEMPT, NAME)
    assert storage.list("") == [NAME]
    assert sorted(storage.list(NAME)) == ["file", "manifest.json"]
    assert _get(storage, f"{NAME}/manifest.json") == b"manifest"
    assert _get(storage, f"{NAME}/file") == b"data"
    storage.remove_folder(ATTEMPT)  # it no longer exists
    assert _get(storage, f"{NAME}/file") == b"data"
    storage.rename(NAME, REMOVED)
    assert storage.list("") == [REMOVED]
    with pytest.raises(FileNotFoundError):
        storage.size(f"{NAME}/manifest.json")
    storage.remove_folder(NAME)  # neither does this
    assert storage.list("") == [REMOVED]
    storage.remove_folder(REMOVED)
    assert storage.list("") == []


def test_a_committed_checkpoint_accepts_no_files(storage: Storage) -> None:
    _attempt(storage)
    storage.rename(ATTEMPT, NAME)
    with pytest.raises(FileNotFoundError):
        storage.create(f"{ATTEMPT}/file")
    with pytest.raises(FileNotFoundError):
        storage.list(ATTEMPT)
    assert _get(storage, f"{NAME}/file") == b"data"


def test_a_folder_is_never_renamed_onto_another(disk: Storage) -> None:
    disk.make_folder("")
    for folder in ("one", "two"):
        disk.make_folder(folder)
        _put(disk, f"{folder}/file", folder.encode())
    with pytest.raises(OSError) as caught:
        disk.rename("one", "two")
    assert caught.value.errno in (errno.EEXIST, errno.ENOTEMPTY)
    disk.rename("one", "three")
    assert sorted(disk.list("")) == ["three", "two"]
    assert _get(disk, "three/file") == b"one"
    disk.remove("three/file")
    assert disk.list("three") == []


def test_the_second_committer_to_an_object_store_gets_an_error(objects: Storage) -> None:
    _attempt(objects)
    objects.rename(ATTEMPT, NAME)
    inner = objects._putting if isinstance(objects, FolderStorage) else objects
    assert isinstance(inner, ObjectStorage)
    pending = inner._objects  # a second one had put its manifest before the first committed
    pending.put(f"{NAME}/.manifest-pending.json", b"manifest")
    with pytest.raises(FileExistsError) as caught:
        objects.rename(ATTEMPT, NAME)
    assert caught.value.errno == errno.EEXIST
    assert "manifest.json" in objects.list(NAME)


def test_an_object_store_does_not_rename_other_folders(objects: Storage) -> None:
    _attempt(objects)
    with pytest.raises(OSError, match="cannot rename"):
        objects.rename(ATTEMPT, "step-000000009.g2.ab")


def test_a_file_is_renamed_onto_another(storage: Storage) -> None:
    storage.make_folder("")
    _put(storage, "old", b"old")
    _put(storage, "new", b"new")
    storage.rename("new", "old")
    assert _get(storage, "old") == b"new"
    assert storage.list("") == ["old"]
    storage.remove("old")
    assert storage.list("") == []


@pytest.mark.parametrize("size", [3, PART_BYTES + 5])
def test_an_object_is_visible_only_once_it_is_complete(
    objects: Storage, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a reader could mistake the beginning of a file for all of it."""
    if isinstance(objects, FolderStorage) and size > 1 << 20:
        pytest.skip("large files, which only a complete part refers to, are written in place")
    monkeypatch.setattr(fsspec_store, "PART_BYTES", PART_BYTES)
    half = bytes(size // 2)
    synced = objects.create(f"{ATTEMPT}/synced")
    closed = objects.create(f"{ATTEMPT}/closed")
    for sink in (synced, closed):
        sink.write(half)
        sink.write(memoryview(b"x" * (size - len(half))))
    with pytest.raises(FileNotFoundError):
        objects.list(ATTEMPT)
    synced.sync()
    assert objects.list(ATTEMPT) == ["synced"]
    synced.close()
    closed.close()
    for file in ("synced", "closed"):
        assert objects.size(f"{ATTEMPT}/{file}") == size
        assert _get(objects, f"{ATTEMPT}/{file}", size - 2) == b"xx"


def test_an_object_whose_write_failed_does_not_exist(tmp_path: Path) -> None:
    fs = fsspec.filesystem("memory", global_store=False, skip_instance_cache=True)
    inner = FsspecObjects(fs, "/a/root")
    storage = ObjectStorage(FaultyObjects(inner, at=2, fault=StorageFault.IO_ERROR))
    sink = storage.create(f"{ATTEMPT}/file")  # call 0 checks for a commit
    sink.write(b"one")
    with pytest.raises(OSError, match="injected"):
        sink.write(b"two")
    sink.close()
    assert inner.list("") == {}


def test_a_closed_file_is_readable(storage: Storage) -> None:
    """Even without a sync, which is needed for power loss only."""
    storage.make_folder("")
    sink = storage.create("file")
    sink.write(b"content")
    sink.close()
    storage.rename("file", "other")
    assert _get(storage, "other") == b"content"


def test_an_empty_file_is_stored(storage: Storage) -> None:
    storage.make_folder("")
    _put(storage, "empty", b"")
    assert storage.size("empty") == 0
    assert _get(storage, "empty") == b""
    storage.rename("empty", "other")
    assert storage.list("") == ["other"]
