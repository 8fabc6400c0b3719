"""Records on the worker's page in which collective the main thread waits for other ranks."""

from __future__ import annotations

import torch.distributed as dist

from elastic import torch_private
from elastic.compiling import not_compiled
from elastic.hangs.facts import COLLECTIVE, Flag, Phase
from elastic.hangs.phases import phases

_UNKNOWN_OPERATION = -1
_SUBGROUPS = int(Flag.SUBGROUPS)  # sets of flags are slow to add up, and this is done in every wait


@not_compiled
def begin_wait(work: dist.Work | None) -> Phase:
    """The main thread waits for ``work``; returns what :func:`end_wait` is to be given."""
    if work is None or not phases.is_on:
        return COLLECTIVE
    if torch_private.has_subgroups():
        phases.set_flag(_SUBGROUPS, True)
    return phases.begin_wait(torch_private.collectives_begun(), torch_private.operation_of(work))


@not_compiled
def end_wait(work: dist.Work | None, before: Phase) -> None:
    """The wait for ``work`` is over, well or not."""
    if work is not None:
        phases.end_wait(before)


@not_compiled
def begin_stream_wait() -> Phase:
    """The main thread waits for what is queued on a device; returns what :func:`end_stream_wait`
    is to be given."""
    if not phases.is_on:
        return COLLECTIVE
    return phases.begin_wait(torch_private.collectives_begun(), _UNKNOWN_OPERATION)


@not_compiled
def end_stream_wait(before: Phase) -> None:
    """The wait is over, well or not."""
    phases.end_wait(before)


@not_compiled
def queued() -> None:
    """A collective is queued on a device, and the host continues."""
    if phases.is_on:
        phases.queued(torch_private.collectives_begun())


def report_collectives() -> None:
    """How many are begun by now, also those that the script does not wait for. From any thread."""
    if phases.is_on:
        phases.begun(torch_private.collectives_begun())


def describe_group(*, is_on_stream: bool) -> None:
    """A world's group is built."""
    phases.set_flag(Flag.ON_STREAM, is_on_stream)
