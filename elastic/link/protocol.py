"""What agent and worker say to each other: one JSON object per frame, strictly parsed.

Nothing received is executed. A frame that is not exactly one of these messages is a
:class:`LinkError`, and ends the connection it came on.
"""

from __future__ import annotations

import types
import typing
from dataclasses import asdict, dataclass, field
from typing import Any

from elastic.errors import LinkError
from elastic.secure_channel import strict_json
from elastic.secure_channel.errors import ProtocolError

PROTOCOL_VERSION = 3
MAX_MESSAGE = 256 << 10
MAX_TEXT = 4000  # characters of one text; JSON makes up to 12 bytes of one


@dataclass(frozen=True, kw_only=True)
class Hello:
    """Worker: here I am."""

    version: int
    pid: int
    local_rank: int
    library: str


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """Worker, several times a second: where it stands. Generation 0: in no world yet."""

    generation: int
    step: int
    phase: str
    step_time_s: float


@dataclass(frozen=True, kw_only=True)
class Ready:
    """Worker: it has reached its training loop, and changes worlds without a restart."""


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


@dataclass(frozen=True, kw_only=True)
class Left:
    """Worker: it has left at a step's boundary, as told."""

    step: int


@dataclass(frozen=True, kw_only=True)
class Bye:
    """Worker: the process is about to end, clean or with this error."""

    clean: bool
    error: str


@dataclass(frozen=True, kw_only=True)
class SigtermAsk:
    """Worker: it got SIGTERM; is the node leaving, or is this worker to end?"""


@dataclass(frozen=True, kw_only=True)
class ProgressPage:
    """Worker: descriptors of its own, which the agent opens (elastic/hangs/page.py, stacks.py)."""

    fd: int
    stacks_fd: int
    stacks_signal: int  # 0: it writes no stacks


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """Agent: the answer to a hello."""

    version: int
    node_id: str


@dataclass(frozen=True, kw_only=True)
class WorldMessage:
    """Agent: a world, as this worker is to enter it."""

    generation: int
    nonce: str
    member: bool  # False: this node is not in it; it leaves at ``switch_at_step``, or at once
    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    nodes: int
    store_host: str
    store_port: int
    store_key: str = field(repr=False)  # that rank 0's store is opened with; base64
    # Files of certificates for the store, of this node: authority, own, its key. None: no TLS.
    store_tls: tuple[str, ...] = ()
    switch_at_step: int | None
    state: str  # "active" | "paused"
    lineage: tuple[int, ...]
    cause: str
    reason: str
    committed_step: int | None


@dataclass(frozen=True, kw_only=True)
class SigtermAnswer:
    """Agent: whether the node is leaving."""

    leaving: bool


@dataclass(frozen=True, kw_only=True)
class Permit:
    """Agent: the worker may begin steps and commit saves until then, by this machine's
    CLOCK_BOOTTIME (``clock.boottime()``). Only ever later than before."""

    until_s: float


Message = (
    Hello
    | Heartbeat
    | Ready
    | Entered
    | CollectiveFailure
    | Left
    | Bye
    | SigtermAsk
    | ProgressPage
    | Welcome
    | WorldMessage
    | SigtermAnswer
    | Permit
)
FROM_WORKER = (
    Hello,
    Heartbeat,
    Ready,
    Entered,
    CollectiveFailure,
    Left,
    Bye,
    SigtermAsk,
    ProgressPage,
)
FROM_AGENT = (Welcome, WorldMessage, SigtermAnswer, Permit)
# Bytes of one message. What is not listed holds a few numbers.
_MOST_BYTES: dict[type[Any], int] = {
    CollectiveFailure: 64 << 10,
    Bye: 64 << 10,
    WorldMessage: MAX_MESSAGE,
}
_MOST_BYTES_OF_OTHERS = 4 << 10
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in typing.get_args(Message)}
_FIELDS = {name: typing.get_type_hints(kind) for name, kind in _KINDS.items()}


def encode(message: Message) -> bytes:
    """The message as a frame's payload; long texts lose their middle.

    Raises LinkError if it is too long.
    """
    kind = type(message)
    data = {name: _sendable(value) for name, value in asdict(message).items()}
    data["type"] = kind.__name__
    payload = strict_json.encode(data)
    _check_size(kind, len(payload))
    return payload


def _check_size(kind: type[Any], size_bytes: int) -> None:
    most = _MOST_BYTES.get(kind, _MOST_BYTES_OF_OTHERS)
    if size_bytes > most:
        raise LinkError(f"a {kind.__name__} of {size_bytes} bytes, more than {most}")


def _sendable(value: Any) -> Any:
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
        data = strict_json.decode(payload)
    except ProtocolError as error:
        raise LinkError(f"{payload[:80]!r}: {error}") from None
    kind = data.pop("type", None)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise LinkError(f"not a message: {payload[:80]!r}")
    _check_size(_KINDS[kind], len(payload))
    hints = _FIELDS[kind]
    if data.keys() != hints.keys():
        differing = sorted(map(str, data.keys() ^ hints.keys()))
        raise LinkError(f"{kind} has other fields than expected: {', '.join(differing)[:200]}")
    values = {name: _value(kind, name, hint, data[name]) for name, hint in hints.items()}
    message: Message = _KINDS[kind](**values)
    return message


def _value(kind: str, name: str, hint: Any, value: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if value is None:
            return None
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)[0]
        if isinstance(value, list):
            return tuple(_value(kind, name, inner, item) for item in value)
    elif hint is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    elif isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise LinkError(f"{kind}.{name} is {str(value)[:80]!r}")
