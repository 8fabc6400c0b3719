"""The time that ranks of a world wait for its stragglers, by the leader's verdicts. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elastic.telemetry.activities import Activity
from elastic.telemetry.journal_reader import JournalRecord, Window

WANTED = frozenset({"straggler-found", "straggler-recovered"})


@dataclass(frozen=True, slots=True)
class Straggling:
    """One straggler, from its verdict until it has recovered or its world is over."""

    rank: int
    start_s: float
    end_s: float
    lag_s: float  # how long the others wait in each step
    is_data_wait: bool  # the straggler's own time is counted as data wait

    def holds_up(self, window: Window, end_s: float) -> float:
        """By how many seconds it delayed a window that ended at ``end_s``."""
        if self.is_data_wait and window.rank == self.rank:
            return 0.0
        start_s = end_s - window.duration_s
        both_s = min(end_s, self.end_s) - max(start_s, self.start_s)
        if both_s <= 0:
            return 0.0
        return self.lag_s * (window.steps or 0) * both_s / window.duration_s


def held_up_s(stragglers: Iterable[Straggling], window: Window, end_s: float) -> float:
    """Productive time of a window that was spent waiting for the slowest straggler."""
    longest_s = max((straggler.holds_up(window, end_s) for straggler in stragglers), default=0.0)
    return max(0.0, min(longest_s, window.productive_s))


def stragglings(verdicts: Iterable[JournalRecord]) -> Mapping[int, Sequence[Straggling]]:
    """Stragglers by generation, from the verdicts of all leaders of a run."""
    found: dict[int, list[Straggling]] = defaultdict(list)
    since: dict[tuple[int, int], JournalRecord] = {}
    for record in sorted(verdicts, key=lambda record: record.at_s):
        generation, rank = record.whole("generation"), record.whole("rank")
        if generation is None or rank is None:
            continue
        if record.name == "straggler-found":
            since.setdefault((generation, rank), record)
        elif (verdict := since.pop((generation, rank), None)) is not None:
            found[generation].append(_straggling(rank, verdict, record.at_s))
    for (generation, rank), verdict in since.items():
        found[generation].append(_straggling(rank, verdict, float("inf")))
    return found


def _straggling(rank: int, verdict: JournalRecord, end_s: float) -> Straggling:
    return Straggling(
        rank=rank,
        start_s=verdict.at_s,
        end_s=end_s,
        lag_s=max(0.0, verdict.number("lag_s")),
        is_data_wait=verdict.text("cause") == Activity.DATA.value,
    )
