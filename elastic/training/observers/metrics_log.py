"""Decides which rank writes which logged values, and when.

Every rank keeps recent values; rank 0 sends them to the writers. A step's values are sent once the
next step is committed: until then values can be added, and an interrupted step leaves none. A rank
that becomes rank 0 sends the values that it has kept, and writers skip those that exist.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.errors import TrainingError
from elastic.events import Metrics
from elastic.telemetry.journal import EventSink
from elastic.telemetry.log import get_logger
from elastic.training.observers.device_reads import DeviceReads
from elastic.training.observers.history import History, Row
from elastic.training.observers.values import Loggable, RecentMeans, Scalar, WorldMean, scalar_of
from elastic.training.observers.writer import MetricsWriter
from elastic.training.observers.writer_thread import WriterThread
from elastic.tuning.worker_intervals import (
    METRICS_CLOSE_S,
    METRICS_DRAIN_S,
    METRICS_EVENT_S,
    METRICS_FLUSH_S,
    METRICS_KEEP_S,
)
from elastic.world.world import World

_MAX_LOGGED = 256  # calls between two steps, if a script logs in its own loop


class MetricsLog:
    """The log of metrics. One per process, used by the main thread.

    Args:
        position: the number of committed steps, including the current one.
        default_writers: creates the writers if the script sets none.
    """

    SEES_EACH_STEP: ClassVar = False

    def __init__(
        self,
        journal: EventSink,
        position: Callable[[], int],
        *,
        default_writers: Callable[[], Sequence[MetricsWriter]] = list,
        reads: DeviceReads | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._journal = journal
        self._position = position
        self._default_writers = default_writers
        self.means = RecentMeans()
        self._writers: list[MetricsWriter] | None = None  # None: the default writers
        self._is_open = False  # values were logged
        self._logged: list[tuple[int, dict[str, Scalar]]] = []  # not yet in the history
        self._history = History(METRICS_KEEP_S)
        self._reads = reads if reads is not None else DeviceReads()
        self._clock = clock
        self._thread: WriterThread | None = None
        self._is_main = False
        self._is_drained = True  # all sent values were written when the last world ended
        self._began_at = 0  # step
        self._step = 0
        self._flushed_s = self._reported_s = float("-inf")
        self._newest: dict[str, float] = {}  # last sent value of each name
        self._unreported: dict[str, float] = {}  # sent since the last event in the journal
        self._reported_step = 0

    @property
    def newest(self) -> Mapping[str, float]:
        """The last known value of each name, on rank 0."""
        return self._newest

    def log(self, values: dict[str, Loggable]) -> None:
        """Keep the values of the current step; takes ownership of the dictionary.

        Only urgent work is done here: telemetry runs with cold caches, so floats and CPU tensors,
        the usual values, are read without a further function call.

        Raises ConfigError for a value that is not a number.
        """
        if not self._is_open:
            self._open()
        for name, value in values.items():
            if type(value) is Tensor and value.is_cpu:
                try:
                    values[name] = value = value.item()
                except RuntimeError:  # not one element
                    values[name] = value = scalar_of(name, value)
            if not (type(value) is float and type(name) is str and name):
                values[name] = scalar_of(name, value)
            elif self.means.has(value):
                values[name] = WorldMean(value)
        if values:
            self._logged.append((self._position(), values))  # type: ignore[arg-type]
            if len(self._logged) >= _MAX_LOGGED:
                self._keep()

    def _open(self) -> None:
        self._is_open = True
        if self._writers is None:
            self._writers = list(self._default_writers())

    def _keep(self) -> None:
        """Move logged values to the history."""
        logged, self._logged = self._logged, []
        now_s = self._clock.monotonic()
        for step, values in logged:
            self._history.put(step, values, now_s)

    def add_writer(self, writer: MetricsWriter) -> None:
        """Use this writer, in addition to others that were added, instead of the default.

        Raises TrainingError after the first value was logged, which the writer would miss.
        """
        if self._is_open:
            raise TrainingError(
                "run.log_to() was called after run.log(): the earlier values would be missing",
                hint="call run.log_to(…) right after run = elastic.join(…)",
            )
        self._writers = [*(self._writers or []), writer]

    # -- steps and worlds ----------------------------------------------------------------------

    def begin_world(self, world: World, step: int) -> None:
        """See :class:`StepObserver`."""
        self._keep()
        self._history.rewind(step)
        self._newest.clear()
        self._unreported.clear()
        self._step = step
        self._is_main = world.rank == 0
        if self._is_main:
            self._history.resend_all()
            self._began_at = step
            if self._thread is not None:
                self._thread.rewind(step)
        elif self._thread is not None and not self._is_drained:
            self._thread.abandon()  # the new rank 0 writes its copies of these values

    def committed(self, step: int) -> None:
        """See :class:`StepObserver`."""
        self._step = step
        self._keep()
        now_s = self._clock.monotonic()
        if now_s - self._flushed_s >= METRICS_FLUSH_S:
            self._flushed_s = now_s
            self._flush(step - 1)
            self._history.prune(now_s, is_writer=self._is_main)

    def end_world(self, ended: str) -> None:
        """See :class:`StepObserver`. Another process may write from now on."""
        self._keep()
        if not self._is_main:
            return
        # After a fault the device may never compute logged values: do not wait for it.
        self._flush(self._step, wait=ended != "fault", is_last=True)
        self._is_main = False
        self._is_drained = self._thread is None or self._thread.drain(METRICS_DRAIN_S)

    def pause(self) -> None:
        """See :class:`StepObserver`."""
        self.end_world("change")

    def close(self) -> None:
        """See :class:`StepObserver`."""
        self._close_thread()

    # -- writing -------------------------------------------------------------------------------

    def _flush(self, step: int, *, wait: bool = False, is_last: bool = False) -> None:
        unsent = self._history.unsent(step)
        if not self._is_main or not unsent:
            return
        rows = self._reads.finish(unsent, wait=wait)
        if rows:
            self._send(rows)
        now_s = self._clock.monotonic()
        if self._unreported and (is_last or now_s - self._reported_s >= METRICS_EVENT_S):
            self._reported_s = now_s
            self._report()

    def _send(self, rows: Sequence[Row]) -> None:
        if self._thread is None and self._writers:
            level = logging.DEBUG if self._began_at else logging.INFO  # INFO once per job
            get_logger().log(level, "run.log writes to %s", ", ".join(map(str, self._writers)))
            self._thread = WriterThread(self._writers)
            self._thread.rewind(self._began_at)
        batch: list[tuple[int, Mapping[str, float]]] = []
        for row in rows:
            row.is_sent = True
            values = {name: float(value) for name, value in row.values.items()}
            batch.append((row.step, values))
            self._newest.update(row.values)  # type: ignore[arg-type]
            self._unreported.update(row.values)  # type: ignore[arg-type]
            self._reported_step = row.step
        if self._thread is not None:
            self._thread.log(batch)

    def _report(self) -> None:
        values, self._unreported = self._unreported, {}
        means = tuple(name for name, value in values.items() if isinstance(value, WorldMean))
        event = Metrics(step=self._reported_step, values=dict(values), means=means)
        self._journal.emit(event, level=logging.DEBUG)

    def _close_thread(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None and not thread.close(METRICS_CLOSE_S):
            get_logger().warning(
                "run.log: a destination of metrics did not accept all values within %g s; its last "
                "values are lost",
                METRICS_CLOSE_S,
            )
