"""The hang report: all facts at the moment of a verdict, as text for users and as JSON.

The text of a rank's last hang replaces the previous one, so that its path can be part of an error
that is compared with the next one; the JSON files of the last ones are kept.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic.errors import ConfigError
from elastic.hangs import flight, stacks
from elastic.hangs.facts import MAX_SHOWN_RANKS, Phase, RankFacts, StackGroup
from elastic.hangs.flight import MAX_ENTRIES, FlightEntry
from elastic.hangs.verdict import Judgment

# Stacks in a report, and in what all nodes of a world send for it.
MAX_CHARACTERS = 512 << 10
_MIN_PER_NODE, _MAX_PER_NODE = 4 << 10, 48 << 10
_MAX_FLIGHT_ENTRIES, _MIN_PER_RANK = 2048, 4

_KEPT_REPORTS = 50  # of each rank, as JSON
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")


@dataclass(frozen=True, kw_only=True)
class HangReport:
    """All facts about one verdict. Processes and stacks are the acting node's; other nodes send
    their stacks later."""

    verdict: Judgment
    generation: int
    size: int  # of the world
    time: str  # UTC
    ranks: tuple[RankFacts, ...]  # the ranks that make no progress
    stacks: tuple[StackGroup, ...]  # of all ranks, outliers first
    flights: Mapping[int, tuple[FlightEntry, ...]]  # collectives begun, by rank
    data_workers: Mapping[int, Mapping[int, str]]  # stacks by pid, by the rank they belong to
    native_stacks: tuple[StackGroup, ...]
    processes: Mapping[int, Mapping[str, str]]
    node: Mapping[str, str]
    done: str

    def where(self, rank: int) -> tuple[str, str]:
        """The position of a rank in the script: :func:`elastic.hangs.stacks.script_frame`."""
        texts = (one.text for one in self.stacks if rank in one.ranks)
        return stacks.script_frame(next(texts, ""))


@dataclass(frozen=True)
class Share:
    """The limits of what one node sends for another node's report."""

    characters: int  # of stacks
    flight_entries: int  # of each rank

    @classmethod
    def of(cls, nodes: int, ranks: int) -> Share:
        """The share of a node: the total of all nodes is bounded, and each may send at least the
        main threads of two groups and the last collectives.

        >>> Share.of(2, 2), Share.of(64, 512)
        (Share(characters=49152, flight_entries=32), Share(characters=8192, flight_entries=4))
        """
        characters = MAX_CHARACTERS // max(nodes, 1)
        entries = _MAX_FLIGHT_ENTRIES // max(ranks, 1)
        return cls(
            min(max(characters, _MIN_PER_NODE), _MAX_PER_NODE),
            min(max(entries, _MIN_PER_RANK), MAX_ENTRIES),
        )


class ReportFolder:
    """The folder for reports: the configured one, else a new one of this user."""

    def __init__(self, folder: str | None) -> None:
        self._folder = folder

    def write_page(self, name: str, text: str) -> tuple[str, str]:
        """Write another page than a hang report; returns its path, and an error or ""."""
        path = Path(self.folder) / f"{_UNSAFE.sub('_', name)}.txt"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n", encoding="utf-8", errors="replace")
        except OSError as error:
            return "", f"{path} cannot be written: {error}"
        return str(path), ""

    @property
    def folder(self) -> str:
        """Created when it is first needed."""
        if self._folder is None:
            self._folder = tempfile.mkdtemp(prefix="elastic-reports-")
        return self._folder

    def path(self, node: str, rank: int | None) -> Path:
        """The path of the text file."""
        what = "world" if rank is None else f"rank{rank}"
        return Path(self.folder) / f"hang-{_UNSAFE.sub('_', node)}-{what}.txt"

    def write(self, path: Path, report: HangReport) -> str:
        """Write both files; returns an error or ""."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _replace(path, render(report))
            name = f"{path.stem}-generation{report.generation}.json"
            _replace(path.with_name(name), as_json(report))
            _remove_oldest(path.parent.glob(f"{path.stem}-generation*.json"))
        except OSError as error:
            return f"{path} cannot be written: {error}"
        return ""


def _replace(path: Path, text: str) -> None:
    """Concurrent readers find a complete report: it is rewritten as stacks arrive."""
    staged = path.with_name(f".{path.name}.new")
    staged.write_text(text, encoding="utf-8", errors="replace")
    staged.replace(path)


def _remove_oldest(paths: Iterable[Path]) -> None:
    """Keep the newest: a job that hangs every hour for months fills no disk."""
    by_age = sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)
    for path in by_age[_KEPT_REPORTS:]:
        path.unlink(missing_ok=True)


def check_folder(folder: str | None) -> None:
    """Raise ConfigError unless reports can be written there."""
    if folder is None:
        return
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"hang_report_folder={folder} cannot be written to: {error}",
            hint="set it with --rdzv-conf=hang_report_folder=... or ELASTIC_HANG_REPORT_FOLDER to "
            "a folder that this user may write to, or omit it",
        ) from None


def as_json(report: HangReport) -> str:
    """The report as JSON. ``where``: by culprit, if its stack is known."""
    where = {rank: found for rank in report.verdict.culprits if (found := report.where(rank)[0])}
    return json.dumps({**dataclasses.asdict(report), "where": where}, indent=1, default=str)


def render(report: HangReport) -> str:
    """The report as text."""
    verdict = report.verdict
    parts = [
        f"Hang: {verdict.reason}",
        "",
        f"kind         {verdict.kind.value} (confidence: {verdict.confidence.value})",
        f"time         {report.time}, in generation {report.generation}{_of_size(report)}",
        f"action       {verdict.action.value}: {report.done}",
        *_culprits(report),
        *_checkpoint(report),
        "",
        *_table(report),
        *_flights(report),
        *_stacks(report),
    ]
    for rank, facts in report.processes.items():
        parts += [f"Process of rank {rank}", *_pairs(facts), ""]
    parts += ["Node", *_pairs(report.node), ""]
    return "\n".join(parts)


def _culprits(report: HangReport) -> list[str]:
    by_rank = {r.rank: r for r in report.ranks}
    lines = []
    for rank in report.verdict.culprits:
        if (r := by_rank.get(rank)) is None:
            continue
        lines.append(
            f"culprit      {r.name} (local rank {r.local_rank}, pid {r.pid}): {r.phase.label}, "
            f"step {r.step}, {r.quiet_s:.1f} s without a sign of progress"
        )
        if where := report.where(rank)[0]:
            lines.append(f"at           {where}")
    return lines


def _of_size(report: HangReport) -> str:
    """A node that ends a stopped worker without the leader does not know the world's size."""
    return f" of {report.size} ranks" if report.size else ""


def _checkpoint(report: HangReport) -> list[str]:
    step = max((r.checkpoint_step for r in report.ranks), default=-1)
    text = f"of step {step}, the latest known to these ranks" if step >= 0 else "none known yet"
    return [f"checkpoint   {text}"]


def _table(report: HangReport) -> list[str]:
    head = ("rank", "node", "pid", "gen", "step", "phase", "quiet s", "collective", "kernel")
    rows = [head, *(_row(r) for r in sorted(report.ranks, key=lambda r: r.rank))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    known = {r.rank for r in report.ranks}
    missing = [rank for rank in range(report.size) if rank not in known]
    if missing:
        why = "making progress, or unknown"
        if len(known) >= MAX_SHOWN_RANKS:
            why = f"not shown, or {why}"
        lines.append(f"{why}: {_named(missing)}")
    return ["Ranks that make no progress", *(line.rstrip() for line in lines), ""]


def _row(r: RankFacts) -> tuple[str, ...]:
    kernel = r.kernel
    facts = (
        kernel.state,
        kernel.wait_channel,
        kernel.file_system,
        f"{100 * kernel.cpu_share:.0f}% CPU",
    )
    workers = f"data workers {kernel.data_workers}" if kernel.data_workers else ""
    where = f" (called in {r.outer.label})" if r.phase is Phase.COLLECTIVE else ""
    return (
        str(r.rank),
        r.node,
        str(r.pid),
        str(r.generation),
        str(r.step),
        r.phase.label + where,
        f"{r.quiet_s:.1f}",
        f"{r.operation} {r.collective}",
        " ".join(part for part in (*facts, workers) if part),
    )


def _flights(report: HangReport) -> list[str]:
    lines = flight.describe(report.flights)
    return ["Collectives from torch's flight recorder", *lines, ""] if lines else []


def _stacks(report: HangReport) -> list[str]:
    lines = []
    for title, taken in (("Stacks", report.stacks), ("Native stacks", report.native_stacks)):
        if not any(one.text for one in taken):
            continue
        lines += [f"{title}, culprits and outliers first", ""]
        for one in taken:
            shown = stacks.main_first(one.text) or "none: it is stopped, or blocked in the kernel"
            lines += [f"{_named(one.ranks)}:", shown, ""]
    for rank, children in report.data_workers.items():
        for pid, text in children.items():
            lines += [f"data worker {pid} of rank {rank}:", stacks.main_first(text), ""]
    return lines


def _named(ranks: Sequence[int]) -> str:
    """The ranks as text; consecutive ones become ranges.

    >>> _named((3,)), _named((0, 1, 2, 5, 6))
    ('rank 3', 'ranks 0-2, 5, 6')
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    count = f" ({len(ranks)} ranks)" if len(ranks) > 8 else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(texts)}{count}"


def _pairs(facts: Mapping[str, str]) -> Sequence[str]:
    width = max(map(len, facts), default=0)
    return [f"  {name.ljust(width)}  {value}" for name, value in facts.items()]
