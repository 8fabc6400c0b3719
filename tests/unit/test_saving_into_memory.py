"""Saves into the node's memory in addition to disk: at which steps, and where a job resumes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import checkpoints
from checkpoints.loading.tiered_storage import TieredStorage
from checkpoints.memory.host import MemoryHost, memory_roots
from elastic.clock import SYSTEM_CLOCK
from elastic.errors import ConfigError
from elastic.training.checkpointing.folder import CheckpointFolder
from elastic.training.checkpointing.memory_interval.agreed import MemoryInterval
from elastic.training.checkpointing.memory_tier import VARIABLE, MemoryTier
from elastic.training.checkpointing.options import Checkpoints
from elastic.training.state.job_state import JobState
from elastic.world.world import World


class Job:
    """The part of a job's state that a memory tier reads."""

    def __init__(self, step: int) -> None:
        self.progress = self
        self.step = step

    def tree(self) -> dict[str, object]:
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
        on_death=lambda reason: pytest.fail(reason),
        clock=SYSTEM_CLOCK,
    )


def save(memory: MemoryTier, steps: range) -> None:
    memory.waits = True  # at each boundary, until the previous save is written
    for step in (*steps, steps[-1]):
        memory.at_boundary(Job(step), checkpoints.WriterGroup(nonce="aa"))  # type: ignore[arg-type]


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
        checkpoints.save(tmp_path / "disk", Job(step).tree(), step=step, nonce="aa")
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
