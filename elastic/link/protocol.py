"""The messages of agent and worker: one JSON object per frame, strictly parsed.

Nothing received is executed. A frame that is not exactly one of these messages is a
:class:`LinkError`, and ends the connection it came on.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass, field
from typing import Any

from elastic.errors import LinkError
from elastic.events import CheckpointSaved, CheckpointSkipped, RankTimes, Recovered
from elastic.hangs.flight import FlightEntry
from elastic.messages import typed_json
from elastic.messages.world import RankAssignment, WorldSpec
from elastic.secure_channel import strict_json
from elastic.secure_channel.tls import TlsFiles
from elastic.stragglers.facts import StepDurations

PROTOCOL_VERSION = 6
MAX_MESSAGE = 256 << 10
MAX_TEXT = 4000  # characters of one text; JSON makes up to 12 bytes of one
IN_STEP = "step"  # the phase of a heartbeat while the worker is within a step


@dataclass(frozen=True, kw_only=True)
class ClientHandshakeRequest:
    """Worker: here I am."""

    version: int
    pid: int
    local_rank: int
    library: str


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """Worker, several times a second: its position. Generation 0: in no world yet."""

    generation: int
    step: int
    phase: str  # IN_STEP, or anything else
    step_time_s: float


@dataclass(frozen=True, kw_only=True)
class Ready:
    """Worker: it has reached its training loop, and changes worlds without a restart."""


@dataclass(frozen=True, kw_only=True)
class ReplicaJoin:
    """Worker: it is one of ``size`` consecutive ranks that hold the model together: of this node
    or, if it has fewer, of several.

    They live and die together: the agent replaces all of them if one dies."""

    size: int
    mesh: str = ""  # their dimensions


@dataclass(frozen=True, kw_only=True)
class ReplicaMet:
    """Worker: it has met the other ranks of its replica, after ReplicaMeet."""


@dataclass(frozen=True, kw_only=True)
class Entered:
    """Worker: it has built the world's group and agreed on the state."""

    generation: int
    step: int  # steps committed


@dataclass(frozen=True, kw_only=True)
class CollectiveFailure:
    """Worker: a collective of this generation failed, or its group could not be built."""

    generation: int
    error: str
    missing: tuple[int, ...] = ()  # ranks that did not come to the building of the group
    unreachable: tuple[str, ...] = ()  # addresses of peers whose connections timed out


@dataclass(frozen=True, kw_only=True)
class Left:
    """Worker: it has left at a step's boundary, as requested."""

    step: int


@dataclass(frozen=True, kw_only=True)
class Exiting:
    """Worker: the process is about to end, clean or with this error."""

    clean: bool
    error: str
    step: int | None = None  # steps committed


@dataclass(frozen=True, kw_only=True)
class SigtermAsk:
    """Worker: it got SIGTERM; is the node leaving, or is this worker to end?"""


@dataclass(frozen=True, kw_only=True)
class ProgressPage:
    """Worker: its descriptors, which the agent opens (elastic/hangs/page.py, stacks.py)."""

    fd: int
    stacks_fd: int
    stacks_signal: int  # 0: it writes no stacks


@dataclass(frozen=True, kw_only=True)
class FlightTrace:
    """Worker: the collectives that it began lately in this generation (elastic/hangs/flight.py)."""

    generation: int
    entries: tuple[FlightEntry, ...]


@dataclass(frozen=True)
class StepReport:
    """Worker, once a window: how long its steps take, for the detection of stragglers."""

    times: StepDurations


@dataclass(frozen=True, kw_only=True)
class ClientHandshakeReply:
    """Agent: the answer to a ClientHandshakeRequest."""

    version: int
    node_id: str


@dataclass(frozen=True, kw_only=True)
class WorldMessage:
    """Agent: a world, and this worker's place in it."""

    world: WorldSpec
    # None: this node is not in it, and leaves at ``world.switch_at_step``, or at once.
    assignment: RankAssignment | None
    node_rank: int  # 0 where the node is not in it
    nodes: int  # 0: all ranks leave
    nodes_leaving: int = 0  # of the worker's present world, those that are not in this one
    store_key: str = field(repr=False)  # that rank 0's store is opened with; base64
    store_tls: TlsFiles | None = None  # this node's certificates for it; None: no TLS


@dataclass(frozen=True, kw_only=True)
class ReplicaMeet:
    """Agent: all ranks of this worker's replica are there; they meet under this name."""

    nonce: str
    rank: int  # of this worker, in the replica
    # Where several nodes hold it: the first one's address, and how its store is opened.
    host: str = ""
    port: int = 0  # 0: all ranks are on this node
    store_key: str = field(default="", repr=False)
    store_tls: TlsFiles | None = None


@dataclass(frozen=True, kw_only=True)
class ReplicaPending:
    """Agent: this node's ranks of the replica are there; it waits for other nodes, which takes as
    long as it takes."""


@dataclass(frozen=True, kw_only=True)
class SigtermAnswer:
    """Agent: whether the node is leaving."""

    leaving: bool


@dataclass(frozen=True, kw_only=True)
class Permit:
    """Agent: the worker may begin steps and commit saves until then, by this machine's
    CLOCK_BOOTTIME (``clock.boottime()``). Only ever later than before."""

    until_s: float


@dataclass(frozen=True, kw_only=True)
class FlightAsk:
    """Agent: ranks show no progress; which collectives has this one begun?"""


@dataclass(frozen=True)
class MeasureSteps:
    """Agent: report the times of steps in windows of this length."""

    window_s: float


@dataclass(frozen=True)
class ProfileSteps:
    """Agent: a request for a trace of the next steps."""

    steps: int
    ranks: tuple[int, ...]  # none: all


@dataclass(frozen=True)
class CountEvents:
    """Agent: send the events in COUNTED from now on, for this node's metrics."""


Message = (
    ClientHandshakeRequest
    | Heartbeat
    | Ready
    | ReplicaJoin
    | ReplicaMet
    | Entered
    | CollectiveFailure
    | Left
    | Exiting
    | SigtermAsk
    | ProgressPage
    | FlightTrace
    | StepReport
    | RankTimes
    | Recovered
    | CheckpointSaved
    | CheckpointSkipped
    | ClientHandshakeReply
    | WorldMessage
    | ReplicaMeet
    | ReplicaPending
    | SigtermAnswer
    | Permit
    | FlightAsk
    | MeasureSteps
    | ProfileSteps
    | CountEvents
)
# Events of a worker that its agent counts: at most one in a few seconds each.
COUNTED = (RankTimes, Recovered, CheckpointSaved, CheckpointSkipped)
FROM_WORKER = (
    ClientHandshakeRequest,
    Heartbeat,
    Ready,
    ReplicaJoin,
    ReplicaMet,
    Entered,
    CollectiveFailure,
    Left,
    Exiting,
    SigtermAsk,
    ProgressPage,
    FlightTrace,
    StepReport,
    *COUNTED,
)
FROM_AGENT = (
    ClientHandshakeReply,
    WorldMessage,
    ReplicaMeet,
    ReplicaPending,
    SigtermAnswer,
    Permit,
    FlightAsk,
    MeasureSteps,
    ProfileSteps,
    CountEvents,
)
# Bytes of one message. Messages that are not listed contain a few numbers.
_MOST_BYTES: dict[type[Any], int] = {
    CollectiveFailure: 64 << 10,
    Exiting: 64 << 10,
    FlightTrace: 64 << 10,
    CheckpointSkipped: 128 << 10,
    WorldMessage: MAX_MESSAGE,
    ReplicaMeet: 64 << 10,
}
_MOST_BYTES_OF_OTHERS = 4 << 10
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in typing.get_args(Message)}


def encode(message: Message) -> bytes:
    """The message as a frame's payload; long texts lose their middle.

    Raises LinkError if it is too long.
    """
    kind = type(message)
    data = _sendable(typed_json.to_json(message))
    payload = strict_json.encode({**data, "type": kind.__name__})
    _check_size(kind, len(payload))
    return payload


def _check_size(kind: type[Any], size_bytes: int) -> None:
    most = _MOST_BYTES.get(kind, _MOST_BYTES_OF_OTHERS)
    if size_bytes > most:
        raise LinkError(f"a {kind.__name__} of {size_bytes} bytes, more than {most}")


def _sendable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _sendable(inner) for name, inner in value.items()}
    if not isinstance(value, str):
        return value
    if len(value) > MAX_TEXT:
        value = f"{value[: MAX_TEXT // 2]} [...] {value[-MAX_TEXT // 2 :]}"
    # Errors quote file names; a lone surrogate in one is nothing that logs and stores can write.
    return value.encode(errors="replace").decode()


def decode(payload: bytes) -> Message:
    """Parse one frame. Raises LinkError, and nothing else."""
    if len(payload) > MAX_MESSAGE:
        raise LinkError(f"a message of {len(payload)} bytes, more than {MAX_MESSAGE}")
    try:
        data = typed_json.parse(payload)
    except typed_json.DecodeError as error:
        raise LinkError(f"{payload[:80]!r} {error}") from None
    name = data.pop("type", None)
    if not isinstance(name, str) or name not in _KINDS:
        raise LinkError(f"not a message: {payload[:80]!r}")
    kind = _KINDS[name]
    _check_size(kind, len(payload))
    try:
        message: Message = typed_json.convert(kind, data)
    except typed_json.DecodeError as error:
        raise LinkError(f"{name} {error}") from None
    return message
