"""Finds the sockets of a store and a process group among the user's, and shuts them down.

On gloo nothing else releases a rank that waits for a departed rank: the backend's ``abort()``
returns at once and the collective keeps waiting [measured, torch 2.13]. Shutting down the
sockets releases it, and also a rank that is still building its group.

A socket is identified by the event loop that watches it. Every gloo device, and the store on rank
0, run a loop with an epoll descriptor that is opened while the group is built, and the kernel lists
what each of them watches (``/proc/self/fdinfo``), including later connections. The store's client
socket is not watched; it is identified by the store's port. Neither rule matches a socket that a
thread of the user opens meanwhile.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from elastic.clock import SYSTEM_CLOCK
from elastic.process_group.deadline import CallDeadline
from elastic.secure_channel import limits
from elastic.telemetry.log import get_logger
from elastic.tuning import timeouts
from elastic.tuning.worker_intervals import (
    ABORT_AGAIN_S,
    BUILD_CONNECT_AGAIN_S,
    BUILD_GRACE_S,
    BUILD_LOOK_S,
    OWN_CONNECT_S,
)

_FDS = "/proc/self/fd"
_EPOLL = "anon_inode:[eventpoll]"
_TCP = (socket.AF_INET, socket.AF_INET6)
_PAIR_BYTES = 8  # of a pair's number, in native byte order
_PAUSE_PER_CONNECT = 4.0  # pause between rounds of connections, in multiples of a round


class Footprint:
    """The descriptors that a store and a group add to this process.

    Create it before them; :meth:`seal` it when they are complete. Before that, it also includes
    sockets that are being opened, so that a half-built group can be shut down.
    """

    def __init__(self, store_port: int | None) -> None:
        self._store_port = store_port
        self._before = _descriptors()
        self._pollers: frozenset[int] | None = None  # None: they are still being created
        self._store: dict[int, int] = {}

    def seal(self) -> None:
        """Mark the group complete: sockets that the user opens later are never attributed to it."""
        self._store = self._new_store_sockets()
        self._pollers = frozenset(self._new_pollers())

    def sockets(self) -> dict[int, int]:
        """The inode of each socket, listening ones included, by descriptor."""
        sealed = self._pollers is not None
        found = dict(self._store) if sealed else self._new_store_sockets()
        for poller in self._pollers if self._pollers is not None else self._new_pollers():
            found |= _watched_sockets(poller)
        return found

    def close_on_exec(self) -> None:
        """Keep the sockets out of programs that this process starts: gloo does not."""
        for fd, inode in self.sockets().items():
            with _held(fd, inode) as held:
                if held is not None:
                    fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)

    def give_up_on_silence(self, silence_s: float) -> None:
        """Make a collective fail if its peer's machine acknowledges nothing for ``silence_s``.

        gloo sets neither keep-alive nor a timeout (gloo/transport/tcp/device.cc): when the packets
        of one established connection were dropped, two ranks waited for each other until the
        group's timeout, half an hour. Now both fail 6.4 s after the first lost packet [measured,
        torch 2.13, silence_s=6], and each error names the peer:
        :func:`elastic.world.faults.unreachable_peers`.
        """
        for fd, inode in self.sockets().items():
            with _held(fd, inode) as held:
                if held is not None:
                    limits.give_up_on_silence(held, silence_s)

    def shut_down(self) -> None:
        """Shut down every connection. This releases all waits on them, at both ends."""
        for fd, inode in self.sockets().items():
            shut_down(fd, inode)

    def connect_to_itself(self, ranks: int) -> None:
        """Release a build that waits for one of ``ranks`` ranks to connect to this one.

        Of two ranks in gloo, one connects and the other waits for it. If the first is gone, the
        second has no socket that could be shut down: it waited for the group's timeout [measured,
        torch 2.13]. Its listener assigns a connection to a pair by the first number that is sent
        (gloo/transport/tcp/listener.cc): the index of the pair, of which there is one per rank.
        This method opens a connection for each pair, and closes it at once.
        """
        for fd, inode in self.sockets().items():
            with _held(fd, inode) as held:
                address = _listening_at(held) if held is not None else None
            if address is not None and address[1] != self._store_port:
                for pair in range(ranks + 1):
                    _send_once(address, pair.to_bytes(_PAIR_BYTES, sys.byteorder))

    def _new_pollers(self) -> set[int]:
        """Epoll descriptors that watch a listening socket opened since then.

        Both of torch's loops have one. A user's asyncio or HTTP client has none. The number of an
        epoll descriptor proves nothing: the last group may be freed only after this object was
        created, and the new group may reuse the number.
        """
        before = set(self._before.values())
        return {
            fd
            for fd, target in _descriptors().items()
            if target == _EPOLL
            and any(
                _socket_target(inode) not in before and _is_listening(s, inode)
                for s, inode in _watched_sockets(fd).items()
            )
        }

    def _new_store_sockets(self) -> dict[int, int]:
        if self._store_port is None:
            return {}
        return {
            fd: inode
            for fd, target in _descriptors().items()
            if self._before.get(fd) != target
            and (inode := _inode_of(target)) is not None
            and self._store_port in _ports(fd, inode)
        }


class BuildWatch:
    """Ends the build of a group that is aborted, or takes too long.

    It shuts sockets down repeatedly, since a build keeps opening new ones. It has its own thread,
    so that the aborting thread is not blocked. NCCL's initialisation uses none of these sockets
    and cannot be aborted: if the build has not ended some time after it was aborted, ``is_stuck``
    is called, which is expected to end the process.
    """

    def __init__(
        self,
        footprint: Footprint,
        timeout_s: float,
        is_stuck: Callable[[], object],
        *,
        ranks: int = 1,
        silence_s: float = limits.PEER_SILENCE_S,
    ) -> None:
        self._footprint = footprint
        self._ranks = ranks
        self._silence_s = silence_s
        self._timeout_s = timeout_s
        self._is_stuck = is_stuck
        self._given_up = threading.Event()
        self._built = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elastic-build-watch", daemon=True)
        self._thread.start()

    def give_up(self) -> None:
        """Abort the build. Thread-safe."""
        self._given_up.set()

    def end(self) -> None:
        """The build has ended, successfully or not."""
        self._built.set()
        self._given_up.set()
        self._thread.join()

    def _run(self) -> None:
        ends_s = SYSTEM_CLOCK.monotonic() + self._timeout_s + BUILD_GRACE_S
        while (left_s := ends_s - SYSTEM_CLOCK.monotonic()) > 0:
            if SYSTEM_CLOCK.wait(self._given_up, min(left_s, BUILD_LOOK_S)):
                break
            # Still building, perhaps with a peer that does not answer.
            self._footprint.give_up_on_silence(self._silence_s)
        if self._built.is_set():
            return
        deadline = CallDeadline(
            timeouts.GIVEN_UP_BUILD_S, self._is_stuck, name="elastic-build-deadline"
        )
        connects_s = SYSTEM_CLOCK.monotonic()
        while not SYSTEM_CLOCK.wait(self._built, ABORT_AGAIN_S):
            self._footprint.shut_down()
            if (began_s := SYSTEM_CLOCK.monotonic()) >= connects_s:
                self._footprint.connect_to_itself(self._ranks)
                took_s = SYSTEM_CLOCK.monotonic() - began_s
                connects_s = began_s + max(BUILD_CONNECT_AGAIN_S, _PAUSE_PER_CONNECT * took_s)
        deadline.end()


def log_still_open(sockets: Mapping[int, int]) -> None:
    """Log how many of these outlive their group. A subgroup, a traceback or the future of a
    collective may still refer to it. The garbage collector would free most of them, but it
    takes a tenth of a second."""
    if left := still_open(sockets):
        get_logger().debug("%d sockets of the last process group are still open", len(left))


def still_open(sockets: Mapping[int, int]) -> list[int]:
    """The descriptors that still refer to the same sockets."""
    return [fd for fd, inode in sockets.items() if _inode_of(_target_of(fd)) == inode]


def _listening_at(held: socket.socket) -> tuple[str, int] | None:
    """The address of a listening TCP socket."""
    if held.family not in _TCP or not held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return None
    host, port = held.getsockname()[:2]
    return str(host), int(port)


def _send_once(address: tuple[str, int], data: bytes) -> None:
    with (
        contextlib.suppress(OSError),  # the build has ended meanwhile
        socket.create_connection(address, timeout=OWN_CONNECT_S) as connection,
    ):
        connection.sendall(data)


def shut_down(fd: int, inode: int) -> bool:
    """End the connection behind ``fd`` if it is still the socket ``inode`` and does not listen.

    The check uses a copy, since the number may refer to another socket at any moment. Listening
    sockets are not touched: libuv terminates the process when accept() fails on one [measured].

    Only the reading side is shut down: gloo sees the end of the stream and closes the connection
    both ways. If the writing side were shut down, too, a write in between would fail; gloo treats
    that as a full buffer and drops the data (``Pair::write`` on EPIPE; see
    :mod:`elastic.process_group.pending`): 16 of 300 collectives that were aborted at random moments
    never returned, against 5 this way [measured, torch 2.13].
    """
    with _held(fd, inode) as held:
        if held is None or held.family not in _TCP:
            return False
        if held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        try:
            held.shutdown(socket.SHUT_RD)
        except OSError:
            return False  # it was not connected, or no longer is
    return True


@contextmanager
def _held(fd: int, inode: int) -> Iterator[socket.socket | None]:
    """A copy of the socket, or None if ``fd`` now refers to something else."""
    try:
        copy = os.dup(fd)
    except OSError:
        yield None
        return
    status = os.fstat(copy)
    if status.st_ino != inode or not stat.S_ISSOCK(status.st_mode):
        os.close(copy)
        yield None
        return
    with socket.socket(fileno=copy) as held:
        yield held


def _is_listening(fd: int, inode: int) -> bool:
    with _held(fd, inode) as held:
        return held is not None and bool(held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _ports(fd: int, inode: int) -> set[int]:
    """The ports of both ends of a TCP socket."""
    found: set[int] = set()
    with _held(fd, inode) as held:
        if held is None or held.family not in _TCP:
            return found
        for name in (held.getsockname, held.getpeername):
            try:
                found.add(int(name()[1]))
            except OSError:
                continue  # no peer (yet)
    return found


def _watched_sockets(poller: int) -> dict[int, int]:
    """The sockets that an epoll descriptor watches."""
    try:
        with open(f"/proc/self/fdinfo/{poller}", encoding="ascii") as lines:
            watched = [int(line.split()[1]) for line in lines if line.startswith("tfd:")]
    except OSError:
        return {}
    found: dict[int, int] = {}
    for fd in watched:
        inode = _inode_of(_target_of(fd))
        if inode is not None:
            found[fd] = inode
    return found


def _descriptors() -> Mapping[int, str]:
    return {int(name): _target_of(int(name)) for name in os.listdir(_FDS)}


def _target_of(fd: int) -> str:
    try:
        return os.readlink(f"{_FDS}/{fd}")
    except OSError:
        return ""  # closed since it was listed


def _socket_target(inode: int) -> str:
    return f"socket:[{inode}]"


def _inode_of(target: str) -> int | None:
    """
    >>> _inode_of("socket:[4711]")
    4711
    """
    return int(target[8:-1]) if target.startswith("socket:[") else None
