"""Records, on the worker's page, the collective in which the main thread waits for other ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from elastic import torch_private
from elastic.clock import SYSTEM_CLOCK
from elastic.compiling import not_compiled
from elastic.hangs.facts import COLLECTIVE, Flag, Phase
from elastic.hangs.phases import on_host, phases
from elastic.tuning.worker_intervals import LONG_WAIT_S

_UNKNOWN_OPERATION = -1
_SUBGROUPS = int(Flag.SUBGROUPS)  # flag enums are slow to combine, and every wait does it


@not_compiled
def begin_wait(work: dist.Work | None) -> Phase:
    """Record that the main thread waits for ``work``; return the argument for :func:`end_wait`."""
    if work is None or not phases.is_on:
        return COLLECTIVE
    return _begin_wait(torch_private.operation_of(work))


@not_compiled
def begin_host_wait(work: dist.Work | None) -> Phase:
    """The same for a collective of the host, in a group that may have others on a device."""
    if work is None or not phases.is_on:
        return COLLECTIVE
    return _begin_wait(on_host(torch_private.operation_of(work)))


def _begin_wait(operation: int) -> Phase:
    if torch_private.has_subgroups():
        phases.set_flag(_SUBGROUPS, True)
    return phases.begin_wait(torch_private.collectives_begun(), operation)


@not_compiled
def end_wait(work: dist.Work | None, before: Phase) -> None:
    """Record that the wait for ``work`` is over, successful or not."""
    if work is not None:
        phases.end_wait(before)


@not_compiled
def begin_stream_wait() -> Phase:
    """Record that the main thread waits for operations queued on a device; return the argument
    for :func:`end_stream_wait`."""
    if not phases.is_on:
        return COLLECTIVE
    return phases.begin_wait(torch_private.collectives_begun(), _UNKNOWN_OPERATION)


@not_compiled
def end_stream_wait(before: Phase) -> None:
    """Record that the wait is over, successful or not."""
    phases.end_wait(before)


@not_compiled
def queued() -> None:
    """Record that a collective is queued on a device, and the host continues."""
    if phases.is_on:
        phases.queued(torch_private.collectives_begun())


@contextmanager
def waits_for_ranks() -> Iterator[None]:
    """The body waits for other ranks outside of any collective."""
    before = begin_stream_wait()
    try:
        yield
    finally:
        end_stream_wait(before)


def report_collectives() -> None:
    """Record how many collectives have begun, waited for or not. Thread-safe."""
    if phases.is_on:
        phases.begun(torch_private.collectives_begun())


def describe_group(*, is_on_stream: bool) -> None:
    """Record whether the new group's collectives are queued on a stream."""
    phases.set_flag(Flag.ON_STREAM, is_on_stream)


_in_long_waits: Callable[[], object] | None = None


def call_in_long_waits(call: Callable[[], object]) -> None:
    """Call this function while the main thread waits long for a collective, periodically, on that
    thread: its errors end the wait."""
    global _in_long_waits
    _in_long_waits = call


class LongWait:
    """A wait for a collective that may take long."""

    def __init__(self) -> None:
        self._next_s = SYSTEM_CLOCK.monotonic() + LONG_WAIT_S

    def look(self) -> None:
        """Call the function if it is due. Called repeatedly in the wait."""
        if (now_s := SYSTEM_CLOCK.monotonic()) < self._next_s:
            return
        self._next_s = now_s + LONG_WAIT_S
        if _in_long_waits and threading.current_thread() is threading.main_thread():
            _in_long_waits()
