"""Calls the writers on a thread, so that a slow disk or tracker delays no step."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from elastic.telemetry.log import get_logger
from elastic.training.observers.writer import BatchWriter, MetricsWriter, Rows

_MAX_WAITING = 4096  # queued batches: half an hour while a destination hangs


@dataclass(frozen=True)
class _Rewind:
    step: int


@dataclass(frozen=True)
class _Drained:
    event: threading.Event


class WriterThread:
    """The writer thread of a process that is, or was, rank 0. Its owner calls :meth:`close`."""

    def __init__(self, writers: Sequence[MetricsWriter]) -> None:
        self._writers = tuple(writers)
        self._failing: set[int] = set()  # writers, by their index
        self._queue: queue.Queue[_Rewind | _Drained | Rows | None] = queue.Queue(_MAX_WAITING)
        self._is_abandoned = False
        self._has_dropped = False
        self._thread = threading.Thread(target=self._run, name="elastic-metrics", daemon=True)
        self._thread.start()

    def rewind(self, step: int) -> None:
        """Rewind the writers to ``step``."""
        self._is_abandoned = False
        self._put(_Rewind(step))

    def log(self, rows: Rows) -> None:
        """Queue these rows, oldest first."""
        self._put(rows)

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything is written; False on a timeout."""
        drained = _Drained(threading.Event())
        self._put(drained)
        return drained.event.wait(timeout_s)

    def abandon(self) -> None:
        """Drop queued rows: another process writes from now on."""
        self._is_abandoned = True

    def close(self, timeout_s: float) -> bool:
        """Write everything and end the thread. False if that takes longer than ``timeout_s``."""
        self._put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _put(self, item: _Rewind | _Drained | Rows | None) -> None:
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            if not self._has_dropped:
                self._has_dropped = True
                get_logger().warning(
                    "run.log: a destination of metrics does not accept values: its values are lost "
                    "meanwhile"
                )

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, _Drained):
                item.event.set()
            elif isinstance(item, _Rewind):
                step = item.step
                self._each(lambda writer, step=step: writer.rewind(step))  # type: ignore[misc]
            else:
                self._log(item)
        self._each(lambda writer: writer.close())

    def _log(self, rows: Rows) -> None:
        for index, writer in enumerate(self._writers):
            for write in _calls(writer, rows):
                if self._is_abandoned:
                    return
                self._call(index, write)

    def _each(self, call: Callable[[MetricsWriter], object]) -> None:
        for index, writer in enumerate(self._writers):
            self._call(index, partial(call, writer))

    def _call(self, index: int, call: Callable[[], object]) -> None:
        """Call one writer. Its exception is reported once, and only its values are lost."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - raised by a user's writer: training continues
            if index not in self._failing:  # once: it may fail in every step
                self._failing.add(index)
                get_logger().warning(
                    "run.log: %s: %s: %s; its values are lost meanwhile",
                    type(self._writers[index]).__name__,
                    type(error).__name__,
                    error,
                    exc_info=not isinstance(error, OSError),
                )
        else:
            self._failing.discard(index)


def _calls(writer: MetricsWriter, rows: Rows) -> Iterator[Callable[[], object]]:
    """The calls that write the rows: one for all, or one per row."""
    if isinstance(writer, BatchWriter):
        yield partial(writer.log_batch, rows)
        return
    for step, values in rows:
        yield partial(writer.log, step, values)
