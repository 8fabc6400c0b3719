"""The exit code of a job.

====  =============================================
0     done
1     the script failed
2     usage: an option, endpoint, run id or argument is wrong
65    no valid checkpoint where one was required
69    etcd is unreachable or denies access
70    the failure budget is spent
71    this node failed its preflight
75    preempted: saved and left
130   interrupted (Ctrl-C)
====  =============================================
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from elastic.errors import (
    BudgetSpent,
    CheckpointRequired,
    ConfigError,
    CoordinationError,
    ElasticError,
    NodeUnfit,
    Preempted,
)

DONE = 0
FAILED = 1
INTERRUPTED = 130
SIGNALLED = 128

# The most informative code first; codes that are not listed follow, largest first.
_BY_PRIORITY = (
    ConfigError.exit_code,
    CoordinationError.exit_code,
    CheckpointRequired.exit_code,
    BudgetSpent.exit_code,
    NodeUnfit.exit_code,
    FAILED,
    Preempted.exit_code,
)


def chain(error: BaseException) -> Iterator[BaseException]:
    """The error, then its causes, nearest first. Terminates on cycles, too."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def elastic_cause(error: BaseException) -> ElasticError | None:
    """The nearest error of this package in the chain: torch wraps it in its own types."""
    return next((e for e in chain(error) if isinstance(e, ElasticError)), None)


def of_agent(error: BaseException) -> int:
    """The exit code for the error that ended an agent.

    Imports torch's exception types, so call it only where torch is loaded already.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError

    if isinstance(error, SystemExit):
        return _of_system_exit(error)
    ours = elastic_cause(error)
    if ours is not None:
        return ours.exit_code
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    for link in chain(error):
        if isinstance(link, ChildFailedError):
            return of_workers([failure.exitcode for failure in link.failures.values()])
        if isinstance(link, SignalException):
            return SIGNALLED + int(link.sigval)
        if isinstance(link, RendezvousConnectionError):
            return CoordinationError.exit_code
    return FAILED


def of_workers(codes: Collection[int]) -> int:
    """65 is passed from a worker to its agent; every other failure counts as the script's."""
    required = CheckpointRequired.exit_code
    return required if required in codes else FAILED


def of_job(codes: Collection[int], *, success_of_one_is_enough: bool) -> int:
    """One exit code for a job from its agents' codes.

    With our rendezvous an agent exits with 0 only when the job is done, so nodes lost earlier do
    not count (``success_of_one_is_enough``). Negative codes are signals.

    >>> of_job([0, -9, 0], success_of_one_is_enough=True)
    0
    >>> of_job([0, 1], success_of_one_is_enough=False)
    1
    >>> of_job([75, 70, 1], success_of_one_is_enough=True)
    70
    """
    if DONE in codes and (success_of_one_is_enough or not any(codes)):
        return DONE
    failures = {SIGNALLED - code if code < 0 else code for code in codes} - {DONE}
    for code in _BY_PRIORITY:
        if code in failures:
            return code
    return max(failures, default=FAILED)


def _of_system_exit(error: SystemExit) -> int:
    if error.code is None:
        return DONE
    return error.code if isinstance(error.code, int) else FAILED
