"""``run.log``: values, and where they are written."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, SupportsFloat, runtime_checkable

import torch
from torch import Tensor

from elastic import errors
from elastic.errors import SYSTEM_CLOCK, Clock, ConfigError, TrainingError
from elastic.groups.world import World
from elastic.telemetry.events import Metrics
from elastic.telemetry.journal import EventSink
from elastic.telemetry.log import get_logger
from elastic.train.hooks import Hook, Left

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

# Rank 0 passes logged values to its writers this often: one batch costs less than a call per step.
# The files of a killed process lack at most this, STEP_SUMS_S and one step.
METRICS_FLUSH_S = 0.5
# All ranks keep their logged values for this long: the next rank 0 writes those that the previous
# one had not written. A death is detected within seconds, and a flush may wait for a slow disk.
METRICS_KEEP_S = 30.0
# Between two events `metrics` in the journal: enough for a curve, about 100 KiB an hour.
METRICS_EVENT_S = 5.0
# For the writers to write pending values before another process may: a local disk takes a
# millisecond, and the recovery does not wait for it.
METRICS_DRAIN_S = 1.0
# For the writers to finish at the end of the process.
METRICS_CLOSE_S = 30.0


# ----------------------------------------------------------------------------
# The interface of a destination of metrics: three methods.

Rows = Sequence[tuple[int, Mapping[str, float]]]
"""Steps, which do not decrease, with their values."""


class MetricsWriter(Protocol):
    """A destination of logged values: TensorBoard, W&B, MLflow, or any other.

    Only rank 0 calls it, on a separate thread. Any process of the job may become rank 0, so
    create resources (files, a client) in :meth:`rewind` and not before, and continue there after
    the values of other processes. An exception in a method is logged once and has no other effect.
    """

    def rewind(self, step: int) -> None:
        """Begin to write from this process; the job continues after ``step`` steps.

        Called before the first :meth:`log` of each world. Later steps that any process has already
        logged will be repeated: their values must be replaced.
        """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of one step. Steps do not decrease until the next :meth:`rewind`.

        After :meth:`rewind`, steps up to its ``step`` may come again, because an earlier process's
        last write is unknown: keep one value per name and step.
        """

    def close(self) -> None:
        """Close: the process is ending."""


@runtime_checkable
class BatchWriter(Protocol):
    """A writer that accepts several steps at once, to save calls."""

    def log_batch(self, rows: Rows) -> None:
        """Write the rows. Called instead of :meth:`MetricsWriter.log`."""


# ----------------------------------------------------------------------------
# TensorBoard event files: one per writing process, in one folder per run.
#
# TensorBoard reads the files of a folder in the order of their names, so a new file's name sorts
# after all existing ones, regardless of the clock. A ``SessionLog.START`` with a step makes
# TensorBoard discard that step and later ones (EventAccumulator, and preemption in its Rust
# reader), so repeated steps replace earlier values. The last written step of each name is kept in
# a small file in the folder, so that the next process neither omits nor duplicates values.

WRITTEN = "elastic-metrics.json"  # the newest step of each name
_NUMBER = re.compile(r"events\.out\.tfevents\.(\d+)\.")


def is_installed() -> bool:
    """Whether TensorBoard can be imported. Does not import it."""
    from importlib.util import find_spec

    return find_spec("tensorboard") is not None


class TensorBoard:
    """Writes ``folder/events.out.tfevents.*``: ``run.log_to(elastic.TensorBoard("runs/a"))``.

    Every node of the job must be able to write to the folder, because it may become rank 0.

    Raises:
        ConfigError: TensorBoard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        if not is_installed():
            raise ConfigError(
                f"elastic.TensorBoard({os.fspath(folder)!r}): TensorBoard is not installed",
                hint="pip install tensorboard",
            )
        self._folder = Path(folder)
        self._file: Any = None  # a RecordWriter; None: the folder cannot be written
        self._has_warned = False
        self._name = ""
        self._steps: dict[str, int] = {}
        self._written_fd: int | None = None
        self._written_bytes = 0

    def __repr__(self) -> str:
        return f"TensorBoard({os.fspath(self._folder)!r})"

    def rewind(self, step: int) -> None:
        """See :class:`~elastic.train.metrics.MetricsWriter`."""
        try:
            self._rewind(step)
        except OSError as error:  # retried when the next world begins
            self.close()
            if not self._has_warned:
                self._has_warned = True
                get_logger().warning(
                    "run.log: TensorBoard's folder %s is not writable (%s): training "
                    "continues without TensorBoard output. Set ELASTIC_TENSORBOARD to a folder "
                    "that all nodes can write to, or to off",
                    self._folder.absolute(),
                    error.strerror or error,
                )

    def _rewind(self, step: int) -> None:
        name, steps = self._read_written()
        is_new = name != self._name or self._file is None
        if is_new:
            self._open()
            if step and not steps:
                get_logger().warning(
                    "run.log: the curves in %s begin at step %d, without earlier values. "
                    "Use a folder that all nodes share (ELASTIC_TENSORBOARD)",
                    self._folder,
                    step,
                )
        newest = max(steps.values(), default=-1)
        # A killed writer may have written steps without recording them: they are replaced.
        if newest > step or (is_new and steps):
            self._purge(min(newest, step) + 1)
        self._steps = {tag: min(known, step) for tag, known in steps.items()}
        self._flush()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See :class:`~elastic.train.metrics.MetricsWriter`."""
        self.log_batch([(step, values)])

    def log_batch(self, rows: Rows) -> None:
        """See :class:`~elastic.train.metrics.BatchWriter`: one write for all rows."""
        if self._file is None:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        for step, values in rows:
            new = {tag: v for tag, v in values.items() if self._steps.get(tag, -1) < step}
            if new:
                points = [Summary.Value(tag=tag, simple_value=v) for tag, v in new.items()]
                self._append(_event(step=step, summary=Summary(value=points)))
                self._steps.update(dict.fromkeys(new, step))
        self._flush()

    def close(self) -> None:
        """See :class:`~elastic.train.metrics.MetricsWriter`."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._written_fd is not None:
            os.close(self._written_fd)
            self._written_fd = None

    def _open(self) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        numbers = [int(m[1]) for name in os.listdir(self._folder) if (m := _NUMBER.match(name))]
        number = max([int(SYSTEM_CLOCK.wall()), *(n + 1 for n in numbers)])
        self._name = f"events.out.tfevents.{number:010d}.{os.uname().nodename}.{os.getpid()}.0"
        self._file = RecordWriter(open(self._folder / self._name, "xb"))  # noqa: SIM115
        self._append(_event(file_version="brain.Event:2"))

    def _purge(self, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._append(_event(step=step, session_log=SessionLog(status=SessionLog.START)))

    def _append(self, event: Event) -> None:
        self._file.write(event.SerializeToString())

    def _flush(self) -> None:
        """Write appended records with one write: a killed process leaves at most one truncated
        record. Then record the newest steps for the next writing process."""
        self._file.flush()
        self._write_written()

    def _read_written(self) -> tuple[str, dict[str, int]]:
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
            written = json.loads((self._folder / WRITTEN).read_text())
            return str(written["file"]), {str(t): int(s) for t, s in written["steps"].items()}
        return "", {}

    def _write_written(self) -> None:
        """Write in place with one call, so that a kill cannot truncate the file."""
        if self._written_fd is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._written_fd = os.open(self._folder / WRITTEN, flags, 0o644)
            self._written_bytes = os.fstat(self._written_fd).st_size
        data = json.dumps({"file": self._name, "steps": self._steps}).encode()
        self._written_bytes = max(self._written_bytes, len(data) + 1)
        os.pwrite(self._written_fd, data.ljust(self._written_bytes - 1) + b"\n", 0)


def _event(**fields: Any) -> Event:
    from tensorboard.compat.proto.event_pb2 import Event

    return Event(wall_time=SYSTEM_CLOCK.wall(), **fields)


# ----------------------------------------------------------------------------
# The default destination of metrics.

OFF = "off"


def default_writers(env: Mapping[str, str] = os.environ) -> Sequence[MetricsWriter]:
    """TensorBoard, if it is installed, in ``ELASTIC_TENSORBOARD`` or ``runs/RUN_ID``.

    With ``ELASTIC_TENSORBOARD=off`` there is none. Raises ConfigError if it names a folder and
    TensorBoard is not installed.
    """
    folder = env.get("ELASTIC_TENSORBOARD")
    if folder == OFF or (not folder and not is_installed()):
        return []
    return [TensorBoard(folder or os.path.join("runs", env.get("TORCHELASTIC_RUN_ID", "local")))]


# ----------------------------------------------------------------------------
# Validation of logged values: numbers, and tensors with one element.

Loggable = SupportsFloat | torch.Tensor
_RECENT_MEANS = 1000
Scalar = float | torch.Tensor
"""A number, or its pending copy from a device: see
:mod:`~elastic.train.metrics`."""


class WorldMean(float):
    """A logged mean over all ranks; other values are one rank's."""

    __slots__ = ()


class RecentMeans:
    """The last means of ``run.mean``, by their identity.

    They are plain floats: ``torch.load`` refuses a file with an object of a class of ours.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, float] = {}  # refers to them, so that no id is used again

    def add(self, mean: float) -> float:
        """Record a mean, and return it."""
        mean = mean * 1.0  # an object that nothing else refers to, unlike math.nan
        self._by_id[id(mean)] = mean
        if len(self._by_id) > _RECENT_MEANS:
            del self._by_id[next(iter(self._by_id))]
        return mean

    def has(self, value: object) -> bool:
        """Whether it is one of them."""
        return id(value) in self._by_id


def weighted(weight: object, values: Iterable[tuple[str, object]]) -> list[float]:
    """The weight, and each value times the weight; 0 where the weight is 0.

    Raises ConfigError for a negative weight, and for a value that is not a number.
    """
    hint = "run.mean(len(batch), loss=loss): the weight, then values"
    share = errors.weight("run.mean: weight ", weight, hint=hint)
    if not share:
        return [0.0 for _ in (None, *values)]
    hint = "a number, or a tensor with one element: loss=losses.mean()"
    numbers = [errors.real_number(f"run.mean: {n}=", v, hint=hint) for n, v in values]
    return [share, *(number * share for number in numbers)]


def scalar_of(name: object, value: object) -> Scalar:
    """Convert a value to a number or, for a tensor on a device, to a pending copy.

    Raises ConfigError, which names the value, for anything else.
    """
    kind = type(value)
    if kind is float:
        scalar: Scalar = value  # type: ignore[assignment]
    elif isinstance(value, torch.Tensor):
        scalar = _scalar_of_tensor(name, value)
    else:
        scalar = _float_of(name, value)
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"run.log({{{name!r}: …}}): the name of a value must be a non-empty string",
            hint="run.log(loss=loss), or run.log({'train/loss': loss})",
        )
    return scalar


def _scalar_of_tensor(name: object, tensor: torch.Tensor) -> Scalar:
    if hasattr(tensor, "full_tensor"):  # a DTensor
        raise _refusal(name, "a sharded tensor", f"run.log({name}=value.full_tensor())")
    if tensor.numel() != 1 or tensor.is_complex() or tensor.is_meta:
        what = f"a tensor of shape {tuple(tensor.shape)} and {tensor.dtype}"
        raise _refusal(name, what, f"run.log({name}=value.mean())")
    tensor = tensor.detach()
    if tensor.device.type == "cpu":
        return float(tensor)
    # Copied now, because the script may change the tensor in place; into pinned memory, so that
    # neither this call nor the device waits (aten/src/ATen/native/TensorConversions.cpp).
    return tensor.to("cpu", non_blocking=True)


def _float_of(name: object, value: object) -> float:
    if isinstance(value, str | bytes | complex) or not hasattr(value, "__float__"):
        raise _refusal(name, f"{_shown(value)}, a {type(value).__name__},", "log numbers only")
    try:
        return float(value)
    except (TypeError, ValueError):
        what = f"a {type(value).__name__} of several values,"
        raise _refusal(name, what, f"run.log({name}=value.mean())") from None


def _refusal(name: object, what: str, remedy: str) -> ConfigError:
    return ConfigError(f"run.log({name}=…): {what} is not a number", hint=remedy)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


# ----------------------------------------------------------------------------
# The recently logged values, by step.

_ALWAYS_KEPT = 8  # rows, however old: steps may take minutes


@dataclass(slots=True)
class Row:
    """Values logged for one step: all, or some of them."""

    step: int  # number of committed steps once this one commits
    logged_s: float
    values: dict[str, Scalar]
    is_sent: bool = False


class History:
    """Rows with non-decreasing steps. Every rank keeps recent rows, because a new rank 0 writes
    those that the previous one did not."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._rows: deque[Row] = deque()

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def put(self, step: int, values: dict[str, Scalar], now_s: float) -> None:
        """Add values to the row of ``step``, replacing values of the same name.

        Takes ownership of the dictionary.
        """
        rows = self._rows
        if rows and rows[-1].step >= step:
            self.rewind(step)
            if rows and rows[-1].step == step and not rows[-1].is_sent:
                rows[-1].values.update(values)
                return
        rows.append(Row(step, now_s, values))

    def rewind(self, step: int) -> None:
        """Forget values of steps after ``step``, which will be repeated."""
        rows = self._rows
        while rows and rows[-1].step > step:
            rows.pop()

    def resend_all(self) -> None:
        """Mark all rows as not written."""
        for row in self._rows:
            row.is_sent = False

    def unsent(self, step: int) -> list[Row]:
        """Unsent rows up to ``step``, oldest first."""
        rows: list[Row] = []
        for row in reversed(self._rows):
            if row.is_sent:
                break
            if row.step <= step:
                rows.append(row)
        return rows[::-1]

    def prune(self, now_s: float, *, is_writer: bool) -> None:
        """Forget old rows. ``is_writer``: unsent rows are kept."""
        rows = self._rows
        while len(rows) > _ALWAYS_KEPT and now_s - rows[0].logged_s > self._keep_s:
            if is_writer and not rows[0].is_sent:
                return
            rows.popleft()


# ----------------------------------------------------------------------------
# Reads scalars copied from a device, without waiting for the device.
#
# A copy is read once an event that was recorded after it has completed. So a value is available
# one flush later, and no step waits.


class DeviceEvent(Protocol):
    """The subset of ``torch.Event`` that is used here."""

    def query(self) -> bool:
        """Whether all work queued before the event is done."""

    def synchronize(self) -> None:
        """Wait until all work queued before the event is done."""


def record_event() -> DeviceEvent:
    """Record an event on the accelerator's current stream."""
    event = torch.Event(device=torch.accelerator.current_accelerator())
    event.record()
    return event


class DeviceReads:
    """Pending device reads. One per process, used by the main thread."""

    def __init__(self, record: Callable[[], DeviceEvent] = record_event) -> None:
        self._record = record
        self._event: DeviceEvent | None = None
        self._covered: list[Row] = []  # rows whose copies were queued before the event

    def finish(self, rows: Sequence[Row], *, wait: bool = False) -> list[Row]:
        """The leading rows whose values are available."""
        open_ = [row for row in rows if _is_open(row)]
        if not open_:
            return list(rows)
        if wait:
            self._event = None
            self._record().synchronize()
            _read(open_)
            return list(rows)
        if self._event is not None and self._event.query():
            _read(self._covered)
            self._event, self._covered = None, []
            open_ = [row for row in open_ if _is_open(row)]
        if self._event is None and open_:
            self._event, self._covered = self._record(), open_
        return _until_open(rows)


def _is_open(row: Row) -> bool:
    return any(isinstance(value, torch.Tensor) for value in row.values.values())


def _read(rows: Sequence[Row]) -> None:
    for row in rows:
        row.values = {name: float(value) for name, value in row.values.items()}


def _until_open(rows: Sequence[Row]) -> list[Row]:
    known: list[Row] = []
    for row in rows:
        if _is_open(row):
            break
        known.append(row)
    return known


# ----------------------------------------------------------------------------
# Calls the writers on a thread, so that a slow disk or tracker delays no step.

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


# ----------------------------------------------------------------------------
# Decides which rank writes which logged values, and when.
#
# Every rank keeps recent values; rank 0 sends them to the writers. A step's values are sent once
# the next step is committed: until then values can be added, and an interrupted step leaves none.
# A rank that becomes rank 0 sends the values that it has kept, and writers skip those that exist.

_MAX_LOGGED = 256  # calls between two steps, if a script logs in its own loop


class MetricsLog(Hook):
    """The log of metrics. One per process, used by the main thread.

    Args:
        position: the number of committed steps, including the current one.
        default_writers: creates the writers if the script sets none.
    """

    SEES_EACH_STEP = False

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

    def enter_world(self, world: World, step: int) -> None:
        """See :class:`Hook`."""
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

    def commit(self, step: int) -> None:
        """See :class:`Hook`."""
        self._step = step
        self._keep()
        now_s = self._clock.monotonic()
        if now_s - self._flushed_s >= METRICS_FLUSH_S:
            self._flushed_s = now_s
            self._flush(step - 1)
            self._history.prune(now_s, is_writer=self._is_main)

    def leave_world(self, reason: Left) -> None:
        """See :class:`Hook`. Another process may write from now on."""
        self._keep()
        if not self._is_main:
            return
        # After a fault the device may never compute logged values: do not wait for it.
        self._flush(self._step, wait=reason != "fault", is_last=True)
        self._is_main = False
        self._is_drained = self._thread is None or self._thread.drain(METRICS_DRAIN_S)

    def close(self) -> None:
        """See :class:`Hook`."""
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
