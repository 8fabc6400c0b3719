"""The exceptions of a launch that ends without a result.

torchrun ends with an exit code that a launcher of pods can act upon (docs/exit-codes.md). A program
that calls ``elastic_launch`` gets one of torch's rendezvous errors, with ours as the cause:
SystemExit must not end it, least of all with 0.

``torch.distributed.run.run(args)`` is called by commands (`elastic run`, `accelerate launch`) and
by programs. It raises both: a rendezvous error that a program can catch like any other, and that
otherwise ends the process with the exit code.
"""

from __future__ import annotations

import logging

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from elastic.errors import (
    BudgetSpent,
    CheckpointRequired,
    CoordinationError,
    ElasticError,
    JobFailed,
    JoinTimeout,
    RecordError,
)
from elastic.node.status import JobSucceeded
from elastic.rendezvous.torch_private import Launcher, WorkerFailure
from elastic.telemetry.log import get_logger

# The first match counts: subclasses come before their bases.
_KINDS: tuple[tuple[type[Exception], type[RendezvousError]], ...] = (
    (JobSucceeded, RendezvousClosedError),
    (JobFailed, RendezvousClosedError),
    (BudgetSpent, RendezvousClosedError),
    (CheckpointRequired, RendezvousClosedError),
    (JoinTimeout, RendezvousTimeoutError),
    (RecordError, RendezvousStateError),
    (CoordinationError, RendezvousConnectionError),
)


def ending(error: ElasticError | JobSucceeded, launcher: Launcher) -> RendezvousError:
    """The exception to raise ``from error``. For commands, the reason is logged here."""
    kind = next((ours for theirs, ours in _KINDS if isinstance(error, theirs)), RendezvousError)
    if launcher is Launcher.PROGRAM:
        return kind(str(error))
    is_done = isinstance(error, JobSucceeded)
    get_logger().log(logging.INFO if is_done else logging.ERROR, "%s", error)
    ended = _with_exit_code(kind)(str(error))
    assert isinstance(ended, SystemExit)
    ended.code = error.exit_code if isinstance(error, ElasticError) else 0
    return ended


def failed_without_restart(failure: WorkerFailure, store: CoordinationError) -> JobFailed:
    """The error of a node whose workers failed, and which cannot enter another world: its launcher
    must learn of the failure of the script, not of the store alone.

    >>> full = CoordinationError("etcd is full", hint="free it")
    >>> print(failed_without_restart(WorkerFailure(text=None, exit_code=3), full))
    the workers of this node failed (exit code 3), and cannot be started again: etcd is full
      free it
    """
    how = failure.text.strip() if failure.text else f"exit code {failure.exit_code}"
    return JobFailed(
        f"the workers of this node failed ({how}), and cannot be started again: {store.message}",
        hint=store.hint,
    )


def why_left(failure: BaseException | None) -> str:
    """Why a node leaves without having finished, for users.

    >>> why_left(None), why_left(OSError("no space\nbelow /tmp"))
    ('its workers ended without having joined the job', 'OSError: no space')
    """
    if failure is None:
        return "its workers ended without having joined the job"
    if isinstance(failure, KeyboardInterrupt):
        return "interrupted"
    if isinstance(failure, ChildFailedError):
        return "its workers failed"
    text = str(failure).strip().partition("\n")[0]
    return f"{type(failure).__name__}: {text[:200]}" if text else type(failure).__name__


def _with_exit_code(kind: type[RendezvousError]) -> type[RendezvousError]:
    return type(f"{kind.__name__}WithExitCode", (kind, SystemExit), {})
