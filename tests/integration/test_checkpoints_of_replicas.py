"""A job resumes from a checkpoint of another layout: replicas, shards, TP, DDP, build."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import checkpoints
from checkpoints.memory import OWN, MemoryHost, memory_roots
from checkpoints.tiers import TieredStorage
from elastic.testing.small_world.world import SmallWorld, WorkerResult

SCRIPT = Path(__file__).with_name("layout_script.py")
LIMIT_S = 400.0  # it takes seconds; a shared machine may take a hundred times as long
NOTES_BYTES = 20_000  # of a checkpoint in addition to its tensors


class Job:
    """Runs of the script with one checkpoint folder."""

    def __init__(self, world: SmallWorld, folder: Path) -> None:
        self.world, self.folder = world, folder

    def copy(self, name: str) -> Job:
        other = Job(self.world, self.folder.with_name(name))
        shutil.copytree(self.folder / "checkpoints", other.folder / "checkpoints")
        return other

    def run(
        self, kind: str, epochs: int, *, size: int, per_node: int = 1, memory: Path | None = None
    ) -> WorkerResult:
        """The result of rank 0, after all ranks have exited with 0. ``memory``: the folder of the
        nodes' memory."""
        outcome = self.world.run(
            SCRIPT,
            self.folder / f"{kind}-{epochs}",
            size=size,
            per_node=per_node,
            arguments=[
                kind,
                "--checkpoints",
                str(self.folder / "checkpoints"),
                f"--epochs={epochs}",
                *([f"--memory={memory}"] if memory is not None else []),
            ],
            limit_s=LIMIT_S,
        )
        outcome.assert_success(workers=size)
        return outcome.workers[0]

    @property
    def size_bytes(self) -> int:
        """The size of the tensor files of the newest checkpoint."""
        found = checkpoints.latest(self.folder / "checkpoints").checkpoint
        assert found is not None
        folder = self.folder / "checkpoints" / found.name
        return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))


@pytest.fixture(scope="module")
def world() -> Iterator[SmallWorld]:
    with SmallWorld() as made:
        yield made


@pytest.fixture(scope="module")
def alone(world: SmallWorld, tmp_path_factory: pytest.TempPathFactory) -> dict[int, WorkerResult]:
    """The result of one undisturbed process with an unsharded model, after the given epochs."""
    folder = tmp_path_factory.mktemp("alone")
    return {
        epochs: Job(world, folder / str(epochs)).run("ddp", epochs, size=1) for epochs in (2, 3)
    }


@pytest.fixture(scope="module")
def saved(world: SmallWorld, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The first epoch, in two replicas of two shards."""
    job = Job(world, tmp_path_factory.mktemp("layouts") / "saved")
    job.run("fsdp", 1, size=4, per_node=2)
    return job


def assert_same(found: WorkerResult, expected: WorkerResult, *, resumed: int) -> None:
    assert found.result["resumed"].item() == resumed, found.log
    names = expected.result.keys() - {"resumed"}
    assert names == found.result.keys() - {"resumed"}
    for name in names:
        torch.testing.assert_close(
            found.result[name], expected.result[name], rtol=0, atol=1e-12, msg=name
        )


@pytest.mark.parametrize(
    ("kind", "size", "per_node"),
    [
        pytest.param("fsdp", 2, 2, id="one replica of two", marks=pytest.mark.slow),
        pytest.param("fsdp", 6, 2, id="three replicas of two", marks=pytest.mark.slow),
        pytest.param("one", 1, 1, id="one rank", marks=pytest.mark.slow),
        pytest.param("tp", 2, 2, id="tensor parallel", marks=pytest.mark.slow),
        pytest.param("both", 4, 4, id="FSDP over tensor parallelism", marks=pytest.mark.slow),
        pytest.param("ddp", 2, 1, id="DDP", marks=pytest.mark.slow),
        pytest.param("build", 3, 1, id="built over three", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_of_two_replicas_resumes_in_another_layout_and_back(
    alone: dict[int, WorkerResult], saved: Job, kind: str, size: int, per_node: int
) -> None:
    job = saved.copy(f"{kind}-{size}")
    assert_same(job.run(kind, 2, size=size, per_node=per_node), alone[2], resumed=1)
    assert_same(job.run("fsdp", 3, size=4, per_node=2), alone[3], resumed=2)


@pytest.mark.slow
def test_a_checkpoint_of_ddp_resumes_in_tensor_parallelism_and_back(
    world: SmallWorld, alone: dict[int, WorkerResult], tmp_path: Path
) -> None:
    job = Job(world, tmp_path / "job")
    job.run("ddp", 1, size=2)
    assert_same(job.run("tp", 2, size=4, per_node=2), alone[2], resumed=1)
    assert_same(job.run("ddp", 3, size=3), alone[3], resumed=2)


def test_a_checkpoint_of_replicas_stores_the_state_once(
    saved: Job, alone: dict[int, WorkerResult]
) -> None:
    state = [t for name, t in alone[2].result.items() if name != "resumed"]
    exact = sum(tensor.numel() * tensor.element_size() for tensor in state)
    assert exact <= saved.size_bytes <= exact + NOTES_BYTES < 1.5 * exact


MIDDLE = 2  # the step of the last save into memory, in the middle of the first epoch


@dataclass(frozen=True)
class SavedInMemory:
    """A job whose only checkpoints are in the nodes' memory."""

    job: Job
    memory: Path
    backup: Path


@pytest.fixture(scope="module")
def in_memory(
    world: SmallWorld, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SavedInMemory]:
    folder = tmp_path_factory.mktemp("memory")
    host = MemoryHost(folder / "host")
    job = Job(world, folder / "saved")
    job.run("fsdp", 1, size=4, per_node=2, memory=host.folder)
    for info in checkpoints.list_checkpoints(job.folder / "checkpoints"):
        shutil.rmtree(job.folder / "checkpoints" / info.name)
    shutil.copytree(host.folder / OWN, folder / "backup")
    yield SavedInMemory(job, host.folder, folder / "backup")
    host.close()


def test_replicas_save_into_memory_once(in_memory: SavedInMemory) -> None:
    newest = checkpoints.latest(TieredStorage(memory_roots(in_memory.memory))).checkpoint
    assert newest is not None
    assert (newest.step, newest.world_size) == (MIDDLE, 2), "the ranks of one replica"


@pytest.mark.parametrize(
    ("kind", "size", "per_node"),
    [
        pytest.param("fsdp", 2, 2, id="one replica of two", marks=pytest.mark.slow),
        pytest.param("fsdp", 6, 2, id="three replicas of two", marks=pytest.mark.slow),
        pytest.param("tp", 2, 2, id="tensor parallel", marks=pytest.mark.slow),
        pytest.param("ddp", 2, 1, id="DDP", marks=pytest.mark.slow),
    ],
)
def test_memory_of_two_replicas_resumes_in_another_layout(
    alone: dict[int, WorkerResult], in_memory: SavedInMemory, kind: str, size: int, per_node: int
) -> None:
    job = in_memory.job.copy(f"memory-{kind}-{size}")
    shutil.rmtree(in_memory.memory / OWN)
    shutil.copytree(in_memory.backup, in_memory.memory / OWN)
    found = job.run(kind, 2, size=size, per_node=per_node, memory=in_memory.memory)
    assert_same(found, alone[2], resumed=0)
    assert f"source='step-{MIDDLE:09d}" in found.log
