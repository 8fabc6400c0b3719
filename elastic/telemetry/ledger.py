"""The account of a job's progress."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from elastic.errors import SYSTEM_CLOCK, Clock

# ----------------------------------------------------------------------------
# The ledger: which samples took effect in which step, one file per worker process.
#
# Off unless ``ELASTIC_LEDGER`` names a folder; :mod:`elastic.testing.ledger` reads it back and
# checks that each sample was seen exactly once. One line is one ``write`` on a file opened for
# appending, so a killed process leaves at most one incomplete line, its last.


class Ledger:
    """Appends the steps of this process. Inactive without a folder."""

    def __init__(self, folder: str | None, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._fd = _open(Path(folder), clock) if folder else None

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> Ledger:
        """The ledger in the folder that ``ELASTIC_LEDGER`` names."""
        return cls(env.get("ELASTIC_LEDGER"))

    @property
    def is_on(self) -> bool:
        """Whether anything is written, so that callers can skip expensive arguments."""
        return self._fd is not None

    def start(self, *, generation: int, step: int, rank: int, size: int, node: str) -> None:
        """Record the beginning of a generation on this rank, after ``step`` steps."""
        self._write("start", generation=generation, step=step, rank=rank, size=size, node=node)

    def begin(
        self, *, generation: int, step: int, epoch: int, rank: int, samples: Sequence[int]
    ) -> None:
        """Record this rank's share of a step, which takes effect if any rank completes the step."""
        samples = [int(i) for i in samples]
        self._write(
            "begin", generation=generation, step=step, epoch=epoch, rank=rank, samples=samples
        )

    def step(
        self, *, generation: int, step: int, epoch: int, rank: int, samples: Sequence[int]
    ) -> None:
        """Record that this rank's share of a step took effect."""
        samples = [int(i) for i in samples]
        self._write(
            "step", generation=generation, step=step, epoch=epoch, rank=rank, samples=samples
        )

    def end(self, *, generation: int, step: int, rank: int, sha256: str, position: int = 0) -> None:
        """Record the end of this rank, with the hash of its weights or shards."""
        self._write(
            "end", generation=generation, step=step, rank=rank, sha256=sha256, position=position
        )

    def _write(self, event: str, **fields: object) -> None:
        if self._fd is not None:
            line = json.dumps({"event": event, **fields, "time": self._clock.wall()})
            os.write(self._fd, line.encode() + b"\n")


def _open(folder: Path, clock: Clock) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{os.uname().nodename}-{os.getpid()}-{clock.wall():.6f}.jsonl"
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


# ----------------------------------------------------------------------------
# Estimates a job's goodput, and records when its last checkpoint was committed.
#
# Each agent keeps its own account from its workers' reports, so that a new leader can publish one
# immediately. It is an estimate: the journal's goodput (elastic/telemetry/goodput.py) has data
# waits and checkpoint stalls, which are part of a step's duration here.

_REMEMBERED = 4096  # reports: a recovery may return to the last checkpoint


class ProgressAccount:
    """Progress of one node since ``start_s`` (wall clock, like all times here)."""

    def __init__(self, start_s: float) -> None:
        self.start_s = start_s
        self.checkpoint_step: int | None = None
        self.checkpoint_at_s: float | None = None  # when this node learned of it
        self._noted_s = start_s
        self._productive_s = 0.0
        # Steps, each with the total time of all steps until then; non-decreasing.
        self._marks: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)

    def note(
        self, now_s: float, step: int | None, step_time_s: float, checkpoint_step: int | None
    ) -> None:
        """Update the account; ``step``: the job's committed step. Idempotent; call it
        periodically."""
        if checkpoint_step != self.checkpoint_step:
            self.checkpoint_step = checkpoint_step
            self.checkpoint_at_s = now_s if checkpoint_step is not None else None
        passed_s, self._noted_s = max(0.0, now_s - self._noted_s), now_s
        if step is None:
            return
        while self._marks and self._marks[-1][0] > step:  # a recovery discarded steps
            self._marks.pop()
            self._productive_s = self._marks[-1][1] if self._marks else 0.0
        if self._marks:
            made = step - self._marks[-1][0]
            self._productive_s += min(passed_s, made * step_time_s)
        if not self._marks or self._marks[-1][0] < step:
            self._marks.append((step, self._productive_s))

    def goodput(self, now_s: float) -> float | None:
        """The fraction of time, 0 to 1, spent in steps that still count; None before the
        first one."""
        whole_s = now_s - self.start_s
        if self._productive_s <= 0 or whole_s <= 0:
            return None
        return min(1.0, self._productive_s / whole_s)
