"""The process group for DDP's reducer: an abort also ends the reducer's waits.

The reducer sums its buckets, rebuilds them in the second step of each world from a plan that rank 0
broadcasts, and with ``find_unused_parameters=True`` sums in every step which parameters were used.
It would wait for all of these inside gloo, where an abort may not reach it (see
:mod:`elastic.process_group.pending`). This group intercepts its calls, and waits for them itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from elastic.compiling import not_compiled
from elastic.process_group import patches
from elastic.process_group.pending import pending_works

AllReduce = Callable[[torch.Tensor, dist.AllreduceOptions], dist.Work]


class ReleasableGroup(dist.ProcessGroup):
    """Forwards the reducer's calls to ``group``, except that ``all_reduce`` computes the sums.

    The reducer waits for sums where nothing can be raised: they must have ended by then. On a
    stream it does not wait, but the host reads the plan for its buckets at once, and an aborted
    broadcast leaves an invalid plan. ``before_plan`` is called before each broadcast of one.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        all_reduce: AllReduce,
        *,
        is_on_stream: bool,
        before_plan: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._group = group
        self._all_reduce = all_reduce
        self._before_plan = before_plan
        works = pending_works()
        self._finish = works.finish_on_stream if is_on_stream else works.finish_one

    def replace(self, reducer: Any) -> None:
        """Make the reducer use this group from now on. It does not keep this group alive."""
        patches.replace_reducer_group(reducer, self)

    @not_compiled
    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        (tensor,) = tensors
        return self._all_reduce(tensor, opts)

    @not_compiled
    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        self._before_plan()
        return _Broadcast(self._group.broadcast(tensors, opts), self._finish)


class _Broadcast(dist.Work):
    """The reducer waits for it at once. A failure is raised there: otherwise the reducer would use
    an invalid plan."""

    def __init__(self, work: dist.Work, finish: Callable[[dist.Work], None]) -> None:
        super().__init__()
        self._work = work
        self._finish = finish

    @not_compiled
    def wait(self, timeout: object = None) -> bool:
        self._finish(self._work)
        return True
