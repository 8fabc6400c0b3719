"""Reads and checks the ledger of a run: which samples took effect.

Every worker process appends JSON lines to its own file in one folder (``ELASTIC_LEDGER``)::

    {"event": "start", "generation", "step", "rank", "size", "node", "time"}
    {"event": "begin", "generation", "step", "epoch", "rank", "samples": [...], "time"}
    {"event": "step", "generation", "step", "epoch", "rank", "samples": [...], "time"}
    {"event": "end", "generation", "rank", "sha256", "position", "time"}

``start`` has the step at which a generation begins on a rank. ``begin`` is written when a rank
receives its share of a step, ``step`` once the optimizer has stepped. ``end`` has the hash of the
final weights, or of the shards at this position of each replica. Times are wall clock: all workers
of a test run on one machine.

**Gradients and steps.** No rank can complete a step before all ranks have contributed gradients. So
if one rank completed a step and another died before it recorded this, the samples of the latter's
``begin`` took effect, too.

**The surviving lineage.** A generation that starts at step s discards all steps of earlier
generations from s on. The final weights result from the steps that no later start discards, and
only among these must each sample be seen exactly once per epoch.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any


class LedgerError(AssertionError):
    """The ledger violates a guarantee. An AssertionError, so that tests fail with it."""


@dataclass(frozen=True)
class Start:
    """A generation began on a rank."""

    generation: int
    step: int
    rank: int
    size: int
    node: str
    time_s: float


@dataclass(frozen=True)
class LedgerStep:
    """A rank's part of a step took effect."""

    generation: int
    step: int
    epoch: int
    rank: int
    node: str
    samples: tuple[int, ...]
    time_s: float


@dataclass(frozen=True)
class Begin(LedgerStep):
    """A rank contributed its part to a step."""


@dataclass(frozen=True)
class LedgerEnd:
    """A rank finished the job."""

    generation: int
    rank: int
    sha256: str
    time_s: float
    position: int = 0  # in its replica: ranks with the same position have the same shards


LedgerEvent = Start | LedgerStep | Begin | LedgerEnd


@dataclass(frozen=True)
class Coverage:
    """How often the samples of one epoch were seen on the surviving lineage."""

    once: int
    twice_or_more: tuple[int, ...]
    never: tuple[int, ...]
    unknown: tuple[int, ...]  # outside range(n)


@dataclass(frozen=True)
class RunLedger:
    """All entries of the workers of a run, in no particular order."""

    starts: tuple[Start, ...] = ()
    steps: tuple[LedgerStep, ...] = ()
    ends: tuple[LedgerEnd, ...] = ()
    begins: tuple[Begin, ...] = ()

    @property
    def last_step(self) -> int:
        """The highest step that any rank completed; -1 before the first."""
        return max((s.step for s in self.steps), default=-1)

    @property
    def last_generation(self) -> int:
        """The newest generation that began on any rank; 0 before the first."""
        return max((s.generation for s in self.starts), default=0)

    @cached_property
    def cuts(self) -> dict[int, int]:
        """Per generation, the step from which a later generation discarded its work.

        A generation that was not interrupted is not in the result.
        """
        begins: dict[int, int] = {}
        for start in self.starts:
            begins[start.generation] = min(start.step, begins.get(start.generation, start.step))
        result: dict[int, int] = {}
        lowest: int | None = None
        for generation in sorted(begins, reverse=True):
            if lowest is not None:
                result[generation] = lowest
            lowest = begins[generation] if lowest is None else min(lowest, begins[generation])
        return result

    @cached_property
    def surviving(self) -> tuple[LedgerStep, ...]:
        """The parts of steps from which the final weights result."""
        done = {(s.generation, s.step) for s in self.steps}
        recorded = {(s.generation, s.step, s.rank) for s in self.steps}
        contributed = {
            key: begin
            for begin in self.begins
            if (key := (begin.generation, begin.step, begin.rank)) not in recorded
            and key[:2] in done
        }
        return tuple(s for s in (*self.steps, *contributed.values()) if not self._is_cut(s))

    @property
    def recomputed_steps(self) -> int:
        """Steps of the job that were done and then discarded."""
        return len({(s.generation, s.step) for s in self.steps if self._is_cut(s)})

    def coverage(self, n: int, epoch: int) -> Coverage:
        """Count the samples 0..n-1 of one epoch on the surviving lineage."""
        seen = Counter(i for s in self.surviving if s.epoch == epoch for i in s.samples)
        return Coverage(
            once=sum(1 for i in range(n) if seen[i] == 1),
            twice_or_more=tuple(i for i in range(n) if seen[i] > 1),
            never=tuple(i for i in range(n) if seen[i] == 0),
            unknown=tuple(sorted(i for i in seen if not 0 <= i < n)),
        )

    def assert_exactly_once(self, n: int, epochs: int) -> None:
        """Check that each of n samples has exactly one effect per epoch. Raises LedgerError."""
        if beyond := sorted({s.epoch for s in self.surviving} - set(range(epochs))):
            raise LedgerError(f"epochs {beyond} were trained, the job has {epochs}")
        for epoch in range(epochs):
            c = self.coverage(n, epoch)
            if c.once != n or c.unknown:
                raise LedgerError(
                    f"epoch {epoch}: {c.once} of {n} samples seen once; "
                    f"{_some(c.twice_or_more)} more than once, {_some(c.never)} never, "
                    f"{_some(c.unknown)} not in the dataset (surviving lineage: "
                    f"{self.describe_lineage()})"
                )

    def assert_one_world_at_a_time(self) -> None:
        """Check that no generation completes a step after a later one completed its first.

        A step is complete when the first rank has recorded it: every rank has contributed its
        gradient by then, and a slow one may record it later. Raises LedgerError.
        """
        done: dict[int, dict[int, float]] = defaultdict(dict)
        for s in self.steps:
            done[s.generation][s.step] = min(s.time_s, done[s.generation].get(s.step, s.time_s))
        generations = sorted(done)
        for earlier, later in pairwise(generations):
            end, begin = max(done[earlier].values()), min(done[later].values())
            if end > begin:
                raise LedgerError(
                    f"generation {earlier} still completed a step {end - begin:.3f} s after "
                    f"generation {later} had completed its first"
                )

    def final_hash(self) -> str:
        """The hash of the final weights, equal on all ranks of the last world.

        Raises LedgerError if ranks differ, or some did not finish.
        """
        if not self.ends:
            raise LedgerError("no rank finished")
        last = max(e.generation for e in self.ends)
        hashes = {e.rank: e.sha256 for e in self.ends if e.generation == last}
        size = max(s.size for s in self.starts if s.generation == last)
        if sorted(hashes) != list(range(size)):
            raise LedgerError(f"generation {last} has {size} ranks; finished: {sorted(hashes)}")
        positions = {e.rank: e.position for e in self.ends if e.generation == last}
        if len({(positions[rank], sha256) for rank, sha256 in hashes.items()}) != len(
            set(positions.values())
        ):
            raise LedgerError(f"final weights differ between ranks: {hashes}")
        return hashes[0]

    def describe_lineage(self) -> str:
        """The lineage as text: ``1: steps 0-41 of 0-45, 2: steps 42-99``."""
        done: dict[int, set[int]] = defaultdict(set)
        kept: dict[int, set[int]] = defaultdict(set)
        for s in self.steps:
            done[s.generation].add(s.step)
        for s in self.surviving:
            kept[s.generation].add(s.step)
        parts = []
        for generation in sorted(done):
            all_of = f"{min(done[generation])}-{max(done[generation])}"
            if not kept[generation]:
                parts.append(f"{generation}: none of {all_of}")
            else:
                survived = f"{min(kept[generation])}-{max(kept[generation])}"
                of = "" if survived == all_of else f" of {all_of}"
                parts.append(f"{generation}: steps {survived}{of}")
        return ", ".join(parts) or "nothing"

    def _is_cut(self, step: LedgerStep) -> bool:
        cut = self.cuts.get(step.generation)
        return cut is not None and step.step >= cut


class LedgerReader:
    """Follows a folder of ledgers while it grows: each line is parsed once."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._files: dict[Path, _FileReader] = {}
        self._starts: list[Start] = []
        self._steps: list[LedgerStep] = []
        self._begins: list[Begin] = []
        self._ends: list[LedgerEnd] = []

    def read(self) -> RunLedger:
        """The ledger so far; a missing folder is an empty ledger. Raises LedgerError for an invalid
        line."""
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if path not in self._files and path.is_file():
                    self._files[path] = _FileReader(path)
        for path in sorted(self._files):
            for event in self._files[path].read_new():
                self._keep(event)
        return RunLedger(
            tuple(self._starts), tuple(self._steps), tuple(self._ends), tuple(self._begins)
        )

    def _keep(self, event: LedgerEvent) -> None:
        match event:
            case Start():
                self._starts.append(event)
            case Begin():
                self._begins.append(event)
            case LedgerStep():
                self._steps.append(event)
            case LedgerEnd():
                self._ends.append(event)


def read_ledger(folder: str | Path) -> RunLedger:
    """Read a finished run once."""
    return LedgerReader(folder).read()


class _FileReader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._lines = 0
        self._node = ""

    def read_new(self) -> list[LedgerEvent]:
        """Entries written since the last call."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        # A line without a newline is still being written, or its writer was killed.
        complete = new[: new.rfind(b"\n") + 1]
        self._offset += len(complete)
        events: list[LedgerEvent] = []
        for line in complete.decode().splitlines():
            self._lines += 1
            event = parse_line(line, self._node, where=f"{self._path}:{self._lines}")
            if isinstance(event, Start):
                self._node = event.node
            events.append(event)
        return events


def parse_line(line: str, node: str, *, where: str) -> LedgerEvent:
    """Parse a line of a process on ``node`` (from its last start). Raises LedgerError."""
    try:
        return _event(json.loads(line), node)
    except (ValueError, KeyError, TypeError) as error:
        raise LedgerError(f"{where}: not a ledger line ({error!r}): {line!r}") from None


def _event(data: dict[str, Any], node: str) -> LedgerEvent:
    kind = data["event"]
    if kind == "start":
        return Start(
            generation=int(data["generation"]),
            step=int(data["step"]),
            rank=int(data["rank"]),
            size=int(data["size"]),
            node=str(data["node"]),
            time_s=float(data["time"]),
        )
    if kind in ("begin", "step"):
        return (LedgerStep if kind == "step" else Begin)(
            generation=int(data["generation"]),
            step=int(data["step"]),
            epoch=int(data["epoch"]),
            rank=int(data["rank"]),
            node=node,
            samples=tuple(int(i) for i in data["samples"]),
            time_s=float(data["time"]),
        )
    if kind == "end":
        return LedgerEnd(
            generation=int(data["generation"]),
            rank=int(data["rank"]),
            sha256=str(data["sha256"]),
            time_s=float(data["time"]),
            position=int(data.get("position", 0)),
        )
    raise ValueError(f"unknown event {kind!r}")


def _some(items: Sequence[int], show: int = 5) -> str:
    """``3`` or ``12 (0, 1, 2, 3, 4, …)``."""
    if not items:
        return "0"
    more = ", …" if len(items) > show else ""
    return f"{len(items)} ({', '.join(map(str, items[:show]))}{more})"
