"""What agent and worker say to each other: one JSON object per line, strictly parsed.

Nothing received is executed. A line that is not exactly one of these messages is a
:class:`LinkError`, and ends the connection it came on.
"""

from __future__ import annotations

import json
import math
import types
import typing
from dataclasses import asdict, dataclass
from typing import Any

from elastic.errors import LinkError

PROTOCOL_VERSION = 1
MAX_LINE = 256 << 10
MAX_TEXT = 4000  # characters of one text; JSON makes up to 12 bytes of one


@dataclass(frozen=True, kw_only=True)
class Hello:
    """Worker: here I am."""

    version: int
    pid: int
    local_rank: int
    library: str


@dataclass(frozen=True, kw_only=True)
class Beat:
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
class Trouble:
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
    | Beat
    | Ready
    | Entered
    | Trouble
    | Left
    | Bye
    | SigtermAsk
    | Welcome
    | WorldMessage
    | SigtermAnswer
    | Permit
)
FROM_WORKER = (Hello, Beat, Ready, Entered, Trouble, Left, Bye, SigtermAsk)
FROM_AGENT = (Welcome, WorldMessage, SigtermAnswer, Permit)
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in typing.get_args(Message)}
_FIELDS = {name: typing.get_type_hints(kind) for name, kind in _KINDS.items()}


def encode(message: Message) -> bytes:
    """The message as one line; long texts lose their middle. Raises LinkError if it is too long."""
    data = {name: _sendable(value) for name, value in asdict(message).items()}
    data["type"] = type(message).__name__
    line = json.dumps(data, separators=(",", ":"), allow_nan=False).encode()
    if len(line) > MAX_LINE:
        raise LinkError(f"a {type(message).__name__} of {len(line)} bytes, more than {MAX_LINE}")
    return line + b"\n"


def _sendable(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if len(value) > MAX_TEXT:
        value = f"{value[: MAX_TEXT // 2]} [...] {value[-MAX_TEXT // 2 :]}"
    # Errors quote file names; a lone surrogate in one is nothing that logs and stores can write.
    return value.encode(errors="replace").decode()


def decode(line: bytes) -> Message:
    """Parse one line. Raises LinkError, and nothing else."""
    if len(line) > MAX_LINE:
        raise LinkError(f"a line of {len(line)} bytes, more than {MAX_LINE}")
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LinkError(f"not JSON: {line[:80]!r} ({error})") from None
    kind = data.pop("type", None) if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise LinkError(f"not a message: {line[:80]!r}")
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
        if isinstance(value, (int, float)) and not isinstance(value, bool) and _finite(value):
            return float(value)
    elif isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise LinkError(f"{kind}.{name} is {str(value)[:80]!r}")


def _finite(value: float) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


class LineBuffer:
    """What has come on a connection: whole lines go on, the beginning of the next one stays."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that ``chunk`` ends. Raises LinkError when one is too long to be a message."""
        self._rest += chunk
        lines: list[bytes] = []
        if b"\n" in chunk:
            *whole, self._rest = self._rest.split(b"\n")
            lines = [bytes(line) for line in whole]
        if len(self._rest) > MAX_LINE:
            raise LinkError(f"a line of more than {MAX_LINE} bytes")
        return lines
