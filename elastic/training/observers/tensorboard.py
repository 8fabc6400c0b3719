"""TensorBoard event files: one per writing process, in one folder per run.

TensorBoard reads the files of a folder in the order of their names, so a new file's name sorts
after all existing ones, regardless of the clock. A ``SessionLog.START`` with a step makes
TensorBoard discard that step and later ones (EventAccumulator, and preemption in its Rust reader),
so repeated steps replace earlier values. The last written step of each name is kept in a small file
in the folder, so that the next process neither omits nor duplicates values.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic.clock import SYSTEM_CLOCK
from elastic.errors import ConfigError
from elastic.telemetry.log import get_logger
from elastic.training.observers.writer import Rows

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

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
        """See :class:`~elastic.training.observers.writer.MetricsWriter`."""
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
        """See :class:`~elastic.training.observers.writer.MetricsWriter`."""
        self.log_batch([(step, values)])

    def log_batch(self, rows: Rows) -> None:
        """See :class:`~elastic.training.observers.writer.BatchWriter`: one write for all rows."""
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
        """See :class:`~elastic.training.observers.writer.MetricsWriter`."""
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
