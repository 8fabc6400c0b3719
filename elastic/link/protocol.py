"""The messages between agent and worker: one JSON object per frame, strictly parsed.

Nothing received is executed. A frame that is not exactly one of these messages raises
:class:`LinkError`, and its connection is closed.
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

PROTOCOL_VERSION = 7
MAX_MESSAGE = 256 << 10
MAX_TEXT = 4000  # characters of one text, up to 12 bytes each in JSON
IN_STEP = "step"  # the phase of a heartbeat while the worker is within a step


@dataclass(frozen=True, kw_only=True)
class ClientHandshakeRequest:
    """Worker: its identity, and its version of the protocol."""

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
    """Worker: it has reached its training loop, and changes worlds without a restart.

    ``max_ranks``: the largest world among whose ranks its batches can be split; 0: not known."""

    max_ranks: int = 0


@dataclass(frozen=True, kw_only=True)
class ReplicaJoin:
    """Worker: it is one of ``size`` consecutive ranks that together hold the model, on this node
    or, if it has fewer workers, on several.

    If one of them dies, the agent replaces all of them."""

    size: int
    mesh: str = ""  # its dimensions
    on_device: bool = False  # its ranks also open communicators between their devices


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
    missing: tuple[int, ...] = ()  # ranks that did not take part in building the group
    unreachable: tuple[str, ...] = ()  # addresses of peers whose connections timed out


@dataclass(frozen=True, kw_only=True)
class Left:
    """Worker: it has left at a step's boundary, as requested."""

    step: int


@dataclass(frozen=True, kw_only=True)
class Exiting:
    """Worker: the process is about to end, clean or with this error.

    If it is not clean, the worker takes no further part in the job: its node is excluded at once,
    not when the process has ended.
    """

    clean: bool
    error: str  # of a clean end: an exception of the training function that the script has handled
    step: int | None = None  # steps committed
    exit_code: int = 1  # that the process will have, if it is not clean


@dataclass(frozen=True, kw_only=True)
class SigtermAsk:
    """Worker: it received SIGTERM. Is the node leaving, or should only this worker end?"""


@dataclass(frozen=True, kw_only=True)
class ProgressPage:
    """Worker: the numbers of its descriptors, which the agent opens (elastic/hangs/page.py,
    stacks.py)."""

    fd: int
    stacks_fd: int
    stacks_signal: int  # 0: the worker writes no stacks


@dataclass(frozen=True, kw_only=True)
class FlightTrace:
    """Worker: its recent collectives of this generation (elastic/hangs/flight.py)."""

    generation: int
    entries: tuple[FlightEntry, ...]


@dataclass(frozen=True)
class StepReport:
    """Worker, once per window: the durations of its steps, for straggler detection."""

    times: StepDurations


@dataclass(frozen=True, kw_only=True)
class ClientHandshakeReply:
    """Agent: the answer to a ClientHandshakeRequest."""

    version: int
    node_id: str


@dataclass(frozen=True, kw_only=True)
class WorldMessage:
    """Agent: a world, and this worker's ranks in it."""

    world: WorldSpec
    # None: this node is not in the world, and leaves at ``world.switch_at_step``, or at once.
    assignment: RankAssignment | None
    node_rank: int  # 0 if the node is not in the world
    nodes: int  # 0: all ranks leave
    nodes_leaving: int = 0  # nodes of the worker's current world that are not in this one
    store_key: str = field(repr=False)  # authenticates at rank 0's store; base64
    store_tls: TlsFiles | None = None  # this node's certificates for it; None: no TLS


@dataclass(frozen=True, kw_only=True)
class ReplicaMeet:
    """Agent: all ranks of this worker's replica are present; their rendezvous uses this nonce."""

    nonce: str
    rank: int  # this worker's, in the replica
    # If several nodes hold the replica: the first node's address, and the credentials of its store.
    host: str = ""
    port: int = 0  # 0: all ranks are on this node
    store_key: str = field(default="", repr=False)
    store_tls: TlsFiles | None = None


@dataclass(frozen=True, kw_only=True)
class ReplicaPending:
    """Agent: this node's ranks of the replica are present; the wait for other nodes has no
    limit."""


@dataclass(frozen=True, kw_only=True)
class SigtermAnswer:
    """Agent: whether the node is leaving."""

    leaving: bool


@dataclass(frozen=True, kw_only=True)
class Permit:
    """Agent: the worker may begin steps and commit saves until this time of the machine's
    CLOCK_BOOTTIME (``clock.boottime()``). It only moves forward."""

    until_s: float


@dataclass(frozen=True, kw_only=True)
class FlightAsk:
    """Agent: ranks show no progress; the worker sends its recent collectives."""


@dataclass(frozen=True)
class MeasureSteps:
    """Agent: report the durations of steps in windows of this length."""

    window_s: float


@dataclass(frozen=True)
class ProfileSteps:
    """Agent: a request for a trace of the next steps."""

    steps: int
    ranks: tuple[int, ...]  # empty: all


@dataclass(frozen=True)
class CountEvents:
    """Agent: from now on, send the events in COUNTED, for this node's metrics."""


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
# Events of a worker that its agent counts: at most one of each kind every few seconds.
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
# Maximum bytes of one message. Messages that are not listed contain a few numbers.
_MAX_BYTES: dict[type[Any], int] = {
    CollectiveFailure: 64 << 10,
    Exiting: 64 << 10,
    FlightTrace: 64 << 10,
    CheckpointSkipped: 128 << 10,
    WorldMessage: MAX_MESSAGE,
    ReplicaMeet: 64 << 10,
}
_DEFAULT_MAX_BYTES = 4 << 10
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in typing.get_args(Message)}


def encode(message: Message) -> bytes:
    """Encode a message as a frame's payload; long texts lose their middle.

    Raises LinkError if the payload is too long.
    """
    kind = type(message)
    data = _sendable(typed_json.to_json(message))
    payload = strict_json.encode({**data, "type": kind.__name__})
    _check_size(kind, len(payload))
    return payload


def _check_size(kind: type[Any], size_bytes: int) -> None:
    most = _MAX_BYTES.get(kind, _DEFAULT_MAX_BYTES)
    if size_bytes > most:
        raise LinkError(f"a {kind.__name__} of {size_bytes} bytes, more than {most}")


def _sendable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _sendable(inner) for name, inner in value.items()}
    if not isinstance(value, str):
        return value
    if len(value) > MAX_TEXT:
        value = f"{value[: MAX_TEXT // 2]} [...] {value[-MAX_TEXT // 2 :]}"
    # Errors quote file names, and neither logs nor stores can write a lone surrogate in one.
    return value.encode(errors="replace").decode()


def decode(payload: bytes) -> Message:
    """Parse one frame. Raises only LinkError."""
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
