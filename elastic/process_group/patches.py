"""Every change that this package makes to torch while it runs: why, and how it is undone.

Nothing is changed when this module is imported. :class:`elastic.process_group.group.ProcessGroup`
applies what it needs while it builds a group, and removes it when it destroys the last one.

``Work.wait``
    ``dist.all_reduce(loss)`` waits inside gloo, where nothing can release it for certain (see
    :mod:`elastic.process_group.pending`). On gloo all synchronous collectives end in ``Work.wait``
    (``work.wait()`` at the end of each function in torch/distributed/distributed_c10d.py), so an
    abort can end those of the script only there. On NCCL synchronous ones have no work at all
    (ProcessGroupNCCL.cpp, the end of ``collective``), the wait for others does not block, and
    nothing has to end either: the stream waits. What the script does with results counts if
    ``ProcessGroup.settle`` returns at the end of the step, which waits for all that groups have
    begun. A process group of our own, registered
    with c10d, would not need this patch; docs/decisions/0027 says what it would cost.

the process group of DDP's reducer
    The reducer waits in C++, for futures, where no Python can raise
    (torch/csrc/distributed/c10d/reducer.cpp, ``finalize_backward``, ``sync_bucket_indices``). It is
    given another group by ``Reducer._update_process_group``, which DistributedDataParallel has for
    worlds that shrink (torch/nn/parallel/distributed.py, ``_update_process_group``). It never
    gets the first one back: a reducer is discarded with its world, and its hooks with it.

``sys.excepthook``
    ``init_process_group`` wraps it, each time again, in a hook that prefixes the rank
    (torch/distributed/distributed_c10d.py, ``_distributed_excepthook``).

``distributed_c10d._world.group_count``
    Default groups are named by a counter (distributed_c10d.py, ``_process_group_name``), and a
    build that failed has counted: this rank's next group would have another name than that of
    a joining node, and they would never find each other in the store.

The environment of ProcessGroupNCCL is changed in :mod:`elastic.process_group.nccl_environment`.
Two changes outside of torch are made elsewhere, once and for good: ``sys.excepthook`` reports the
error that ends a worker (:mod:`elastic.world.failure`), and ``pdb.Pdb.interaction`` marks a worker
whose debugger waits for a person (:mod:`elastic.hangs.phases`). ``REPLACED`` in
``tests/contract/test_torch_private_names.py`` is the list; a change that is not in it fails there.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch.distributed as dist

from elastic import torch_private
from elastic.process_group.pending import pending_works
from elastic.process_group.semantics import is_of_nccl
from elastic.process_group.wait_phase import begin_wait, end_wait

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]

_NO_TIMEOUT = datetime.timedelta(0)
_in_torch: Callable[[dist.Work, datetime.timedelta], bool] = dist.Work.wait
# What the class itself holds: an object that binds self, which dist.Work.wait is not.
_OF_TORCH = vars(dist.Work)["wait"]


# Work.wait -----------------------------------------------------------------------------------


def release_waits() -> None:
    """Have an abort end all waits for collectives in this process. May be called again."""
    dist.Work.wait = _wait  # type: ignore[method-assign, assignment]


def restore_waits() -> None:
    """Restore torch's waits, unless other code has replaced ours. Idempotent."""
    if dist.Work.wait is _wait:
        dist.Work.wait = _OF_TORCH  # type: ignore[method-assign]


def _wait(work: dist.Work, timeout: datetime.timedelta = _NO_TIMEOUT) -> bool:
    """As torch's: true, or raises what went wrong; GroupAborted once the world is over."""
    if timeout != _NO_TIMEOUT:
        return _wait_in_torch(work, timeout)  # it ends by itself
    if is_of_nccl(work):  # and its future may be a null pointer
        pending_works().queue(work)
        return True
    try:
        future = work.get_future()
    except RuntimeError:  # sends and receives have none
        return _wait_in_torch(work, timeout)
    if future.done():
        pending_works().queue(work)
    else:
        pending_works().wait(work)
    return True


def _wait_in_torch(work: dist.Work, timeout: datetime.timedelta) -> bool:
    before = begin_wait(work)
    try:
        return _in_torch(work, timeout)
    finally:
        end_wait(work, before)


# DDP's reducer -------------------------------------------------------------------------------


def replace_reducer_group(reducer: Any, group: dist.ProcessGroup) -> None:
    """Make a DDP's reducer use ``group`` for its collectives. It does not keep ``group`` alive."""
    torch_private.give_group(reducer, group)


def remove_reducer_hooks(reducer: Any) -> None:
    """Take a reducer's hooks off the parameters, before it is discarded: the next DDP over the
    same parameters would call the old hooks, too."""
    torch_private.remove_hooks(reducer)


# What init_process_group leaves --------------------------------------------------------------


class TorchExceptHook:
    """The hook that ``init_process_group`` puts around ``sys.excepthook``. Made before the call."""

    def __init__(self) -> None:
        self._before: ExceptHook = sys.excepthook
        self._of_torch: ExceptHook = sys.excepthook

    def installed(self) -> None:
        """The group is initialised, and torch's hook is in place."""
        self._of_torch = sys.excepthook

    def remove(self) -> None:
        """Put back the hook of before, unless there is another one on top of torch's."""
        if sys.excepthook is self._of_torch:
            sys.excepthook = self._before


def reset_group_count() -> None:
    """Have the next default group be named like the first: all ranks must name it alike."""
    torch_private.forget_group_count()
