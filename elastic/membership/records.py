"""What stands in etcd: one frozen dataclass per key of PROTOCOL section 1, as strict JSON.

Every record carries ``version``. A key whose value is not JSON, has another version, an
unknown or missing field or a value of the wrong type is a :class:`RecordError` that names the
key: a newer library's record must stop an older agent with a sentence, not in a crash loop.
"""

from __future__ import annotations

import functools
import json
import math
import reprlib
import types
import typing
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar

from elastic.errors import RecordError
from elastic.hangs.facts import RankFacts
from elastic.hangs.verdict import HangAction, HangConfidence, HangKind
from elastic.membership.keys import Keys as Keys

RECORD_VERSION = 1

# A hostile value must not fill the log, nor recurse too deep to be shown.
_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = 120


class NodeState(str, Enum):
    """Where a node stands (PROTOCOL section 1)."""

    ARRIVED = "arrived"  # in next_rendezvous
    STARTING = "starting"  # workers spawned
    READY = "ready"  # all its workers reached the step loop
    LEAVING = "leaving"  # told to go
    FAILED = "failed"  # workers died, restart under way
    FINISHED = "finished"  # its workers ended with success


class WorldState(str, Enum):
    ACTIVE = "active"
    PAUSED = "paused"  # fewer than min_nodes: agree, save, wait


class Cause(str, Enum):
    """Why a world was formed."""

    FIRST = "first"
    LOST = "lost"  # a member is gone
    LEFT = "left"  # a member was told to leave
    FAILURE = "failure"  # a failure with everyone alive
    JOINED = "joined"  # joining nodes
    PAUSED = "paused"  # fewer than min_nodes are left
    RESUMED = "resumed"  # enough nodes again
    TAKEOVER = "takeover"  # every member of the last world is gone


class Outcome(str, Enum):
    SUCCESS = "success"
    FAILURE = "failure"


@dataclass(frozen=True, kw_only=True)
class ProcessIdentity:
    """Enough to prove on the same machine that a process is gone (node/identity.py)."""

    host: str
    machine_id: str  # "": none, as in many containers
    boot_id: str  # "": not known
    pod_uid: str  # "": in no pod, or not told
    pid_namespace: int
    pid: int
    start_ticks: int


@dataclass(frozen=True, kw_only=True)
class Member:
    """A node's place in a world. Rank order is list order; ``nproc`` workers each."""

    node_id: str
    name: str
    nproc: int
    role: str
    liveness_host: str
    liveness_port: int
    process: ProcessIdentity
    memory_port: int = 0  # where its memory for checkpoints is served; 0: it has none


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """How a node's workers ended."""

    node: str  # its name
    text: str | None
    exit_code: int | None


@dataclass(frozen=True, kw_only=True)
class BreakageRecord:
    """A world that failures broke: the failure budget's memory, for the next leader."""

    generation: int
    lived_s: float
    steps: int | None  # made since the breakage before
    failures: tuple[FailureRecord, ...]
    lost: tuple[str, ...]  # names
    time_s: float  # wall clock


@dataclass(frozen=True, kw_only=True)
class World:
    """The agreed world: key ``world``. Only compare-and-swap writes it."""

    generation: int
    members: tuple[Member, ...]
    store_host: str
    store_port: int
    nonce: str
    mode: str  # "restart" | "in-process"
    switch_at_step: int | None
    state: WorldState
    min_nodes: int
    max_nodes: int
    lineage: tuple[int, ...]  # earlier generations, newest last, at most 32
    cause: Cause
    reason: str  # a sentence for people
    time_s: float  # wall clock, for people
    committed_step: int | None = None  # a floor: if set, a start from zero is refused
    library: str = ""  # torch-elastic-harness version of the job; "": not known
    tls: bool = False  # its nodes connect with TLS
    breakages: tuple[BreakageRecord, ...] = ()  # the last ones, newest last
    version: int = RECORD_VERSION

    @property
    def size(self) -> int:
        """Number of workers."""
        return sum(m.nproc for m in self.members)

    @property
    def node_ids(self) -> tuple[str, ...]:
        return tuple(m.node_id for m in self.members)

    def first_rank_of(self, node_id: str) -> int:
        """Global rank of the node's local rank 0."""
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
    name: str  # ELASTIC_NODE_NAME, else the host name: what people see, and what flaps
    nproc: int
    role: str
    address: str  # where the others reach this node (--local-addr)
    ports: tuple[int, ...]  # free ports for the group's store, used as ports[generation % n]
    liveness_port: int
    process: ProcessIdentity
    state: NodeState
    in_process: bool
    min_nodes: int
    max_nodes: int
    library: str  # torch-elastic-harness version
    torch: str
    running: World | None  # the world record its workers run, for a wiped etcd
    arrived_for: int  # the last generation this node is done with, when arrived
    failure: str | None  # what its workers ended with, when it arrived after a failure
    failure_exit_code: int | None
    joined_at_s: float  # wall clock, for people and seniority among joining nodes
    memory_port: int = 0
    tls: bool = False  # it connects to other nodes with TLS, and serves them so
    version: int = RECORD_VERSION

    def as_member(self) -> Member:
        return Member(
            node_id=self.node_id,
            name=self.name,
            nproc=self.nproc,
            role=self.role,
            liveness_host=self.address,
            liveness_port=self.liveness_port,
            process=self.process,
            memory_port=self.memory_port,
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
    """Key ``failure_reports/{node_id}``: what a node's workers saw in ``generation``.

    That is the world they were in, or the one whose group they could not build: trouble of an
    older generation than the newest world was answered by that world.
    """

    node_id: str
    generation: int
    error: str
    accused: tuple[str, ...] = ()  # node ids that did not come to a build
    version: int = RECORD_VERSION


@dataclass(frozen=True, kw_only=True)
class HangFacts:
    """Key ``hangs/{node_id}``, on the node's lease: the node's ranks that show no progress. It is
    there only while there are some."""

    node_id: str
    generation: int  # the newest that the node knows: the quiet time counts from then at most
    ranks: tuple[RankFacts, ...]
    version: int = RECORD_VERSION


@dataclass(frozen=True, kw_only=True)
class HangVerdict:
    """Key ``hang_verdict``: the leader's last verdict on a world that does not go on."""

    generation: int
    action: HangAction
    kind: HangKind
    confidence: HangConfidence
    reason: str
    culprits: tuple[int, ...]  # ranks
    culprit: RankFacts | None  # the first of them
    node_id: str  # who acts: the node of the first culprit, or of rank 0
    ranks: tuple[RankFacts, ...]  # what it was judged from
    size: int  # of the world
    version: int = RECORD_VERSION


@dataclass(frozen=True, kw_only=True)
class RankStacks:
    """Stacks of one rank's threads, the main thread's last, cut to a few pages."""

    rank: int
    text: str


@dataclass(frozen=True, kw_only=True)
class HangStacks:
    """Key ``hang_stacks/{node_id}``, on the node's lease: of its ranks at the last verdict, for the
    report of the node that acts."""

    node_id: str
    generation: int
    ranks: tuple[RankStacks, ...]
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
    version: int = RECORD_VERSION


@dataclass(frozen=True, kw_only=True)
class Secret:
    """Key ``secret``: what all nodes of this run prove to each other that they know."""

    secret: str = field(repr=False)  # 32 bytes as base64
    version: int = RECORD_VERSION


Record = (
    World | Node | Leader | FailureReport | HangFacts | HangVerdict | HangStacks | Done | Secret
)
R = TypeVar(
    "R", World, Node, Leader, FailureReport, HangFacts, HangVerdict, HangStacks, Done, Secret
)


def encode(record: Record) -> bytes:
    """The record as JSON with sorted keys: equal records are equal bytes."""
    return json.dumps(
        asdict(record), sort_keys=True, separators=(",", ":"), allow_nan=False
    ).encode()


def decode(cls: type[R], key: str, value: bytes) -> R:
    """Parse strictly. Raises RecordError naming ``key`` and the field, and nothing else."""
    try:
        data = json.loads(value, object_pairs_hook=_object, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _broken(key, f"is not JSON ({error})") from None
    if not isinstance(data, dict):
        raise _broken(key, f"is a JSON {type(data).__name__}, not an object")
    return typing.cast(R, _build(cls, data, key, ""))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        raise ValueError("duplicate field in an object")
    return data


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")  # Python's json would let it pass


def _broken(key: str, what: str) -> RecordError:
    return RecordError(
        f"{key}: the record {what}",
        hint="another program may have written it; delete the key, or use another --rdzv-id",
    )


def _wrong(key: str, path: str, value: Any, expected: str) -> RecordError:
    return _broken(key, f"has {path}={_shown.repr(value)}, expected {expected}")


@functools.cache
def _types(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _build(cls: type, data: dict[str, Any], key: str, path: str) -> Any:
    hints = _types(cls)
    known = {f.name for f in fields(cls)}
    if "version" in known and data.get("version", RECORD_VERSION) != RECORD_VERSION:
        version = _shown.repr(data["version"])
        raise RecordError(
            f"{key}: record version {version}, this library reads {RECORD_VERSION}",
            hint="run the same version of torch-elastic-harness on every node, "
            "or use another --rdzv-id",
        )
    unknown, missing = sorted(set(data) - known), sorted(known - set(data))
    if unknown or missing:
        said = [
            f"{word} {', '.join(map(_shown.repr, names))}"
            for word, names in (("unknown", unknown), ("missing", missing))
            if names
        ]
        raise _broken(key, f"has in {path or 'the top'}: {'; '.join(said)}")
    built = cls(**{n: _value(hints[n], v, key, f"{path}.{n}".lstrip(".")) for n, v in data.items()})
    if nonsense := _nonsense(built):
        raise _broken(key, f"has in {path or 'the top'}: {nonsense}")
    return built


def _nonsense(record: object) -> str | None:
    """What the types cannot say, and what would otherwise end the leader, again and again."""
    match record:
        case Member(nproc=nproc) | Node(nproc=nproc) if nproc < 1:
            return f"nproc={nproc}, expected at least 1"
        case Member(memory_port=port) | Node(memory_port=port) if not 0 <= port < 65536:
            return f"memory_port={port}, expected 0 to 65535"
        case Node(ports=ports) if not ports or not all(0 <= p < 65536 for p in ports):
            return f"ports={_shown.repr(list(ports))}, expected at least one, each below 65536"
        case Node(min_nodes=low, max_nodes=high) | World(min_nodes=low, max_nodes=high) if not (
            1 <= low <= high
        ):
            return f"min_nodes={low} and max_nodes={high}, expected 1 <= min <= max"
        case World(generation=generation) if generation < 1:
            return f"generation={generation}, expected at least 1"
        case World() if len(set(record.node_ids)) < len(record.members):
            return "a member stands twice in the world"
    return None


def _value(hint: Any, value: Any, key: str, path: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        inner = next(a for a in typing.get_args(hint) if a is not type(None))
        return _value(inner, value, key, path)
    if origin is tuple:
        if not isinstance(value, list):
            raise _wrong(key, path, value, "a list")
        inner = typing.get_args(hint)[0]
        return tuple(_value(inner, v, key, f"{path}[{i}]") for i, v in enumerate(value))
    if is_dataclass(hint):
        if not isinstance(value, dict):
            raise _wrong(key, path, value, "an object")
        return _build(typing.cast(type, hint), value, key, path)
    if issubclass(hint, Enum):
        try:
            return hint(value)
        except ValueError:
            names = ", ".join(str(m.value) for m in hint)
            raise _wrong(key, path, value, f"one of: {names}") from None
    return _number(value, key, path) if hint is float else _plain(hint, value, key, path)


def _plain(hint: type, value: Any, key: str, path: str) -> Any:
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise _wrong(key, path, value, hint.__name__)
    return value


def _number(value: Any, key: str, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _wrong(key, path, value, "a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _wrong(key, path, value, "a finite number")
    return number
