"""Signs of life while a checkpoint is read."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from elastic.hangs import page
from elastic.hangs.page import THREAD_NAME, busy, cpu_ticks

LONG_S = 90.0


@pytest.fixture(autouse=True)
def polls_often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(page, "BUSY_POLL_S", 0.01)
    yield
    assert THREAD_NAME not in [thread.name for thread in threading.enumerate()]


def spin_until(reached: threading.Event) -> None:
    until_s = time.monotonic() + LONG_S
    while not reached.is_set() and time.monotonic() < until_s:
        pass


class Signs:
    """Counts signs of life; the third one cannot be of what ran before the block."""

    def __init__(self) -> None:
        self.count = 0
        self.enough = threading.Event()

    def __call__(self) -> None:
        self.count += 1
        if self.count == 3:
            self.enough.set()


def test_a_caller_that_computes_makes_progress() -> None:
    signs = Signs()
    with busy(progressed=signs):
        spin_until(signs.enough)
    assert signs.enough.is_set()


def test_a_blocked_caller_makes_progress_while_its_helpers_compute() -> None:
    signs = Signs()
    helper = threading.Thread(target=spin_until, args=(signs.enough,), name="reader_0")
    helper.start()
    with busy("reader", progressed=signs):
        assert signs.enough.wait(LONG_S)
    helper.join()


def test_a_blocked_caller_makes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that hangs: other threads of the process still run."""
    signs, polls, looked = Signs(), [], threading.Event()

    def recording(native_id: int) -> int:
        polls.append(native_id)
        if len(polls) == 20:
            looked.set()
        return cpu_ticks(native_id)

    monkeypatch.setattr(page, "cpu_ticks", recording)
    other = threading.Thread(target=spin_until, args=(looked,), name="data worker")
    other.start()
    with busy("reader", progressed=signs):
        assert looked.wait(LONG_S)
    other.join()
    assert set(polls) == {threading.get_native_id()}
    assert signs.count <= 2, "of what ran before"


def test_a_thread_that_has_ended_has_used_nothing() -> None:
    ended = threading.Thread(target=lambda: None)
    ended.start()
    ended.join()
    assert ended.native_id is not None and cpu_ticks(ended.native_id) == 0
