"""An agent's response to a verdict on one of its workers: take stacks, end it, report.

Runs on the thread of :class:`elastic.hangs.watch.HangWatch`: neither a slow disk nor a worker that
writes no stacks delays the node's own thread.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.events import HangFound, HangOver
from elastic.hangs import kernel, stacks
from elastic.hangs.facts import RankFacts, StackGroup
from elastic.hangs.flight import FlightEntry
from elastic.hangs.report import MAX_CHARACTERS, HangReport, ReportFolder
from elastic.hangs.verdict import HangAction, Judgment, judge_stopped
from elastic.hangs.watch import HangWatch, WatchedWorker
from elastic.telemetry.journal import EventSink
from elastic.telemetry.log import get_logger
from elastic.tuning.agent_intervals import HANG_REPORT_WRITTEN_S

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
            reason = f"{_named(judged, report)}; report: {path}"
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


def _named(judged: Judged, report: HangReport) -> str:
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
