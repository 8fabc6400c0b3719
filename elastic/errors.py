"""Every error this package raises on purpose.

::

    ElasticError                     exit code 1
    ├── ConfigError (ValueError)     2   an option, endpoint, run id or argument is invalid
    ├── CoordinationError            69  the store cannot be used
    │   ├── StoreUnreachable         69  no endpoint answers
    │   ├── StoreRefused             69  invalid certificate, user or password
    │   ├── StoreTooOld              69  etcd before 3.4
    │   ├── StoreFull                69  it answers, but has no space for writes
    │   ├── LeaseGone                69  a write under a lease that has expired
    │   └── RecordError              69  a key has a value that this version cannot read
    ├── ClusterError                 69  Kubernetes' API server cannot be used
    │   ├── ClusterUnreachable       69  it does not respond, or its response is invalid
    │   └── ClusterRefused           69  it refuses the request
    ├── LinkError                    1   agent and worker cannot communicate
    ├── NodeRefused                  2   this node is incompatible with the running job
    ├── NodeUnfit                    71  this node failed its preflight
    ├── JobFailed                    1   the job has ended without success
    ├── BudgetSpent                  70  too many failures without progress
    ├── JoinTimeout                  1   not enough nodes arrived in time
    ├── Preempted                    75  asked to leave, and left
    ├── WorldLost                    1   the world has ended; run.retry continues in the next one
    │   ├── Superseded               1   a newer world arrived while a group was being built
    │   ├── GroupBuildFailed         1   the ranks of a world could not connect
    │   ├── GroupAborted             1   a collective was pending when its group was aborted
    │   └── ReplicaLost              1   another rank of this rank's replica is lost
    └── TrainingError                1   misuse inside a worker
        ├── NoWorld                  1   the world was read before one exists
        ├── WorldChanged             1   the world has changed; run.retry continues in the next one
        └── CheckpointRequired       65  no valid checkpoint where one was required

The message states what happened and where; ``hint`` states what to do. ``exit_code`` is the exit
code of ``elastic run``.
"""

from __future__ import annotations

from typing import ClassVar


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
