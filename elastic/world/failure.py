"""How a worker reports its failure to the agent: torch's error file, written for any exception.

torchrun reads ``TORCHELASTIC_ERROR_FILE`` of each worker, but only scripts decorated with
``@record`` write one; for all others it reports a bare exit code.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from types import TracebackType

from elastic.errors import ElasticError
from elastic.world.faults import is_world_fault

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


# Of DistributedSampler, dist.get_rank() and others, at the top of a script.
_NO_GROUP = "Default process group has not been initialized"
_NO_GROUP_YET = (
    "elastic: the process group is made by run.retry and by the first loop; do not call "
    "init_process_group before.\n"
    "  DataLoader(dataset, shuffle=True) in run.loader(…) takes the place of DistributedSampler;\n"
    "  run.world.rank, run.world.size and run.is_main are the rank inside the training function\n"
)


class FailureHook:
    """An excepthook that records the exception, and remembers that there was one."""

    def __init__(self) -> None:
        self.failed = False
        self.text = ""  # what failed, in a line
        self.is_of_the_world = False  # peers are gone; the script has made no mistake
        self._exit_code = 1
        self._next: _Hook = sys.excepthook

    def install(self) -> None:
        """Put this hook before the present one. What is registered with atexit after this
        still runs."""
        self._next = sys.excepthook
        sys.excepthook = self
        atexit.register(self._leave)

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self.failed = True
        self.text = f"{kind.__name__}: {error}".splitlines()[0][:500]
        self.is_of_the_world = is_world_fault(error)
        if isinstance(error, Exception):
            record(error)
        self._next(kind, error, trace)
        if _NO_GROUP in str(error):
            sys.stderr.write(_NO_GROUP_YET)
        if isinstance(error, ElasticError):
            self._exit_code = error.exit_code

    def _leave(self) -> None:
        # Not in the hook: init_process_group puts a hook around this one that collects what is
        # said, to print it with the rank in front (torch 2.13, distributed_c10d.py). An exit in
        # there is silent. And an excepthook cannot choose the exit code otherwise.
        if self._exit_code != 1:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self._exit_code)


def record(error: Exception) -> None:
    """Write torch's error file, unless ``@record`` has already done it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or (os.path.exists(path) and os.path.getsize(path) > 0):
        return
    try:
        _record_raised(error)
    except OSError as failure:
        sys.stderr.write(f"elastic: {path} could not be written: {failure}\n")


def _record_raised(error: Exception) -> None:
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        raise error  # torch's handler takes the traceback of the exception that is being handled
    except Exception as raised:  # noqa: BLE001  it is the one just raised
        get_error_handler().record_exception(raised)
