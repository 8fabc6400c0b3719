"""Lets an abort end the script's own waits for collectives, too, or makes it known to them.

``dist.all_reduce(loss)`` waits inside gloo, where nothing can release it for sure (see
elastic/process_group/pending.py). All such calls end in ``Work.wait`` (torch/distributed/
distributed_c10d.py), so that one is replaced: by a wait that :data:`pending` can end.

On NCCL that wait does not block, and nothing needs to end it: the stream waits. What the script
does with the result counts if :meth:`elastic.process_group.pending.Pending.settle` says so, at the
end of the step.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable

import torch.distributed as dist

from elastic.process_group.pending import pending
from elastic.process_group.wait_phase import begin_wait, end_wait

_NO_TIMEOUT = datetime.timedelta(0)
_in_torch: Callable[[dist.Work, datetime.timedelta], bool] = dist.Work.wait


def _wait(work: dist.Work, timeout: datetime.timedelta = _NO_TIMEOUT) -> bool:
    """As torch's: true, or raises what went wrong; GroupAborted once the world is over."""
    if timeout != _NO_TIMEOUT:
        return _wait_in_torch(work, timeout)  # it ends by itself
    try:
        future = work.get_future()
    except RuntimeError:  # sends and receives have none
        return _wait_in_torch(work, timeout)
    if future.done():  # it has ended, or runs on a stream: such futures are done from the start
        pending.queue(work)
    else:
        pending.wait(work)
    return True


def _wait_in_torch(work: dist.Work, timeout: datetime.timedelta) -> bool:
    before = begin_wait(work)
    try:
        return _in_torch(work, timeout)
    finally:
        end_wait(work, before)


@functools.cache  # once per process
def make_waits_end_with_the_group() -> None:
    """For all collectives of this process, from now on."""
    dist.Work.wait = _wait  # type: ignore[method-assign, assignment]
