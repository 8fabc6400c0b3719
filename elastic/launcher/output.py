"""Keeps what a node's workers and its agent write, for ``elastic logs``, and passes it on.

Workers that torchrun starts as commands inherit the agent's stdout and stderr. Instead, each gets a
pipe, or a pseudo-terminal where the agent's stream is a terminal, so that progress bars and line
buffering stay as they are. One thread reads them all, writes the bytes to the agent's stream first,
and then keeps the lines. Streams that torchrun redirects to files (``--redirects``, ``--tee``) stay
with it; where those files are is recorded.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import selectors
import termios
import threading
import tty
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch.distributed.elastic.multiprocessing.api import LogsDest

from elastic.errors import SYSTEM_CLOCK, Clock
from elastic.telemetry.journal import THREAD, Journal
from elastic.telemetry.log import get_logger
from elastic.telemetry.output import Output, OutputLines, OutputRedirected

_CONSOLE = {"stdout": 1, "stderr": 2}
_READ_BYTES = 1 << 16
_MAX_AT_END = 16  # reads of one stream: a process that outlives its worker may write forever
_LONGEST_TEXT = 16_000  # characters of one record
_ENDED_S = 2.0  # for the thread, which may be writing to a terminal that is stopped


@dataclass(kw_only=True)
class _Channel:
    """One stream of one worker."""

    local_rank: int
    stream: str
    path: str  # that the worker's stream is opened with
    fd: int  # that it is read from
    held: int  # its other end: without it, reading reports an end or error between two workers
    lines: OutputLines = field(default_factory=OutputLines)


WhereRun = Callable[[], tuple[int | None, int | None]]
"""The generation that the node's workers run, and the global rank of the first of them."""


class KeptOutput:
    """The output of one node. ``journal``: where it is kept."""

    def __init__(self, journal: Journal, where: WhereRun, clock: Clock = SYSTEM_CLOCK) -> None:
        self._journal = journal
        self._where = where
        self._clock = clock
        self._channels: dict[tuple[int, str], _Channel] = {}
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._last: tuple[int | None, int | None] = None, None
        self._broken: set[str] = set()  # of the agent's streams: their reader has exited
        self._lock = threading.Lock()  # one reads and keeps
        self._thread: threading.Thread | None = None
        self._is_closing = self._has_failed = False
        self._log = get_logger()
        self._handler = _Handler(self._keep_log)
        for known in self._log.handlers[:1]:
            self._handler.setFormatter(known.formatter)
        self._log.addHandler(self._handler)

    def redirect(self, destinations: LogsDest) -> LogsDest:
        """Destinations of the workers that are started next: those that torchrun passes on to its
        own streams are kept."""
        given = {"stdout": destinations.stdouts, "stderr": destinations.stderrs}
        ours = {stream: dict(paths) for stream, paths in given.items()}
        try:
            for stream, paths in given.items():
                for local_rank, path in paths.items():
                    if not path:
                        ours[stream][local_rank] = self._channel(local_rank, stream).path
                    elif path != os.devnull:
                        self._journal.record(
                            OutputRedirected(stream=stream, local_rank=local_rank, path=path)
                        )
        except OSError as error:
            self._log.warning("the output of workers is not kept for `elastic logs`: %s", error)
            return destinations
        self.end_lines()
        if self._thread is None and self._channels:
            self._thread = threading.Thread(target=self._run, name="elastic-output", daemon=True)
            self._thread.start()
        return replace(destinations, stdouts=ours["stdout"], stderrs=ours["stderr"])

    def _channel(self, local_rank: int, stream: str) -> _Channel:
        key = local_rank, stream
        if key not in self._channels:
            channel = (
                self._terminal(local_rank, stream)
                if os.isatty(_CONSOLE[stream])
                else self._pipe(local_rank, stream)
            )
            os.set_blocking(channel.fd, False)
            self._channels[key] = channel
            self._selector.register(channel.fd, selectors.EVENT_READ, channel)
        return self._channels[key]

    def _pipe(self, local_rank: int, stream: str) -> _Channel:
        fd, held = os.pipe()
        # Not a FIFO in a folder, which a cleaner of temporary files may remove. torch opens its end
        # later, and ends it with each worker.
        path = f"/proc/{os.getpid()}/fd/{held}"
        return _Channel(local_rank=local_rank, stream=stream, path=path, fd=fd, held=held)

    def _terminal(self, local_rank: int, stream: str) -> _Channel:
        fd, held = os.openpty()
        tty.setraw(held)  # the agent's own terminal translates line feeds
        with contextlib.suppress(OSError):
            size = fcntl.ioctl(_CONSOLE[stream], termios.TIOCGWINSZ, bytes(8))
            fcntl.ioctl(held, termios.TIOCSWINSZ, size)
        path = os.ttyname(held)
        return _Channel(local_rank=local_rank, stream=stream, path=path, fd=fd, held=held)

    def end_lines(self) -> None:
        """Incomplete lines are complete: the processes that wrote them are replaced by others."""
        for channel in list(self._channels.values()):
            for _ in range(_MAX_AT_END):
                if not self._read(channel):
                    break
            with self._lock:
                self._keep(channel, channel.lines.end())

    def close(self) -> None:
        """Pass on and keep what remains; at the end of the node. Idempotent."""
        if self._is_closing:
            return
        self._is_closing = True
        self._log.removeHandler(self._handler)
        os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join(_ENDED_S)
            if self._thread.is_alive():
                return  # it has the descriptors
        self.end_lines()
        self._journal.close()
        self._selector.close()
        os.close(self._wake)
        for channel in self._channels.values():
            os.close(channel.fd)
            os.close(channel.held)

    def _run(self) -> None:
        """On the thread."""
        while not self._is_closing:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._read(key.data)

    def _read(self, channel: _Channel) -> bool:
        """Whether there was something to read."""
        with self._lock:
            try:
                data = os.read(channel.fd, _READ_BYTES)
            except OSError:  # nothing now
                return False
            self._pass_on(channel.stream, data)
            try:
                self._keep(channel, channel.lines.feed(data, self._clock.monotonic()))
            except Exception:  # noqa: BLE001  else its worker would wait for a reader
                if not self._has_failed:
                    self._has_failed = True
                    self._log.exception("output of workers could not be kept for `elastic logs`")
            return bool(data)

    def _pass_on(self, stream: str, data: bytes) -> None:
        while data and stream not in self._broken:
            try:
                data = data[os.write(_CONSOLE[stream], data) :]
            except BlockingIOError:  # a program has made its terminal so
                self._clock.sleep(0.01)
            except OSError:
                self._broken.add(stream)

    def _keep(self, channel: _Channel, lines: Sequence[str]) -> None:
        known = self._where()
        if known[1] is not None:  # else these are the last lines of workers that have left
            self._last = known
        generation, first_rank = self._last
        rank = first_rank + channel.local_rank if first_rank is not None else None
        for text in _texts(lines):
            self._journal.record(
                Output(
                    stream=channel.stream,
                    local_rank=channel.local_rank,
                    rank=rank,
                    generation=generation,
                    text=text,
                )
            )

    def _keep_log(self, text: str) -> None:
        generation, _ = self._where()
        self._journal.record(
            Output(stream="log", local_rank=None, rank=None, generation=generation, text=text)
        )


class _Handler(logging.Handler):
    """Keeps the lines that the agent logs."""

    def __init__(self, keep: Callable[[str], object]) -> None:
        super().__init__()
        self._keep = keep

    def emit(self, record: logging.LogRecord) -> None:
        if record.threadName == THREAD:
            return  # a journal's thread would wait for itself
        try:
            self._keep(self.format(record))
        except Exception:  # noqa: BLE001 - as in every handler of the standard library
            self.handleError(record)


def _texts(lines: Sequence[str]) -> Iterator[str]:
    """The lines, in as few texts as fit into records."""
    text: list[str] = []
    size = 0
    for line in lines:
        if text and size + len(line) > _LONGEST_TEXT:
            yield "\n".join(text)
            text, size = [], 0
        text.append(line)
        size += len(line) + 1
    if text:
        yield "\n".join(text)
