"""Parts in several places form one checkpoint: completeness, and which copy is read."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kit.checkpoint_states import flip, odd_state, same, save_all, small_state

import checkpoints
from checkpoints.errors import DiskFull
from checkpoints.memory import NodeMemory, available_bytes_in, used_bytes
from checkpoints.storage import LocalStorage
from checkpoints.testing import FaultyStorage
from checkpoints.tiers import TieredStorage

LONG_S = 90.0
PER_NODE = 2
Nodes = list[NodeMemory]


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return [NodeMemory(tmp_path / f"node-{index}") for index in range(3)]


def save(
    nodes: Nodes,
    state: Any,
    step: int,
    *,
    skipped_nodes: tuple[int, ...] = (),
    keep: checkpoints.RetentionFunction | None = None,
    generation: int = 0,
    nonce: str = "aa",
) -> None:
    """Every rank saves into its node's memory, except those of the nodes in ``skipped_nodes``."""
    for rank in range(len(nodes) * PER_NODE):
        if rank // PER_NODE in skipped_nodes:
            continue
        saved = checkpoints.save(
            nodes[rank // PER_NODE],
            state,
            step=step,
            nonce=nonce,
            generation=generation,
            rank=rank,
            world_size=len(nodes) * PER_NODE,
            keep=keep,
        )
        assert saved.committed and saved.notes == ()


def steps(tiers: TieredStorage) -> list[int]:
    return [info.step for info in checkpoints.list_checkpoints(tiers)]


def test_only_the_parts_of_all_nodes_form_a_checkpoint(nodes: Nodes) -> None:
    save(nodes, odd_state(), 5)
    save(nodes, odd_state(), 6, skipped_nodes=(1,))
    tiers = TieredStorage(nodes)
    found = checkpoints.latest(tiers)
    assert found.checkpoint is not None and found.checkpoint.step == 5
    assert same(checkpoints.load(tiers, found.checkpoint.name).state, odd_state())
    assert steps(TieredStorage(nodes[:2])) == []
    assert tiers.failures == ()


def test_a_merged_manifest_equals_a_committed_one(nodes: Nodes, tmp_path: Path) -> None:
    together = tmp_path / "disk"
    for rank in range(6):
        for root in (nodes[rank // PER_NODE], together):
            checkpoints.save(
                root, odd_state(), step=5, nonce="aa", rank=rank, world_size=6, clock=lambda: 7.0
            )
    name = "step-000000005.g0.aa"
    source = TieredStorage(nodes).open(f"{name}/manifest.json")
    data = bytearray(source.size())
    source.read_at(0, memoryview(data))
    assert bytes(data) == (together / name / "manifest.json").read_bytes()


def test_the_newest_checkpoint_of_all_tiers_is_used(nodes: Nodes, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    save_all(disk, small_state(10), step=10)
    save(nodes, small_state(12), 12)
    tiers = TieredStorage([*nodes, disk])
    assert steps(tiers) == [12, 10]
    found = checkpoints.latest(tiers).checkpoint
    assert found is not None
    assert same(checkpoints.load(tiers, found.name).state, small_state(12))
    for node in nodes[1:]:
        node.remove_folder(".tmp-step-000000012.g0.aa")
    assert steps(TieredStorage([*nodes, disk])) == [10]


def test_parts_on_disk_and_in_memory_complete_each_other(nodes: Nodes, tmp_path: Path) -> None:
    """The union of the parts counts, regardless of their places."""
    disk = LocalStorage(tmp_path / "disk")
    save(nodes, small_state(3), 3, skipped_nodes=(2,))
    for rank in (4, 5):
        checkpoints.save(disk, small_state(3), step=3, nonce="aa", rank=rank, world_size=6)
    tiers = TieredStorage([*nodes, disk])
    name = checkpoints.list_checkpoints(tiers)[0].name
    assert same(checkpoints.load(tiers, name).state, small_state(3))


def test_each_chunk_is_read_from_an_intact_copy(nodes: Nodes, tmp_path: Path) -> None:
    """Memory has one bad file, disk another one: together they have everything."""
    disk = tmp_path / "disk"
    save(nodes, small_state(3), 3)
    save_all(disk, small_state(3), step=3, world_size=6)
    folder = tmp_path / "node-0" / ".tmp-step-000000003.g0.aa"
    flip(folder / "00000-of-00006.safetensors", -1)
    flip(disk / "step-000000003.g0.aa" / "00003-of-00006.safetensors", -1)
    tiers = TieredStorage([*nodes, disk])
    name = checkpoints.list_checkpoints(tiers)[0].name
    assert same(checkpoints.load(tiers, name).state, small_state(3))
    assert [t.place for t in tiers.failures] == [str(tmp_path / "node-0")]
    assert "are damaged" in tiers.failures[0].reason
    (folder / "00001-of-00006.safetensors").write_bytes(b"cut")
    assert same(checkpoints.load(TieredStorage([*nodes, disk]), name).state, small_state(3))


def test_a_checkpoint_with_unrecoverable_damage_is_skipped(nodes: Nodes, tmp_path: Path) -> None:
    save(nodes, small_state(2), 2)
    save(nodes, small_state(3), 3)
    flip(tmp_path / "node-1" / ".tmp-step-000000003.g0.aa" / "00002-of-00006.safetensors", -1)
    found = checkpoints.latest(TieredStorage(nodes))
    assert found.checkpoint is not None and found.checkpoint.step == 2
    assert "00002-of-00006.safetensors" in found.skipped[0].reason
    with pytest.raises(checkpoints.CorruptCheckpoint, match="00002-of-00006"):
        checkpoints.load(TieredStorage(nodes), "step-000000003.g0.aa")


def test_a_damaged_part_is_read_from_a_copy_or_the_checkpoint_is_skipped(
    nodes: Nodes, tmp_path: Path
) -> None:
    save(nodes, small_state(2), 2)
    save(nodes, small_state(3), 3)
    copies = NodeMemory(tmp_path / "copies")
    checkpoints.save(copies, small_state(3), step=3, nonce="aa", rank=2, world_size=6)
    flip(tmp_path / "node-1" / ".tmp-step-000000003.g0.aa" / "part-00002-of-00006.json", 60)
    assert checkpoints.latest(TieredStorage([*nodes, copies])).skipped == ()
    found = checkpoints.latest(TieredStorage(nodes))
    assert found.checkpoint is not None and found.checkpoint.step == 2
    assert "do not form a complete checkpoint" in found.skipped[0].reason


def test_parts_of_two_worlds_never_form_one_checkpoint(nodes: Nodes) -> None:
    save(nodes, small_state(3), 3, skipped_nodes=(0,), nonce="dead")
    save(nodes, small_state(3), 3, skipped_nodes=(1, 2), nonce="beef")
    assert steps(TieredStorage(nodes)) == []


@pytest.mark.parametrize("call", ["list ", "open ", "read "])
def test_a_failing_place_is_skipped_and_reported(nodes: Nodes, tmp_path: Path, call: str) -> None:
    disk = tmp_path / "disk"
    save(nodes, small_state(3), 3)
    save_all(disk, small_state(3), step=3, world_size=6)
    asked = []

    def fail(label: str) -> None:
        if label.startswith(call):
            asked.append(label)
            raise OSError(errno.EIO, "the memory module smokes", label)

    tiers = TieredStorage([FaultyStorage(nodes[0], before=fail), *nodes[1:], disk])
    found = checkpoints.latest(tiers).checkpoint
    assert found is not None
    assert same(checkpoints.load(tiers, found.name).state, small_state(3))
    assert [(t.place, t.reason) for t in tiers.failures] == [
        (str(tmp_path / "node-0"), "the memory module smokes")
    ]
    assert len(asked) == 1  # it is not tried again


def test_tiers_are_read_only(nodes: Nodes) -> None:
    with pytest.raises(checkpoints.NotWritable):
        checkpoints.save(TieredStorage(nodes), small_state(1), step=1, nonce="aa")


def test_memory_keeps_the_newest_parts(nodes: Nodes) -> None:
    for step in range(6):
        save(nodes, small_state(step), step, keep=checkpoints.LatestN(3))
    assert steps(TieredStorage(nodes)) == [5, 4, 3]


def test_an_engine_reports_parts_in_memory_as_committed(nodes: Nodes) -> None:
    engines = [checkpoints.Engine(nodes[rank // PER_NODE]) for rank in range(6)]
    for rank, engine in enumerate(engines):
        world = checkpoints.WriterGroup(nonce="aa", rank=rank, size=6)
        outcome = engine.save_async(small_state(1), step=1, world=world).wait(30)
        assert outcome is not None and outcome.status is checkpoints.SaveStatus.COMMITTED
        engine.close()
    assert steps(TieredStorage(nodes)) == [1]


def test_a_save_that_does_not_fit_fails_with_the_reason(tmp_path: Path) -> None:
    memory = NodeMemory(tmp_path / "own", limit_bytes=3000)
    with checkpoints.Engine(memory) as engine:
        for step, status in ((1, "committed"), (2, "failed")):
            outcome = engine.save_async(
                small_state(step), step=step, world=checkpoints.WriterGroup(nonce="aa")
            ).wait(30)
            assert outcome is not None and outcome.status.value == status
    assert outcome is not None and isinstance(outcome.error, DiskFull)
    assert "the limit of 3000 bytes allows" in outcome.reason
    assert steps(TieredStorage([memory])) == [1]  # and nothing of the other one is left
    assert memory.list("") == [".tmp-step-000000001.g0.aa"]


def test_available_space_is_determined_by_the_lowest_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(100))
    assert used_bytes(tmp_path) == 100
    assert available_bytes_in(tmp_path, 1000) == (900, "the limit of 1000 bytes")
    left, bound = available_bytes_in(tmp_path, None)
    assert left > 0 and "limit" not in bound


def _room(left: int) -> Callable[[Path, int | None], tuple[int, str]]:
    return lambda folder, limit: (left, "the cgroup's memory")


def test_a_save_that_exceeds_available_memory_writes_nothing(tmp_path: Path) -> None:
    memory = NodeMemory(tmp_path, room=_room(1000))
    with pytest.raises(DiskFull, match="the cgroup's memory allows"):
        checkpoints.save(memory, {"large": odd_state()["float64"]} | odd_state(), step=1, nonce="a")
    assert used_bytes(tmp_path) == 0


def test_engines_save_to_memory_often_and_to_disk_rarely(tmp_path: Path) -> None:
    memory, disk = NodeMemory(tmp_path / "memory"), tmp_path / "disk"
    world = checkpoints.WriterGroup(nonce="aa")
    keep = checkpoints.LatestN(2)
    with checkpoints.Engine(memory) as often, checkpoints.Engine(disk, keep=keep) as rarely:
        for step in range(1, 22):
            for engine, every in ((often, 2), (rarely, 6)):
                if step % every == 0:
                    engine.save_async(small_state(step), step=step, world=world)
                    assert engine.wait(LONG_S)
    both = TieredStorage([memory, disk])
    assert steps(TieredStorage([memory])) == [20, 18, 16]
    assert [info.step for info in checkpoints.list_checkpoints(disk)] == [18, 12]
    newest = checkpoints.latest(both).checkpoint
    assert newest is not None and newest.step == 20
    assert same(checkpoints.load(both, newest.name).state, small_state(20))
