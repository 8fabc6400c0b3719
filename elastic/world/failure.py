"""Reports a worker's failure to the agent in torch's error file, for any exception.

torchrun reads each worker's ``TORCHELASTIC_ERROR_FILE``, but only functions decorated with
``@record`` write it; for all others torchrun reports a bare exit code.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType

import torch

from elastic.errors import ElasticError
from elastic.events import WorldFault
from elastic.telemetry.journal import EventSink, Position
from elastic.world.faults import is_world_fault

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


_OUR_AGENT = "ELASTIC_NODE_ID"  # set: an agent reports the lost peer, and restarts this worker
_PACKAGES = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))
_OF_LIBRARIES = ("<frozen ", *(package + os.sep for package in _PACKAGES))
# torch's error for DistributedSampler, dist.get_rank() and others at the top of a script.
_NO_GROUP = "Default process group has not been initialized"
# torch's error for init_process_group() under plain Python, after elastic.join().
_NO_LAUNCHER = "Error initializing torch.distributed using env:// rendezvous"
_NO_GROUP_YET = (
    "elastic: run.retry or the first loop creates the process group; do not call "
    "init_process_group before.\n"
    "  run.wrap(model) replaces DistributedDataParallel(model);\n"
    "  DataLoader(dataset, shuffle=True) in run.loader(…) replaces DistributedSampler;\n"
    "  run.world.rank, run.world.size and run.is_main are the rank inside the training function\n"
)


class FailureHook:
    """An excepthook that records the exception in the error file and in its attributes."""

    def __init__(self, journal: EventSink | None = None, position: Position = dict) -> None:
        self._journal = journal
        self._position = position
        self.failed = False
        self.text = ""  # the error, in one line
        self.is_of_the_world = False  # peers are lost; the script itself did not fail
        self._exit_code = 1
        self._next: _Hook = sys.excepthook

    def install(self) -> None:
        """Install this hook in front of the current one. Functions registered with atexit later
        still run."""
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
        if self._journal is None or not self.is_of_the_world or not os.environ.get(_OUR_AGENT):
            self._next(kind, error, trace)
        else:
            self._report_lost_peers(error, self._journal)
        if _NO_GROUP in str(error) or _NO_LAUNCHER in str(error):
            sys.stderr.write(_NO_GROUP_YET)
        if isinstance(error, ElasticError):
            self._exit_code = error.exit_code

    def _report_lost_peers(self, error: BaseException, journal: EventSink) -> None:
        """Print one line instead of a traceback: when a rank is lost, all others of the world
        raise, and their agents restart them. The leader's log names the lost rank."""
        at = self._position()
        event = world_fault(error, generation=at.get("generation") or 0, step=at.get("step") or 0)
        journal.emit(event, level=logging.DEBUG)
        if os.environ.get("ELASTIC_JOURNAL"):
            return  # the journal has the traceback
        sys.stderr.write(
            f"elastic: peers, or the connections to them, are lost: {self.text}\n  raised "
            f"{_place(error)}; ELASTIC_JOURNAL=FOLDER keeps the traceback\n"
        )

    def _leave(self) -> None:
        # At exit, because an excepthook cannot set the exit code, and must not exit itself:
        # init_process_group wraps it in a hook that collects stderr, to prefix the rank (torch
        # 2.13, distributed_c10d.py), so the text would be lost.
        if self._exit_code != 1:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self._exit_code)


def world_fault(error: BaseException, *, generation: int, step: int) -> WorldFault:
    """The event for an exception that means that peers are lost, with its traceback."""
    return WorldFault(
        generation=generation,
        step=step,
        error=f"{type(error).__name__}: {error}",
        traceback="".join(traceback.format_exception(error)),
    )


def _place(error: BaseException) -> str:
    """The script's location: the last frame that is neither in torch nor in this library."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_OF_LIBRARIES)]
    if not own:
        return "outside the script"
    return f"at {own[-1].filename}:{own[-1].lineno} in {own[-1].name}"


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
