"""The process group that DDP's reducer is given: what it waits for in C++ ends with the group, too.

The reducer builds its buckets anew in the second step of each world, by a plan that rank 0
broadcasts, and with ``find_unused_parameters=True`` sums up in every step which parameters were
used. It waits for both without Python, inside gloo, where an abort may not reach it (see
:mod:`elastic.worker.pending`). Its calls come here first; here the waiting is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from elastic.worker.pending import pending


class ReleasableGroup(dist.ProcessGroup):
    """Passes on what the reducer asks of ``group``.

    ``failed`` is told of a sum that failed: it is waited for where nothing can be raised. A
    broadcast that failed is raised, or the reducer would take what is not a plan for one.
    """

    def __init__(self, group: dist.ProcessGroup, failed: Callable[[BaseException], object]) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._group = group
        self._failed = failed

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        return _Work(self._group.broadcast(tensors, opts), None)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        return _Work(self._group.allreduce(tensors, opts), self._failed)


class _Work(dist.Work):
    def __init__(self, work: dist.Work, failed: Callable[[BaseException], object] | None) -> None:
        super().__init__()
        self._work = work
        self._failed = failed

    def wait(self, timeout: object = None) -> bool:
        try:
            pending.wait(self._work)
        except Exception as error:
            if self._failed is None:
                raise
            self._failed(error.with_traceback(None))  # its frames hold the group
        return True
