"""The data workers of a loader: kept across worlds within an epoch, and no longer."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, dataloader

from elastic import torch_private
from elastic.errors import TrainingError
from elastic.testing.forks.server import run_forked
from elastic.testing.processes import is_alive
from elastic.testing.waiting import PATIENCE_S
from elastic.train.loader import ElasticLoader
from elastic.train.sampler import Position

N = 48


class Pids(Dataset[torch.Tensor]):
    """Each sample is its index and the ID of the process that read it."""

    def __init__(self, read_s: float = 0.0, log: Path | None = None) -> None:
        self.read_s = read_s
        self.log = log

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{index}\n")
        time.sleep(self.read_s)
        return torch.tensor([index, os.getpid()])


class Ahead(DataLoader[Any]):
    """A loader with its own iteration, such as one that reads ahead in a thread."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


def elastic(data: Dataset[Any] | None = None, *, kind: type = DataLoader, **options: Any) -> Any:
    given = kind(data or Pids(), batch_size=8, shuffle=True, num_workers=2, **options)
    return ElasticLoader(given, global_batch=8)


def pids(passed: Iterator[Any], batches: int | None = None) -> set[int]:
    """The processes that read the next batches, or all remaining ones."""
    found: set[int] = set()
    for _, batch in passed:
        found |= set(batch[:, 1].tolist())
        batches = None if batches is None else batches - 1
        if batches == 0:
            break
    return found


def leave_early(one: ElasticLoader, rank: int, size: int, **options: bool) -> set[int]:
    passed = one.batches(rank, size, **options)
    found = pids(passed, 2)
    passed.close()  # type: ignore[attr-defined]
    return found


def test_a_pass_in_another_world_reuses_the_data_workers() -> None:
    one = elastic()
    before = leave_early(one, 1, 2, keeps_workers=True)
    one.seek(Position(0, 2))
    indices: list[int] = []
    after: set[int] = set()
    for info, batch in one.batches(0, 1):
        assert tuple(batch[:, 0].tolist()) == info.indices
        indices += info.indices
        after |= set(batch[:, 1].tolist())
    assert len(before) == 2
    assert after == before
    assert len(indices) == N - 2 * 8


def test_data_workers_end_with_the_epoch() -> None:
    one = elastic()
    before = pids(one.batches(0, 1, keeps_workers=True))
    assert not any(map(is_alive, before))
    one.begin_epoch(1)
    assert not before & pids(one.batches(0, 1, keeps_workers=True))


@pytest.mark.parametrize("how", ["left", "let go", "at its end", "another epoch"])
def test_data_workers_end_with_an_abandoned_pass(how: str) -> None:
    one = elastic()
    before = leave_early(one, 0, 1, keeps_workers=how != "left")
    if how == "let go":
        assert all(map(is_alive, before))
        one.stop_workers()
    elif how == "at its end":
        one.seek(Position(0, len(one)))
        assert list(one.batches(0, 1)) == []
    elif how == "another epoch":
        one.seek(Position(1, 2))
        assert not before & leave_early(one, 0, 1)
    assert not any(map(is_alive, before))


def test_data_workers_end_with_the_loader() -> None:
    one = elastic()
    before = leave_early(one, 0, 1, keeps_workers=True)
    assert all(map(is_alive, before))
    del one
    gc.collect()
    assert not any(map(is_alive, before))


def test_persistent_workers_are_kept_across_epochs() -> None:
    one = elastic(persistent_workers=True)
    before = pids(one.batches(0, 1))
    one.begin_epoch(1)
    assert leave_early(one, 0, 1) == before
    one.stop_workers()
    assert all(map(is_alive, before))


def test_a_loader_with_its_own_iteration_starts_its_own_workers() -> None:
    one = elastic(kind=Ahead)
    before = leave_early(one, 0, 1, keeps_workers=True)
    assert not before & leave_early(one, 0, 1, keeps_workers=True)


def test_the_users_loader_is_not_modified() -> None:
    given = DataLoader(Pids(), batch_size=8, num_workers=2)
    one = ElasticLoader(given, global_batch=8)
    assert not given.persistent_workers
    assert not one.persistent_workers


def test_pending_reads_of_the_previous_world_are_discarded(tmp_path: Path) -> None:
    log = tmp_path / "read"
    data = Pids(0.05, log)
    one = ElasticLoader(
        DataLoader(data, batch_size=2, num_workers=1, prefetch_factor=20), global_batch=2
    )
    leave_early(one, 0, 1, keeps_workers=True)  # two batches are read, twenty more requested
    passed = one.batches(0, 1)
    next(passed)
    passed.close()  # type: ignore[attr-defined]
    # Of the twenty, only those in progress are read: one, or a few more on a busy machine.
    assert len(log.read_text().splitlines()) < 2 * 15


def test_an_older_loop_cannot_take_the_batches_of_a_newer_one() -> None:
    one = elastic()
    older = one.batches(0, 1)
    next(older)
    newer = one.batches(0, 1)
    next(newer)
    with pytest.raises(TrainingError, match="after a newer loop has begun"):
        next(older)
    assert len(list(newer)) == len(one) - 1


def test_workers_forked_next_to_a_busy_thread_send_their_batches() -> None:
    """Without preparation, 2 % of them deadlock on a lock that was held at the fork."""
    script = Path(__file__).with_name("forks_beside_registrations.py")
    done = run_forked([sys.executable, str(script)], timeout_s=PATIENCE_S)
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr


def test_waits_for_kept_data_workers_are_watched_between_passes_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that hangs neither returns a batch nor ends the former pass. (Starting them is no wait
    for them.)"""
    for kind, name in (
        (dataloader._BaseDataLoaderIter, "__next__"),
        (dataloader._MultiProcessingDataLoaderIter, "_reset"),
    ):
        monkeypatch.setattr(kind, name, getattr(kind, name))  # restored afterwards
    waits: list[str] = []
    torch_private.watch_batches(lambda _: waits.append("begin"), lambda _: waits.append("end"))
    one = elastic()
    for number in range(2):
        passed = one.batches(0, 1, keeps_workers=True)
        assert waits == ["begin", "end"] * 2 * number, "the first batch, and the new pass"
        next(passed)
