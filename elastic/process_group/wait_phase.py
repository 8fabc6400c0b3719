"""Records, on the worker's page, the collective in which the main thread waits for other ranks."""

from __future__ import annotations

import torch.distributed as dist

from elastic import torch_private
from elastic.compiling import not_compiled
from elastic.hangs.facts import COLLECTIVE, Flag, Phase
from elastic.hangs.phases import on_host, phases

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


def report_collectives() -> None:
    """Record how many collectives have begun, waited for or not. Thread-safe."""
    if phases.is_on:
        phases.begun(torch_private.collectives_begun())


def describe_group(*, is_on_stream: bool) -> None:
    """Record whether the new group's collectives are queued on a stream."""
    phases.set_flag(Flag.ON_STREAM, is_on_stream)
