"""Which writer commits and when, and how other entries of the folder are handled."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.checkpoint_states import same, save_all, small_state

import checkpoints
from checkpoints import commit as manifests
from checkpoints import manifest as manifest_module
from checkpoints.commit import commit, merge_parts, read_manifest, read_parts
from checkpoints.manifest import (
    Chunk,
    ChunkTable,
    parse_manifest,
    parse_without_tensors,
    without_tensors,
)
from checkpoints.names import CheckpointName
from checkpoints.tensors import Region, Span
from checkpoints.testing import FaultyStorage, MemoryStorage


def _save(
    root: Path | FaultyStorage | MemoryStorage, rank: int, world_size: int, **more: object
) -> checkpoints.SaveResult:
    arguments = {"step": 5, "nonce": "aa", **more}
    return checkpoints.save(
        root,
        small_state(int(str(arguments["step"]))),
        rank=rank,
        world_size=world_size,
        **arguments,  # type: ignore[arg-type]
    )


def _folders(root: Path) -> list[str]:
    return sorted({path.name for path in root.iterdir()} - {"LATEST", ".summaries.json"})


def test_only_the_writer_that_finds_all_parts_commits(tmp_path: Path) -> None:
    assert [_save(tmp_path, rank, 3).committed for rank in (2, 0, 1)] == [False, False, True]
    assert _folders(tmp_path) == ["step-000000005.g0.aa"]
    assert sorted(os.listdir(tmp_path / "step-000000005.g0.aa")) == [
        "00000-of-00003.safetensors",
        "00001-of-00003.safetensors",
        "00002-of-00003.safetensors",
        "manifest.json",
    ]


def test_an_uncommitted_attempt_is_not_listed(tmp_path: Path) -> None:
    saved = _save(tmp_path, 0, 2)
    assert saved.notes == ("not committed: waiting for 1 of 2 writers: 1",)
    assert checkpoints.list_checkpoints(tmp_path) == ()
    assert checkpoints.latest(tmp_path).checkpoint is None


def test_saving_a_committed_step_again_changes_nothing(tmp_path: Path) -> None:
    name = save_all(tmp_path, small_state(5), step=5)
    again = checkpoints.save(tmp_path, small_state(5), step=5, nonce="aa")
    assert (again.committed, again.bytes_written) == (True, 0)
    with pytest.raises(checkpoints.NameTaken, match="another state"):
        checkpoints.save(tmp_path, small_state(6), step=5, nonce="aa")
    assert same(checkpoints.load(tmp_path, name).state, small_state(5))


def test_a_repeated_save_of_a_part_does_not_rewrite_it(tmp_path: Path) -> None:
    _save(tmp_path, 0, 2)
    file = tmp_path / ".tmp-step-000000005.g0.aa" / "00000-of-00002.safetensors"
    before = file.stat()
    assert _save(tmp_path, 0, 2).bytes_written == 0
    assert (file.stat().st_mtime_ns, file.stat().st_ino) == (before.st_mtime_ns, before.st_ino)


def test_parts_of_different_runs_never_form_one_checkpoint(tmp_path: Path) -> None:
    """Parts 0 and 1 of a crashed run, 2 and 3 of the next, same step."""
    for rank in (0, 1):
        _save(tmp_path, rank, 4, nonce="dead")
    for rank in (2, 3):
        assert not _save(tmp_path, rank, 4, nonce="beef").committed
    collected = checkpoints.collect_garbage(tmp_path, generation=0, nonce="beef")
    assert collected.committed == ()
    assert checkpoints.list_checkpoints(tmp_path) == ()


def test_a_part_of_another_world_in_an_attempt_is_rejected(tmp_path: Path) -> None:
    _save(tmp_path, 1, 2, nonce="dead")
    _save(tmp_path, 0, 2, nonce="beef")
    source = tmp_path / ".tmp-step-000000005.g0.dead"
    for file in source.iterdir():
        shutil.copy(file, tmp_path / ".tmp-step-000000005.g0.beef" / file.name)
    collected = checkpoints.collect_garbage(tmp_path, generation=0, nonce="beef")
    assert collected.committed == ()
    reasons = {left.folder: left.reason for left in collected.retained}
    assert "part 1 belongs to another world" in reasons[".tmp-step-000000005.g0.beef"]


def test_writers_with_different_tensors_do_not_commit(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, {"a": torch.ones(4)}, step=1, nonce="aa", rank=0, world_size=2)
    saved = checkpoints.save(
        tmp_path, {"a": torch.ones(5)}, step=1, nonce="aa", rank=1, world_size=2
    )
    assert not saved.committed
    assert saved.notes == ("not committed: writer 1 saved different tensors than writer 0",)


def test_a_stale_world_does_not_commit(tmp_path: Path) -> None:
    saved = _save(tmp_path, 0, 1, fence=lambda: False)
    assert not saved.committed
    assert "stale" in saved.notes[0]
    assert checkpoints.list_checkpoints(tmp_path) == ()


def test_committers_racing_at_any_call_both_succeed(tmp_path: Path) -> None:
    """A second committer runs to completion before the first one's n-th storage call, for all n."""
    name = CheckpointName(5, 0, "aa")
    at, calls = 0, 1
    while at < calls:
        root = tmp_path / str(at)
        _save(root, 0, 2)
        storage = _raced(root, name, at)
        assert _save(storage, 1, 2).committed, storage.calls[at]
        assert same(checkpoints.load(root, str(name)).state, small_state(5))
        assert _folders(root) == [str(name)]
        assert len(os.listdir(root / str(name))) == 3
        at, calls = at + 1, len(storage.calls)
    assert at > 20


def _raced(root: Path, name: CheckpointName, at: int) -> FaultyStorage:
    """A storage in which another writer commits, if possible, before the ``at``-th call."""
    seen: list[str] = []

    def race(label: str) -> None:
        seen.append(label)
        if len(seen) - 1 == at and (root / name.attempt / "part-00001-of-00002.json").exists():
            commit(checkpoints.LocalStorage(root), name, 2)

    return FaultyStorage(checkpoints.LocalStorage(root), before=race)


def test_the_next_start_finishes_the_commit_of_a_dead_writer(tmp_path: Path) -> None:
    _save(tmp_path, 0, 2)
    _save(tmp_path, 1, 2, fence=lambda: False)  # complete except for the commit
    collected = checkpoints.collect_garbage(tmp_path, generation=1, nonce="bb")
    assert collected.committed == ("step-000000005.g0.aa",)
    assert same(checkpoints.load(tmp_path, collected.committed[0]).state, small_state(5))


def test_garbage_collection_removes_only_ownerless_entries(tmp_path: Path) -> None:
    _save(tmp_path, 0, 2, generation=1, nonce="old")
    _save(tmp_path, 0, 2, generation=2, nonce="mine")
    _save(tmp_path, 0, 2, generation=2, nonce="other")
    _save(tmp_path, 0, 2, generation=3, nonce="new")
    name = save_all(tmp_path, small_state(1), step=1)
    (tmp_path / ".tmp-removed-step-000000002.g0.aa").mkdir()
    (tmp_path / ".tmp-LATEST-abcd").write_text("torn")
    (tmp_path / "my notes").mkdir()
    (tmp_path / ".tmp-mine-too").mkdir()
    collected = checkpoints.collect_garbage(tmp_path, generation=2, nonce="mine")
    assert set(collected.removed) == {
        ".tmp-step-000000005.g1.old",
        ".tmp-removed-step-000000002.g0.aa",
        ".tmp-LATEST-abcd",
    }
    assert [left.folder for left in collected.retained] == [
        ".tmp-step-000000005.g2.mine",
        ".tmp-step-000000005.g2.other",
        ".tmp-step-000000005.g3.new",
    ]
    assert (tmp_path / "my notes").exists()
    assert (tmp_path / ".tmp-mine-too").exists()
    assert [info.name for info in checkpoints.list_checkpoints(tmp_path)] == [name]


def test_an_attempt_of_an_unknown_run_is_removed_by_age(tmp_path: Path) -> None:
    _save(tmp_path, 0, 2)
    folder = tmp_path / ".tmp-step-000000005.g0.aa"
    changed = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    young = checkpoints.collect_garbage(tmp_path, min_age_s=60, clock=lambda: changed + 59)
    assert young.removed == ()
    old = checkpoints.collect_garbage(tmp_path, min_age_s=60, clock=lambda: changed + 61)
    assert old.removed == (folder.name,)


def test_garbage_collection_of_a_missing_folder_does_nothing(tmp_path: Path) -> None:
    collected = checkpoints.collect_garbage(tmp_path / "nowhere")
    assert collected == checkpoints.GarbageCollectionResult(committed=(), removed=(), retained=())


def test_retention_keeps_the_newest_by_generation_then_step(tmp_path: Path) -> None:
    for generation, step in ((1, 10), (1, 30), (2, 20)):
        save_all(tmp_path, {}, step=step, generation=generation, keep=None)
    save_all(tmp_path, {}, step=25, generation=2, keep=checkpoints.LatestN(2))
    assert [(i.generation, i.step) for i in checkpoints.list_checkpoints(tmp_path)] == [
        (2, 25),
        (2, 20),
    ]


def test_retention_never_removes_the_newest(tmp_path: Path) -> None:
    save_all(tmp_path, {}, step=1, keep=lambda names: ())
    save_all(tmp_path, {}, step=2, keep=lambda names: ())
    assert [info.step for info in checkpoints.list_checkpoints(tmp_path)] == [2]
    with pytest.raises(checkpoints.ArgumentError):
        checkpoints.LatestN(0)


def test_an_incomplete_attempt_is_removed_by_the_next_commit_of_its_world(
    tmp_path: Path,
) -> None:
    _save(tmp_path, 0, 2, step=5)  # rank 1 failed here
    _save(tmp_path, 0, 2, step=6, nonce="other")
    for rank in (0, 1):
        _save(tmp_path, rank, 2, step=7)
    assert _folders(tmp_path) == [".tmp-step-000000006.g0.other", "step-000000007.g0.aa"]


def test_the_latest_file_is_informational_only(tmp_path: Path) -> None:
    name = save_all(tmp_path, small_state(1), step=1)
    assert (tmp_path / "LATEST").read_text() == f"{name}\n"
    (tmp_path / "LATEST").write_text("step-000000009.g9.ff\n")
    found = checkpoints.latest(tmp_path).checkpoint
    assert found is not None
    assert found.name == name


def test_a_manifest_that_would_not_be_read_is_not_committed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every part is below the limit, and the manifest that they form is not."""
    monkeypatch.setattr(manifests, "MAX_DOCUMENT_BYTES", 20_000)
    state = {f"t{i}": torch.ones(4) for i in range(150)}
    checkpoints.save(tmp_path, {"t": torch.ones(4)}, step=1, nonce="aa")
    for rank in range(4):
        saved = checkpoints.save(tmp_path, state, step=2, nonce="aa", rank=rank, world_size=4)
    assert not saved.committed and "too many for a manifest" in saved.notes[0]
    found = checkpoints.latest(tmp_path)
    assert found.checkpoint is not None and found.checkpoint.step == 1 and found.skipped == ()


def test_shares_that_lack_a_part_of_a_tensor_are_not_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = MemoryStorage()
    assert not _save(storage, 0, 2).committed
    monkeypatch.setattr("checkpoints.saving.share_of", lambda *_: ())
    saved = _save(storage, 1, 2)
    assert not saved.committed and "do not form a valid checkpoint" in saved.notes[0]


def test_a_state_of_too_many_tensors_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(manifests, "MAX_DOCUMENT_BYTES", 20_000)
    state = {f"t{i}": torch.ones(4) for i in range(150)}
    with pytest.raises(checkpoints.StateError, match="too many for a manifest"):
        checkpoints.save(tmp_path, state, step=2, nonce="aa")
    assert _folders(tmp_path) == [], "nothing of it is left"


# -- many tensors -------------------------------------------------------------------------------


def test_a_writer_does_not_read_the_part_that_it_has_written() -> None:
    storage = FaultyStorage(MemoryStorage())
    assert [_save(storage, rank, 2).committed for rank in range(2)] == [False, True]
    read = [Path(call).name for call in storage.calls if call.startswith("open ")]
    # Each looks once whether it has written its part before.
    assert read.count("part-00000-of-00002.json") == 2
    assert read.count("part-00001-of-00002.json") == 1
    assert "manifest.json" not in read


def test_no_call_of_json_encodes_many_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the GIL until it returns, and with it training."""
    longest = [0]

    def dumps(*args: Any, **more: Any) -> str:
        text = encode(*args, **more)
        longest[0] = max(longest[0], len(text))
        return text

    encode = json.dumps
    monkeypatch.setattr(json, "dumps", dumps)
    state = {"m": {f"layers.{i}": torch.ones(2) for i in range(1000)}, "list": [torch.ones(1)] * 9}
    assert checkpoints.save(MemoryStorage(), state, step=1, nonce="aa").committed
    assert 0 < longest[0] < 1000


def test_chunks_of_many_tensors_are_nothing_that_the_garbage_collector_visits() -> None:
    """Otherwise each save makes it visit all objects of the process, holding the GIL."""
    chunks = [
        Chunk("file", 0, 8, Span(3, 2), "00"),
        Chunk("file", 8, 16, Region((0, 1), (1, 2)), "11"),
        Chunk("file", 16, 24, Region((1, 1), (1, 2)), "22"),
    ]
    written = ChunkTable()
    written.add("span", chunks[:1])
    for chunk in chunks[1:]:
        written.add("regions", [chunk])
    written.add("empty", [])
    assert dict(written) == {"span": (chunks[0],), "regions": tuple(chunks[1:])}
    gc.collect(0)
    assert not any(map(gc.is_tracked, written._rows.values()))


def test_parts_of_many_tensors_are_parsed_and_merged_without_objects_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """100,000 of them would make the garbage collector hold the GIL for 0.2 s, several times."""
    storage, world_size = MemoryStorage(), 2
    state = {f"layers.{i}": torch.full((3,), float(i)) for i in range(1000)}
    for rank in range(world_size):
        checkpoints.save(
            storage,
            state,
            step=1,
            nonce="aa",
            rank=rank,
            world_size=world_size,
            fence=lambda: False,
        )
    longest = 0

    class Decoder(json.JSONDecoder):
        def raw_decode(self, text: str, idx: int = 0) -> tuple[Any, int]:
            nonlocal longest
            value, end = super().raw_decode(text, idx)
            longest = max(longest, end - idx)
            return value, end

    monkeypatch.setattr(manifest_module, "_DECODER", Decoder())
    gc.collect()
    before = len(gc.get_objects())
    merged = merge_parts(read_parts(storage, CheckpointName(1, 0, "aa"), world_size))
    text = merged.to_bytes()
    gc.collect()
    assert len(gc.get_objects()) - before < 100 + tracked_dicts(len(state))
    assert 0 < longest < 1000
    assert parse_manifest(text, "manifest.json") == merged
    assert parse_without_tensors(text, "manifest.json") == without_tensors(merged)
    assert 0 < longest < 1000


def test_a_manifest_without_its_tensors_is_checked_as_a_whole_one() -> None:
    storage = MemoryStorage()
    state = {"loss": 1.0, "layers": [{"weight": torch.ones(2)}], "model": {"weight": torch.ones(3)}}
    name = checkpoints.save(storage, state, step=1, nonce="aa").name
    whole = read_manifest(storage, str(name))
    small = read_manifest(storage, str(name), parse_without_tensors)
    assert small == without_tensors(whole) and not small.tensors and len(whole.tensors) == 2
    damaged = bytearray(whole.to_bytes())
    damaged[len(damaged) // 2] ^= 1
    for data in (
        bytes(damaged),
        dataclasses.replace(whole, tree={"dict": {"a": {"tensor": "b"}}}).to_bytes(),
        dataclasses.replace(whole, tree={"dict": {"a": {"unknown": 1}}}).to_bytes(),
    ):
        with pytest.raises(checkpoints.CorruptCheckpoint):
            parse_without_tensors(data, "manifest.json")


def tracked_dicts(nodes: int) -> int:
    """The number of nodes of a tree that the garbage collector visits: it tracks each dict since
    Python 3.14."""
    return nodes if gc.is_tracked({"tensor": "name"}) else 0
