"""The steps of a run, by world, and the steps that a later world repeated."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elastic.telemetry.activities import Activity
from elastic.telemetry.journal_reader import JournalRecord, Window
from elastic.telemetry.straggling import WANTED, Straggling, stragglings

_LAST_WINDOWS = 1000


@dataclass(frozen=True)
class StepHistory:
    """The combined windows of all ranks."""

    usual_s: Mapping[int, float]  # by generation: productive time of a step, without the first
    windows: Mapping[int, Sequence[Window]]  # by generation: the last ones of all ranks
    cuts: Mapping[int, int]  # by generation: the step after which a later world repeated its steps
    newest: int  # generation with steps; 0: none
    first_step: int
    last_step: int
    recomputed_steps: int
    stragglers: Mapping[int, Sequence[Straggling]]  # by generation

    def shares_of(self, generation: int) -> dict[Activity, float]:
        """The activities of its windows as fractions of 1; empty without windows."""
        sums: dict[Activity, float] = defaultdict(float)
        for window in self.windows.get(generation, ()):
            discarded = discarded_part(window, self.cuts.get(generation))
            for activity, took_s in parts_of(window, discarded).items():
                sums[activity] += took_s
        whole_s = sum(sums.values())
        return {a: took_s / whole_s for a, took_s in sums.items()} if whole_s > 0 else {}

    def usual_of(self, generation: int) -> float | None:
        """Median step time of the generation, or of the nearest generation with data."""
        known = self.usual_s.get(generation)
        if known is not None or not self.usual_s:
            return known
        return self.usual_s[min(self.usual_s, key=lambda g: abs(g - generation))]


class _WorldSteps:
    """Sums over one world."""

    __slots__ = ("begin", "end", "is_stepping", "productive_s", "steps", "windows")

    def __init__(self, begin: int) -> None:
        self.begin = begin
        self.end: int | None = None
        self.is_stepping = False
        self.steps, self.productive_s = 0, 0.0
        self.windows: deque[Window] = deque(maxlen=_LAST_WINDOWS)

    def add(self, window: Window, step: int, made: int) -> None:
        """Add a window of ``made`` steps that ends with ``step``."""
        if self.end is None or step > self.end:
            self.end = step
        if made <= 0:
            return
        self.is_stepping = True
        if window.ended != "first-step":
            self.windows.append(window)
            self.productive_s += window.productive_s
            self.steps += made


def step_history(records: Iterable[JournalRecord]) -> StepHistory:
    """The history from the windows of all ranks of a run. Fast for a million of them."""
    worlds: dict[int, _WorldSteps] = {}
    verdicts: list[JournalRecord] = []
    for record in records:
        if record.name == "rank-times":
            window = record.window
            generation, step = window.generation, window.step
            if generation is not None and step is not None:
                made = window.steps or 0
                world = _begun(worlds, generation, step - made if made > 0 else step)
                world.add(window, step, made)
        elif record.name == "world-joined":
            generation, step = record.whole("generation"), record.whole("step")
            if generation is not None and step is not None:
                _begun(worlds, generation, step)
        elif record.name in WANTED:
            verdicts.append(record)
    return _history(worlds, stragglings(verdicts))


def _begun(worlds: dict[int, _WorldSteps], generation: int, step: int) -> _WorldSteps:
    """The world of the generation; it began with ``step`` or earlier."""
    world = worlds.get(generation)
    if world is None:
        world = worlds[generation] = _WorldSteps(step)
    elif step < world.begin:
        world.begin = step
    return world


def _history(
    worlds: Mapping[int, _WorldSteps], stragglers: Mapping[int, Sequence[Straggling]]
) -> StepHistory:
    cuts = _cuts({g: world.begin for g, world in worlds.items()})
    ends = {g: world.end for g, world in worlds.items() if world.end is not None}
    return StepHistory(
        usual_s={g: w.productive_s / w.steps for g, w in worlds.items() if w.steps},
        windows={g: tuple(w.windows) for g, w in worlds.items() if w.steps},
        cuts=cuts,
        newest=max((g for g, world in worlds.items() if world.is_stepping), default=0),
        first_step=min((world.begin for world in worlds.values()), default=0),
        last_step=max(ends.values(), default=0),
        recomputed_steps=sum(max(0, ends[g] - cuts[g]) for g in ends if g in cuts),
        stragglers=stragglers,
    )


def parts_of(window: Window, discarded: float, straggling_s: float = 0.0) -> dict[Activity, float]:
    """Seconds by activity, without the step that had not ended. ``straggling_s`` is a part of the
    productive time."""
    parts = {
        Activity.DATA: max(0.0, window.data_s),
        Activity.CHECKPOINT: max(0.0, window.checkpoint_s),
        Activity.EVALUATION: max(0.0, window.evaluation_s),
    }
    productive_s = max(0.0, window.productive_s)
    parts[Activity.RECOMPUTED] = productive_s * discarded
    parts[Activity.STRAGGLING] = straggling_s * (1 - discarded)
    parts[Activity.PRODUCTIVE] = (productive_s - straggling_s) * (1 - discarded)
    return parts


def discarded_part(window: Window, cut: int | None) -> float:
    """The fraction of the window's steps that a later generation, from step ``cut`` on,
    repeated."""
    steps = window.steps or 0
    if cut is None or steps <= 0:
        return 0.0
    last = window.step or 0
    return min(1.0, max(0, last - max(cut, last - steps)) / steps)


def _cuts(begins: Mapping[int, int]) -> dict[int, int]:
    cuts: dict[int, int] = {}
    lowest: int | None = None
    for generation in sorted(begins, reverse=True):
        if lowest is not None:
            cuts[generation] = lowest
        lowest = begins[generation] if lowest is None else min(lowest, begins[generation])
    return cuts
