"""Loading from a memory file system: verified in place, then copied into live tensors."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.checkpoint_states import flip, odd_state, same, save_all, small_state

import checkpoints
from checkpoints import reader, storage
from checkpoints.storage import is_memory_file_system

SHM = Path("/dev/shm")


@pytest.fixture(autouse=True)
def memory_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the folder of the tests as being on a memory file system."""
    monkeypatch.setattr(storage, "is_memory_file_system", lambda device: True)


def zeros(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: zeros(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(map(zeros, state))
    if isinstance(state, torch.Tensor):
        return torch.zeros(state.shape, dtype=state.dtype)
    return state


@pytest.mark.parametrize("threads_from_bytes", [64 << 20, 0], ids=["one thread", "threads"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_kind_of_tensor_is_filled(
    tmp_path: Path, world_size: int, threads_from_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_PARALLEL_BYTES", threads_from_bytes)
    name = save_all(tmp_path, odd_state(), step=1, world_size=world_size)
    live = zeros(odd_state())
    loaded = checkpoints.load(tmp_path, name, into=live)
    assert same(loaded.state, odd_state())
    assert same(live, odd_state())


def test_views_and_parameters_are_filled_in_place(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    name = save_all(tmp_path, {"w": base, "p": base + 1}, step=1, world_size=2)
    live = {"w": torch.zeros(4, 6).t()[::2], "p": torch.nn.Parameter(torch.zeros(3, 4))}
    addresses = [tensor.data_ptr() for tensor in live.values()]
    checkpoints.load(tmp_path, name, into=live)
    assert torch.equal(live["w"], base) and torch.equal(live["p"].detach(), base + 1)
    assert [tensor.data_ptr() for tensor in live.values()] == addresses


@pytest.mark.parametrize("aliased", [True, False])
def test_tied_tensors_are_filled_wherever_they_are(tmp_path: Path, aliased: bool) -> None:
    weight = torch.arange(6.0)
    name = save_all(tmp_path, {"a": weight, "b": weight}, step=1)
    first = torch.zeros(6)
    live = {"a": first, "b": first if aliased else torch.zeros(6)}
    checkpoints.load(tmp_path, name, into=live)
    assert torch.equal(live["a"], weight) and torch.equal(live["b"], weight)


def test_non_strict_load_fills_matching_tensors_and_returns_the_rest(tmp_path: Path) -> None:
    name = save_all(tmp_path, small_state(9), step=9)
    live = {"model": {"weight": torch.zeros(7, 4), "bias": torch.zeros(5, dtype=torch.int64)}}
    loaded = checkpoints.load(tmp_path, name, into=live, strict=False)
    assert torch.equal(live["model"]["bias"], torch.full((5,), 9))
    assert not live["model"]["weight"].any()
    assert torch.equal(loaded.state["model"]["weight"], torch.full((7, 3), 9.0))


@pytest.mark.parametrize("file", ["00000-of-00002.safetensors", "00001-of-00002.safetensors"])
@pytest.mark.parametrize("at", [0, 100, -1])
def test_damage_is_detected_before_anything_is_changed(tmp_path: Path, file: str, at: int) -> None:
    name = save_all(tmp_path, small_state(9), step=9, world_size=2)
    flip(tmp_path / name / file, at)
    live = small_state(0)
    with pytest.raises(checkpoints.CorruptCheckpoint, match=file):
        checkpoints.load(tmp_path, name, into=live)
    assert same(live, small_state(0))


def later(path: Path) -> None:
    """Advance the mtime: the clock of a file system may have a resolution of milliseconds."""
    then = os.stat(path).st_mtime + 1
    os.utime(path, (then, then))


def overwritten(path: Path) -> None:
    flip(path, -1)
    later(path)


def shortened(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("change", [overwritten, shortened])
def test_a_file_that_changes_during_a_load_is_reported(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    name = save_all(tmp_path, small_state(9), step=9)
    file = tmp_path / name / "00000-of-00001.safetensors"
    seen: list[int] = []
    count = len(small_state(9)["model"]) + 1

    def progress(size: int) -> None:
        seen.append(size)
        if len(seen) == count:  # everything is verified; nothing is copied yet
            change(file)

    with pytest.raises(checkpoints.TornRead, match=name) as caught:
        checkpoints.load(tmp_path, name, into=small_state(0), progress=progress)
    assert "Load another checkpoint" in caught.value.hint


def test_a_checkpoint_removed_during_a_load_is_still_loaded(tmp_path: Path) -> None:
    name = save_all(tmp_path, small_state(9), step=9)
    loaded = checkpoints.load(
        tmp_path,
        name,
        into=small_state(0),
        progress=lambda _: shutil.rmtree(tmp_path / name, ignore_errors=True),
    )
    assert same(loaded.state, small_state(9))


def test_files_that_cannot_be_mapped_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    name = save_all(tmp_path, small_state(9), step=9)
    monkeypatch.setattr("checkpoints.storage.mmap.mmap", refused)
    before = len(os.listdir("/proc/self/fd"))
    loaded = checkpoints.load(tmp_path, name, into=small_state(0))
    assert same(loaded.state, small_state(9))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_has_just_changed_its_size_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = save_all(tmp_path, small_state(9), step=9, world_size=2)
    monkeypatch.setattr("checkpoints.storage.MappedFile.__len__", lambda file: 1)
    before = len(os.listdir("/proc/self/fd"))
    loaded = checkpoints.load(tmp_path, name, into=small_state(0))
    assert same(loaded.state, small_state(9))
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_file_stays_mapped_or_open(tmp_path: Path) -> None:
    name = save_all(tmp_path, small_state(9), step=9, world_size=3)
    before = len(os.listdir("/proc/self/fd"))
    checkpoints.load(tmp_path, name, into=small_state(0))
    flip(tmp_path / name / "00001-of-00003.safetensors", -1)
    with pytest.raises(checkpoints.CorruptCheckpoint) as caught:
        checkpoints.load(tmp_path, name, into=small_state(0))
    assert caught.value.tensor
    assert len(os.listdir("/proc/self/fd")) == before
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EFAULT], ids=["old kernel", "cut"])
def test_madvise_errors_are_handled(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux before 5.14 lacks MADV_POPULATE_READ; later ones fail if a file was truncated."""

    class Refusing(mmap.mmap):
        def madvise(self, *args: object) -> None:
            raise OSError(number, os.strerror(number))

    name = save_all(tmp_path, small_state(9), step=9)
    monkeypatch.setattr("checkpoints.storage.mmap.mmap", Refusing)
    live = small_state(0)
    if number == errno.EINVAL:
        loaded = checkpoints.load(tmp_path, name, into=live)
        assert same(loaded.state, small_state(9))
        return
    with pytest.raises(checkpoints.ReadFailed, match="Bad address"):
        checkpoints.load(tmp_path, name, into=live)
    assert same(live, small_state(0))


def test_memory_file_systems_are_recognized(tmp_path: Path) -> None:
    assert not is_memory_file_system(os.stat("/proc").st_dev)
    assert not is_memory_file_system(os.makedev(4095, 1 << 19))  # none
    if os.path.ismount(SHM):
        assert is_memory_file_system(SHM.stat().st_dev)
