"""Process groups and handles of collectives that the script keeps beyond the end of their world.

Their sockets are closed, so a collective fails like one whose peer has died: the next world would
fail in the same place, and so on.
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Iterable, Iterator

import torch.distributed as dist

from elastic.errors import TrainingError
from elastic.world.faults import causes

_OF_TORCH = "torch.distributed"
_HINT = """\
create groups again in each world, in the function that run.retry calls, and keep them in its
      local variables; or in a callback, which is called in each world:
      run.on_world(lambda world: groups.update(pair=dist.new_group([0, 1])))
      groups of a mesh are those of run.mesh, or of the mesh that the function of run.build gets"""

_failed: weakref.WeakKeyDictionary[dist.Work, weakref.ref[object]] = weakref.WeakKeyDictionary()
_ended: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()


def have_ended(groups: Iterable[dist.ProcessGroup], where: str) -> None:
    """Note that the world of these groups has ended: ``where``, as in "generation 1 on rank 0"."""
    for group in groups:
        _ended[group] = where


def uses_stale_group(error: BaseException) -> bool:
    """Whether the error was raised in a collective of a group whose world has ended."""
    return next(_used(error), None) is not None


def refuse_stale_group(error: BaseException) -> None:
    """Raise TrainingError, with the group and the script's line, if the error was raised in a
    collective of a group whose world has ended."""
    for group in _used(error):
        raise TrainingError(
            f"{_line_of(error)} uses a process group of {group.size()} ranks that was created in "
            f"{_ended[group]}: that world has ended",
            hint=_HINT,
        ) from error


def refuse_stale_handle(work: dist.Work, world: object) -> None:
    """Raise TrainingError if a wait for this collective has failed in another world before."""
    failed_in = _failed.get(work)
    if failed_in is not None and failed_in() is not world:
        raise TrainingError(
            "work.wait() of a collective that has failed in an earlier world, which has ended",
            hint="do not keep handles of async_op=True in attributes or globals: wait for each in "
            "the function that run.retry calls, in its local variables",
        )


def handle_failed(work: dist.Work, world: object) -> None:
    """Note that a wait for this collective has failed. ``world``: any object that lives as long."""
    _failed[work] = weakref.ref(world)


def _used(error: BaseException) -> Iterator[dist.ProcessGroup]:
    for cause in causes(error) if _ended else ():
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            if str(frame.f_globals.get("__name__", "")).startswith(_OF_TORCH):
                for value in frame.f_locals.values():
                    if isinstance(value, dist.ProcessGroup) and value in _ended:
                        yield value


def _line_of(error: BaseException) -> str:
    """The last line of the script on the way to the error."""
    line = "the script"
    for frame, number in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in ("torch", "elastic"):
            line = f"{frame.f_code.co_filename}:{number}"
    return line
