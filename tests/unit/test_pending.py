"""Collectives under way: ended, aborted, and both at once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from elastic.process_group.pending import PendingWorks
from elastic.world.faults import GroupAborted

DEADLINE_S = 60.0


class FakeWork:
    """A collective that ends when it is told to."""

    def __init__(self) -> None:
        self.future: torch.futures.Future[int] = torch.futures.Future()

    def get_future(self) -> torch.futures.Future[int]:
        return self.future

    def end(self) -> None:
        self.future.set_result(1)


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns as often as they can."""
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


def test_what_has_ended_is_told_once_and_is_not_under_way() -> None:
    pending = PendingWorks()
    (work,), told = start(pending, 1)
    assert not pending.drain(0.0)
    work.end()
    assert told == [None]
    assert pending.drain(0.0)
    pending.abort()
    assert told == [None]


def test_what_is_aborted_is_told_at_once_and_stays_under_way_until_it_ends() -> None:
    pending = PendingWorks()
    (work,), told = start(pending, 1)
    pending.abort()
    assert isinstance(told[0], GroupAborted)
    assert not pending.drain(0.0)
    work.end()
    assert len(told) == 1 and pending.drain(0.0)


def test_a_collective_is_under_way_until_its_owner_has_been_told() -> None:
    pending = PendingWorks()
    work: Any = FakeWork()
    drained: list[bool] = []
    pending.start(work, lambda error: drained.append(pending.drain(0.0)))
    work.end()
    assert drained == [False]


@pytest.mark.usefixtures("restless")
def test_an_abort_while_collectives_end_tells_each_once() -> None:
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
    """A collective of a peer that never comes: as gloo's, whose queued sends it forgets."""

    def __init__(self, *, is_over: bool = False) -> None:
        super().__init__()
        self.is_over = is_over

    def is_completed(self) -> bool:
        return self.is_over

    def wait(self, timeout: object = None) -> bool:
        if self.is_over:
            raise RuntimeError("Connection closed by peer")
        raise RuntimeError("the slice is over")


def test_what_was_begun_and_never_waited_for_is_under_way() -> None:
    """Another one has failed first. To destroy its group would wait for it, until the timeout."""
    pending, flags, gradients = PendingWorks(), BlockedWork(), BlockedWork(is_over=True)
    pending.begin(flags)
    with pytest.raises(RuntimeError, match="closed by peer"):
        pending.finish_one(gradients)
    assert not pending.drain(0.0)
    flags.is_over = True
    assert pending.drain(0.0)
