"""What follows from a hang: the report, and the end of the workers."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import logging
import os
import queue
import re
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from elastic.errors import SYSTEM_CLOCK, Clock
from elastic.hangs import kernel, stacks
from elastic.hangs.page import MAX_SHOWN_RANKS, Phase, RankFacts, StackGroup
from elastic.hangs.verdict import MAX_ENTRIES, FlightEntry, HangAction, Judgment, judge_stopped
from elastic.hangs.verdict import describe as describe_flights
from elastic.hangs.watch import HangWatch, WatchedWorker
from elastic.telemetry.events import HangFound, HangOver
from elastic.telemetry.files import replacing
from elastic.telemetry.journal import EventSink
from elastic.telemetry.log import get_logger

# To write a report, or to query the free space of a disk. The worker may hang because of that file
# system, so the agent waits no longer.
HANG_REPORT_WRITTEN_S = 5.0

# ----------------------------------------------------------------------------
# The hang report: all facts at the moment of a verdict, as text for users and as JSON.
#
# The text of a rank's last hang replaces the previous one, so that its path can be part of an
# error that is compared with the next one; the JSON files of the last ones are kept.

# Stacks in a report, and in what all nodes of a world send for it.
MAX_CHARACTERS = 512 << 10
_MIN_PER_NODE, _MAX_PER_NODE = 4 << 10, 48 << 10
_MAX_FLIGHT_ENTRIES, _MIN_PER_RANK = 2048, 4

_KEPT_REPORTS = 50  # of each rank, as JSON
_TEMPORARY, _KEPT_FOLDERS = "elastic-reports-", 50  # of agents without a folder for reports
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
            self._folder = tempfile.mkdtemp(prefix=_TEMPORARY)
            _remove_oldest_folders(Path(self._folder).parent)
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
    with replacing(path) as new:
        new.write_text(text, encoding="utf-8", errors="replace")


def _remove_oldest(paths: Iterable[Path]) -> None:
    """Keep the newest: a job that hangs every hour for months fills no disk."""
    by_age = sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)
    for path in by_age[_KEPT_REPORTS:]:
        path.unlink(missing_ok=True)


def _remove_oldest_folders(base: Path) -> None:
    """Keep the newest of this user: an agent that fails once has one, and may start any number of
    times."""
    lines = []
    for path in base.glob(f"{_TEMPORARY}*"):
        with contextlib.suppress(FileNotFoundError):  # another agent has removed it
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                lines.append((status.st_mtime, path))
    for _, path in sorted(lines, reverse=True)[_KEPT_FOLDERS:]:
        shutil.rmtree(path, ignore_errors=True)


def as_json(report: HangReport) -> str:
    """The report as JSON. ``where``: by culprit, if its stack is known."""
    where = {rank: lines for rank in report.verdict.culprits if (lines := report.where(rank)[0])}
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
        lines.append(f"{why}: {_named_report(missing)}")
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
    lines = describe_flights(report.flights)
    return ["Collectives from torch's flight recorder", *lines, ""] if lines else []


def _stacks(report: HangReport) -> list[str]:
    lines = []
    for title, taken in (("Stacks", report.stacks), ("Native stacks", report.native_stacks)):
        if not any(one.text for one in taken):
            continue
        lines += [f"{title}, culprits and outliers first", ""]
        for one in taken:
            shown = stacks.main_first(one.text) or "none: it is stopped, or blocked in the kernel"
            lines += [f"{_named_report(one.ranks)}:", shown, ""]
    for rank, children in report.data_workers.items():
        for pid, text in children.items():
            lines += [f"data worker {pid} of rank {rank}:", stacks.main_first(text), ""]
    return lines


def _named_report(ranks: Sequence[int]) -> str:
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


# ----------------------------------------------------------------------------
# An agent's response to a verdict on one of its workers: take stacks, end it, report.
#
# Runs on the thread of :class:`elastic.hangs.watch.HangWatch`: neither a slow disk nor a worker
# that writes no stacks delays the node's own thread.

T = TypeVar("T")

_HANDLED = 100  # verdicts: an old one is only received again if the watch starts over
_MAX_STACKS = 4  # number of data workers whose stacks are taken
_SILENT = f"the file system did not answer within {HANG_REPORT_WRITTEN_S:g} s"


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A verdict, and the facts from which it was judged."""

    verdict: Judgment
    generation: int
    size: int
    ranks: tuple[RankFacts, ...]


class HangResponse:
    """One per agent. ``before_kill`` is called with the pid and the reason before a process ends;
    ``abort`` makes the same nodes form another world."""

    def __init__(
        self,
        *,
        node: str,
        acts: bool,
        stop_grace_s: float,
        folder: ReportFolder,
        journal: EventSink,
        before_kill: Callable[[int, str], object],
        abort: Callable[[int, str], object],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._node = node
        self._acts = acts
        self._stop_grace_s = stop_grace_s
        self._folder = folder
        self._journal = journal
        self._before_kill = before_kill
        self._abort = abort
        self._clock = clock
        self._handled: dict[tuple[object, ...], None] = {}  # the last ones, oldest first
        self._last: tuple[Path, HangReport] | None = None
        self._has_more = False  # other nodes' stacks are to be written into it

    def on_stopped(
        self, watch: HangWatch, worker: WatchedWorker, facts: RankFacts, stopped_s: float
    ) -> None:
        """Handle a worker in state T or t, for which no other facts are needed."""
        verdict = judge_stopped(facts, stopped_s, self._stop_grace_s)
        if verdict.action is HangAction.WAIT:
            return
        judged = Judged(verdict=verdict, generation=facts.generation, size=0, ranks=(facts,))
        self.carry_out(watch, judged)

    def carry_out(self, watch: HangWatch, judged: Judged) -> None:
        """Execute a verdict once, however often it is received."""
        verdict = judged.verdict
        culprit = verdict.culprit
        key: tuple[object, ...] = (judged.generation, verdict.kind, culprit and culprit.pid)
        if verdict.action is not HangAction.LEAVE_ALONE:  # logged once
            key += (culprit and culprit.progress,)
        if key in self._handled:
            return
        self._handled[key] = None
        if len(self._handled) > _HANDLED:
            del self._handled[next(iter(self._handled))]
        worker = watch.worker(culprit.pid) if culprit is not None else None
        if verdict.action is HangAction.KILL:
            if worker is None or culprit is None:
                return  # it has ended in the meantime
            self._end(watch, judged, worker, culprit)
        elif verdict.action is HangAction.ABORT_AND_REFORM:
            self._reform(watch, judged)
        elif worker is not None:
            self._emit(judged, "")

    def _reform(self, watch: HangWatch, judged: Judged) -> None:
        path = self._folder.path(self._node, None)
        report = self._observe(watch, judged)
        if self._acts:
            self._abort(judged.generation, f"{judged.verdict.reason}; report: {path}")
            report = replace(report, done="the same ranks form another world")
        self._write(path, judged, report)

    def _end(
        self, watch: HangWatch, judged: Judged, worker: WatchedWorker, culprit: RankFacts
    ) -> None:
        path = self._folder.path(self._node, culprit.rank)
        report = self._observe(watch, judged)
        if not worker.is_as_judged(culprit):  # also while its stacks were taken
            reason = "it showed a sign of progress before it was ended"
            self._journal.emit(HangOver(hung_rank=culprit.rank, reason=reason))
            return
        if self._acts:
            reason = f"{_named_response(judged, report)}; report: {path}"
            self._before_kill(worker.pid, reason)
            at_s, error_file = self._clock.wall(), worker.error_file
            _in_time(
                lambda: _write_error_file(error_file, reason, at_s),
                lambda why: get_logger().warning("%s: %s", error_file, why),
            )
            worker.kill()
            done = f"pid {worker.pid} was killed with SIGKILL; the others recover as from a death"
            report = replace(report, done=done)
        self._write(path, judged, report)

    def _observe(self, watch: HangWatch, judged: Judged) -> HangReport:
        """Take the facts that are lost once the verdict is executed. The rest can follow: the job
        waits."""
        workers = {watch.facts(w).rank: w for w in watch.workers}
        to_end = judged.verdict.culprits if judged.verdict.action is HangAction.KILL else ()
        return HangReport(
            verdict=judged.verdict,
            generation=judged.generation,
            size=judged.size,
            time=_utc(self._clock.wall()),
            ranks=judged.ranks,
            stacks=_grouped(
                (
                    (rank, stacks.take(w.pid, w.stacks, is_culprit=rank in to_end))
                    for rank, w in workers.items()
                ),
                judged.verdict.culprits,
            ),
            flights=watch.flights_of(
                judged.generation,
                lambda rank, flight: self.add_stacks(watch, judged.generation, (), {rank: flight}),
            ),
            data_workers=_data_workers(watch, judged),
            native_stacks=_grouped(
                ((r, stacks.take_native(w.pid)) for r, w in workers.items()),
                judged.verdict.culprits,
            ),
            processes={rank: kernel.describe_process(w.pid) for rank, w in workers.items()},
            node={},
            done="none (hang_detection=report)",
        )

    def _write(self, path: Path, judged: Judged, report: HangReport) -> None:
        space = _in_time(
            lambda: kernel.free_disk_space([os.getcwd(), self._folder.folder]),
            lambda why: {"disk": why},
        )
        node = {**kernel.describe_node(), **space}
        report = replace(report, node=node)
        self._last = path, report
        failure = self._write_in_time(path, report)
        if failure:
            get_logger().warning("no hang report: %s", failure)
        culprits = judged.verdict.culprits
        self._emit(
            judged,
            "" if failure else str(path),
            where=report.where(culprits[0])[0] if culprits else "",
        )

    def _write_in_time(self, path: Path, report: HangReport) -> str:
        """Write the report; returns an error or ""."""
        return _in_time(lambda: self._folder.write(path, report), lambda why: f"{path}: {why}")

    def add_stacks(
        self,
        watch: HangWatch,
        generation: int,
        taken: Sequence[StackGroup],
        flights: Mapping[int, tuple[FlightEntry, ...]],
    ) -> None:
        """Add the stacks of another node's ranks, and collectives that arrived late, to the last
        report, which is rewritten once for all that have arrived."""
        if self._last is None or self._last[1].generation != generation:
            return
        path, report = self._last
        report = replace(
            report,
            stacks=stacks.within(
                stacks.merge([*report.stacks, *taken], report.verdict.culprits), MAX_CHARACTERS
            ),
            flights={**flights, **report.flights},
        )
        self._last = path, report
        if not self._has_more:
            self._has_more = True
            watch.post(self._write_again)

    def _write_again(self) -> None:
        self._has_more = False
        if self._last is not None:
            self._write_in_time(*self._last)

    def _emit(self, judged: Judged, path: str, where: str = "") -> None:
        verdict = judged.verdict
        self._journal.emit(
            HangFound(
                generation=judged.generation,
                action=verdict.action.value if self._acts else "report",
                kind=verdict.kind.value,
                ranks=verdict.culprits,
                confidence=verdict.confidence.value,
                reason=verdict.reason,
                where=where,
                report=path,
            ),
            level=logging.WARNING,
        )


def _in_time(act: Callable[[], T], otherwise: Callable[[str], T]) -> T:
    """The result of ``act``, or of ``otherwise(reason)`` if it failed unexpectedly or the file
    system does not respond; then its thread is abandoned."""
    done: queue.SimpleQueue[T | Exception] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put(act())
        except Exception as error:  # noqa: BLE001 (reported)
            done.put(error)

    threading.Thread(target=run, name="elastic-hang-report", daemon=True).start()
    try:
        result = done.get(timeout=HANG_REPORT_WRITTEN_S)
    except queue.Empty:
        return otherwise(_SILENT)
    if isinstance(result, Exception):
        get_logger().error("a part of a hang report failed", exc_info=result)
        return otherwise(f"failed unexpectedly: {type(result).__name__}: {result}")
    return result


def _utc(wall_s: float) -> str:
    return datetime.datetime.fromtimestamp(wall_s, datetime.timezone.utc).isoformat("T", "seconds")


def _data_workers(watch: HangWatch, judged: Judged) -> dict[int, dict[int, str]]:
    """Stacks of the culprit's forked children, which inherited its handler and its file."""
    culprit = judged.verdict.culprit
    worker = watch.worker(culprit.pid) if culprit is not None else None
    if worker is None or culprit is None:
        return {}
    taken = {
        pid: stacks.take(pid, worker.stacks) for pid in kernel.children(worker.pid)[:_MAX_STACKS]
    }
    return {culprit.rank: {pid: text for pid, text in taken.items() if text}}


def _grouped(by_rank: Iterable[tuple[int, str]], culprits: Sequence[int]) -> tuple[StackGroup, ...]:
    return stacks.within(stacks.group(by_rank, culprits), MAX_CHARACTERS)


def _named_response(judged: Judged, report: HangReport) -> str:
    """The reason, with the function of the script in which a sleeping culprit waits. (The position
    of running code varies, but the same hang must have the same reason.)"""
    culprit = judged.verdict.culprit
    place = report.where(culprit.rank)[1] if culprit is not None and culprit.is_asleep else ""
    return f"{judged.verdict.reason}; it is in {place}" if place else judged.verdict.reason


def _write_error_file(path: str, reason: str, wall_s: float) -> None:
    """The file in which torchrun looks for the error of its workers (torch 2.13,
    elastic/multiprocessing/errors/error_handler.py): otherwise it only has the signal."""
    if not path:
        return
    message = {"message": reason, "extraInfo": {"py_callstack": "", "timestamp": str(int(wall_s))}}
    try:
        with open(path, "x", encoding="utf-8") as file:
            json.dump({"message": message}, file)
    except OSError as error:
        get_logger().warning("%s cannot be written: %s", path, error)
