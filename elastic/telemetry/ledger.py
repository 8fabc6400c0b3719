"""The ledger: which samples took effect in which step, one file per worker process.

Off unless ``ELASTIC_LEDGER`` names a folder; :mod:`elastic.testing.ledger` reads it back and
checks that each sample was seen exactly once. One line is one ``write`` on a file opened for
appending, so a killed process leaves at most one incomplete line, its last.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from elastic.clock import SYSTEM_CLOCK, Clock


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
