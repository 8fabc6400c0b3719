"""A restarted script that writes a checkpoint without having read one."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from elastic.launcher.scripts import FileReads, StartingOver, places, written_since
from elastic.testing.waiting import eventually

STATE = {"weights": torch.zeros(1000)}


def save(path: Path, value: float = 0.0) -> None:
    torch.save({"weights": torch.full((1000,), value)}, path)


def test_reads_are_detected_and_writes_are_not(tmp_path: Path) -> None:
    names = ("torch.pt", "mapped.pt", "x.safetensors", "lazy.bin", "overwritten.pt", "replaced.pt")
    paths = {name: tmp_path / name for name in names}
    for name, path in paths.items():
        if name.endswith(".safetensors"):
            save_file(STATE, path)
        else:
            save(path)
    reads = FileReads([*paths.values()])
    save(paths["overwritten.pt"])
    torch.load(paths["overwritten.pt"])  # just written by this process
    save(tmp_path / "new")
    (tmp_path / "new").replace(paths["replaced.pt"])
    assert reads.seen() == set()
    torch.load(paths["torch.pt"])
    torch.load(paths["mapped.pt"], mmap=True)
    load_file(paths["x.safetensors"])
    with paths["lazy.bin"].open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    read = {paths[n] for n in ("torch.pt", "mapped.pt", "x.safetensors", "lazy.bin")}
    assert reads.seen() == read
    mapped.close()
    reads.close()


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="missing"):
        FileReads([tmp_path / "missing.pt"])


def test_only_checkpoints_of_this_job_count(tmp_path: Path) -> None:
    save(tmp_path / "old.pt")
    os.utime(tmp_path / "old.pt", (0, 0))
    deep = tmp_path / "out" / "run-1" / "checkpoint-5"
    deep.mkdir(parents=True)
    save(deep / "model.pt")
    (tmp_path / "log.txt").write_text("x" * 1000)
    (tmp_path / "empty.pt").touch()
    hidden = tmp_path / ".cache"
    hidden.mkdir()
    save(hidden / "model.pt")
    found = {w.path: w.cut_off for w in written_since([tmp_path], 1.0)}
    assert found == {deep / "model.pt": False, tmp_path / "empty.pt": True}


def test_places_are_the_working_directory_and_paths_in_arguments(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here / "inside", there):
        folder.mkdir(parents=True)
    arguments = ["train.py", f"--out_dir={there}/new", "inside", "--steps=5"]
    assert set(places(arguments, here)) == {here, there}


@pytest.fixture
def warned() -> list[str]:
    return []


@pytest.fixture
def watch(tmp_path: Path, warned: list[str]) -> Iterator[StartingOver]:
    began = StartingOver(lambda: [tmp_path], lambda: True, warn=warned.append)
    yield began
    began.close()


def is_done() -> bool:
    return "elastic-starting-over" not in {thread.name for thread in threading.enumerate()}


def is_watching(path: Path) -> bool:
    """Whether this process watches the file: the kernel lists the inode of each watch."""
    wanted = f"ino:{path.stat().st_ino:x} "
    return any(
        wanted in info.read_text() for info in Path("/proc/self/fdinfo").iterdir() if info.exists()
    )


@pytest.mark.parametrize("again", ["ckpt.pt", "step-20.pt"])
def test_a_write_without_a_read_causes_a_warning(
    tmp_path: Path, watch: StartingOver, warned: list[str], again: str
) -> None:
    save(tmp_path / "ckpt.pt")
    watch.workers_start_again()
    eventually(lambda: is_watching(tmp_path / "ckpt.pt"))
    save(tmp_path / again, 1.0)
    eventually(is_done)
    (warning,) = warned
    assert f"written {tmp_path / again} " in warning
    assert ("again without having read it" in warning) == (again == "ckpt.pt")
    watch.workers_start_again()
    assert is_done(), "once is enough"


def test_the_only_checkpoint_may_have_been_cut_off_by_the_kill(
    tmp_path: Path, watch: StartingOver, warned: list[str]
) -> None:
    """torch.save truncates the file first, and a small checkpoint reaches it at the end."""
    (tmp_path / "ckpt.pt").touch()
    watch.workers_start_again()
    eventually(lambda: is_watching(tmp_path / "ckpt.pt"))
    save(tmp_path / "other.pt", 1.0)  # ckpt.pt may be no checkpoint
    save(tmp_path / "ckpt.pt", 1.0)
    eventually(is_done)
    (warning,) = warned
    assert f"written {tmp_path / 'ckpt.pt'} again without having read it" in warning


@pytest.mark.parametrize("cut_off", [False, True])
def test_a_read_ends_the_watch(
    tmp_path: Path, watch: StartingOver, warned: list[str], cut_off: bool
) -> None:
    save(tmp_path / "ckpt.pt")
    if cut_off:
        os.truncate(tmp_path / "ckpt.pt", 0)
    watch.workers_start_again()
    eventually(lambda: is_watching(tmp_path / "ckpt.pt"))
    with pytest.raises(EOFError) if cut_off else contextlib.nullcontext():
        torch.load(tmp_path / "ckpt.pt")
    save(tmp_path / "ckpt.pt", 1.0)
    eventually(is_done)
    assert warned == []


def test_without_checkpoints_nothing_is_watched(watch: StartingOver, warned: list[str]) -> None:
    watch.workers_start_again()
    eventually(is_done)
    assert warned == []
