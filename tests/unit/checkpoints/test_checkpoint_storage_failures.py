"""A storage that fails for a moment, for good, or for lack of space."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.checkpoint_states import flip, same, save_all, small_state
from kit.manual_clock import ManualClock
from kit.renames import refuse_renames

import checkpoints
from checkpoints import LatestN
from checkpoints.intervals import STORAGE_PATIENCE_S
from checkpoints.memory import NodeMemory
from checkpoints.objects import ObjectStorage, open_url, storage_for
from checkpoints.storage import LocalStorage, PatientStorage
from checkpoints.testing import FaultyStorage, MemoryStorage, SimulatedCrash, StorageFault
from checkpoints.tiers import TieredStorage
from elastic.errors import CheckpointRequired, ConfigError
from elastic.telemetry.log import get_logger
from elastic.train.folder import CheckpointFolder

WORLD: Any = SimpleNamespace(generation=2, nonce="n2")
NEWEST = "step-000000030.g1.aa"


def failing(
    inner: Any, chosen: Callable[[str], bool], number: int = errno.ESTALE, times: int | None = None
) -> PatientStorage:
    """A storage on which the chosen calls fail, the first ``times`` of them or all, and whose
    reader waits by a manual clock."""
    left = [times if times is not None else 1 << 30]

    def before(label: str) -> None:
        if chosen(label) and left[0] > 0:
            left[0] -= 1
            raise OSError(number, os.strerror(number), label)

    return PatientStorage(FaultyStorage(inner, before=before), clock=ManualClock())


def saved_disk() -> MemoryStorage:
    disk = MemoryStorage()
    for step in (10, 20, 30):
        save_all(disk, small_state(step), step=step, generation=1)
    return disk


def names(storage: Any) -> list[str]:
    return [info.name for info in checkpoints.list_checkpoints(storage)]


# -- reads --------------------------------------------------------------------------------------


def test_a_file_whose_close_fails_has_been_read() -> None:
    disk = failing(saved_disk(), lambda label: label.startswith("close "))
    latest = checkpoints.latest(disk)
    assert latest.skipped == () and latest.checkpoint is not None
    assert latest.checkpoint.name == NEWEST


def test_a_listing_without_the_newest_checkpoint_misleads_no_save(tmp_path: Path) -> None:
    """Some file systems list a new name after a delay."""
    late = ""

    class Late(LocalStorage):
        def list(self, path: str) -> list[str]:
            return [name for name in super().list(path) if name != late]

    for step in (1, 2, 3):
        late = f"step-{step:09d}.g0.aa"
        saved = save_all(Late(tmp_path), small_state(step), step=step, keep=LatestN(2))
        assert saved == late and (tmp_path / "LATEST").read_text().strip() == late
    assert names(tmp_path) == [f"step-{step:09d}.g0.aa" for step in (3, 2)]


def test_the_attempt_of_a_newer_version_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = MemoryStorage()
    checkpoints.save(disk, small_state(1), step=1, nonce="aa", generation=1, fence=lambda: False)

    def parse(data: bytes, file: str) -> Any:
        raise checkpoints.UnsupportedFormat(f"{file}: a newer format")

    monkeypatch.setattr("checkpoints.commit.parse_part", parse)
    collected = checkpoints.collect_garbage(disk, generation=2, nonce="n2")
    assert collected.removed == () and "newer format" in collected.failed[0].reason
    monkeypatch.undo()
    assert len(checkpoints.collect_garbage(disk, generation=2, nonce="n2").committed) == 1


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.ENOSPC])
@pytest.mark.parametrize("call", ["list ", "open ", "read ", "fstat "])
def test_a_read_that_fails_for_a_moment_is_repeated(call: str, number: int) -> None:
    # Once more than there are checkpoints: latest() first looks for a lineage in each.
    disk = failing(saved_disk(), lambda label: label.startswith(call), number, times=4)
    latest = checkpoints.latest(disk)
    assert latest.skipped == () and latest.checkpoint is not None
    assert same(checkpoints.load(disk, latest.checkpoint.name).state, small_state(30))


def test_a_read_is_repeated_for_a_limited_time_and_a_permanent_failure_not_at_all() -> None:
    clock = ManualClock()
    calls: list[str] = []

    def fail(label: str) -> None:
        calls.append(label)
        raise OSError(number, "injected", label)

    number = errno.EIO
    storage = PatientStorage(FaultyStorage(MemoryStorage(), before=fail), clock=clock)
    with pytest.raises(OSError, match="injected"):
        storage.list("")
    assert clock.monotonic() == pytest.approx(STORAGE_PATIENCE_S) and len(calls) > 3
    for number in (errno.EACCES, errno.ENOTDIR, errno.ENOSYS, errno.ENOENT):  # noqa: B007
        calls.clear()
        with pytest.raises(OSError, match="injected"):
            storage.list("")
        assert len(calls) == 1


def test_a_stale_handle_is_opened_again(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    stale: list[Any] = []

    class Stale(LocalStorage):
        def open(self, path: str) -> Any:
            source = super().open(path)
            if not stale:
                stale.append(source)

                def fail(offset: int, into: memoryview) -> int:
                    raise OSError(errno.ESTALE, "stale")

                return SimpleNamespace(read_at=fail, close=source.close)
            return source

    source = PatientStorage(Stale(tmp_path), clock=ManualClock()).open("file")
    data = bytearray(7)
    assert source.read_at(0, memoryview(data)) == 7 and bytes(data) == b"content"
    source.close()


# -- tiers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listing", "has_memory"),
    [*((n, False) for n in (1, 2, 3)), *((n, True) for n in (1, 2, 3, 4))],
)
def test_a_failed_listing_is_never_a_start_from_step_0(listing: int, has_memory: bool) -> None:
    seen = [0]

    def fails_from(label: str) -> bool:
        seen[0] += label == "list "
        return label == "list " and seen[0] >= listing

    for times, expected in ((2, NEWEST), (None, None)):
        seen[0] = 0
        folder = CheckpointFolder(
            failing(saved_disk(), fails_from, times=times), lambda *_: None, memory=has_memory
        )
        if expected is None:
            with pytest.raises(checkpoints.ReadFailed):
                folder.resolve(WORLD, required=False)
        else:
            assert folder.resolve(WORLD, required=False).name == expected


def test_memory_that_answers_does_not_hide_a_disk_that_cannot_be_listed() -> None:
    disk = failing(saved_disk(), lambda label: label == "list ")
    with pytest.raises(checkpoints.ReadFailed, match="Stale"):
        checkpoints.latest(TieredStorage([MemoryStorage(), disk]))


def test_a_listing_that_fails_at_first_leads_to_no_older_generation() -> None:
    """Later checkpoints would count as older ones, and be removed before them."""
    clock, is_over = ManualClock(), [False]

    def fails_at_first(label: str) -> None:
        if label == "list " and not is_over[0]:
            is_over[0] = clock.monotonic() >= STORAGE_PATIENCE_S  # the last repetition
            raise OSError(errno.ESTALE, "stale", label)

    storage = PatientStorage(FaultyStorage(saved_disk(), before=fails_at_first), clock=clock)
    world: Any = SimpleNamespace(generation=1, nonce="n2")
    folder = CheckpointFolder(storage, lambda *_: None)
    with pytest.raises(checkpoints.ReadFailed):
        folder.resolve(world, required=False)
    assert folder.resolve(world, required=False).generation == 2


@pytest.mark.parametrize("call", ["read", "list"])
def test_what_one_tier_cannot_read_does_not_hide_its_other_checkpoints(call: str) -> None:
    disk = failing(saved_disk(), lambda label: label.startswith(f"{call} {NEWEST}"))
    tiers = TieredStorage([disk])
    latest = checkpoints.latest(tiers)
    assert latest.checkpoint is not None and latest.checkpoint.step == 20
    assert [(skipped.name, skipped.is_unreadable) for skipped in latest.skipped] == [(NEWEST, True)]
    assert "Stale" in latest.skipped[0].reason and "Stale" in tiers.failures[0].reason


def refusing(*names: str) -> PatientStorage:
    """The three checkpoints, of which some have a file that cannot be read, for good."""
    return failing(saved_disk(), lambda label: any(name in label for name in names), errno.EIO)


@pytest.mark.parametrize("call", ["open", "read"])
def test_a_checkpoint_that_cannot_be_read_for_good_is_skipped_with_a_warning(
    call: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad sector must not end the job for good."""
    monkeypatch.setattr(get_logger(), "propagate", True)
    disk = refusing(f"{call} {NEWEST}/manifest.json")
    reported: list[str] = []
    folder = CheckpointFolder(disk, lambda name, _: reported.append(name))
    assert folder.resolve(WORLD, required=False).name == "step-000000020.g1.aa"
    assert reported == [NEWEST]
    assert "resuming from step 20 instead of 30" in caplog.text and NEWEST in caplog.text


def test_a_storage_that_cannot_be_read_does_not_lead_to_an_older_checkpoint() -> None:
    """Several unreadable checkpoints are not damaged: their storage fails, and may recover."""
    folder = CheckpointFolder(refusing(NEWEST, "step-000000020"), lambda *_: None)
    with pytest.raises(checkpoints.ReadFailed, match=r"step-000000020.*, step-000000030"):
        folder.resolve(WORLD, required=False)


def test_if_all_that_a_load_refuses_cannot_be_read_the_start_ends() -> None:
    folder = CheckpointFolder(saved_disk(), lambda *_: None)
    newest = checkpoints.SkippedCheckpoint(NEWEST, "EIO", is_unreadable=True)
    older = "step-000000020.g1.aa"
    assert folder.choose([newest], required=False) == older
    with pytest.raises(checkpoints.ReadFailed):
        folder.choose(
            [newest, checkpoints.SkippedCheckpoint(older, "EIO", is_unreadable=True)],
            required=False,
        )
    damaged = checkpoints.SkippedCheckpoint(older, "damaged")
    assert folder.choose([newest, damaged], required=False) == "step-000000010.g1.aa"


def test_the_only_checkpoint_that_cannot_be_read_is_no_missing_one() -> None:
    disk = MemoryStorage()
    save_all(disk, small_state(30), step=30, generation=1)
    unreadable = failing(disk, lambda label: NEWEST in label, errno.EIO)
    with pytest.raises(checkpoints.ReadFailed, match=NEWEST):
        CheckpointFolder(unreadable, lambda *_: None).resolve(WORLD, required=False)


def test_memory_that_cannot_be_read_is_replaced_by_the_disk(tmp_path: Path) -> None:
    memory = FaultyStorage(NodeMemory(tmp_path), at=0, fault=StorageFault.IO_ERROR)
    latest = checkpoints.latest(TieredStorage([memory, saved_disk()])).checkpoint
    assert latest is not None and latest.name == NEWEST


def test_large_damaged_chunks_are_read_from_another_tier(tmp_path: Path) -> None:
    state = {"w": torch.arange(800_000, dtype=torch.float32)}  # more than a read buffer
    for tier in ("fast", "disk"):
        saved = checkpoints.save(tmp_path / tier, state, step=1, nonce="aa", clock=lambda: 1.0)
    flip(tmp_path / "fast" / saved.name / "00000-of-00001.safetensors", -10)
    flip(tmp_path / "disk" / saved.name / "00000-of-00001.safetensors", 20)  # in its header
    tiers = TieredStorage([tmp_path / "fast", tmp_path / "disk"])
    assert same(checkpoints.load(tiers, saved.name).state, state)
    checkpoints.verify(tiers, saved.name)
    assert {failure.place for failure in tiers.failures} == {str(tmp_path / "fast")}


# -- retention ----------------------------------------------------------------------------------


def test_a_checkpoint_that_cannot_be_read_is_kept_and_does_not_count() -> None:
    disk = MemoryStorage()
    best = "step-000000001.g0.aa"
    keep = checkpoints.LatestN(1) | checkpoints.BestN(1, "loss")
    for step in (1, 2, 3):
        checkpoints.save(disk, {"loss": step}, step=step, nonce="aa", keep=keep)
    for times in (1, None):  # for a moment, and for good
        unreadable = failing(disk, lambda label: label == f"open {best}/manifest.json", times=times)
        for step in (4, 5):
            saved = checkpoints.save(unreadable, {"loss": 9}, step=step, nonce="aa", keep=keep)
            assert saved.committed and best in disk.list("")


def test_a_damaged_checkpoint_never_displaces_a_valid_one(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoints.save(tmp_path, small_state(step), step=step, nonce="aa", keep=None)
    flip(tmp_path / "step-000000003.g0.aa" / "00000-of-00001.safetensors", -1)
    assert checkpoints.prune(tmp_path, checkpoints.LatestN(1)) == ("step-000000001.g0.aa",)
    assert names(tmp_path) == ["step-000000003.g0.aa", "step-000000002.g0.aa"]
    (tmp_path / "step-000000003.g0.aa" / "manifest.json").write_text("damaged")
    checkpoints.save(tmp_path, small_state(4), step=4, nonce="aa", keep=checkpoints.LatestN(2))
    assert names(tmp_path) == ["step-000000004.g0.aa", "step-000000002.g0.aa"]


def test_milestones_are_the_steps_that_every_steps_saves() -> None:
    when = checkpoints.EverySteps(1000)
    keep = checkpoints.LatestN(1) | checkpoints.EveryNSteps(1000)
    storage = MemoryStorage()
    previous = saved_step = 0
    saves = []
    for step in range(3, 5010, 3):  # three accumulated steps per boundary
        context = checkpoints.SaveContext(
            step=step, previous_step=previous, now_s=0, began_s=0, saved_step=saved_step, saved_s=0
        )
        previous = step
        if when(context):
            saved_step = step
            saves.append(step)
            checkpoints.save(storage, {}, step=step, nonce="aa", keep=keep)
    kept = [info.step for info in checkpoints.list_checkpoints(storage)]
    assert kept[::-1] == saves == [1002, 2001, 3000, 4002, 5001]


def test_the_milestone_of_an_abandoned_branch_is_replaced() -> None:
    storage = MemoryStorage()
    keep = checkpoints.LatestN(1) | checkpoints.EveryNSteps(1000)
    for generation, step, lineage in (
        (1, 900, [(1, 0)]),
        (1, 1002, [(1, 0)]),
        (2, 1005, [(1, 0), (2, 900)]),  # 1002 was lost
        (2, 1500, [(1, 0), (2, 900)]),
        (2, 2001, [(1, 0), (2, 900)]),
    ):
        checkpoints.save(
            storage, {}, step=step, nonce="aa", generation=generation, lineage=lineage, keep=keep
        )
    assert [info.step for info in checkpoints.list_checkpoints(storage)] == [2001, 1005]


# -- space --------------------------------------------------------------------------------------


class Quota(LocalStorage):
    """A folder with a limit of space, which other users share."""

    def __init__(self, root: Path, limit_bytes: int) -> None:
        super().__init__(root)
        self.left_bytes = limit_bytes

    def create(self, path: str) -> Any:
        sink = super().create(path)

        def write(data: bytes | memoryview) -> None:
            used = sum(f.stat().st_size for f in Path(self.folder).rglob("*") if f.is_file())
            if used + memoryview(data).nbytes > self.left_bytes:
                raise OSError(errno.ENOSPC, "No space left on device")
            sink.write(data)
            sink.sync()

        return SimpleNamespace(write=write, sync=sink.sync, close=sink.close)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_short_lack_of_space_does_not_outlast_itself(
    tmp_path: Path, order: tuple[int, int]
) -> None:
    state = {"w": torch.ones(40_000)}
    disk = Quota(tmp_path, 700_000)  # three checkpoints, a new one and a third of one

    def save(step: int) -> bool:
        committed = False
        for rank in order:
            try:
                committed = checkpoints.save(
                    disk, state, step=step, nonce="aa", rank=rank, world_size=2
                ).committed
            except checkpoints.SaveError:
                committed = False
        return committed

    assert [save(step) for step in range(1, 5)] == [True] * 4
    for left_bytes in (490_000, 590_000):  # none, or only the first writer has room
        disk.left_bytes = left_bytes
        assert not save(5) and not save(6)
        assert list(tmp_path.glob(".tmp-*/*.safetensors")) == []
        disk.left_bytes = 700_000
        assert save(left_bytes)


@pytest.mark.parametrize("call", ["write", "rename", "list"])
def test_a_writer_that_fails_is_known_to_the_others_at_once(tmp_path: Path, call: str) -> None:
    """Whichever call of the other writer comes next, after the folder was removed."""

    def fail_as_writer_0(label: str) -> None:
        if failed or not label.startswith(f"{call} "):
            return
        failed.append(label)
        full = FaultyStorage(LocalStorage(tmp_path), at=5, fault=StorageFault.NO_SPACE)
        with pytest.raises(checkpoints.DiskFull):
            checkpoints.save(full, small_state(1), step=1, nonce="aa", rank=0, world_size=2)

    failed: list[str] = []
    disk = FaultyStorage(LocalStorage(tmp_path), before=fail_as_writer_0)
    with checkpoints.Engine(disk) as engine:
        waiting = engine.save_async(
            small_state(1), step=1, world=checkpoints.WriterGroup(nonce="aa", rank=1, size=2)
        )
        outcome = waiting.wait(60)
    assert failed
    assert outcome is not None and outcome.status is checkpoints.SaveStatus.FAILED
    assert "writer 0 could not write its part" in outcome.reason
    assert list(tmp_path.rglob("*.safetensors")) == []


@pytest.mark.parametrize(
    ("call", "world_size"),
    [("write .tmp", 2), ("write .tmp", 1), ("sync_folder .tmp", 1), ("rename .tmp", 1)],
)
def test_a_folder_that_another_process_removed_is_no_fault_of_the_disk(
    tmp_path: Path, call: str, world_size: int
) -> None:
    """The record of the writer that failed may follow later, or never; or a newer run saves into
    the folder."""
    attempt = ".tmp-step-000000001.g0.aa"

    def remove(label: str) -> None:
        if label.startswith(call):
            shutil.rmtree(tmp_path / attempt, ignore_errors=True)

    disk = FaultyStorage(LocalStorage(tmp_path), before=remove)
    rank = world_size - 1
    with pytest.raises(checkpoints.WriteFailed, match="another process removed its folder"):
        checkpoints.save(disk, small_state(1), step=1, nonce="aa", rank=rank, world_size=world_size)


def test_a_save_that_is_not_committed_in_time_leaves_nothing(tmp_path: Path) -> None:
    with checkpoints.Engine(tmp_path, deadline_s=0.2) as engine:
        for step in (1, 2):
            handle = engine.save_async(
                small_state(step), step=step, world=checkpoints.WriterGroup(nonce="aa", size=2)
            )
            assert handle.wait(60) is not None
        engine.submit(lambda: None)
        assert engine.close(60)
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_a_job_restarts_on_a_full_disk() -> None:
    disk = saved_disk()
    complete = small_state(40)
    checkpoints.save(disk, complete, step=40, nonce="aa", generation=1, fence=lambda: False)
    checkpoints.save(disk, small_state(50), step=50, nonce="aa", generation=1, world_size=2)
    reports: list[str] = []
    full = failing(disk, lambda label: label.startswith(("write ", "create ")), errno.ENOSPC)
    folder = CheckpointFolder(full, lambda name, reason: reports.append(f"{name}: {reason}"))
    folder.check_writable(0)
    source = folder.resolve(WORLD, required=False)
    assert (source.name, source.generation, source.is_recorded) == (NEWEST, 2, False)
    assert [entry for entry in disk.list("") if entry.startswith(".tmp-")] == [
        ".tmp-step-000000040.g1.aa"
    ], "the incomplete attempt takes space, the complete one may be committed later"
    assert len(reports) == 3 and all("space" in report for report in reports)
    source = CheckpointFolder(disk, lambda *_: None).resolve(WORLD, required=False)
    assert source.name == "step-000000040.g1.aa"


def test_incomplete_attempts_make_room_for_the_commit_of_complete_ones(tmp_path: Path) -> None:
    disk = Quota(tmp_path, 1 << 20)
    state = {"w": torch.ones(40_000)}
    save_all(disk, state, step=1)
    for step, size in ((2, 1), (3, 2)):  # the incomplete one is the newer
        checkpoints.save(
            disk, state, step=step, nonce="aa", world_size=size, fence=lambda: False, generation=1
        )
    disk.left_bytes = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    collected = checkpoints.collect_garbage(disk, generation=2, nonce="n2")
    assert collected.committed == ("step-000000002.g1.aa",) and collected.failed == ()
    assert collected.removed == (".tmp-step-000000003.g1.aa",)


def test_a_checkpoint_archived_by_a_symbolic_link_blocks_nothing(tmp_path: Path) -> None:
    root, archive = tmp_path / "root", tmp_path / "archive"
    name = save_all(root, small_state(1), step=1)
    archive.mkdir()
    shutil.move(root / name, archive)
    (root / name).symlink_to(archive / name)
    for step in (2, 3, 4):
        saved = checkpoints.save(root, small_state(step), step=step, nonce="aa")
    assert saved.notes == () and not (root / name).exists()
    assert same(checkpoints.load(archive, name).state, small_state(1)), "only the link is removed"


def test_a_full_disk_is_freed_of_what_the_policy_no_longer_keeps(tmp_path: Path) -> None:
    """The user keeps fewer, as the error says, or removals have failed before."""
    state = {"w": torch.ones(40_000)}
    disk = Quota(tmp_path, 700_000)  # four checkpoints and a third
    for step in range(1, 5):
        checkpoints.save(disk, state, step=step, nonce="aa", keep=LatestN(9))
    with pytest.raises(checkpoints.DiskFull, match="keep fewer"):
        checkpoints.save(disk, state, step=5, nonce="aa", keep=LatestN(9))
    with pytest.raises(checkpoints.DiskFull):
        checkpoints.save(disk, state, step=5, nonce="aa", keep=LatestN(2), fence=lambda: False)
    assert len(names(disk)) == 4, "a stale world removes nothing"
    assert checkpoints.save(disk, state, step=6, nonce="aa", keep=LatestN(2)).committed
    assert [info.step for info in checkpoints.list_checkpoints(disk)] == [6, 4]


def test_a_full_disk_is_not_freed_of_the_only_checkpoint_that_is_still_intact() -> None:
    disk = MemoryStorage()
    is_full = [False]

    def before(label: str) -> None:
        if is_full[0] and label.startswith("write "):
            raise OSError(errno.ENOSPC, "full", label)

    group = checkpoints.WriterGroup(nonce="aa")
    with checkpoints.Engine(FaultyStorage(disk, before=before), keep=None) as engine:
        for step in (1, 2):
            engine.save_async(small_state(step), step=step, world=group).wait()
    with checkpoints.Engine(FaultyStorage(disk, before=before), keep=LatestN(2)) as engine:
        engine.save_async(small_state(3), step=3, world=group).wait()  # it knows 2 and 3
        for name in names(disk)[:2]:
            del disk.contents(f"{name}/00000-of-00001.safetensors")[-1]
        save_all(disk, small_state(1), step=1)
        is_full[0] = True
        outcome = engine.save_async(small_state(4), step=4, world=group).wait()
    assert outcome is not None and outcome.status is checkpoints.SaveStatus.FAILED
    assert [info.step for info in checkpoints.list_checkpoints(disk)] == [1]


def test_a_full_disk_is_freed_of_attempts_of_earlier_worlds(tmp_path: Path) -> None:
    """Those that the collection at the start could not remove, and, if need be, not commit."""
    state = {"w": torch.ones(40_000)}
    disk = Quota(tmp_path, 700_000)
    checkpoints.save(disk, state, step=1, nonce="aa")
    for step, size in ((2, 2), (3, 2), (4, 1)):
        checkpoints.save(
            disk, state, step=step, nonce="aa", world_size=size, fence=lambda: False, generation=1
        )
    attempts = [entry for entry in disk.list("") if entry.startswith(".tmp-step")]
    assert len(attempts) == 3
    state = {"w": torch.ones(80_000)}
    for left_bytes, complete in ((600_000, True), (500_000, False)):
        disk.left_bytes = left_bytes
        saved = checkpoints.save(
            disk, state, step=5, nonce=f"a{left_bytes}", world_size=2, generation=2, rank=1
        )
        left = [entry for entry in disk.list("") if entry.startswith(".tmp-step-000000004")]
        assert saved.is_waiting and bool(left) is complete
    assert ".tmp-step-000000002.g1.aa" not in disk.list("")


@pytest.mark.parametrize("call", ["write", "rename"])
def test_saves_that_fail_for_long_leave_one_attempt(call: str) -> None:
    """The shares of one writer, or the commit."""

    def fails(label: str) -> bool:
        return label.startswith(f"{call} .tmp-step") and ("/" in label) is (call == "write")

    disk = saved_disk()
    broken = failing(disk, fails, errno.EIO)
    for step in (40, 50, 60):
        save = functools.partial(
            checkpoints.save, step=step, nonce="aa", generation=1, world_size=2
        )
        save(disk, small_state(step), rank=1)
        with pytest.raises(checkpoints.WriteFailed):
            save(broken, small_state(step), rank=0)
    attempts = [entry for entry in disk.list("") if entry.startswith(".tmp-step")]
    assert attempts == [".tmp-step-000000060.g1.aa"]


def test_killed_commits_leave_no_manifests_behind() -> None:
    disk = MemoryStorage()
    for start in range(2, 6):
        with pytest.raises(SimulatedCrash):
            crashing = FaultyStorage(disk, before=_dies_at_manifest())
            if start == 2:
                checkpoints.save(crashing, small_state(1), step=1, nonce="aa", generation=1)
            checkpoints.collect_garbage(crashing, generation=start, nonce="bb")
        files = disk.list(".tmp-step-000000001.g1.aa")
        assert sum(file.startswith(".manifest-") for file in files) == 1


def _dies_at_manifest() -> Callable[[str], None]:
    """Dies once a manifest is written, before it is renamed."""
    dead = [False]

    def before(label: str) -> None:
        dead[0] |= label.startswith("rename .tmp-step") and ".manifest-" in label
        if dead[0]:
            raise SimulatedCrash(label)

    return before


def test_leftovers_that_cannot_be_removed_are_reported() -> None:
    disk = saved_disk()
    checkpoints.save(disk, small_state(50), step=50, nonce="aa", generation=1, world_size=2)
    reports: list[tuple[str, str]] = []
    stuck = failing(disk, lambda label: label.startswith("remove"), errno.EPERM)
    folder = CheckpointFolder(stuck, lambda *report: reports.append(report))
    assert folder.resolve(WORLD, required=False).name == NEWEST
    assert reports == [
        (".tmp-step-000000050.g1.aa", "it cannot be removed: Operation not permitted")
    ]


def test_kills_of_a_job_whose_world_is_always_the_first_leave_one_attempt() -> None:
    disk = MemoryStorage()
    world: Any = SimpleNamespace(generation=1, nonce="n")
    for start in range(1, 5):
        world.nonce = f"n{start}"
        folder = CheckpointFolder(disk, lambda *_: None)
        generation = folder.resolve(world, required=False).generation
        save_all(disk, small_state(start), step=start, nonce=world.nonce, generation=generation)
        with pytest.raises(SimulatedCrash):
            checkpoints.save(
                FaultyStorage(disk, at=8),
                small_state(start + 1),
                step=start + 1,
                nonce=world.nonce,
                generation=generation,
            )
        assert sum(entry.startswith(".tmp-step") for entry in disk.list("")) == 1


@pytest.mark.parametrize("record", [b"1000000000000000", b"9" * 400, b"-1", b"\0\0", b"[1]"])
def test_a_damaged_record_of_the_generation_counts_for_nothing(record: bytes) -> None:
    """In a generation above the limit, no checkpoint could be saved."""
    disk = saved_disk()
    disk.create(".generation").write(record)
    generation = CheckpointFolder(disk, lambda *_: None).resolve(WORLD, required=True).generation
    save_all(disk, small_state(40), step=40, generation=generation)


def test_an_old_attempt_of_a_newer_generation_is_removed() -> None:
    disk = MemoryStorage()
    checkpoints.save(disk, small_state(1), step=1, nonce="aa", generation=7, world_size=2)
    young = checkpoints.collect_garbage(disk, generation=1, nonce="bb", clock=lambda: 1.0)
    assert [retained.folder for retained in young.retained] == [".tmp-step-000000001.g7.aa"]
    old = checkpoints.collect_garbage(disk, generation=1, nonce="bb", clock=lambda: 1e6)
    assert old.removed == (".tmp-step-000000001.g7.aa",)


def test_failed_small_files_leave_nothing() -> None:
    disk = saved_disk()
    for fails in ("write .tmp-LATEST", "sync .tmp-LATEST", "rename .tmp-LATEST"):
        full = failing(disk, lambda label, fails=fails: label.startswith(fails), errno.ENOSPC)  # type: ignore[misc]
        saved = checkpoints.save(full, small_state(40), step=40, nonce=fails[:4], generation=1)
        assert saved.committed
        CheckpointFolder(full, lambda *_: None).resolve(WORLD, required=False)
        assert [entry for entry in disk.list("") if entry.startswith(".tmp")] == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_a_probe_of_the_folder_that_fails_leaves_nothing(number: int) -> None:
    disk = saved_disk()
    before = disk.list("")
    full = failing(disk, lambda label: label == "close .writable-0", number)
    with contextlib.suppress(ConfigError):
        CheckpointFolder(full, lambda *_: None).check_writable(0)
    assert disk.list("") == before


# -- memory -------------------------------------------------------------------------------------


def test_memory_makes_room_before_it_writes(tmp_path: Path) -> None:
    memory = NodeMemory(tmp_path, limit_bytes=380_000, room=None)
    for step in range(1, 9):
        state = {"w": torch.ones(25_000 if step < 6 else 60_000)}  # the world shrinks
        checkpoints.save(memory, state, step=step, nonce="aa")
        assert memory.names()[0].step == step
    assert [name.step for name in memory.names()] == [8]


def test_memory_that_can_never_hold_a_share_keeps_what_it_has(tmp_path: Path) -> None:
    memory = NodeMemory(tmp_path, limit_bytes=380_000)
    for step in (1, 2):
        checkpoints.save(memory, {"w": torch.ones(25_000)}, step=step, nonce="aa")
    with pytest.raises(checkpoints.DiskFull, match="the limit of 380000 bytes"):
        checkpoints.save(memory, {"w": torch.ones(100_000)}, step=3, nonce="aa")
    assert [name.step for name in memory.names()] == [2, 1]
    assert [entry for entry in memory.list("") if "000003" in entry] == []


def test_failed_saves_displace_no_complete_part(tmp_path: Path) -> None:
    is_full = [False]

    def room(folder: Path, limit: int | None) -> tuple[int, str]:
        return (0, "the machine's memory") if is_full[0] else (1 << 40, "")

    memory = [NodeMemory(tmp_path / "0", room=room), NodeMemory(tmp_path / "1")]

    def save(step: int, *ranks: int) -> None:
        for rank in ranks:
            try:
                checkpoints.save(
                    memory[rank], small_state(step), step=step, nonce="aa", rank=rank, world_size=2
                )
            except checkpoints.DiskFull:
                pass

    save(10, 0, 1)
    save(20, 0, 1)
    is_full[0] = True
    save(30, 0, 1)
    save(40, 0, 1)
    is_full[0] = False
    save(50, 0)
    latest = checkpoints.latest(TieredStorage(memory)).checkpoint
    assert latest is not None and latest.step == 20


def test_what_killed_writers_leave_in_memory_counts_for_nothing_and_is_removed(
    tmp_path: Path,
) -> None:
    memory = NodeMemory(tmp_path, room=lambda folder, limit: (1 << 40, ""))

    def save(*steps: int) -> list[int]:
        for step in steps:
            checkpoints.save(memory, small_state(step), step=step, nonce="aa", keep=LatestN(3))
        return [name.step for name in memory.names()]

    save(1, 2)
    for step in (3, 4):
        memory.make_folder(f".tmp-step-{step:09d}.g0.aa")
        memory.create(f".tmp-step-{step:09d}.g0.aa/00000-of-00001.safetensors").close()
    assert save(5) == [5, 2, 1]
    assert save(6, 7, 8) == [8, 7, 6]
    assert len(memory.list("")) == 3


# -- file systems -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "of_files"),
    [
        (errno.EINVAL, False),
        (errno.ENOSYS, False),
        (errno.EOPNOTSUPP, False),
        (errno.EBADF, False),
        (errno.ENOSYS, True),
    ],
)
def test_a_file_system_without_fsync_is_used(
    tmp_path: Path, number: int, of_files: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def refuse(descriptor: int) -> None:
        if of_files or os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    root = tmp_path / "new" / "root"
    CheckpointFolder(root, lambda *_: None).check_writable(0)
    save_all(root, small_state(1), step=1)
    assert same(checkpoints.load(root, names(root)[0]).state, small_state(1))


@pytest.mark.parametrize(
    ("number", "of_files", "as_storage"),
    [
        (errno.EINVAL, False, False),
        (errno.ENOSYS, True, False),
        (errno.EOPNOTSUPP, False, True),
        (errno.EMFILE, False, False),
        (errno.EXDEV, False, True),
        (errno.EXDEV, True, False),
        (errno.EPERM, True, False),
        (errno.EACCES, False, False),
    ],
)
def test_a_file_system_that_cannot_rename_is_used(
    tmp_path: Path, number: int, of_files: bool, as_storage: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writers, garbage collection, retention and readers, which do not find out by a rename."""
    with monkeypatch.context() as patch:
        refuse_renames(patch, number, of_files=of_files)
        root = LocalStorage(tmp_path) if as_storage else tmp_path
        folder = CheckpointFolder(root, lambda *_: None)
        folder.check_writable(0)
        for step in (1, 2, 3, 4):
            save_all(root, small_state(step), step=step, world_size=2, keep=LatestN(2))
        checkpoints.save(tmp_path, small_state(5), step=5, nonce="aa", rank=0, world_size=2)
        assert folder.resolve(WORLD, required=True).name == names(tmp_path)[0]
        assert [name.partition(".")[0] for name in names(tmp_path)] == [
            "step-000000004",
            "step-000000003",
        ]
        assert (tmp_path / "LATEST").read_text().strip() == names(tmp_path)[0]
    # Another mount of the folder, or the bucket.
    for other in (tmp_path, ObjectStorage(open_url(f"file://{tmp_path}"))):
        assert same(checkpoints.load(other, names(tmp_path)[0]).state, small_state(4))
    assert not [entry for entry in os.listdir(tmp_path) if entry.startswith(".tmp")]


@pytest.mark.parametrize(
    ("call", "number"), [("fsync", errno.EIO), ("rename", errno.EBUSY), ("rename", errno.EIO)]
)
def test_a_job_does_not_begin_in_a_folder_in_which_no_save_can_end(
    tmp_path: Path, call: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where files can be created, but their folder cannot be made durable or renamed."""
    real = getattr(os, call)

    def refuse(target: int | str | Path, *others: str | Path) -> None:
        if os.path.isdir(f"/proc/self/fd/{target}" if isinstance(target, int) else target):
            raise OSError(number, os.strerror(number))
        real(target, *others)

    monkeypatch.setattr(os, call, refuse)
    folder = CheckpointFolder(tmp_path / "root", lambda *_: None)
    with pytest.raises(ConfigError, match=os.strerror(number)):
        folder.check_writable(0)


def test_an_attempt_without_a_manifest_is_no_damaged_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        refuse_renames(patch, errno.ENOSYS)
        save_all(tmp_path, small_state(1), step=1)
        checkpoints.save(tmp_path, small_state(2), step=2, nonce="aa", rank=0, world_size=2)
    latest = checkpoints.latest(tmp_path)  # in a process that can rename
    assert latest.checkpoint is not None and latest.checkpoint.step == 1 and latest.skipped == ()


def test_file_systems_that_can_rename_are_left_without_a_trace(tmp_path: Path) -> None:
    CheckpointFolder(tmp_path, lambda *_: None).check_writable(0)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_does_not_decide_how_checkpoints_are_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_renames(monkeypatch, errno.ENOSYS)
    storage = storage_for(tmp_path)
    with monkeypatch.context() as patch:

        def full(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(os, "mkdir", full)
        with pytest.raises(OSError):
            storage.make_folder(".tmp-step-000000001.g1.ab")
    save_all(storage, small_state(1), step=1)
    assert same(checkpoints.load(tmp_path, names(tmp_path)[0]).state, small_state(1))


def test_a_folder_whose_checkpoints_are_missing_is_no_start_from_step_0(tmp_path: Path) -> None:
    name = save_all(tmp_path, small_state(7), step=7)
    shutil.rmtree(tmp_path / name)
    folder = CheckpointFolder(tmp_path, lambda *_: None)
    with pytest.raises(CheckpointRequired, match=f"its file LATEST names {name}"):
        folder.resolve(WORLD, required=False)
    (tmp_path / "LATEST").unlink()
    assert folder.resolve(WORLD, required=False).name is None
