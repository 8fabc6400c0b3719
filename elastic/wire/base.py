"""Errors, limits, private files and strict JSON of channels."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import socket
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

# ----------------------------------------------------------------------------
# Every error that this package raises on purpose; all but the last concern one connection.
#
# ::
#
#     OSError
#     ├── ProtocolError             the other end violates the protocol
#     │   ├── AuthenticationError   it does not prove that it has the key
#     │   └── TlsError              only one end uses TLS, or a certificate was rejected
#     └── CertificateError          this node's own certificates cannot be used


class ProtocolError(OSError):
    """The other end violates the protocol: the connection ends."""


class AuthenticationError(ProtocolError):
    """The other end does not prove possession of this run's secret."""


class TlsError(ProtocolError):
    """Only one end uses TLS, or a certificate was rejected."""


class CertificateError(OSError):
    """This node's certificate files cannot be used; ``remedy`` states what to do."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(f"{message}: {remedy}")
        self.message = message
        self.remedy = remedy


# ----------------------------------------------------------------------------
# The maximum resources that a listener uses for others: bytes, seconds, connections, and log
# lines.

T = TypeVar("T")
Report = Callable[[str], object]
# Secure channels do not import elastic, so their intervals are here and not in elastic/tuning.
REPORT_EVERY_S = 10.0  # lines about bad clients
ACCEPT_AGAIN_S = 0.2  # after no descriptor was free
LOAD_AGAIN_S = 1.0  # TLS files that could not be used, and have not changed since
# A peer whose machine acknowledges nothing for this long is dead; if there are leases, their length
# determines it (elastic/tuning/intervals.py, peer_silence_s).
PEER_SILENCE_S = 6.0
_PROBES = 3  # within that time; the kernel counts in whole seconds


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of one listener. Unauthenticated connections have tighter limits."""

    frame_bytes: int  # of a client's message
    server_frame_bytes: int = 0  # of a message from a server that this hub has connected to
    unsent_bytes: int = 2 << 20  # for one connection that does not read
    handshake_s: float = 5.0  # from connecting to the proof
    message_s: float = 10.0  # from a message's first byte to its last
    silence_s: float = PEER_SILENCE_S  # of a TCP peer's kernel: see give_up_on_silence
    open_connections: int = 1024  # that have proved themselves
    pending_connections: int = 128  # that have not yet
    pending_per_address: int = 64
    # A handshake takes milliseconds. If clients arrive faster than they are served, younger ones
    # wait in the kernel's queue, so that a burst of legitimate clients evicts none of them.
    evict_after_s: float = 0.05


def give_up_on_silence(sock: socket.socket, silence_s: float) -> None:
    """End a TCP connection whose peer's kernel acknowledges nothing for ``silence_s``.

    Otherwise a disconnected cable is never detected on an idle connection, and on one with pending
    bytes only after a quarter of an hour (tcp(7): tcp_retries2). Keep-alive probes are for the idle
    one, TCP_USER_TIMEOUT is for the other; a live peer that accepts none of the pending bytes
    counts as silent as well. A stopped process does not: its kernel responds.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    every_s = max(1, math.floor(silence_s / _PROBES))
    with contextlib.suppress(OSError):  # it has ended: the next event reports it
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(silence_s * 1000))


class Unauthenticated(Generic[T]):
    """Connections that are not authenticated yet: the oldest is evicted first."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._since_s: dict[T, tuple[float, str]] = {}  # oldest first
        self._addresses: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._since_s)

    def __iter__(self) -> Iterator[T]:
        return iter(tuple(self._since_s))

    def add(self, connection: T, address: str, now_s: float) -> None:
        """It has connected."""
        self._since_s[connection] = now_s, address
        self._addresses[address] += 1

    def discard(self, connection: T) -> None:
        """It is authenticated, or has ended."""
        entry = self._since_s.pop(connection, None)
        if entry is not None:
            self._addresses[entry[1]] -= 1
            if not self._addresses[entry[1]]:
                del self._addresses[entry[1]]

    @property
    def oldest(self) -> T | None:
        """The next one to evict."""
        return next(iter(self._since_s), None)

    def room_in_s(self, now_s: float) -> float:
        """Seconds until another one may connect: 0 at once, possibly after :meth:`to_evict` has
        ended."""
        if len(self._since_s) < self._limits.pending_connections:
            return 0.0
        since_s, _ = next(iter(self._since_s.values()))
        return max(0.0, since_s + self._limits.evict_after_s - now_s)

    def to_evict(self) -> T | None:
        """The connection to evict for one more; None: there is room."""
        is_full = len(self._since_s) >= self._limits.pending_connections
        return self.oldest if is_full else None

    def to_evict_of(self, address: str) -> T | None:
        """The connection to evict for one more of this address; None: there is room."""
        if self._addresses[address] < self._limits.pending_per_address:
            return None
        return next(one for one, (_, at) in self._since_s.items() if at == address)


class LimitedReports:
    """Rate-limits the log of one listener: a flood of bad clients must not fill a disk."""

    def __init__(
        self,
        report: Report,
        *,
        every_s: float = REPORT_EVERY_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report = report
        self._every_s = every_s
        self._monotonic = monotonic
        self._not_before_s = float("-inf")
        self._left_out = 0

    def __call__(self, line: str) -> None:
        now_s = self._monotonic()
        if now_s < self._not_before_s:
            self._left_out += 1
            return
        more = f" ({self._left_out} more such lines were suppressed)" if self._left_out else ""
        self._not_before_s, self._left_out = now_s + self._every_s, 0
        self._report(line + more)


# ----------------------------------------------------------------------------
# Folders and files of mode 0700 and 0600, in folders where others may write: ``/tmp``,
# ``/dev/shm``.
#
# Another user may create names there beforehand, as a link to another place. So folders are always
# new, files are created and never opened through a link, and files that are read must belong to
# this user.

_MAX_BYTES = 16 << 20


def make_folder(prefix: str, *, base: str | None = None) -> str:
    """A new folder with an unpredictable name, of mode 0700."""
    return tempfile.mkdtemp(prefix=prefix, dir=base)


def make_folder_again(folder: str | os.PathLike[str]) -> None:
    """Create a folder of :func:`make_folder` again if it was removed.

    Raises PermissionError for one that others own or can enter: its name is known by now.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    status = os.lstat(folder)
    is_private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    if status.st_uid != os.geteuid() or not is_private:
        raise PermissionError(errno.EACCES, "others own it, or can enter it", os.fspath(folder))


def write(path: str | os.PathLike[str], data: bytes) -> None:
    """A new file of mode 0600. Raises FileExistsError if the name exists, even as a link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def read(path: str | os.PathLike[str]) -> bytes:
    """Read a private file. Raises PermissionError for a link, and for files that others own or can
    read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise PermissionError(f"{path} is a link") from error
        raise
    with os.fdopen(descriptor, "rb") as file:
        require_private(descriptor, path)
        return file.read(_MAX_BYTES)


def open_lock(path: str | os.PathLike[str]) -> int:
    """Open a lock file of this user, or create it with mode 0600; returns its descriptor.

    Raises PermissionError for a link, or a file that others own or can change.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        if Path(path).is_symlink():
            raise PermissionError(f"{path} is a link: remove it, or set TMPDIR") from error
        raise
    try:
        require_private(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def require_private(descriptor: int, path: str | os.PathLike[str]) -> None:
    """Raises PermissionError unless it is a regular file that only this user can access."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        raise PermissionError(f"{path} is not a regular file: remove it, or set TMPDIR")
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(
            f"{path} belongs to user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}, "
            f"expected user {os.geteuid()} and 600: remove it, or set TMPDIR"
        )


# ----------------------------------------------------------------------------
# The JSON of control messages: one object, finite numbers, bounded depth, no duplicate fields.
#
# ``json.loads`` accepts ``Infinity``, keeps the last of two equal keys and recurses once per
# bracket: each of these has ended a parsing thread [measured: ``{"id": Infinity}`` in the store of
# a world, 5,000 brackets with a low recursion limit].

MAX_DEPTH = 16
_MAX_DIGITS = 20
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")


def encode(message: Mapping[str, Any]) -> bytes:
    """Compact JSON. Raises ValueError for NaN and infinities."""
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode()


def decode(data: bytes | bytearray, *, max_depth: int = MAX_DEPTH) -> dict[str, Any]:
    """The object in ``data``. Raises ProtocolError, and nothing else.

    >>> decode(b'{"id": 3}')
    {'id': 3}
    >>> decode(b'{"id": Infinity}')
    Traceback (most recent call last):
    elastic.wire.base.ProtocolError: not JSON: Infinity is not a JSON number
    """
    _check_depth(data, max_depth)
    try:
        message = json.loads(
            data,
            object_pairs_hook=_object,
            parse_constant=_no_constant,
            parse_int=_integer,
            parse_float=_number,
        )
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {error}") from None
    if not isinstance(message, dict):
        raise ProtocolError(f"a JSON {type(message).__name__}, not an object")
    return message


def _check_depth(data: bytes | bytearray, max_depth: int) -> None:
    if data.count(b"[") + data.count(b"{") <= max_depth:
        return
    depth = 0
    for bracket in _BRACKET.finditer(_STRING.sub(b"", data)):
        depth += 1 if bracket.group() in b"[{" else -1
        if depth > max_depth:
            raise ProtocolError(f"JSON nested more than {max_depth} deep")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("duplicate field in an object")
    return fields


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is not a finite number")
    return number
