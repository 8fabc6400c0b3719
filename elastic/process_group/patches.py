"""Every change that this package makes to torch at run time: why, and how it is undone.

Importing this module changes nothing. :class:`elastic.process_group.group.ProcessGroup` applies
changes when it builds a group, and undoes them when it destroys the last one.

``Work.wait``
    ``dist.all_reduce(loss)`` waits inside gloo, where nothing can reliably release it (see
    :mod:`elastic.process_group.pending`). On gloo all synchronous collectives end in ``Work.wait``
    (``work.wait()`` at the end of each function in torch/distributed/distributed_c10d.py): only
    there can an abort end those of the script. On NCCL synchronous collectives have no work
    (ProcessGroupNCCL.cpp, the end of ``collective``), and waits for the others do not block the
    host, only the stream: nothing has to be released. Results count if ``ProcessGroup.settle``
    returns at the end of the step; it waits for all collectives that the groups have begun. A
    process group of our own, registered with c10d, would not need this patch; docs/decisions/0027
    describes its cost.

the process group of DDP's reducer
    The reducer waits for futures in C++, where Python code cannot raise
    (torch/csrc/distributed/c10d/reducer.cpp, ``finalize_backward``, ``sync_bucket_indices``).
    ``Reducer._update_process_group`` gives it another group; DistributedDataParallel has it for
    worlds that shrink (torch/nn/parallel/distributed.py, ``_update_process_group``). The first
    group is not restored: the reducer and its hooks are discarded with the world.

``sys.excepthook``
    Each call of ``init_process_group`` wraps it in another hook that prefixes the rank
    (torch/distributed/distributed_c10d.py, ``_distributed_excepthook``).

``distributed_c10d._world.group_count``
    A counter names the default groups (distributed_c10d.py, ``_process_group_name``), and a
    failed build increments it: the names of the next group would differ between this rank and a
    joining node, and they would never find each other in the store.

``torch.autograd._engine_run_backward``
    Gradients are reduced, and hangs judged, by backward pass; torch has hooks for the tensors of a
    pass, but none for its beginning and its end. ``backward()`` calls this function of
    torch/autograd/__init__.py. Permanent, from the first wrapped or built model on
    (:func:`elastic.torch_private.watch_backward`).

The environment of ProcessGroupNCCL is changed in :mod:`elastic.process_group.nccl_environment`.
Two permanent changes outside torch are made elsewhere: ``sys.excepthook`` reports the error that
ends a worker (:mod:`elastic.world.failure`), and ``pdb.Pdb.interaction`` marks a worker whose
debugger waits for input (:mod:`elastic.hangs.phases`). ``REPLACED`` in
``tests/contract/test_torch_private_names.py`` lists all changes; that test rejects any other.
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
from elastic.process_group.stale_groups import handle_failed, refuse_stale_handle
from elastic.process_group.wait_phase import begin_wait, end_wait

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]

_NO_TIMEOUT = datetime.timedelta(0)
_in_torch: Callable[[dist.Work, datetime.timedelta], bool] = dist.Work.wait
# The object in the class's dictionary: it binds self, and dist.Work.wait does not.
_OF_TORCH = vars(dist.Work)["wait"]


# Work.wait -----------------------------------------------------------------------------------


def release_waits() -> None:
    """Make an abort end all waits for collectives in this process. Idempotent."""
    dist.Work.wait = _wait  # type: ignore[method-assign, assignment]


def restore_waits() -> None:
    """Restore torch's waits, unless other code has replaced ours. Idempotent."""
    if dist.Work.wait is _wait:
        dist.Work.wait = _OF_TORCH  # type: ignore[method-assign]


def _wait(work: dist.Work, timeout: datetime.timedelta = _NO_TIMEOUT) -> bool:
    """Like torch's: True, or raises the error; GroupAborted once the world is over."""
    world = pending_works()
    refuse_stale_handle(work, world)
    try:
        return _wait_interruptibly(work, timeout)
    except Exception:
        handle_failed(work, world)
        raise


def _wait_interruptibly(work: dist.Work, timeout: datetime.timedelta) -> bool:
    if timeout != _NO_TIMEOUT:
        return _wait_in_torch(work, timeout)  # it ends by itself
    if is_of_nccl(work):  # its future may be a null pointer
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
    """Make DDP's reducer use ``group`` for its collectives, without keeping ``group`` alive."""
    torch_private.give_group(reducer, group)


def remove_reducer_hooks(reducer: Any) -> None:
    """Remove a reducer's hooks from the parameters before it is discarded: the next DDP with the
    same parameters would call the old hooks, too."""
    torch_private.remove_hooks(reducer)


# Side effects of init_process_group ----------------------------------------------------------


class TorchExceptHook:
    """The wrapper of ``sys.excepthook`` by ``init_process_group``. Create it before that call."""

    def __init__(self) -> None:
        self._before: ExceptHook = sys.excepthook
        self._of_torch: ExceptHook = sys.excepthook

    def installed(self) -> None:
        """Call this once the group is initialised and torch's hook is in place."""
        self._of_torch = sys.excepthook

    def remove(self) -> None:
        """Restore the previous hook, unless another one was installed after torch's."""
        if sys.excepthook is self._of_torch:
            sys.excepthook = self._before


def reset_group_count() -> None:
    """Name the next default group like the first: all ranks must use the same name."""
    torch_private.forget_group_count()
