"""Every error this package raises on purpose.

::

    ElasticError                     exit code 1
    ├── ConfigError (ValueError)     2   an option, endpoint, run id or argument is wrong
    ├── CoordinationError            69  the store cannot be used
    │   ├── StoreUnreachable         69  no endpoint answers
    │   ├── StoreRefused             69  wrong certificate, user or password
    │   ├── StoreTooOld              69  etcd before 3.4
    │   ├── LeaseGone                69  a key was to be written on a lease that has ended
    │   └── RecordError              69  a key holds what this version cannot read
    ├── ClusterError                 69  Kubernetes' API server cannot be used
    │   ├── ClusterUnreachable       69  it does not answer, or not sensibly
    │   └── ClusterRefused           69  it will not do what it is asked
    ├── LinkError                    1   agent and worker do not understand each other
    ├── NodeRefused                  2   this node cannot mix with the running job
    ├── NodeUnfit                    71  this node failed its preflight
    ├── JobFailed                    1   the job has ended without success
    ├── BudgetSpent                  70  too many failures without progress
    ├── JoinTimeout                  1   not enough nodes came in time
    ├── Preempted                    75  asked to leave, and left
    ├── WorldLost                    1   the present world is over; run.retry goes on in the next
    │   ├── Superseded               1   a newer world came while a group was being built
    │   ├── GroupBuildFailed         1   the ranks of a world did not get together
    │   ├── GroupAborted             1   a collective was under way when its group was taken down
    │   └── ReplicaLost              1   another rank of this rank's replica is gone
    └── TrainingError                1   misuse inside a worker
        ├── NoWorld                  1   asked for the world before there is one
        ├── WorldChanged             1   the world has changed; run.retry goes on in the next one
        └── CheckpointRequired       65  no valid checkpoint where one was required

The message says what happened and where; ``hint`` says what to do. ``exit_code`` is what
``elastic run`` ends with.
"""

from __future__ import annotations

from typing import ClassVar


class ElasticError(Exception):
    """Base of the tree. ``str()`` is the message, followed by the hint on a line of its own."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message


class ConfigError(ElasticError, ValueError):
    """An option, endpoint, run id or argument is wrong; nothing has been changed."""

    exit_code = 2


class CoordinationError(ElasticError):
    """The store that nodes agree through cannot be used."""

    exit_code = 69


class StoreUnreachable(CoordinationError):
    """No endpoint of the store answers. Names every endpoint tried and its reason."""


class StoreRefused(CoordinationError):
    """The store answers and refuses: wrong certificate, user or password."""


class StoreTooOld(CoordinationError):
    """The store's version is older than 3.4."""


class LeaseGone(CoordinationError):
    """A key was to be written on a lease that the store no longer knows."""


class RecordError(CoordinationError):
    """A key holds a record that this version cannot read. Names the key."""


class ClusterError(ElasticError):
    """Kubernetes' API server cannot be used."""

    exit_code = 69


class ClusterUnreachable(ClusterError):
    """The API server has not done what it was asked within the time there was."""


class ClusterRefused(ClusterError):
    """The API server answers, and will not do what it is asked."""


class LinkError(ElasticError):
    """The connection between an agent and its worker cannot be used."""


class NodeRefused(ElasticError):
    """This node cannot mix with the running job (other min/max, other version)."""

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
    """Not enough nodes came in time."""


class Preempted(ElasticError):
    """This node was asked to leave, and left."""

    exit_code = 75


class WorldLost(ElasticError):
    """The present world is over, by nobody's mistake: ``run.retry`` goes on in the next one."""


class Superseded(WorldLost):
    """A newer world came while the group of this one was being built."""


class GroupBuildFailed(WorldLost):
    """The ranks of a world did not get together. ``missing``: those that are known to lack."""

    def __init__(self, message: str, *, missing: tuple[int, ...] = (), hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.missing = missing


class GroupAborted(WorldLost):
    """A collective was under way when its group was taken down."""


class ReplicaLost(WorldLost):
    """A rank of this rank's replica is gone, and with it a part of the only state that this
    process can use. It ends; a new one receives its shards from another replica."""


class TrainingError(ElasticError):
    """The worker's API is used in a way that cannot work."""


class NoWorld(TrainingError):
    """The world was asked for before there is one."""


class WorldChanged(TrainingError):
    """The world is over. Ends the training function; ``run.retry`` goes on in the next world."""


class CheckpointRequired(TrainingError):
    """Steps were committed earlier, and no checkpoint of them can be loaded."""

    exit_code = 65
