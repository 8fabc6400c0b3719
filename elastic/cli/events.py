"""``elastic events``: the merged journals of a run in order of time, and changes seen in etcd.

Clock differences are corrected; files that could not be read are named on stderr.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from elastic.cli.arguments import (
    CommandParser,
    add_job_arguments,
    add_output,
    local_run,
    nearest,
    run_id_of,
    unknown_run,
)
from elastic.cli.last_known import EtcdChanges
from elastic.cli.view import age, job_store, keys_of, read_job
from elastic.errors import SYSTEM_CLOCK, Clock, ConfigError, StoreUnreachable
from elastic.membership.failures import is_consequence
from elastic.telemetry.events import Event
from elastic.telemetry.journal import kebab_name
from elastic.telemetry.log import printable, timestamp, wrapped
from elastic.telemetry.reader import UNNAMED_RUNS, JournalFolder, JournalRecord, merge
from elastic.telemetry.runs import chosen_journal, is_default, is_known, local_runs
from elastic.tracebacks import for_a_line, innermost_place, shorten

RUN_OR_FOLDER = (
    "run id, or a folder of journals (default: ELASTIC_JOURNAL, or the only job of this machine)"
)
# Polling interval of `elastic events --follow`.
FOLLOW_S = 0.3

# Fields that begin each line, or that are not useful to people.
_ENVELOPE = frozenset({"event", "seq", "time", "monotonic", "writer", "node", "node_id"})
_MAX_RUNS = 5  # in an error
# Most events of a run: every rank reports its times every few seconds.
_FREQUENT = ("rank-times",)
_OF_RANKS = ("world-fault", "collective-failed")  # events that all ranks of a world may have
_PLACE = (("rank", "r"), ("generation", "g"), ("step", "s"))


def main(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run ``elastic events ARGV``; returns the exit code."""
    args = parser(environ).parse_args(list(argv))
    source = find_journals(args, environ)
    if source is None and args.rdzv_endpoint is None:
        args.rdzv_endpoint = environ.get("PET_RDZV_ENDPOINT")
    if source is None and not args.rdzv_endpoint:
        raise no_journals(args)
    since_s = time_of(args.since, SYSTEM_CLOCK.wall()) if args.since else None
    _require_known(args.event or ())
    try:
        with _changes_in_etcd(args, is_needed=source is None) as changes:
            _print_all(source, changes, args, since_s, SYSTEM_CLOCK)
    except BrokenPipeError:  # the reader, such as `head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def parser(environ: Mapping[str, str] = os.environ) -> argparse.ArgumentParser:
    """The command line of ``elastic events``."""
    own = CommandParser(
        prog="elastic events",
        description="Print the events of a run: the journals of all its processes, merged in order "
        "of time. The fields of each event: docs/reference/events.md. With --rdzv-endpoint, also "
        "changes that etcd shows and no journal records: worlds, nodes, the job's end.",
        epilog="PET_RDZV_ENDPOINT is used only if no journals are known. exit codes: 0 success, 2 "
        "usage, or no such run, 69 etcd denies access, or is unreachable and no journals are known",
    )
    add_job_arguments(
        own,
        {k: v for k, v in environ.items() if k != "PET_RDZV_ENDPOINT"},
        run_help=RUN_OR_FOLDER,
    )
    own.add_argument(
        "-f", "--follow", action="store_true", help="print new events as they are written"
    )
    own.add_argument(
        "--since",
        metavar="TIME",
        help="only later events: an age such as 90s, 10m, 2h, 1d, or a time in UTC such as "
        "2026-01-31T12:00",
    )
    own.add_argument("--node", metavar="NAME", help="only events of this node")
    own.add_argument(
        "--event",
        metavar="NAME",
        action="append",
        help="only events of this kind; may be repeated (default: all; as text, no rank-times)",
    )
    add_output(
        own,
        "text",
        "json",
        text="json: one object per line, with the corrected time in `at` (default: %(default)s)",
    )
    return own


def _require_known(names: Iterable[str]) -> None:
    """Raise ConfigError for a kind of event that does not exist."""
    known = sorted(
        kebab_name(k) for k in Event.__subclasses__() if k.__module__ == Event.__module__
    )
    for name in names:
        if name not in known:
            raise ConfigError(
                f"--event={printable(name, 80)}: there is no such event{nearest(name, known)}",
                hint=f"the events are {', '.join(known)}",
            )


def find_journals(
    args: argparse.Namespace, environ: Mapping[str, str] = os.environ
) -> JournalSource | None:
    """The journals that RUN, ELASTIC_JOURNAL or this machine's only job means; None: none is known.
    Raises ConfigError for a folder that does not exist."""
    given, chosen = args.run, chosen_journal(environ)
    # A run is often called like its checkpoint folder, in which it is started.
    if given and (os.sep in given or (Path(given).is_dir() and not is_known(given))):
        args.run = None  # the run's id, if any, is that of --rdzv-id
        return JournalSource(existing_folder(given), args.rdzv_id)
    args.rdzv_id = given or args.rdzv_id
    if args.rdzv_id is None and chosen is not None:
        return JournalSource(existing_folder(chosen), None)
    run = local_run(args, or_last=True)
    if run is not None and Path(run.journal).is_dir() and run.journal:
        args.rdzv_id = run.run_id
        return JournalSource(Path(run.journal), run.run_id)
    return JournalSource(existing_folder(chosen), args.rdzv_id) if chosen is not None else None


@dataclass(frozen=True)
class JournalSource:
    """A folder of journals, and the run in it; None: all of them, or the last."""

    folder: Path
    run_id: str | None

    def current(self) -> Path:
        """Where the run's journals are now: they move once its checkpoint folder is known."""
        known = (run for run in local_runs() if run.run_id == self.run_id and run.journal)
        run = next(known, None)
        was_default = is_default(str(self.folder))
        return Path(run.journal) if run is not None and was_default else self.folder


def no_journals(args: argparse.Namespace) -> ConfigError:
    """The error of a command that finds no journals."""
    runs = local_runs()
    if args.rdzv_id is not None:
        return unknown_run(args.rdzv_id, runs)
    if runs:
        run_id_of(args)  # raises: there are several
    return ConfigError(
        "neither RUN nor ELASTIC_JOURNAL is given, and no job has run on this machine",
        hint="give the run id, or the folder that ELASTIC_JOURNAL named when the job ran",
    )


def existing_folder(name: str) -> Path:
    """The folder of journals. Raises ConfigError if it does not exist."""
    folder = Path(name)
    if not folder.is_dir():
        raise ConfigError(
            f"there is no folder {printable(name)}",
            hint="give the folder that ELASTIC_JOURNAL named when the job ran, or a run id",
        )
    return folder


def time_of(text: str, now_s: float) -> float:
    """An age or a time, as seconds since 1970. Raises ConfigError."""
    if (seconds := age(text)) is not None:
        return now_s - seconds
    try:
        at = datetime.fromisoformat(text.removesuffix("Z"))
    except ValueError:
        raise ConfigError(
            f"--since={printable(text)} is neither an age nor a time",
            hint="for example --since=10m, or --since=2026-01-31T12:00 (UTC)",
        ) from None
    return (at if at.tzinfo else at.replace(tzinfo=timezone.utc)).timestamp()


def _print_all(
    source: JournalSource | None,
    changes: EtcdChanges | None,
    args: argparse.Namespace,
    since_s: float | None,
    clock: Clock,
) -> None:
    journals = JournalFolder(source.folder) if source is not None else None
    runs = RunSelection(args.rdzv_id)
    read = journals.read_new() if journals is not None else []
    merged = merge(runs.select(read), journals.notes() if journals is not None else [])
    notes = _Notes()
    of_etcd = _changes(changes, merged.records, notes, at_once=not args.follow)
    _print(_in_order([*merged.records, *of_etcd]), args, since_s)
    notes.print(merged.notes)
    notes.print(_not_shown(merged.records, args))
    nodes = sorted({record.node for record in merged.records})
    if args.node is not None and args.node not in nodes and nodes and not args.follow:
        raise ConfigError(
            f"there are no events of node {printable(args.node, 80)}{nearest(args.node, nodes)}",
            hint=f"the nodes are {', '.join(printable(node, 80) for node in nodes)}",
        )
    if not merged.records and not of_etcd and not args.follow:
        where = printable(str(source.folder)) if source is not None else "etcd"
        if runs.others:
            raise ConfigError(
                f"there are no events of run {printable(args.rdzv_id)} in {where}",
                hint=f"it has those of {', '.join(map(printable, runs.others[:_MAX_RUNS]))}",
            )
        print(f"elastic: there are no events in {where}", file=sys.stderr)
    offsets = {r.writer: r.at_s - r.monotonic_s for r in merged.records}
    newest = {r.writer: r.seq for r in sorted(merged.records, key=lambda r: r.seq)}
    while args.follow:
        clock.sleep(FOLLOW_S)
        records = runs.select(journals.read_new()) if journals is not None else []
        if source is not None and journals is not None:
            journals.folder = source.current()
            # A file that moved to another file system is read again.
            records = [r for r in records if r.seq < 0 or r.seq > newest.get(r.writer, -1)]
            newest |= {r.writer: r.seq for r in sorted(records, key=lambda r: r.seq)}
        for record in records:
            known = offsets.setdefault(record.writer, record.time_s - record.monotonic_s)
            record.at_s = record.monotonic_s + known
        of_etcd = _changes(changes, records, notes, at_once=journals is None)
        _print(_in_order([*records, *of_etcd]), args, since_s)
        if journals is not None:
            notes.print(journals.notes(is_growing=True))


class RunSelection:
    """Selects the events of one run, and those of journals without a run id.

    ``run_id``: None selects all runs.
    """

    def __init__(self, run_id: str | None) -> None:
        self._run_id = run_id
        self._runs: dict[str, str] = {}  # by writer

    @property
    def others(self) -> list[str]:
        """The runs that were not selected, in the order of their first journal."""
        ids = dict.fromkeys(self._runs.values())
        return [run for run in ids if self._run_id and run not in (*UNNAMED_RUNS, self._run_id)]

    def select(self, records: Sequence[JournalRecord]) -> list[JournalRecord]:
        """The selected records. A writer's first record names its run."""
        for record in records:
            if record.name == "journal-opened":
                self._runs[record.writer] = record.text("run_id")
        others = set(self.others)
        return [r for r in records if self._runs.get(r.writer, "") not in others]


def _changes(
    changes: EtcdChanges | None,
    recorded: Sequence[JournalRecord],
    notes: _Notes,
    *,
    at_once: bool,
) -> list[JournalRecord]:
    """Changes that etcd shows and journals do not record."""
    if changes is None:
        return []
    changes.exclude(recorded)
    newer = changes.take(at_once=at_once)
    notes.print([changes.problem] * bool(changes.problem))
    return newer


@contextmanager
def _changes_in_etcd(args: argparse.Namespace, *, is_needed: bool) -> Iterator[EtcdChanges | None]:
    """The connection to etcd, if requested; None also if it is unreachable and journals exist.

    Raises ConfigError and CoordinationError.
    """
    if not args.rdzv_endpoint:
        yield None
        return
    keys = keys_of(args)
    with ExitStack() as opened:
        try:
            store = opened.enter_context(job_store(args))
        except StoreUnreachable as error:
            if is_needed:
                raise
            print(f"elastic: note: {printable(error.message, 1000)}", file=sys.stderr)
            yield None
            return
        yield EtcdChanges(lambda: read_job(store, keys, SYSTEM_CLOCK.wall()))


class _Notes:
    """Print each note once."""

    def __init__(self) -> None:
        self._printed: set[str] = set()

    def print(self, notes: Iterable[str]) -> None:
        for note in notes:
            if note not in self._printed:
                self._printed.add(note)
                print(f"elastic: note: {printable(note, 1000)}", file=sys.stderr)


def _in_order(records: Iterable[JournalRecord]) -> list[JournalRecord]:
    return sorted(records, key=lambda record: record.at_s)


def _print(
    records: Iterable[JournalRecord], args: argparse.Namespace, since_s: float | None
) -> None:
    wanted = [record for record in records if _is_wanted(record, args, since_s)]
    for text in map(_json, wanted) if args.output == "json" else _lines(wanted):
        print(text if args.output == "json" else wrapped(text, sys.stdout))
    sys.stdout.flush()


def _is_wanted(record: JournalRecord, args: argparse.Namespace, since_s: float | None) -> bool:
    if since_s is not None and record.at_s < since_s:
        return False
    if args.node is not None and record.node != args.node:
        return False
    if args.event:
        return record.name in args.event
    return args.output == "json" or record.name not in _FREQUENT


def _not_shown(records: Iterable[JournalRecord], args: argparse.Namespace) -> Iterator[str]:
    if args.event or args.output == "json":
        return
    for name, count in Counter(r.name for r in records if r.name in _FREQUENT).items():
        yield f"{count} events {name} are not shown: --event {name} does"


def _lines(records: Iterable[JournalRecord]) -> Iterator[str]:
    """A line for each record, but one for all ranks that have only noticed that a peer is gone."""
    known: dict[object, list[JournalRecord]] = {}
    for record in records:
        known.setdefault(_same_failure(record) or id(record), []).append(record)
    for first, *others in known.values():
        count = f" ranks={len(others) + 1}" if others else ""
        yield f"{line(first)}{count}"


def _same_failure(record: JournalRecord) -> object:
    if record.name in _OF_RANKS and is_consequence(record.text("error")):
        return record.name, record.whole("generation")
    return None


def _json(record: JournalRecord) -> str:
    data = {**record.data, "at": round(record.at_s, 6)}
    return json.dumps({k: v for k, v in data.items() if not _is_not_finite(v)})


def _is_not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def line(record: JournalRecord) -> str:
    """``2026-01-31T12:00:00.123Z node-a r3 g7 s120 world-fault error="…"``."""
    data = record.data
    place = [f"{letter}{data[name]}" for name, letter in _PLACE if isinstance(data.get(name), int)]
    shown = _ENVELOPE | {name for name, _ in _PLACE}
    if data.get("error") and (trace := record.text("traceback")):
        # The error says the same; its place is worth a field.
        data = {**data, "traceback": "", "at": innermost_place(shorten(trace))}
    fields = [
        f"{printable(str(key), 60)}={_value(value)}"
        for key, value in data.items()
        if key not in shown and value not in (None, "", [])
    ]
    parts = (timestamp(record.at_s), printable(record.node, 80), *place)
    return " ".join((*parts, printable(record.name, 80), *fields))


def _value(value: object) -> str:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        value = ",".join(value)
    text = for_a_line(value) if isinstance(value, str) else json.dumps(value)
    shown = printable(text)
    return json.dumps(shown, ensure_ascii=False) if " " in shown else shown
