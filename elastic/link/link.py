"""The connection between a worker and its agent."""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import itertools
import os
import select
import shutil
import socket
import struct
import tempfile
import threading
import typing
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import tenacity

from elastic.errors import SYSTEM_CLOCK, Clock, LinkError
from elastic.hangs.page import StepDurations
from elastic.hangs.verdict import FlightEntry
from elastic.telemetry.events import CheckpointSaved, CheckpointSkipped, RankTimes, Recovered
from elastic.telemetry.log import get_logger
from elastic.tuning.intervals import (
    LINK_CLOSE_S,
    LINK_HEARTBEAT_S,
)
from elastic.wire import base as wire_base
from elastic.wire import typed_json
from elastic.wire.base import AuthenticationError, Limits, ProtocolError
from elastic.wire.handshake import (
    MAX_FRAME,
    ClientHandshake,
    Credentials,
    FrameReader,
    SecretKey,
    frame,
)
from elastic.wire.hub import Connection, Handler, Hub, listen_on_path
from elastic.wire.messages import WorldIdentity, WorldReference, WorldState
from elastic.wire.tls import TlsFiles

# To connect to the agent, retries included: it may be busy starting workers.
LINK_CONNECT_S = 10.0
# Between two attempts of the first connection: the agent listens before it starts workers.
LINK_CONNECT_AGAIN_S = 0.1
# The first pause between two attempts to reconnect; each further one is twice as long.
LINK_FIRST_PAUSE_S = 0.05
# The longest pause between them: the worker finds a restarted listener within this.
LINK_LONGEST_PAUSE_S = 1.0
# A worker waits in slices of this length for pending data to be sent, and checks for messages.
LINK_FLUSH_S = 0.01

# ----------------------------------------------------------------------------
# Sockets that a forked child must not keep, because it would hide its parent's death from the
# peers.
#
# A data worker forked from a training process inherits all its sockets. After the parent's SIGKILL
# they stay open until the child ends: peers and the agent detected the death after 5 s with idle
# data workers, and not within 40 s with busy ones [measured]. The child therefore replaces them
# with /dev/null.
#
# A child must not collect the parent's garbage either: if it contains a process group, the group's
# destructor joins threads that the child does not have, and the child dies of SIGSEGV [measured].
# Objects that exist at the fork are therefore excluded from the child's collector. (In the parent
# nothing is frozen: unfreezing would undo the script's own ``gc.freeze()``.)

_covered: dict[int, tuple[int, int]] = {}  # fd -> its device and inode
_is_installed = False
_collector = threading.local()  # ``was_enabled``: whether the collector was on


def cover(fds: Iterable[int]) -> None:
    """From now on, forked children have /dev/null instead of these sockets."""
    global _is_installed
    for fd in fds:
        try:
            _covered[fd] = _identity(fd)
        except OSError:
            continue  # closed in the meantime
    if not _is_installed:
        os.register_at_fork(
            before=_pause_collector, after_in_parent=_restore_collector, after_in_child=_in_child
        )
        _is_installed = True


def uncover(fds: Iterable[int]) -> None:
    """Stop replacing these sockets, which are closed, or which a child may inherit again."""
    for fd in fds:
        _covered.pop(fd, None)


def _pause_collector() -> None:
    # Until the child has frozen its parent's objects.
    _collector.was_enabled = gc.isenabled()
    gc.disable()


def _restore_collector() -> None:
    if _collector.was_enabled:
        gc.enable()


def _in_child() -> None:
    gc.freeze()
    _restore_collector()
    _replace_sockets()


def _replace_sockets() -> None:
    # In a forked child of a threaded process: no locks, no logging, nothing that may fail.
    if not _covered:
        return
    try:
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return  # no descriptor is free
    for fd, identity in list(_covered.items()):
        try:
            if _identity(fd) == identity:  # otherwise closed in the meantime, and its number reused
                os.dup2(null, fd, inheritable=False)
        except OSError:
            continue
    os.close(null)
    _covered.clear()


def _identity(fd: int) -> tuple[int, int]:
    stat = os.fstat(fd)
    return stat.st_dev, stat.st_ino


# ----------------------------------------------------------------------------
# The process at the other end of a unix socket, and its exit status, as the kernel reports
# them.

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


@dataclass(frozen=True)
class Peer:
    """The process that connected, or that listens, by SO_PEERCRED."""

    pid: int  # 0: in a pid namespace that is not visible to this process
    uid: int


def peer_of(sock: socket.socket) -> Peer:
    """The process at the other end of a connected unix socket."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return Peer(pid, uid)


def may_claim_pid(pid: int, claimed: int) -> bool:
    """Whether process ``pid`` may claim the id ``claimed``: its own, or its id in its pid
    namespace.

    ``NSpid`` of /proc/PID/status lists its ids from this namespace down to its own (proc(5)).
    """
    if pid == claimed:
        return True
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
            ids = next((line.split()[1:] for line in status if line.startswith("NSpid:")), [])
    except OSError:
        return False
    return len(ids) > 1 and ids[-1] == str(claimed)


def has_ended(pidfd: int) -> bool:
    """Whether that process has ended, or is a zombie."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def exit_status(pidfd: int) -> tuple[int | None, int | None]:
    """The exit code and the signal of a child that has ended; one of them is None. Does not reap
    it.

    Both are None if the process is not a child, or was reaped already.
    """
    try:
        info = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return None, None  # a shell's child, or reaped already
    if info is None:
        return None, None
    if info.si_code == os.CLD_EXITED:
        return info.si_status, None
    return None, info.si_status


# ----------------------------------------------------------------------------
# The messages between agent and worker: one JSON object per frame, strictly parsed.
#
# Nothing received is executed. A frame that is not exactly one of these messages raises
# :class:`LinkError`, and its connection is closed.

PROTOCOL_VERSION = 10
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
class ReplicaFormed:
    """Worker: it has reached the other ranks of its replica, after ReplicaRendezvous."""


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
    """Worker: it has left at a step's boundary, after Leave."""

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
class InTraining:
    """Worker: its training function or loop has begun, or has ended.

    A process that ends in between has failed, whatever its exit code: others train with it.
    """

    value: bool


@dataclass(frozen=True, kw_only=True)
class SigtermAsk:
    """Worker: it received SIGTERM. Is the node leaving, or should only this worker end?"""


@dataclass(frozen=True, kw_only=True)
class FolderAsk:
    """Worker: this is its checkpoint folder. Which one is the job's?"""

    folder: str


@dataclass(frozen=True, kw_only=True)
class ProgressPage:
    """Worker: the numbers of its descriptors, which the agent opens (elastic/hangs/page.py,
    stacks.py)."""

    fd: int
    stacks_fd: int
    stacks_signal: int  # 0: the worker writes no stacks


@dataclass(frozen=True, kw_only=True)
class FlightTrace:
    """Worker: its recent collectives of this generation (elastic/hangs/verdict.py)."""

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
class ClientHandshakeRefusal:
    """Agent: why it refuses a ClientHandshakeRequest, and disconnects."""

    reason: str
    hint: str


@dataclass(frozen=True, kw_only=True)
class GroupSpec(WorldReference):
    """What the ranks of a group need to find each other: the part of a message from which a process
    group is built (groups/store.py)."""

    rank: int
    size: int  # number of ranks
    store_host: str  # rank 0's
    store_port: int
    store_key: str = field(repr=False)  # authenticates at the store; base64
    store_tls: TlsFiles | None = None  # this node's certificates for it; None: no TLS


@dataclass(frozen=True, kw_only=True)
class Assignment(WorldIdentity, GroupSpec):
    """Agent: a world, as one of its workers receives it."""

    local_rank: int
    local_size: int
    node_rank: int
    nodes: int
    nodes_leaving: int = 0  # nodes of the worker's current world that are not in this one
    switch_at_step: int | None  # the first step in this world; None: switch at once
    state: WorldState
    committed_step: int | None  # a lower bound: if set, training must not start from zero
    # Not 0: a smaller world follows if the script's limit is at least this, and less than the size.
    shrinks_from: int = 0


@dataclass(frozen=True, kw_only=True)
class Leave:
    """Agent: this world is without the worker's node. It leaves at ``switch_at_step``, or at
    once."""

    generation: int
    nodes: int  # of the world; 0: all ranks leave
    nodes_leaving: int = 0  # nodes of the worker's current world that are not in this one
    switch_at_step: int | None


@dataclass(frozen=True, kw_only=True)
class ReplicaRendezvous(GroupSpec):
    """Agent: all ranks of this worker's replica are present; their rendezvous uses this nonce.

    Without a ``store_port`` all of them are on this node, and need no store."""

    generation: int = 0  # a replica outlives worlds
    store_host: str = ""  # the first node's
    store_port: int = 0
    store_key: str = field(default="", repr=False)


@dataclass(frozen=True, kw_only=True)
class ReplicaPending:
    """Agent: this node's ranks of the replica are present; the wait for other nodes has no
    limit."""


@dataclass(frozen=True, kw_only=True)
class SigtermAnswer:
    """Agent: whether the node is leaving."""

    leaving: bool


@dataclass(frozen=True, kw_only=True)
class FolderAnswer:
    """Agent: the checkpoint folder of the job's first worker."""

    folder: str


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
    | ReplicaFormed
    | Entered
    | CollectiveFailure
    | Left
    | Exiting
    | InTraining
    | SigtermAsk
    | FolderAsk
    | ProgressPage
    | FlightTrace
    | StepReport
    | RankTimes
    | Recovered
    | CheckpointSaved
    | CheckpointSkipped
    | ClientHandshakeReply
    | ClientHandshakeRefusal
    | Assignment
    | Leave
    | ReplicaRendezvous
    | ReplicaPending
    | SigtermAnswer
    | FolderAnswer
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
    ReplicaFormed,
    Entered,
    CollectiveFailure,
    Left,
    Exiting,
    InTraining,
    SigtermAsk,
    FolderAsk,
    ProgressPage,
    FlightTrace,
    StepReport,
    *COUNTED,
)
FROM_AGENT = (
    ClientHandshakeReply,
    ClientHandshakeRefusal,
    Assignment,
    Leave,
    ReplicaRendezvous,
    ReplicaPending,
    SigtermAnswer,
    FolderAnswer,
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
    ClientHandshakeRefusal: 128 << 10,
    Assignment: MAX_MESSAGE,
    ReplicaRendezvous: 64 << 10,
    FolderAsk: 64 << 10,
    FolderAnswer: 64 << 10,
}
_DEFAULT_MAX_BYTES = 4 << 10
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in typing.get_args(Message)}


def encode(message: Message) -> bytes:
    """Encode a message as a frame's payload; long texts lose their middle.

    Raises LinkError if the payload is too long.
    """
    kind = type(message)
    data = _sendable(typed_json.to_json(message))
    payload = wire_base.encode({**data, "type": kind.__name__})
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


# ----------------------------------------------------------------------------
# A worker's side of the handshake with its agent: one attempt, which ends at once if the agent
# dies.

KEY_FILE = "key"  # mode 0600, in the socket's folder of mode 0700


@dataclass(frozen=True, kw_only=True)
class AgentConnection:
    """A connection after the handshake. The caller owns both descriptors."""

    sock: socket.socket  # non-blocking
    agent: int  # pidfd; -1: the agent is in a pid namespace that is not visible to this process
    received: FrameReader
    messages: list[Message]  # received right after the agent's reply


def handshake(
    path: str,
    request: ClientHandshakeRequest,
    *,
    key: SecretKey,
    deadline_s: float,
    stop: int,
    clock: Clock,
) -> AgentConnection:
    """Connect, prove to each other that both have the link's key, and wait for the agent's reply;
    stop once ``stop`` is readable.

    Raises OSError if another attempt may succeed, LinkError if it cannot.
    """
    handshake = ClientHandshake(key, str(request.pid))
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    agent = -1
    try:
        sock.connect(path)
        pid = peer_of(sock).pid
        agent = os.pidfd_open(pid) if pid else -1
        sock.send(frame(handshake.hello))
        received = FrameReader(MAX_FRAME)
        try:
            while (challenge := received.next()) is None:
                _wait(sock, agent, stop, deadline_s - clock.monotonic())
                received.feed(_receive(sock, path))
            sock.send(frame(handshake.answer(challenge)) + frame(encode(request)))
            received.limit = MAX_MESSAGE
            while (reply := received.next()) is None:
                _wait(sock, agent, stop, deadline_s - clock.monotonic())
                received.feed(_receive(sock, path))
            _check(decode(reply))
            messages = []
            while (message := received.next()) is not None:
                messages.append(decode(message))
        except ProtocolError as error:
            is_other_agent = isinstance(error, AuthenticationError)
            raise LinkError(
                f"the listener at {path} is not this worker's agent: {error}",
                hint="the agent sets ELASTIC_LINK; it may be another or an earlier agent's"
                if is_other_agent
                else "use the same torch-elastic-harness in the worker's and the agent's Python",
            ) from error
        return AgentConnection(sock=sock, agent=agent, received=received, messages=messages)
    except BaseException:
        sock.close()
        if agent >= 0:
            os.close(agent)
        raise


def key_path(path: str) -> str:
    """The path of the file that holds the key of the link at ``path``."""
    return os.path.join(os.path.dirname(path), KEY_FILE)


def read_key(path: str) -> SecretKey:
    """The key of the link at ``path``, as its agent wrote it, readable only by this user.

    Raises OSError if there is none, LinkError if others could have written or read it.
    """
    try:
        return SecretKey.parse(wire_base.read(key_path(path)).decode("ascii"))
    except (PermissionError, ValueError) as error:
        raise LinkError(
            f"the key of the link at {path} cannot be used: {error}",
            hint="ELASTIC_LINK is set by the agent; workers must run as its user",
        ) from None


def _wait(sock: socket.socket, agent: int, stop: int, timeout_s: float) -> None:
    poll = select.poll()
    for fd in (sock.fileno(), agent, stop):
        if fd >= 0:
            poll.register(fd, select.POLLIN)
    ready = [fd for fd, _ in poll.poll(max(0.0, timeout_s) * 1000)]
    if not ready:
        raise TimeoutError("no answer to the handshake")
    if sock.fileno() not in ready:
        raise ConnectionError("the agent died" if agent in ready else "interrupted")


def _receive(sock: socket.socket, path: str) -> bytes:
    chunk = sock.recv(1 << 16)
    if not chunk:
        raise LinkError(f"the agent at {path} hung up", hint="its log has the reason")
    return chunk


def _check(message: Message) -> None:
    if isinstance(message, ClientHandshakeRefusal):
        raise LinkError(f"the agent refuses this worker: {message.reason}", hint=message.hint)
    if not isinstance(message, ClientHandshakeReply) or message.version != PROTOCOL_VERSION:
        raise LinkError(
            f"the agent replied with {message}, not with a handshake of version {PROTOCOL_VERSION}",
            hint="use the same torch-elastic-harness in the worker's and the agent's Python",
        )


# ----------------------------------------------------------------------------
# The queue of messages to the agent: any thread may put, none blocks, the order is preserved.
#
# The thread that puts also sends, so that a process's last messages are sent before it ends. The
# link's thread sends the rest once the socket is writable. Unsent frames outlive a connection: the
# next one begins with the first frame that was not sent completely.

MAX_FRAMES = 1024  # unsent frames: at this limit the agent has read nothing for minutes


class Outbox:
    """One per client; ``put`` and ``flush`` may interrupt each other, in signal handlers too."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()
        self._taken = 0  # bytes of the first frame that are sent on this connection
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()

    @property
    def is_empty(self) -> bool:
        return not self._frames

    def attach(self, sock: socket.socket) -> None:
        """Send on this non-blocking socket from now on."""
        with self._lock:
            self._socket, self._taken = sock, 0

    def detach(self) -> None:
        """Stop using the socket, before it is closed."""
        with self._lock:
            self._socket = None

    def put(self, frame: bytes) -> bool:
        """Queue a frame. Returns False if the queue is full."""
        if len(self._frames) >= MAX_FRAMES:
            return False
        self._frames.append(frame)
        return True

    def flush(self, wait_s: float = 0.0) -> bool:
        """Send as much as the socket accepts; False: call again when it is writable."""
        if not self._lock.acquire(timeout=wait_s):
            return False  # the sending thread may already have checked the queue for the last time
        try:
            while self._frames and self._socket is not None:
                if not self._send_first(self._socket):
                    return False
            return True
        finally:
            self._lock.release()

    def _send_first(self, sock: socket.socket) -> bool:
        frame = self._frames[0]
        try:
            self._taken += sock.send(frame[self._taken :])
        except OSError:
            return False  # full, or broken: the receiving thread notices that and reconnects
        if self._taken == len(frame):
            self._frames.popleft()
            self._taken = 0
        return True


# ----------------------------------------------------------------------------
# The worker's end of the link: one thread that receives, sends heartbeats, and watches the agent.
#
# The agent's pidfd reports its death. A connection that ends while the agent is alive is
# reestablished.

_READABLE = select.POLLIN | select.POLLHUP | select.POLLERR | select.POLLNVAL


class LinkClient:
    """Created by :meth:`connect`; its owner calls ``close``.

    ``on_message``, ``on_agent_death`` and ``heartbeat``, which returns the worker's position, run
    on the thread ``elastic-link-client``. In a forked child the client does nothing.
    """

    # Of two clients for one agent in one process, the older one does not reconnect: the agent
    # closes the older of two connections, so the clients would displace each other endlessly.
    _latest: ClassVar[dict[str, int]] = {}
    _serials: ClassVar[itertools.count[int]] = itertools.count(1)

    def __init__(
        self,
        path: str,
        *,
        local_rank: int,
        on_message: Callable[[Message], None],
        on_agent_death: Callable[[], None],
        heartbeat: Callable[[], Heartbeat],
        heartbeat_every_s: float,
        clock: Clock,
    ) -> None:
        self._path = path
        self._on_message = on_message
        self._on_agent_death = on_agent_death
        self._heartbeat = heartbeat
        self._heartbeat_every_s = heartbeat_every_s
        self._clock = clock
        self._serial = next(self._serials)
        self._pid = os.getpid()
        self._request = ClientHandshakeRequest(
            version=PROTOCOL_VERSION,
            pid=self._pid,
            local_rank=local_rank,
            library=importlib.metadata.version("torch-elastic-harness"),
        )
        self._outbox = Outbox()
        self._key: SecretKey | None = None
        self._socket: socket.socket | None = None
        self._agent = -1  # pidfd
        self._received = FrameReader(MAX_MESSAGE)
        self._undelivered: list[Message] = []
        self._next_heartbeat_s = 0.0
        self._pause_s = LINK_FIRST_PAUSE_S
        self._waker, self._wakee = socket.socketpair()
        for sock in (self._waker, self._wakee):
            sock.setblocking(False)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="elastic-link-client", daemon=True)

    @classmethod
    def connect(
        cls,
        path: str,
        *,
        local_rank: int,
        on_message: Callable[[Message], None],
        on_agent_death: Callable[[], None],
        heartbeat: Callable[[], Heartbeat],
        heartbeat_every_s: float = LINK_HEARTBEAT_S,
        clock: Clock = SYSTEM_CLOCK,
    ) -> LinkClient:
        """Perform the handshake, start the thread. Raises LinkError."""
        client = cls(
            path,
            local_rank=local_rank,
            on_message=on_message,
            on_agent_death=on_agent_death,
            heartbeat=heartbeat,
            heartbeat_every_s=heartbeat_every_s,
            clock=clock,
        )
        before = cls._latest.get(path)
        cls._latest[path] = client._serial  # before the agent hangs up on the older one
        try:
            client._attach(client._first_handshake())
        except BaseException:
            client._release()
            if before is not None:
                cls._latest[path] = before
            raise
        client._thread.start()
        return client

    def sockets(self) -> tuple[int, ...]:
        """File descriptors that a forked child must not keep. (An inherited pidfd does no harm.)"""
        sock = self._socket
        ours = [self._waker.fileno(), self._wakee.fileno(), sock.fileno() if sock else -1]
        return tuple(fd for fd in ours if fd >= 0)

    def send(self, message: Message) -> None:
        """Send to the agent, in order, from any thread; never blocks. Messages to a dead agent are
        dropped."""
        if os.getpid() != self._pid or self._closing:
            return
        if not self._outbox.put(frame(encode(message))):
            get_logger().warning("link: the agent does not read its messages; dropped %s", message)
        if not self._outbox.flush():
            self._wake()

    def send_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Send a heartbeat, unless earlier messages are still unsent."""
        if self._outbox.is_empty:
            self.send(heartbeat)

    def close(self) -> None:
        """Send queued messages, stop and join. Idempotent; may be called from a callback."""
        if os.getpid() != self._pid:
            return
        self._closing = True
        self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join()

    # -- connecting ---------------------------------------------------------------------------

    def _first_handshake(self) -> AgentConnection:
        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(OSError),
            stop=tenacity.stop_after_delay(LINK_CONNECT_S),
            wait=tenacity.wait_fixed(LINK_CONNECT_AGAIN_S),
            sleep=self._clock.sleep,
            reraise=True,
        )
        deadline_s = self._clock.monotonic() + LINK_CONNECT_S
        try:
            return attempts(self._handshake, deadline_s)
        except OSError as error:
            raise LinkError(
                f"the agent at {self._path} does not answer: {error}",
                hint="ELASTIC_LINK is set by the agent; workers must run on its machine",
            ) from error

    def _handshake(self, deadline_s: float) -> AgentConnection:
        if self._key is None:  # once: a cleaner of /tmp may remove the file
            self._key = read_key(self._path)
        return handshake(
            self._path,
            self._request,
            key=self._key,
            deadline_s=deadline_s,
            stop=self._wakee.fileno(),
            clock=self._clock,
        )

    def _attach(self, connection: AgentConnection) -> None:
        if self._agent >= 0:
            os.close(self._agent)
        self._socket, self._agent = connection.sock, connection.agent
        self._received = connection.received
        self._undelivered = connection.messages
        cover(self.sockets())
        self._outbox.attach(connection.sock)

    def _reconnect(self) -> None:
        if self._latest.get(self._path) != self._serial:
            self._closing = True
            return
        if self._agent >= 0 and has_ended(self._agent):
            self._end_with_agent()
            return
        try:
            self._attach(self._handshake(self._clock.monotonic() + LINK_CONNECT_S))
            self._pause_s = LINK_FIRST_PAUSE_S
        except (OSError, LinkError) as error:
            if self._agent < 0 and isinstance(error, (ConnectionRefusedError, FileNotFoundError)):
                self._end_with_agent()  # without a pidfd, only the socket shows its death
                return
            if (
                self._pause_s == 2 * LINK_FIRST_PAUSE_S
            ):  # a dying agent's socket ends before its process
                get_logger().warning("link: connecting to the agent again: %s", error)
            _poll({self._agent: select.POLLIN, self._wakee.fileno(): select.POLLIN}, self._pause_s)
            self._pause_s = min(LINK_LONGEST_PAUSE_S, 2 * self._pause_s)

    def _disconnect(self) -> None:
        sock, self._socket = self._socket, None
        if sock is not None:
            self._outbox.detach()
            uncover([sock.fileno()])
            sock.close()

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._run_once()
            self._send_queued()
        except Exception:  # noqa: BLE001  logged, and the worker ends
            get_logger().exception("the link to the agent broke; the worker ends")
            self._on_agent_death()
        finally:
            self._release()

    def _run_once(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wakee.recv(4096)
        if self._closing:
            return
        sock = self._socket
        if sock is None:
            self._reconnect()
            return
        undelivered, self._undelivered = self._undelivered, []
        self._deliver(undelivered)
        events = self._wait(sock)
        if self._agent in events:
            self._end_with_agent()
            return
        mask = events.get(sock.fileno(), 0)
        if mask & select.POLLOUT:
            self._outbox.flush(wait_s=LINK_FLUSH_S)
        if mask & _READABLE:
            self._read(sock)

    def _wait(self, sock: socket.socket) -> dict[int, int]:
        """Wait for an event or for the time of the next heartbeat; send a heartbeat that is due."""
        now = self._clock.monotonic()
        if now >= self._next_heartbeat_s:
            self._next_heartbeat_s = now + self._heartbeat_every_s
            self.send_heartbeat(self._heartbeat())
        unsent = 0 if self._outbox.is_empty else select.POLLOUT
        wanted = {
            self._agent: select.POLLIN,
            self._wakee.fileno(): select.POLLIN,
            sock.fileno(): select.POLLIN | unsent,
        }
        return _poll(wanted, self._next_heartbeat_s - self._clock.monotonic())

    def _read(self, sock: socket.socket) -> None:
        try:
            chunk = sock.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if chunk:
            self._received.feed(chunk)
            self._deliver(self._complete_messages())
        else:
            self._disconnect()

    def _complete_messages(self) -> list[Message]:
        messages = []
        try:
            while (payload := self._received.next()) is not None:
                messages.append(decode(payload))
        except ProtocolError as error:
            raise LinkError(f"the agent sent an invalid message: {error}") from error
        return messages

    def _deliver(self, messages: list[Message]) -> None:
        for message in messages:
            if not isinstance(message, FROM_AGENT):
                raise LinkError(f"the agent sent a message that only workers send: {message}")
            self._on_message(message)

    def _end_with_agent(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):  # a killed agent cannot remove it
            os.unlink(self._path)
            os.unlink(key_path(self._path))
            os.rmdir(os.path.dirname(self._path))
        self._on_agent_death()

    def _send_queued(self) -> None:
        until_s = self._clock.monotonic() + LINK_CLOSE_S
        while self._socket is not None and not self._outbox.flush(wait_s=LINK_FLUSH_S):
            left_s = until_s - self._clock.monotonic()
            events = _poll({self._socket.fileno(): select.POLLOUT}, left_s)
            if left_s <= 0 or any(event & _READABLE for event in events.values()):
                return  # the agent does not read, or has closed the connection

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: the thread is awake; closed: it has ended
            self._waker.send(b"x")

    def _release(self) -> None:
        uncover(self.sockets())
        self._disconnect()
        self._waker.close()
        self._wakee.close()
        if self._agent >= 0:
            os.close(self._agent)
            self._agent = -1
        if self._latest.get(self._path) == self._serial:
            del self._latest[self._path]


def _poll(wanted: dict[int, int], timeout_s: float) -> dict[int, int]:
    """The events by descriptor. poll, because select supports no descriptor above 1023."""
    poll = select.poll()
    for fd, events in wanted.items():
        if fd >= 0:
            poll.register(fd, events)
    return dict(poll.poll(max(0.0, timeout_s) * 1000))


# ----------------------------------------------------------------------------
# The agent's end of the link: one unix socket, one thread, and a pidfd for every worker.
#
# A worker's pidfd reports its death within milliseconds. Its socket does not: forked data workers
# inherit it and keep it open. A client is identified by SO_PEERCRED, not by its messages, and must
# prove that it has the key, which is in the socket's folder and readable only by this user.

LIMITS = Limits(
    frame_bytes=MAX_MESSAGE,
    unsent_bytes=1 << 20,
    open_connections=256,
    pending_connections=64,
    pending_per_address=16,
)
_BACKLOG = 512
LONGEST_TEMP_FOLDER = 60  # bytes: a unix socket's path has at most 107


@dataclass(frozen=True)
class Worker:
    """A worker that has completed the handshake."""

    pid: int
    local_rank: int
    token: int  # of this connection


@dataclass(frozen=True)
class WorkerDeath:
    """How a worker's process ended."""

    pid: int
    exit_code: int | None  # None: ended by a signal, or not a child of this process
    signal: int | None
    exit_notice: Exiting | None


@dataclass(eq=False)
class _Process:
    """A worker's process, watched until it ends; its connection may change."""

    pidfd: int
    worker: Worker
    exit_notice: Exiting | None = None


class LinkServer:
    """Created by the agent; its owner calls ``close``.

    All callbacks run on the thread ``elastic-link``. The link's key is generated here, for this
    agent and its workers only.
    """

    def __init__(
        self,
        *,
        on_message: Callable[[Worker, Message], None],
        on_death: Callable[[Worker, WorkerDeath], None],
        on_error: Callable[[BaseException], None],
        node_id: str = "",
        limits: Limits = LIMITS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._on_message = on_message
        self._on_death = on_death
        self._on_error = on_error
        self._node_id = node_id
        self._folder = _fresh_folder()
        self.path = os.path.join(self._folder, "link")
        self._key = key = SecretKey.generate()
        self._write_key()
        self._hub = Hub(
            "elastic-link",
            listen_on_path(self.path, backlog=_BACKLOG),
            _LinkHandler(self),
            credentials=Credentials(key=lambda: key, identity=node_id),
            limits=limits,
            report=get_logger().warning,
            on_error=self._died,
            monotonic=clock.monotonic,
        )
        self._processes: dict[int, _Process] = {}
        self._present: tuple[Worker, ...] = ()
        self._tokens = itertools.count(1)

    def start(self) -> None:
        """Listen."""
        self._hub.start()

    def keep_key(self) -> None:
        """Ensure that starting workers find the key and the socket: what a cleaner of the folder
        for temporary files has removed is created again. (After days, systemd-tmpfiles removes
        untouched files, but keeps live sockets; others remove everything.)

        Raises LinkError if that is impossible.
        """
        try:
            try:
                os.utime(key_path(self.path), follow_symlinks=False)
            except FileNotFoundError:
                wire_base.make_folder_again(self._folder)
                self._write_key()
            if not os.path.exists(self.path):
                self._hub.listen_on(listen_on_path(self.path, backlog=_BACKLOG))
        except OSError as error:
            raise LinkError(
                f"the folder of the link to this node's workers cannot be restored: {error}",
                hint=f"exclude {self._folder} from the cleaning of temporary files, or set TMPDIR",
            ) from error

    def _write_key(self) -> None:
        wire_base.write(key_path(self.path), self._key.text.encode())

    def close(self) -> None:
        """Stop, join, remove the socket. Idempotent."""
        self._hub.close()
        for process in self._processes.values():
            os.close(process.pidfd)
        self._processes.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def send(self, message: Message, worker: Worker | None = None) -> None:
        """Send to one worker, or to all connected ones. From any thread; never blocks."""
        payload = encode(message)
        if not self._hub.is_closing:
            self._hub.post(lambda: self._send_all(payload, worker))

    def workers(self) -> tuple[Worker, ...]:
        """The workers that are connected and alive."""
        return self._present

    # -- the thread ---------------------------------------------------------------------------

    def _died(self, error: BaseException) -> None:
        get_logger().error("the link's thread died", exc_info=error)
        self._on_error(error)

    def handle(self, connection: Connection, payload: bytes) -> None:
        """Process a worker's frame. Raises LinkError."""
        message = decode(payload)
        if isinstance(message, ClientHandshakeRequest):
            try:
                self._complete_handshake(connection, message)
            except LinkError as error:
                refusal = ClientHandshakeRefusal(reason=error.message, hint=error.hint)
                self._hub.send(connection, encode(refusal))
                raise
            return
        worker = connection.data
        if not isinstance(worker, Worker):
            raise LinkError(f"{type(message).__name__} before ClientHandshakeRequest")
        if not isinstance(message, FROM_WORKER):
            raise LinkError(f"{type(message).__name__} is sent by agents only")
        process = self._processes.get(worker.pid)
        if isinstance(message, Exiting) and process is not None:
            process.exit_notice = message
        self._on_message(worker, message)

    def _complete_handshake(self, connection: Connection, request: ClientHandshakeRequest) -> None:
        if request.version != PROTOCOL_VERSION:
            raise LinkError(
                f"the worker speaks version {request.version} of the link (torch-elastic-harness "
                f"{request.library}), this agent {PROTOCOL_VERSION}",
                hint="use the same torch-elastic-harness in the worker's and the agent's Python",
            )
        if connection.data is not None:
            raise LinkError("a second ClientHandshakeRequest on one connection")
        pid = peer_of(connection.socket).pid
        if not may_claim_pid(pid, request.pid):
            raise LinkError(f"pid {pid} claims to be pid {request.pid}")
        self._refuse_duplicate_rank(pid, request.local_rank)
        for other in self._connections_of(pid):  # the worker has reconnected
            self._hub.drain(other)
            self._hub.drop(other)
        worker = Worker(pid, request.local_rank, next(self._tokens))
        connection.data = worker
        self._watch(worker)
        self._update_present()
        reply = ClientHandshakeReply(version=PROTOCOL_VERSION, node_id=self._node_id)
        self._hub.send(connection, encode(reply))
        self._on_message(worker, request)

    def _connections_of(self, pid: int) -> list[Connection]:
        return [
            connection
            for connection in self._hub.connections
            if isinstance(connection.data, Worker) and connection.data.pid == pid
        ]

    def _refuse_duplicate_rank(self, pid: int, local_rank: int) -> None:
        for process in list(self._processes.values()):
            other = process.worker
            if other.local_rank != local_rank or other.pid == pid:
                continue
            if not has_ended(process.pidfd):
                raise LinkError(
                    f"pid {pid} claims to be local rank {local_rank}, which is pid {other.pid}",
                    hint="elastic.join() is for the process that torchrun starts, not for its "
                    'child processes: call it below if __name__ == "__main__":',
                )
            self._reap(process)  # its successor connected before its death was reported

    def _watch(self, worker: Worker) -> None:
        known = self._processes.get(worker.pid)
        if known is not None:
            known.worker, known.exit_notice = worker, None
            return
        try:
            pidfd = os.pidfd_open(worker.pid)
        except OSError as error:
            raise LinkError(f"pid {worker.pid} cannot be watched: {error}") from None
        process = _Process(pidfd, worker)
        self._processes[worker.pid] = process
        self._hub.watch(pidfd, lambda: self._reap(process))

    # -- deaths and outgoing messages ---------------------------------------------------------

    def _reap(self, process: _Process) -> None:
        pid = process.worker.pid
        if self._processes.get(pid) is not process:
            return
        self._hub.unwatch(process.pidfd)
        exit_code, signum = exit_status(process.pidfd)
        # Its last messages may still be unread.
        for connection in self._connections_of(pid):
            self._hub.drain(connection)
            self._hub.drop(connection)
        del self._processes[pid]
        os.close(process.pidfd)
        self._update_present()
        self._on_death(process.worker, WorkerDeath(pid, exit_code, signum, process.exit_notice))

    def _update_present(self) -> None:
        self._present = tuple(p.worker for p in self._processes.values())

    def _send_all(self, payload: bytes, to: Worker | None) -> None:
        for connection in self._hub.connections:
            worker = connection.data
            if isinstance(worker, Worker) and (to is None or to.pid == worker.pid):
                self._hub.send(connection, payload)


class _LinkHandler(Handler):
    """Adapts the hub, which handles connections, to the server, which handles workers."""

    def __init__(self, server: LinkServer) -> None:
        self._server = server

    def admit(self, sock: socket.socket) -> str:
        peer = peer_of(sock)
        if why := _refusal(peer):
            raise ProtocolError(f"pid {peer.pid} of user {peer.uid}: {why}")
        return f"pid {peer.pid}"

    def received(self, connection: Connection, payload: bytes) -> None:
        try:
            self._server.handle(connection, payload)
        except LinkError as error:
            raise ProtocolError(str(error)) from error


def _refusal(peer: Peer) -> str:
    if peer.uid != os.geteuid():
        return "it belongs to another user"
    if not peer.pid:
        return "it is in a pid namespace that is not visible to this agent, which cannot watch it"
    return ""


def _fresh_folder() -> str:
    """A new folder of mode 0700, accessible only to this user."""
    base = tempfile.gettempdir()
    if len(os.fsencode(base)) > LONGEST_TEMP_FOLDER:
        base = "/tmp"
    return wire_base.make_folder("elastic-", base=base)


# ----------------------------------------------------------------------------
# Which workers of this node together hold the model: if one dies, all are replaced.


class LocalReplicas:
    """The replicas on one node, as its workers announce them: consecutive local ranks. If a
    replica spans several nodes, all workers of this node belong to it."""

    def __init__(self) -> None:
        self._joined: dict[int, tuple[Worker, int]] = {}  # by pid, with the replica's size

    def join(self, worker: Worker, size: int, nproc: int | None = None) -> tuple[Worker, ...]:
        """Register a worker. Returns all workers of its replica on this node once they are present,
        else none. ``nproc``: the number of workers on this node."""
        self._joined[worker.pid] = worker, size
        members = (worker, *self.siblings(worker.pid))
        places = {member.local_rank % size for member in members}
        return members if len(places) == min(size, nproc or size) else ()

    def has_joined(self, pid: int) -> bool:
        """Whether the worker has announced itself."""
        return pid in self._joined

    def siblings(self, pid: int) -> tuple[Worker, ...]:
        """The other workers in this worker's replica; none if each rank is a replica."""
        if pid not in self._joined:
            return ()
        worker, size = self._joined[pid]
        return tuple(
            other
            for other, other_size in self._joined.values()
            if other.pid != pid
            and other_size == size
            and other.local_rank // size == worker.local_rank // size
        )

    def leave(self, pid: int) -> None:
        """Remove a worker whose process has ended."""
        self._joined.pop(pid, None)
