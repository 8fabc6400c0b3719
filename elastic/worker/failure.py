"""How a worker tells its agent why it failed: torch's error file, written for any exception.

torchrun reads ``TORCHELASTIC_ERROR_FILE`` of each worker, but only scripts decorated with
``@record`` write one; for all others it reports a bare exit code.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import TracebackType

from elastic.errors import ElasticError

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class FailureHook:
    """An excepthook that records the exception, and remembers that there was one."""

    def __init__(self) -> None:
        self.failed = False
        self._next: _Hook = sys.excepthook

    def install(self) -> None:
        """Put this hook before the present one."""
        self._next = sys.excepthook
        sys.excepthook = self

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self.failed = True
        if isinstance(error, Exception):
            record(error)
        self._next(kind, error, trace)
        if isinstance(error, ElasticError) and error.exit_code != 1:
            # An excepthook cannot choose the exit code otherwise, and the interpreter's own end
            # is not safe here: see process_group.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(error.exit_code)


def record(error: Exception) -> None:
    """Write torch's error file, unless ``@record`` has already done it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or (os.path.exists(path) and os.path.getsize(path) > 0):
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        get_error_handler().record_exception(error)
    except OSError as failure:
        sys.stderr.write(f"elastic: {path} could not be written: {failure}\n")
