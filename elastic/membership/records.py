"""The records of a job in etcd, and their keys."""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from elastic.errors import ConfigError, RecordError
from elastic.hangs.page import RankFacts, RankStepTimes, StackGroup
from elastic.hangs.verdict import Confidence, FlightEntry, HangAction, HangKind
from elastic.wire import typed_json
from elastic.wire.messages import (
    Cause,
    MemoryLocation,
    NodeReplica,
    WorldIdentity,
    WorldReference,
    WorldState,
    nodes_per_replica,
)

# ----------------------------------------------------------------------------
# The etcd keys of a job's records: docs/explanation/protocol.md, section 1.

# Control characters, and the surrogates to which Python decodes argument bytes that are not UTF-8.
_UNPRINTABLE = "\x00-\x1f\x7f-\x9f\ud800-\udfff"
# Generated for a job that was started without one, as by `elastic run --embedded-etcd`.
_GENERATED_RUN_ID = re.compile(r"job-[0-9a-f]{12}")
# A name of a file has 255 bytes, and torch appends nine (DefaultLogsSpecs, torch 2.11 to 2.15).
LONGEST_RUN_ID_BYTES = 246
_FORBIDDEN_IN_RUN_ID = re.compile(f"[/{_UNPRINTABLE}]")
_FORBIDDEN_IN_PREFIX = re.compile(f"[{_UNPRINTABLE}]")


# Parts of a job's keys under which there are further ones: another job there would be in its lists.
_FOLDERS = frozenset({"nodes", "failure_reports", "hangs", "hang_stacks", "step_times"})


@dataclass(frozen=True)
class Keys:
    """The names under ``{prefix}/{run_id}/``.

    ``is_etcd_local``: etcd listens on this machine only, as the embedded one does, which ends with
    the job.
    """

    root: str  # ends with "/"
    is_etcd_local: bool = False

    @staticmethod
    def of(prefix: str, run_id: str, *, is_etcd_local: bool = False) -> Keys:
        """Check both parts and join them. Raises ConfigError."""
        if len(run_id.encode(errors="replace")) > LONGEST_RUN_ID_BYTES:
            raise ConfigError(
                f"the run id {run_id[:40]}… is longer than {LONGEST_RUN_ID_BYTES} bytes: torch "
                "creates a folder for logs with this name",
                hint="use a shorter --rdzv-id",
            )
        if not run_id or _FORBIDDEN_IN_RUN_ID.search(run_id):
            raise ConfigError(
                f"run id {run_id!r} cannot be part of an etcd key",
                hint="use --rdzv-id with at least one character, without '/' "
                "and control characters",
            )
        if not prefix.startswith("/") or _FORBIDDEN_IN_PREFIX.search(prefix):
            raise ConfigError(
                f"prefix {prefix!r} must start with '/' and contain no control characters",
                hint="set prefix in --rdzv-conf, or ELASTIC_PREFIX",
            )
        root = f"{prefix.rstrip('/')}/{run_id}/"
        # (The first part cannot be in another job: a job's keys have at least one part before.)
        if reserved := _FOLDERS.intersection(root.split("/")[2:]):
            raise ConfigError(
                f"{root!r} may be among the keys of another job: it contains {min(reserved)!r}",
                hint="use another --rdzv-id or prefix, without "
                f"{', '.join(sorted(_FOLDERS))} as a part",
            )
        return Keys(root, is_etcd_local)

    def of_job(self, stored: Iterable[str]) -> tuple[str, ...]:
        """Those of the stored keys that are of this job, with one key, which ends with ``/``, for
        each of its folders. Another job's prefix may be this one's root."""
        names = (key.removeprefix(self.root) for key in stored if key.startswith(self.root))
        folders = tuple(f"{self.root}{folder}/" for folder in sorted(_FOLDERS))
        return (*(self.root + name for name in names if "/" not in name), *folders)

    @property
    def run_id(self) -> str:
        """The job's name, without the prefix."""
        return self.root.rstrip("/").rpartition("/")[2]

    @property
    def how_to_continue(self) -> str:
        """How users let a job go on that has ended without success."""
        if _GENERATED_RUN_ID.fullmatch(self.run_id):
            return "start it again: it continues from its last checkpoint, under a new id"
        again = "start it again under another --rdzv-id, from its last checkpoint"
        if self.is_etcd_local:  # nobody can delete keys of an etcd that has ended
            return again
        return f"{again}, or delete {self.done} in etcd to let it continue"

    @property
    def nodes(self) -> str:
        return f"{self.root}nodes/"

    def node(self, node_id: str) -> str:
        return f"{self.root}nodes/{node_id}"

    @property
    def leader(self) -> str:
        return f"{self.root}leader"

    @property
    def progress(self) -> str:
        return f"{self.root}progress"

    @property
    def world(self) -> str:
        return f"{self.root}world"

    @property
    def replicas(self) -> str:
        return f"{self.root}replicas"

    @property
    def failure_reports(self) -> str:
        return f"{self.root}failure_reports/"

    def failure_report(self, node_id: str) -> str:
        return f"{self.root}failure_reports/{node_id}"

    @property
    def hangs(self) -> str:
        return f"{self.root}hangs/"

    def hang(self, node_id: str) -> str:
        return f"{self.root}hangs/{node_id}"

    @property
    def hang_verdict(self) -> str:
        return f"{self.root}hang_verdict"

    @property
    def hang_stacks(self) -> str:
        return f"{self.root}hang_stacks/"

    def hang_stack(self, node_id: str) -> str:
        return f"{self.root}hang_stacks/{node_id}"

    @property
    def step_times(self) -> str:
        return f"{self.root}step_times/"

    def step_times_of(self, node_id: str) -> str:
        return f"{self.root}step_times/{node_id}"

    @property
    def profile(self) -> str:
        return f"{self.root}profile"

    @property
    def done(self) -> str:
        return f"{self.root}done"

    @property
    def stop(self) -> str:
        return f"{self.root}stop"

    @property
    def secret(self) -> str:
        return f"{self.root}secret"

    @property
    def checkpoint_folder(self) -> str:
        return f"{self.root}checkpoint_folder"


# ----------------------------------------------------------------------------
# The records in etcd: one frozen dataclass per key, as strict JSON.
#
# The keys are listed in docs/explanation/protocol.md, section 1.
#
# Every record carries ``version``. A key whose value is not JSON, has another version, an unknown
# or missing field or a value of the wrong type raises a :class:`RecordError` that names the key: a
# newer library's record must stop an older agent with an error message, not in a crash loop.

RECORD_VERSION = 3

# etcd accepts values up to 1.5 MiB, and so do proxies and the liveness connection up to 1 MiB. Ids
# and addresses shrink to about a tenth: the world of 10,000 nodes takes half a megabyte.
COMPRESSED_FROM_BYTES = 32 << 10
MAX_RECORD_BYTES = 64 << 20  # of a record once it is decompressed: bounds what a value can cost

# Checked when a record is read.
_Port = Annotated[int, Meta(ge=0, le=65535)]
_Positive = Annotated[int, Meta(ge=1)]
_ZLIB = b"\x78"  # the first byte of its streams; that of a JSON object is another one


class NodeState(str, Enum):
    """The state of a node (docs/explanation/protocol.md, section 1)."""

    ARRIVED = "arrived"  # in next_rendezvous
    STARTING = "starting"  # workers spawned
    READY = "ready"  # all its workers reached the step loop
    LEAVING = "leaving"  # asked to leave
    FAILED = "failed"  # workers died, restart in progress
    FINISHED = "finished"  # its workers ended with success


class Outcome(str, Enum):
    SUCCESS = "success"
    FAILURE = "failure"


@dataclass(frozen=True, kw_only=True)
class ProcessIdentity:
    """Sufficient to prove on the same machine that a process has ended (agent/identity.py)."""

    host: str
    machine_id: str  # "": none, as in many containers
    boot_id: str  # "": not known
    pod_uid: str  # "": not in a pod, or not set
    pid_namespace: int
    pid: int
    start_ticks: int

    @property
    def digest(self) -> ProcessDigest:
        """Equal tables have equal digests. Without a boot id or a pid namespace, none is proved to
        be the same."""
        ids = (self.boot_id, self.machine_id, self.pod_uid, self.host, str(self.pid_namespace))
        is_known = bool(self.boot_id and self.pid_namespace)
        digest = hashlib.blake2b("\0".join(ids).encode(), digest_size=8).hexdigest()
        return ProcessDigest(
            table=digest if is_known else "", pid=self.pid, start_ticks=self.start_ticks
        )


@dataclass(frozen=True, kw_only=True)
class ProcessDigest:
    """A process identity, reduced to what a comparison on the same machine needs: a world has one
    per member, and four random ids each would be most of its record."""

    table: str  # of the ids that name the process table; "": they prove nothing
    pid: int
    start_ticks: int


@dataclass(frozen=True, kw_only=True)
class Member:
    """A node's place in a world. Rank order is list order; ``nproc`` workers each."""

    node_id: str
    name: str
    nproc: _Positive
    role: str
    liveness_host: str
    liveness_port: int
    process: ProcessDigest
    memory_port: _Port = 0  # where its memory for checkpoints is served; 0: it has none
    replica_port: _Port = 0  # where the ranks of a replica connect if this is its first node
    # The last generation that its workers had run when this world was written; 0 if it joined with
    # this world, None: not known. It outlives the node's key: from it, a leader that has never seen
    # the key knows in which older group the node may still train, and with whom.
    ran_generation: int | None = None


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """How a node's workers ended."""

    node: str  # its name
    text: str | None
    exit_code: int | None
    step: int | None = None  # steps committed by the worker that failed; None: not known
    is_oom_kill: bool = False  # the kernel ended it, since its memory limit was reached


@dataclass(frozen=True, kw_only=True)
class BreakageRecord:
    """A world that broke or shrank, for the next leader's failure budget and the failure
    timeline."""

    generation: int
    lived_s: float
    steps: int | None  # since the previous breakage
    failures: tuple[FailureRecord, ...]
    lost: tuple[str, ...]  # names
    time_s: float  # wall clock
    left: tuple[str, ...] = ()  # names of nodes that left gracefully
    churned: tuple[str, ...] = ()  # of those lost and left: repeatedly within the window
    counts: bool = True  # against the failure budget
    step: int | None = None  # of the job, as reported to the leader
    excluded: str = ""  # name of a node whose machine was at fault
    verdict: str = ""  # on the first failure, for users
    response: str = ""  # the leader's response
    attempts: int = 1  # worlds in a row whose groups could not be built


@dataclass(frozen=True, kw_only=True)
class WorldRecord(WorldIdentity):
    """The agreed world: key ``world``. Only compare-and-swap writes it."""

    store_host: str  # rank 0's
    store_port: int
    switch_at_step: int | None  # the first step in this world; None: switch at once
    state: WorldState
    cause: Cause
    reason: str  # a sentence for users
    committed_step: int | None = None  # a lower bound: if set, training must not start from zero
    members: tuple[Member, ...]
    mode: str  # "restart" | "in-process"
    min_nodes: int
    max_nodes: int
    time_s: float  # wall clock, for users
    library: str = ""  # torch-elastic-harness version of the job; "": not known
    tls: bool = False  # its nodes connect with TLS
    outside: tuple[MemoryLocation, ...] = ()  # of nodes that were alive, and are not members
    breakages: tuple[BreakageRecord, ...] = ()  # the last ones, newest last
    # Ranks that together hold one copy of the model: consecutive ones, so that a rank's replica is
    # rank // replica_size.
    replica_size: _Positive = 1
    # Without members: all nodes were asked to leave, to save or report the lost steps before.
    left_in_order: bool = False
    # Without members: nodes whose workers may still step in an earlier world. A key that has
    # expired does not tell whether they have stopped, so that the world says whom to wait for.
    leaving: tuple[Member, ...] = ()
    version: int = RECORD_VERSION

    @property
    def size(self) -> int:
        """Number of workers."""
        return sum(m.nproc for m in self.members)

    @property
    def tracked(self) -> tuple[Member, ...]:
        """The nodes on whose fate the next world depends, whether or not their keys exist."""
        return self.members + self.leaving

    @cached_property
    def node_ids(self) -> tuple[str, ...]:
        return tuple(m.node_id for m in self.members)

    @cached_property
    def id_set(self) -> frozenset[str]:
        """For lookups: a search in ``node_ids`` for every node is quadratic."""
        return frozenset(self.node_ids)

    @property
    def nodes_per_replica(self) -> int:
        """1 if each node has complete replicas."""
        return nodes_per_replica(self.replica_size, self.members[0].nproc) if self.members else 1

    @property
    def shrinks_from(self) -> int:
        """The smallest limit of its ranks for which a smaller world replaces this one before it
        trains; 0: none does, because workers of an earlier world have the state.

        Only the workers know how many ranks can split their batches, once they have started.
        """
        if self.cause not in (Cause.FIRST, Cause.TAKEOVER) or not self.members:
            return 0
        per_replica = self.nodes_per_replica
        nodes = -(-max(1, self.min_nodes) // per_replica) * per_replica
        return nodes * max(m.nproc for m in self.members)

    def first_rank_of(self, node_id: str) -> int:
        """Global rank of the node's local rank 0. Raises KeyError if it is not a member."""
        rank = 0
        for member in self.members:
            if member.node_id == node_id:
                return rank
            rank += member.nproc
        raise KeyError(node_id)


@dataclass(frozen=True, kw_only=True)
class Node:
    """A live agent: key ``nodes/{node_id}``, on its lease."""

    node_id: str
    name: str  # ELASTIC_NODE_NAME, else the host name: shown to users, and used to detect flapping
    nproc: _Positive
    role: str
    address: str  # where the others reach this node (--local-addr)
    # Free ports for the group's store, used as ports[generation % n].
    ports: Annotated[tuple[_Port, ...], Meta(min_length=1)]
    liveness_port: int
    process: ProcessIdentity
    state: NodeState
    in_process: bool
    min_nodes: int
    max_nodes: int
    library: str  # torch-elastic-harness version
    torch: str
    # The world that its workers run. The key only names it: with the record of N nodes in each of N
    # keys, a listing would be quadratic. In memory it is the complete WorldRecord where that is
    # known: in the node's own agent, and to a leader (agent/roster.py).
    running: WorldReference | None
    arrived_for: int  # the last generation that this node has left, when it arrived
    failure: str | None  # the error of its workers, if it arrived after a failure
    failure_exit_code: int | None
    joined_at_s: float  # wall clock, for users and for seniority among joining nodes
    failure_step: int | None = None  # steps committed by the worker that failed; None: not known
    failure_is_oom_kill: bool = False  # the kernel ended it, since its memory limit was reached
    # Lines of the kernel's log since its workers had started, which may explain it.
    failure_kernel_log: tuple[str, ...] = ()
    ran_generation: int | None = None  # the last that its workers have run, also after they restart
    memory_port: _Port = 0
    tls: bool = False  # its connections to and from other nodes use TLS
    replica_size: _Positive = 1  # ranks that hold the model once
    replica_port: _Port = 0
    # If a replica takes several nodes: the start of its workers that requests the other nodes, and
    # the ids of the nodes that together hold a model, in rank order.
    replica_start: str = ""
    replica: tuple[str, ...] = ()
    mesh: str = ""  # of a replica, as passed to elastic.join; "": not known, or none
    # The largest world among whose ranks the script's batches can be split; 0: not known.
    max_ranks: Annotated[int, Meta(ge=0)] = 0
    version: int = RECORD_VERSION

    @property
    def nodes_per_replica(self) -> int:
        """1 if each node has complete replicas."""
        return nodes_per_replica(self.replica_size, self.nproc)

    @property
    def last_run(self) -> int | None:
        """The world that its workers run or, if they run none, the last one that they ran."""
        return self.running.generation if self.running is not None else self.ran_generation

    @property
    def has_failed(self) -> bool:
        """Whether its workers have failed since they were last started."""
        return self.failure is not None or self.failure_exit_code is not None

    @property
    def outlives_lease(self) -> bool:
        """Whether the key has no lease. A later leader would otherwise take a node that has
        finished for lost, and interrupt the others."""
        return self.state is NodeState.FINISHED

    def as_member(self) -> Member:
        return Member(
            node_id=self.node_id,
            name=self.name,
            nproc=self.nproc,
            role=self.role,
            liveness_host=self.address,
            liveness_port=self.liveness_port,
            process=self.process.digest,
            memory_port=self.memory_port,
            replica_port=self.replica_port,
            ran_generation=self.ran_generation,
        )


@dataclass(frozen=True, kw_only=True)
class Leader:
    """Key ``leader``, on the leader's lease."""

    node_id: str
    address: str
    liveness_port: int
    version: int = RECORD_VERSION


@dataclass(frozen=True, kw_only=True)
class FailureReport:
    """Key ``failure_reports/{node_id}``: a failure that a node's workers saw in ``generation``.

    That is the world they were in, or the one whose group they could not build. A newer world
    supersedes the report.
    """

    node_id: str
    generation: int
    error: str
    # Ids of nodes that did not arrive at a build, or whose connections timed out.
    unreachable: tuple[str, ...] = ()
    version: int = RECORD_VERSION


@dataclass(frozen=True, kw_only=True)
class HangFacts:
    """Key ``hangs/{node_id}``, on the node's lease: the node's ranks that make no progress. It
    exists only while there are any."""

    node_id: str
    generation: int  # the newest known to the node; time without progress counts from its start on
    ranks: tuple[RankFacts, ...]
    version: int = RECORD_VERSION


@dataclass(frozen=True, kw_only=True)
class HangVerdict:
    """Key ``hang_verdict``: the leader's last verdict on a world without progress."""

    generation: int
    action: HangAction
    kind: HangKind
    confidence: Confidence
    reason: str
    culprits: tuple[int, ...]  # ranks
    culprit: RankFacts | None  # the first of them
    node_id: str  # the acting node: that of the first culprit, or of rank 0
    ranks: tuple[RankFacts, ...]  # the facts from which it was judged, of a sample of many
    size: int  # of the world
    version: int = RECORD_VERSION


@dataclass(frozen=True, kw_only=True)
class RankFlight:
    """The collectives that a rank started recently."""

    rank: int
    entries: tuple[FlightEntry, ...]


@dataclass(frozen=True, kw_only=True)
class HangStacks:
    """Key ``hang_stacks/{node_id}``, on the node's lease: the stacks of its ranks at the last
    verdict, for the report of the acting node. Bounded in size (``elastic.hangs.report.Share``)."""

    node_id: str
    generation: int
    stacks: tuple[StackGroup, ...]
    flights: tuple[RankFlight, ...]
    version: int = RECORD_VERSION


@dataclass(frozen=True, kw_only=True)
class NodeStepTimes:
    """Key ``step_times/{node_id}``, on the node's lease: how long the last steps of its ranks took,
    written about once a window."""

    node_id: str
    ranks: tuple[RankStepTimes, ...]
    version: int = RECORD_VERSION


@dataclass(frozen=True, kw_only=True)
class ReplicaSlots:
    """Key ``replicas``: which nodes form a replica, for nodes whose workers were started while the
    others trained. Only compare-and-swap writes it; a first world implies its replicas."""

    replicas: tuple[NodeReplica, ...]
    version: int = RECORD_VERSION


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Key ``profile``, on the lease of `elastic profile`: requests a profile of some or all
    ranks."""

    steps: Annotated[int, Meta(ge=1, le=10_000)]
    ranks: tuple[Annotated[int, Meta(ge=0)], ...]  # none: all
    version: int = RECORD_VERSION


@dataclass(frozen=True, kw_only=True)
class Done:
    """Key ``done``: set once, never changed."""

    outcome: Outcome
    reason: str
    exit_code: int
    generation: int
    final_step: int | None
    time_s: float
    breakages: tuple[BreakageRecord, ...] = ()  # of a job that failed: the last ones
    version: int = RECORD_VERSION


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Key ``stop``, from `elastic stop` to `elastic resume`: nodes that train save and leave, and
    others wait."""

    by: str  # user@host
    time_s: float
    version: int = RECORD_VERSION


@dataclass(frozen=True, kw_only=True)
class Secret:
    """Key ``secret``: the secret that all nodes of this run prove to each other."""

    secret: str = field(repr=False)  # 32 bytes as base64
    version: int = RECORD_VERSION


@dataclass(frozen=True, kw_only=True)
class JobFolderRecord:
    """Key ``checkpoint_folder``: the folder of the run's first worker that saves checkpoints."""

    folder: str  # absolute
    version: int = RECORD_VERSION


Record = (
    WorldRecord
    | Node
    | Leader
    | FailureReport
    | HangFacts
    | HangVerdict
    | HangStacks
    | NodeStepTimes
    | ReplicaSlots
    | Profile
    | Done
    | Stop
    | Secret
    | JobFolderRecord
)
R = TypeVar("R", bound=Record)


def encode(record: Record) -> bytes:
    """The record as JSON with sorted keys, compressed if it is large: equal records give equal
    bytes."""
    if isinstance(record, Node) and record.running is not None:
        running = record.running
        name = WorldReference(generation=running.generation, nonce=running.nonce)
        record = replace(record, running=name)
    return packed(
        json.dumps(
            typed_json.to_json(record), sort_keys=True, separators=(",", ":"), allow_nan=False
        ).encode()
    )


def packed(text: bytes) -> bytes:
    """The JSON text as a value for the store."""
    return zlib.compress(text) if len(text) >= COMPRESSED_FROM_BYTES else text


def unpacked(key: str, value: bytes) -> bytes:
    """The JSON text of a value. Raises RecordError."""
    if not value.startswith(_ZLIB):
        return value
    stream = zlib.decompressobj()
    try:
        text = stream.decompress(value, MAX_RECORD_BYTES)
    except zlib.error as error:
        raise _broken(key, f"is damaged: {error}") from None
    if not stream.eof:
        raise _broken(key, f"is incomplete, or has more than {MAX_RECORD_BYTES >> 20} MiB")
    return text


def group_of(running: WorldReference | None) -> tuple[str, ...] | None:
    """The ids of the nodes in this world; None if only its name is known."""
    return running.node_ids if isinstance(running, WorldRecord) else None


def decode(cls: type[R], key: str, value: bytes) -> R:
    """Parse strictly. Raises RecordError naming ``key`` and the field, and nothing else."""
    try:
        data = typed_json.parse(unpacked(key, value))
        _check_version(key, data)
        record = typed_json.convert(cls, data)
    except typed_json.DecodeError as error:
        raise _broken(key, str(error)) from None
    if impossible := _contradiction(record):
        raise _broken(key, impossible)
    return record


def _check_version(key: str, data: dict[str, Any]) -> None:
    """Checked first, since another version may have different fields."""
    version = data.get("version", RECORD_VERSION)
    if version != RECORD_VERSION:
        raise RecordError(
            f"{key}: record version {typed_json.shown(version)}, this library reads "
            f"{RECORD_VERSION}",
            hint="run the same version of torch-elastic-harness on every node, "
            "or use another --rdzv-id",
        )


def _broken(key: str, what: str) -> RecordError:
    return RecordError(
        f"{key}: the record {what}",
        hint="another program may have written it; delete the key, or use another --rdzv-id: the "
        "job continues from its newest checkpoint",
    )


def _contradiction(record: Record) -> str | None:
    """Contradictions that the types cannot express, and that would crash every leader."""
    match record:
        case Node(min_nodes=low, max_nodes=high) | WorldRecord(min_nodes=low, max_nodes=high) if (
            not 1 <= low <= high
        ):
            return f"has min_nodes={low} and max_nodes={high}, expected 1 <= min <= max"
        case WorldRecord(generation=generation) if generation < 1:
            return f"has generation={generation}, expected at least 1"
        case WorldRecord() if len(set(record.node_ids)) < len(record.members):
            return "has a member twice in the world"
        case Node(running=WorldReference(generation=generation)) if generation < 1:
            return f"has running.generation={generation}, expected at least 1"
    return None
