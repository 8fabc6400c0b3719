"""What every storage for checkpoints keeps: the local one and the one in memory alike."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from checkpoints.faulty import FaultyStorage
from checkpoints.memory import MemoryStorage
from checkpoints.storage import LocalStorage, Storage


@pytest.fixture(params=["local", "memory", "faulty without a fault"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return LocalStorage(tmp_path / "a" / "root")
    inner = MemoryStorage()
    return inner if request.param == "memory" else FaultyStorage(inner)


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


def test_files_are_written_read_and_replaced(storage: Storage) -> None:
    storage.make_folder("")
    storage.make_folder("folder")
    storage.make_folder("folder")
    _put(storage, "folder/file", b"long content")
    _put(storage, "folder/file", b"content")
    assert _get(storage, "folder/file") == b"content"
    assert _get(storage, "folder/file", 3, 2) == b"te"
    assert storage.size("folder/file") == 7
    source = storage.open("folder/file")
    assert source.size() == 7
    source.close()
    assert storage.list("folder") == ["file"]
    assert storage.list("") == ["folder"]
    storage.sync_folder("folder")
    storage.sync_folder("")
    assert isinstance(storage.modified_s("folder/file"), float)


def test_what_is_missing_is_file_not_found(storage: Storage) -> None:
    storage.make_folder("")
    for call in (storage.list, storage.size, storage.open, storage.sync_folder):
        with pytest.raises(FileNotFoundError):
            call("missing")
    with pytest.raises(FileNotFoundError):
        storage.create("missing/file")
    with pytest.raises(FileNotFoundError):
        storage.remove("missing")
    with pytest.raises(FileNotFoundError):
        storage.rename("missing", "other")
    storage.remove_folder("missing")


def test_a_folder_is_renamed_whole_and_never_onto_another(storage: Storage) -> None:
    storage.make_folder("")
    for folder in ("one", "two"):
        storage.make_folder(folder)
        _put(storage, f"{folder}/file", folder.encode())
    with pytest.raises(OSError) as caught:
        storage.rename("one", "two")
    assert caught.value.errno in (errno.EEXIST, errno.ENOTEMPTY)
    storage.rename("one", "three")
    assert sorted(storage.list("")) == ["three", "two"]
    assert _get(storage, "three/file") == b"one"
    storage.remove("three/file")
    storage.remove_folder("two")
    assert storage.list("") == ["three"]
    assert storage.list("three") == []


def test_a_file_is_renamed_onto_another(storage: Storage) -> None:
    storage.make_folder("")
    _put(storage, "old", b"old")
    _put(storage, "new", b"new")
    storage.rename("new", "old")
    assert _get(storage, "old") == b"new"
    assert storage.list("") == ["old"]
