"""Errors, argument checks and clocks."""

from __future__ import annotations

import math
import operator
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Protocol

# ----------------------------------------------------------------------------
# Every error this package raises on purpose.
#
# ::
#
#     ElasticError                     exit code 1 ├── ConfigError (ValueError)     2   an option,
#     endpoint, run id or argument is invalid ├── CoordinationError            69  the store cannot
#     be used │   ├── StoreUnreachable         69  no endpoint answers │   ├── StoreRefused
#     69  invalid certificate, user or password │   ├── StoreTooOld              69  etcd before
#     3.4 │   ├── StoreFull                69  it answers, but has no space for writes │   ├──
#     LeaseGone                69  a write under a lease that has expired │   └── RecordError
#     69  a key has a value that this version cannot read ├── ClusterError                 69
#     Kubernetes' API server cannot be used │   ├── ClusterUnreachable       69  it does not
#     respond, or its response is invalid │   └── ClusterRefused           69  it refuses the
#     request ├── LinkError                    1   agent and worker cannot communicate ├──
#     NodeRefused                  2   this node is incompatible with the running job ├── NodeUnfit
#     71  this node failed its preflight ├── JobFailed                    1   the job has ended
#     without success ├── BudgetSpent                  70  too many failures without progress ├──
#     JoinTimeout                  1   not enough nodes arrived in time ├── Preempted
#     75  asked to leave, and left ├── WorldLost                    1   the world has ended;
#     run.retry continues in the next one │   ├── Superseded               1   a newer world
#     arrived while a group was being built │   ├── GroupBuildFailed         1   the ranks of a
#     world could not connect │   ├── GroupAborted             1   a collective was pending when
#     its group was aborted │   └── ReplicaLost              1   another rank of this rank's
#     replica is lost └── TrainingError                1   misuse inside a worker ├── NoWorld
#     1   the world was read before one exists ├── WorldChanged             1   the world has
#     changed; run.retry continues in the next one └── CheckpointRequired       65  no valid
#     checkpoint where one was required
#
# The message states what happened and where; ``hint`` states what to do. ``exit_code`` is the exit
# code of ``elastic run``.


class ElasticError(Exception):
    """Base of the tree. ``str()`` is the message, followed by the hint on a separate line."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message


class ConfigError(ElasticError, ValueError):
    """An option, endpoint, run id or argument is invalid; nothing has been changed."""

    exit_code = 2


class CoordinationError(ElasticError):
    """The store through which nodes coordinate cannot be used."""

    exit_code = 69


class StoreUnreachable(CoordinationError):
    """No endpoint of the store answers. Names every endpoint tried and its reason."""


class StoreRefused(CoordinationError):
    """The store responds, but refuses: invalid certificate, user or password."""


class StoreTooOld(CoordinationError):
    """The store's version is older than 3.4."""


class StoreFull(CoordinationError):
    """The store responds to reads, but refuses all writes until space is freed."""


class LeaseGone(CoordinationError):
    """A write used a lease that has expired in the store."""


class RecordError(CoordinationError):
    """A key holds a record that this version cannot read. Names the key."""


class ClusterError(ElasticError):
    """Kubernetes' API server cannot be used."""

    exit_code = 69


class ClusterUnreachable(ClusterError):
    """The API server has not handled the request in time."""


class ClusterRefused(ClusterError):
    """The API server responds, but refuses the request."""


class LinkError(ElasticError):
    """The connection between an agent and its worker cannot be used."""


class NodeRefused(ElasticError):
    """This node is incompatible with the running job (different min/max, different version)."""

    exit_code = 2


class NodeUnfit(ElasticError):
    """This node failed its preflight, and has not joined the job. Names every failed check."""

    exit_code = 71


class JobFailed(ElasticError):
    """The job ended without success."""


class BudgetSpent(ElasticError):
    """Too many failures in the window without progress between them."""

    exit_code = 70


class JoinTimeout(ElasticError):
    """Not enough nodes arrived in time."""


class Preempted(ElasticError):
    """This node was asked to leave, and left."""

    exit_code = 75


class WorldLost(ElasticError):
    """The current world has ended without an error of the script: ``run.retry`` continues in the
    next one."""


class Superseded(WorldLost):
    """A newer world arrived while the group of this one was being built."""


class GroupBuildFailed(WorldLost):
    """The ranks of a world could not connect. ``missing`` are the ranks known to be absent."""

    def __init__(self, message: str, *, missing: tuple[int, ...] = (), hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.missing = missing


class GroupAborted(WorldLost):
    """A collective was pending when its group was aborted."""


class ReplicaLost(WorldLost):
    """A rank of this rank's replica is lost, and with it a part of the only state that this process
    can use. The process ends; a new one receives its shards from another replica."""


class TrainingError(ElasticError):
    """The worker's API is used in a way that cannot work."""


class NoWorld(TrainingError):
    """The world was read before one exists."""


class WorldChanged(TrainingError):
    """The world has ended. Ends the training function; ``run.retry`` continues in the next
    world."""


class CheckpointRequired(TrainingError):
    """Steps were committed earlier, but no checkpoint of them can be loaded."""

    exit_code = 65


# ----------------------------------------------------------------------------
# Checks of arguments of the public API: the error names the call, the value and the remedy.
#
# They run before anything is changed. Without them a wrong type would surface as an AttributeError
# or TypeError from within this package, often much later.


def whole_number(what: str, value: object, *, least: int, hint: str = "") -> int:
    """``value`` as an int, also NumPy's and a tensor's integers.

    Raises ConfigError for other types, a bool among them, and for a number below ``least``.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(f"{what}{value!r} is not an integer", hint=hint) from None
    if number < least:
        raise ConfigError(f"{what}{number} is below {least}", hint=hint)
    return number


def real_number(what: str, value: object, *, hint: str = "") -> float:
    """``value`` as a float: a number, or a tensor with one element.

    Raises ConfigError for anything else, text among it.
    """
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        shape = getattr(value, "shape", None)
        shown = repr(value) if shape is None else f"a tensor of shape {tuple(shape)}"
        raise ConfigError(f"{what}{shown} is not a number", hint=hint) from None


def weight(what: str, value: object, *, hint: str = "") -> float:
    """``value`` as a finite number of at least 0; otherwise raises ConfigError."""
    number = real_number(what, value, hint=hint)
    if not (math.isfinite(number) and number >= 0.0):
        raise ConfigError(f"{what}{number} is not a weight of at least 0", hint=hint)
    return number


def described(value: object) -> str:
    """A value in an error: its type if it is an object, else the value."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    is_short = value is None or isinstance(value, int | float | str)
    return repr(value) if is_short else type(value).__name__


def instance(call: str, value: object, kind: type, *, hint: str) -> None:
    """Raise ConfigError unless ``value`` is a ``kind``."""
    if not isinstance(value, kind):
        raise ConfigError(f"{call}({described(value)}): no {kind.__name__}", hint=hint)


def function(call: str, value: object, *, hint: str = "") -> None:
    """Raise ConfigError unless ``value`` can be called."""
    if not callable(value):
        raise ConfigError(f"{call}({described(value)}): not a function", hint=hint)


def named_only(call: str, unnamed: Iterable[Any], example: str) -> None:
    """Raise ConfigError for arguments without a name, where names are part of the job's state."""
    for value in unnamed:
        raise ConfigError(
            f"{call}({type(value).__name__}): an object without a name",
            hint=f"checkpoints store objects by name: {example}",
        )


def same_as_before(call: str, given: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument that is neither a default (None, 0) nor what it was in the
    first call."""
    for name, value in given.items():
        if value is None or value is before[name]:
            continue
        if value != 0 and value != before[name]:
            raise ConfigError(
                f"{call}({name}={value!r}) after a call with {name}={before[name]!r}",
                hint="pass all arguments to the first call; later ones return the same object",
            )


# ----------------------------------------------------------------------------
# Time as an argument. Nothing else in this package reads a clock or sleeps.
#
# Decisions take ``now``; code that waits takes a :class:`Clock`, so that tests control time.


class Clock(Protocol):
    """Every operation on time that this package uses."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary point; never goes back. For intervals."""
        ...

    def boottime(self) -> float:
        """Seconds since the machine booted, including suspended time; the same for all its
        processes. For permissions that must expire even while the granting process sleeps."""
        ...

    def wall(self) -> float:
        """Seconds since 1970 (UTC). For records and users, never for decisions."""
        ...

    def sleep(self, seconds: float) -> None:
        """Block this thread."""
        ...

    def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
        """Block until ``event`` is set, at most ``timeout_s``; returns whether it is."""
        ...


class SystemClock:
    """The machine's clock."""

    monotonic = staticmethod(time.monotonic)  # no call in between: every step reads it

    def boottime(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
        return event.wait(timeout_s)


SYSTEM_CLOCK = SystemClock()
