"""Saves into the node's memory in addition to disk: at which steps, and where a job resumes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import checkpoints
from checkpoints.memory import MemoryHost, memory_roots
from checkpoints.tiers import TieredStorage
from elastic.errors import SYSTEM_CLOCK, CheckpointRequired, ConfigError
from elastic.groups.world import ReplicaMesh, World
from elastic.train import transfer
from elastic.train.checkpointing import CheckpointManager
from elastic.train.current import CurrentStep
from elastic.train.folder import CheckpointFolder, Checkpoints
from elastic.train.memory import VARIABLE, MemoryInterval, MemoryTier
from elastic.train.optimizers import Registry
from elastic.train.progress import Agreement, RankProgress
from elastic.train.state import JobState
from elastic.train.transfer import Reconfiguration


class Job:
    """The part of a job's state that a memory tier reads."""

    def __init__(self, step: int) -> None:
        self.progress = self
        self.step = step

    def saved_tree(self) -> dict[str, object]:
        return {"weight": torch.full((3,), float(self.step))}

    def data_position(self) -> int:
        return self.step


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryHost]:
    memory_host = MemoryHost(tmp_path / "memory", host="127.0.0.1")
    monkeypatch.setenv(VARIABLE, str(memory_host.folder))
    yield memory_host
    memory_host.close()


def tier(reports: list[str], every_steps: int | None = 5) -> MemoryTier:
    return MemoryTier(
        MemoryInterval(every_steps, overhead=0.01, clock=SYSTEM_CLOCK, changed=lambda *_: None),
        report=lambda name, reason: reports.append(reason),
        clock=SYSTEM_CLOCK,
    )


def save(memory: MemoryTier, steps: range, *, nonce: str = "aa", **how: bool) -> None:
    memory.waits = True  # at each boundary, until the previous save is written
    for step in (*steps, steps[-1]):
        memory.at_boundary(Job(step), checkpoints.WriterGroup(nonce=nonce), **how)  # type: ignore[arg-type]


def saved_steps(host: MemoryHost) -> list[int]:
    listed = checkpoints.list_checkpoints(TieredStorage(memory_roots(host.folder)))
    return sorted(info.step for info in listed)


def test_the_memory_tier_saves_at_its_interval_and_keeps_the_newest(host: MemoryHost) -> None:
    reports: list[str] = []
    memory = tier(reports)
    save(memory, range(1, 24))
    memory.close()
    listed = checkpoints.list_checkpoints(TieredStorage(memory_roots(host.folder)))
    assert [info.step for info in listed] == [20, 15, 10]
    assert listed[0].data_position == 20
    assert reports == []


def test_an_automatic_interval_includes_the_wait_for_the_writer(host: MemoryHost) -> None:
    memory = tier([], every_steps=None)
    save(memory, range(1, 22))
    assert memory.interval.needs_agreement
    memory.interval.agree(22)
    costs = memory.interval.meter.costs(None)
    assert costs.wait_s is not None and costs.step_s is not None
    assert costs.wait_s > costs.step_s, "steps are empty here"
    assert memory.interval.every_steps > 10
    memory.close()


def test_a_job_resumes_from_the_newest_of_memory_and_disk(host: MemoryHost, tmp_path: Path) -> None:
    for step in (7, 12):
        checkpoints.save(tmp_path / "disk", Job(step).saved_tree(), step=step, nonce="aa")
    memory = tier([])
    save(memory, range(1, 12))
    world = World(
        generation=2,
        rank=0,
        size=1,
        local_rank=0,
        local_size=1,
        nonce="bb",
        lineage=(1,),
        node="n1",
        is_launched=True,
    )
    steps = []
    for _ in range(2):
        folder = CheckpointFolder(tmp_path / "disk", lambda name, why: None, memory=True)
        name = folder.resolve(world, required=True).name
        assert name is not None
        steps.append(folder.load(name, JobState(seed=0)).info.step)
        save(memory, range(15, 16))
    memory.close()
    assert steps == [12, 15]


def test_a_missing_memory_host_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    reports: list[str] = []
    save(tier(reports), range(1, 20))
    assert reports == ["no agent hosts memory here: checkpoints are saved to disk only"]
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gone"))
    save(tier(reports), range(1, 20))
    assert len(reports) == 2 and "cannot be used" in reports[1]


def test_a_memory_failure_is_reported_once_and_saves_resume(host: MemoryHost) -> None:
    reports: list[str] = []
    memory = tier(reports)
    save(memory, range(5, 6))
    shutil.rmtree(host.folder / "own")
    (host.folder / "own").touch()  # nothing can be written below a file
    save(memory, range(6, 30))
    assert len(reports) == 1 and "memory: failed" in reports[0]
    (host.folder / "own").unlink()
    save(memory, range(30, 31))
    memory.close()
    assert len(reports) == 1
    listed = checkpoints.list_checkpoints(TieredStorage(memory_roots(host.folder)))
    assert [info.step for info in listed] == [30]


def test_a_memory_interval_of_zero_is_rejected() -> None:
    with pytest.raises(ConfigError, match="memory=0"):
        Checkpoints("f", memory=0)


def test_another_replica_saves_from_its_first_boundary_as_the_first_one(host: MemoryHost) -> None:
    """Its ranks have written nothing before, and follow the interval. Steps may be repeated."""
    memory = tier([])
    memory.enter_world(4, saves_first=True)
    save(memory, range(1, 9), is_writer=False)
    assert saved_steps(host) == []
    memory.enter_world(2, saves_first=True)
    save(memory, range(8, 12), nonce="bb")
    assert saved_steps(host) == [8, 10]
    memory.enter_world(4, saves_first=True)
    save(memory, range(10, 12), nonce="cc")
    memory.close()
    assert saved_steps(host) == [8, 10, 10]


@pytest.mark.parametrize(("rank", "steps"), [(0, [1, 2]), (1, [])])
def test_only_the_first_replica_writes(
    host: MemoryHost, tmp_path: Path, rank: int, steps: list[int]
) -> None:
    journal = SimpleNamespace(emit=lambda event, level=0: None)
    saver = CheckpointManager(Checkpoints(tmp_path / "disk", memory=2), journal)
    job = JobState(seed=0, is_sharded=True)
    world = World(
        generation=1,
        rank=rank,
        size=2,
        local_rank=rank,
        local_size=2,
        nonce="bb",
        lineage=(),
        node="n1",
        is_launched=True,
        mesh=ReplicaMesh((("shard", 1),)),
    )
    saver.keep_shards_in_memory()  # each boundary waits until the previous save is written
    saver.resume(None, 1, 0)
    saver.begin_world(world, job)
    for step in (1, 2, 3):
        job.progress.step = step
        saver.save_if_due(job, None)
    saver.close(60.0)
    assert saved_steps(host) == steps


@pytest.mark.parametrize(
    ("memory", "is_sharded", "committed", "starts"),
    [(5, True, 6, True), (5, True, 7, False), (None, True, 1, False), (5, False, 1, False)],
)
def test_replicas_start_over_if_they_lose_no_more_steps_than_between_two_saves(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    memory: int | None,
    is_sharded: bool,
    committed: int,
    starts: bool,
) -> None:
    """All replicas broke before the first save was complete: no rank has a state."""
    monkeypatch.setattr(transfer, "agree", lambda *_: Agreement(None, None, ()))
    monkeypatch.setattr(transfer, "all_gather_json", lambda value: [value])
    journal = SimpleNamespace(emit=lambda event, level=0: None)
    current = CurrentStep()
    registry = Registry(seed=0, inside=lambda: current.inside)
    registry.job.is_sharded = is_sharded
    manager = CheckpointManager(Checkpoints(tmp_path, memory=memory), journal)
    monkeypatch.setattr(manager, "restore", lambda world, job, may_begin: 1)
    progress = RankProgress(registry.job, registry.optimizer_watch, current)
    rank = Reconfiguration(registry.job, progress, manager, journal, torch.device("cpu"))
    world = World(
        generation=1,
        rank=0,
        size=1,
        local_rank=0,
        local_size=1,
        nonce="bb",
        lineage=(),
        node="n1",
        is_launched=True,
    )
    if starts:
        assert rank.enter(world, committed).generation == 1
    else:
        with pytest.raises(CheckpointRequired, match=f"committed {committed} steps"):
            rank.enter(world, committed)
