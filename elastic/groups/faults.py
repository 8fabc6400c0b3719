"""Which exceptions are faults of the world, and the report of a failure."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable
from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException

from elastic.errors import ElasticError, NoWorld, WorldLost
from elastic.telemetry.events import WorldFault
from elastic.telemetry.journal import EventSink, Position
from elastic.tracebacks import described, members, shorten

# ----------------------------------------------------------------------------
# Classifies exceptions: those that mean that the world has ended, and failures of the script.
#
# Training recovers from a world fault in the next world; everything else must surface. A world
# fault is identified by type, and for gloo by the source file in its text:
#
# - ours: :class:`elastic.errors.WorldLost` and its subclasses;
# - torch's DistError (``c10/util/Exception.h``: DistBackendError, DistNetworkError,
#   DistStoreError): NCCL and the store;
# - gloo raises plain RuntimeErrors, but each begins with the source file that raised it
#   (``GLOO_ERROR_MSG`` in gloo's ``common/logging.h``), as in ``[…/gloo/transport/tcp/pair.cc:538]
#   Connection closed by peer``. "Broken pipe" or "Timed out waiting" are not sufficient: a
#   script's own connections break, too.

_GLOO = (
    "gloo/transport/",  # connections: closed, reset, timed out (pair.cc, unbound_buffer.cc, …)
    "gloo/rendezvous/",  # while a group is built (store.h, context.cc)
    "Gloo connectFullMesh failed",  # torch's wrapper text
)
# gloo names the peer of a connection that the kernel has timed out (gloo/transport/tcp/pair.cc:
# "Read error [10.0.0.2]:1769: Connection timed out", "timed out connecting: SO_ERROR: Connection
# timed out, remote=[10.0.0.2]:9138$1"). Connections that peers have closed prove nothing.
_TIMED_OUT = (
    re.compile(r"\[([0-9a-fA-F.:]+)\]:\d+: (?:Connection timed out|No route to host)"),
    re.compile(r"(?:Connection timed out|No route to host), remote=\[([0-9a-fA-F.:]+)\]"),
)
# gloo's assertions name their file as well, but they report mismatched sizes and shapes.
_GLOO_ASSERTION = "enforce fail at"
# These take precedence anywhere in the chain: a signal may arrive while a fault is handled, or
# memory may run out before a collective in a `finally` is aborted.
_ALWAYS_SURFACE = (SignalException, torch.OutOfMemoryError)
# A CUDA context in which a kernel has failed is unusable in the next world, too.
_BROKEN_DEVICE = ("device-side assert", "CUDA error:")


class ControlFlow(BaseException):
    """Ends a function of the script on purpose. Not a cause of an error that is raised while it is
    handled, although Python records it as that error's context."""


def is_world_fault(error: BaseException) -> bool:
    """Whether ``error``, or a cause of it, means that peers or the connections to them are lost."""
    if isinstance(error, ElasticError) and not isinstance(error, WorldLost):
        return False  # it has a hint, and may have been raised while a fault was handled
    chain = causes(error)
    return not any(_must_surface(e) for e in chain) and any(_is_fault(e) for e in chain)


def unreachable_peers(error: BaseException) -> tuple[str, ...]:
    """The addresses of peers that stopped responding, as reported by gloo.

    >>> unreachable_peers(RuntimeError("Read error [10.0.0.2]:1769: Connection timed out."))
    ('10.0.0.2',)
    >>> unreachable_peers(RuntimeError("Connection closed by peer [10.0.0.2]:1769."))
    ()
    """
    text = "\n".join(map(described, causes(error)))
    return tuple(sorted({address for words in _TIMED_OUT for address in words.findall(text)}))


def may_stem_from_aborted_output(error: BaseException) -> bool:
    """Whether ``error`` may have been raised because an aborted collective left garbage in its
    output: on a stream nothing else indicates the abort (:mod:`elastic.groups.pending`).

    False for this library's errors, which have a hint, and for those that would recur in the next
    world.
    """
    chain = causes(error)
    return not any(_must_surface(e) or isinstance(e, ElasticError) for e in chain)


def causes(error: BaseException) -> list[BaseException]:
    """The exception with all its causes, contexts and members, each once, as in a printed
    traceback."""
    chain: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left:
        failure = left.pop()
        if failure is None or any(failure is known for known in chain):
            continue
        if isinstance(failure, ControlFlow):
            continue
        chain.append(failure)
        left.extend(members(failure))
        left.append(failure.__cause__)
        if not failure.__suppress_context__:
            left.append(failure.__context__)
    return chain


def _must_surface(error: BaseException) -> bool:
    if isinstance(error, _ALWAYS_SURFACE) or not isinstance(error, Exception):
        return True  # KeyboardInterrupt, SystemExit
    return isinstance(error, RuntimeError) and any(t in described(error) for t in _BROKEN_DEVICE)


def _is_fault(error: BaseException) -> bool:
    if isinstance(error, WorldLost | dist.DistError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = described(error)
    return any(part in text for part in _GLOO) and _GLOO_ASSERTION not in text


# ----------------------------------------------------------------------------
# Reports a worker's failure to the agent in torch's error file, for any exception.
#
# torchrun reads each worker's ``TORCHELASTIC_ERROR_FILE``, but only functions decorated with
# ``@record`` write it; for all others torchrun reports a bare exit code.

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


_OUR_AGENT = "ELASTIC_NODE_ID"  # set: an agent reports the lost peer, and restarts this worker
_PACKAGES = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))
_OF_LIBRARIES = ("<frozen ", *(package + os.sep for package in _PACKAGES))
# torch's error for DistributedSampler, dist.get_rank() and others at the top of a script.
_NO_GROUP = "Default process group has not been initialized"
# torch's error for init_process_group() under plain Python, after elastic.join().
_NO_LAUNCHER = "Error initializing torch.distributed using env:// rendezvous"
_NO_GROUP_YET = (
    "run.retry or the first loop creates the process group; init_process_group() may be called "
    "after elastic.join(), not before.\n"
    "  run.wrap(model) replaces DistributedDataParallel(model);\n"
    "  DataLoader(dataset, shuffle=True) in run.loader(…) replaces DistributedSampler;\n"
    "  run.world.rank, run.world.size and run.is_main are the rank inside the training function"
)


class FailureHook:
    """An excepthook that reports the exception to the agent, and records it in the error file and
    in its attributes.

    ``notify`` is called with the error and the exit code as soon as it is certain that the process
    ends with a failure. Its end may take seconds: interpreters run exit handlers, wait for threads,
    and a last share of a checkpoint is written.
    """

    def __init__(
        self,
        journal: EventSink | None = None,
        position: Position = dict,
        notify: Callable[[str, int], object] = lambda error, exit_code: None,
    ) -> None:
        self._journal = journal
        self._position = position
        self.notify = notify
        self.failed = False
        self.text = ""  # the error that ended the training function or the script, in one line
        self.report = ""  # the same for the agent, with its place in the script
        self.is_of_the_world = False  # peers are lost; the script itself did not fail
        self._exit_code: int | None = None  # if it is not that of the interpreter
        self._others: list[_Hook] = []  # that this one replaced, the newest last
        self._wrote = ""  # the error file, if this hook wrote it

    def install(self) -> None:
        """Install this hook in front of the current one. Functions registered with atexit later
        still run."""
        self._put_in_front()
        atexit.register(self._leave)

    def begin_training(self) -> None:
        """The training function is called: the script has handled an earlier exception of it."""
        if self.failed or not self.text:
            return
        self.text = self.report = ""
        if self._wrote:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._wrote)
            self._wrote = ""

    def end_training(self, error: BaseException) -> None:
        """An exception leaves the training function.

        Where that ends the script, it need not reach an excepthook: Hydra, Typer and
        ``loguru.catch`` handle exceptions themselves, and exit. Others replace the hook.
        """
        if self.failed:
            return
        if isinstance(error, SystemExit):
            if error.code not in (None, 0):
                self._describe(error, f"the script called sys.exit({error.code!r:.200})")
                self._fail(error)
            return
        self._describe(error, described(error))
        if isinstance(error, Exception):
            self._wrote = record(error)
        self._put_in_front()

    def fail_at_exit(self, error: Exception) -> None:
        """The script has ended, and the process fails all the same. Called at exit."""
        self(type(error), error, None)
        self._exit_code = _exit_code_of(error)

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        error = _explained(error)
        kind = type(error)
        if not self.failed:
            self._on_uncaught(error)
        other = self._others.pop() if self._others else sys.__excepthook__
        if self._journal is None or not self.is_of_the_world or not os.environ.get(_OUR_AGENT):
            other(kind, error, trace)
        else:
            self._report_lost_peers(error, self._journal)

    def _on_uncaught(self, error: BaseException) -> None:
        self._describe(error, described(error))
        self._fail(error)
        if isinstance(error, Exception):
            record(error, replaces=bool(self._wrote))

    def _describe(self, error: BaseException, text: str) -> None:
        self.text = text.splitlines()[0][:500]
        self.report = shortened(error, text)
        self.is_of_the_world = isinstance(error, Exception) and is_world_fault(error)

    def _fail(self, error: BaseException) -> None:
        """The process ends with this error. First of all, tell the agent: peers are waiting."""
        self.failed = True
        if isinstance(error, ElasticError) and error.exit_code != 1:
            self._exit_code = error.exit_code
        self.notify(self.report, _exit_code_of(error))

    def _put_in_front(self) -> None:
        if sys.excepthook is not self:
            self._others.append(sys.excepthook)
            sys.excepthook = self

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
        if self._exit_code is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self._exit_code)


def world_fault(error: BaseException, *, generation: int, step: int) -> WorldFault:
    """The event for an exception that means that peers are lost, with its traceback."""
    return WorldFault(
        generation=generation,
        step=step,
        error=described(error),
        traceback="".join(traceback.format_exception(error)),
    )


def _place(error: BaseException) -> str:
    """The script's location: the last frame that is neither in torch nor in this library."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_OF_LIBRARIES)]
    if not own:
        return "outside the script"
    return f"at {own[-1].filename}:{own[-1].lineno} in {own[-1].name}"


def shortened(error: BaseException, text: str) -> str:
    """The error's text, after the frames of the script that led to it."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    return shorten(f"Traceback (most recent call last):\n{frames}{text}")


def _explained(error: BaseException) -> BaseException:
    """Torch's error about a missing process group as a refusal with the remedy, which ends the job
    at once; every other error as it is."""
    text = described(error)
    if _NO_GROUP not in text and _NO_LAUNCHER not in text:
        return error
    refusal = NoWorld(text.partition(", please make sure")[0], hint=_NO_GROUP_YET)
    return refusal.with_traceback(error.__traceback__)


def _exit_code_of(error: BaseException) -> int:
    """The exit code of a process that this exception ends."""
    if isinstance(error, ElasticError):
        return error.exit_code
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code & 0xFF
    return 1


def record(error: Exception, *, replaces: bool = False) -> str:
    """Write torch's error file, unless ``@record`` has already done it. Returns its path if it was
    written. ``replaces``: the existing file is ours, about an earlier exception."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or (not replaces and os.path.exists(path) and os.path.getsize(path) > 0):
        return ""
    try:
        _record_raised(_printable(error))
    except OSError as failure:
        sys.stderr.write(f"elastic: {path} could not be written: {failure}\n")
        return ""
    return path


def _record_raised(error: Exception) -> None:
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    trace = error.__traceback__
    try:
        raise error  # torch's handler takes the traceback of the exception that is being handled
    except Exception as raised:  # noqa: BLE001  it is the one just raised
        get_error_handler().record_exception(raised)
    finally:
        error.__traceback__ = trace  # without this function, which has nothing to do with it


def _printable(error: Exception) -> Exception:
    """The exception, or if its message cannot be computed, one that describes it."""
    try:
        str(error)
    except Exception:  # noqa: BLE001  raised by the script's class
        return RuntimeError(described(error)).with_traceback(error.__traceback__)
    return error
