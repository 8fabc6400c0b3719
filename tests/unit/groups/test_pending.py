"""Pending collectives: completed, aborted, and both concurrently."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from elastic.errors import GroupAborted
from elastic.groups.pending import PendingWorks

DEADLINE_S = 60.0


class FakeWork:
    """A collective that completes when the test calls ``end``."""

    def __init__(self) -> None:
        self.future: torch.futures.Future[int] = torch.futures.Future()

    def get_future(self) -> torch.futures.Future[int]:
        return self.future

    def end(self) -> None:
        self.future.set_result(1)


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Switch between threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def start(pending: PendingWorks, count: int) -> tuple[list[FakeWork], list[BaseException | None]]:
    told: list[BaseException | None] = []
    works: list[Any] = [FakeWork() for _ in range(count)]
    for work in works:
        pending.start(work, told.append)
    return works, told


def test_a_completed_work_reports_once_and_is_not_pending() -> None:
    pending = PendingWorks()
    (work,), told = start(pending, 1)
    assert not pending.drain(0.0)
    work.end()
    assert told == [None]
    assert pending.drain(0.0)
    pending.abort()
    assert told == [None]


def test_an_aborted_work_reports_at_once_and_is_pending_until_it_ends() -> None:
    pending = PendingWorks()
    (work,), told = start(pending, 1)
    pending.abort()
    assert isinstance(told[0], GroupAborted)
    assert not pending.drain(0.0)
    work.end()
    assert len(told) == 1 and pending.drain(0.0)


def test_a_collective_is_pending_until_its_callback_has_returned() -> None:
    pending = PendingWorks()
    work: Any = FakeWork()
    drained: list[bool] = []
    pending.start(work, lambda error: drained.append(pending.drain(0.0)))
    work.end()
    assert drained == [False]


@pytest.mark.usefixtures("frequent_switches")
def test_an_abort_while_collectives_complete_reports_each_once() -> None:
    for _ in range(20):
        pending = PendingWorks()
        works, told = start(pending, 500)
        begun = threading.Event()

        def end_all(works: list[FakeWork] = works, begun: threading.Event = begun) -> None:
            begun.set()
            for work in works:
                work.end()

        thread = threading.Thread(target=end_all)
        thread.start()
        begun.wait(DEADLINE_S)
        while thread.is_alive():
            pending.abort()
        thread.join()
        assert len(told) == len(works)
        assert pending.drain(0.0)


class BlockedWork(torch.distributed.Work):
    """A collective whose peer never joins, like gloo's, which loses queued sends."""

    def __init__(self, *, is_over: bool = False) -> None:
        super().__init__()
        self.is_over = is_over

    def is_completed(self) -> bool:
        return self.is_over

    def wait(self, timeout: object = None) -> bool:
        if self.is_over:
            raise RuntimeError("Connection closed by peer")
        raise RuntimeError("the slice is over")


def test_a_started_collective_without_a_wait_is_pending() -> None:
    """Another one failed first. Destroying the group would wait for this one, until the timeout."""
    pending, flags, gradients = PendingWorks(), BlockedWork(), BlockedWork(is_over=True)
    pending.begin(flags)
    with pytest.raises(RuntimeError, match="closed by peer"):
        pending.finish_one(gradients)
    assert not pending.drain(0.0)
    flags.is_over = True
    assert pending.drain(0.0)
