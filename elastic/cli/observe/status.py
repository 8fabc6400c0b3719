"""``elastic status``: a job's status in one sentence and a table, from etcd alone."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

from elastic.cli.command_parser import CommandParser
from elastic.cli.job_arguments import add_job_arguments
from elastic.cli.observe.connection import job_store, keys_of
from elastic.cli.observe.job_view import JobCondition, JobView, read_job
from elastic.cli.observe.printable import duration, printable
from elastic.cli.observe.sentence import incident, sentence
from elastic.cli.observe.status_document import document
from elastic.clock import SYSTEM_CLOCK
from elastic.errors import StoreUnreachable
from elastic.membership.keys import Keys
from elastic.membership.records import Node
from elastic.tuning.agent_intervals import STATUS_WATCH_S

ABSENT = 1  # exit code: no such job
_CLEAR = "\x1b[H\x1b[2J"


def main(argv: Sequence[str]) -> int:
    """Run ``elastic status ARGV``; returns the exit code."""
    args = parser().parse_args(list(argv))
    keys = keys_of(args)
    while True:
        try:
            return _from_store(args, keys)
        except StoreUnreachable as error:
            _show_last_known(args, keys.run_id)
            if not args.watch:
                raise
            print(f"elastic: {error.message}", file=sys.stderr)
            SYSTEM_CLOCK.sleep(STATUS_WATCH_S)


def _from_store(args: argparse.Namespace, keys: Keys) -> int:
    with job_store(args) as store:
        view = read_job(store, keys, SYSTEM_CLOCK.wall())
        _show(view, args)
        while args.watch:
            SYSTEM_CLOCK.sleep(STATUS_WATCH_S)
            try:
                view = read_job(store, keys, SYSTEM_CLOCK.wall())
            except StoreUnreachable as error:
                _show_outage(view, args, error.message)
                continue
            _show(view, args)
    return ABSENT if view.state is JobCondition.ABSENT else 0


def parser(environ: Mapping[str, str] = os.environ) -> argparse.ArgumentParser:
    """The command line of ``elastic status``."""
    own = CommandParser(
        prog="elastic status",
        description="Print a job's status: its state in one sentence, its step and its nodes. "
        "Reads etcd and changes nothing.",
        epilog="exit codes: 0 success, 1 no such job, 2 usage, 69 etcd unreachable, or access "
        "denied",
    )
    add_job_arguments(own, environ)
    own.add_argument(
        "--journal",
        default=environ.get("ELASTIC_JOURNAL"),
        metavar="FOLDER",
        help="journal folder; used to show the last known state when etcd is unreachable "
        "(default: ELASTIC_JOURNAL)",
    )
    own.add_argument("-w", "--watch", action="store_true", help="refresh until Ctrl-C")
    own.add_argument(
        "-o",
        "--output",
        choices=("table", "wide", "json"),
        default="table",
        help="output format (default: %(default)s)",
    )
    return own


def _show(view: JobView, args: argparse.Namespace) -> None:
    if args.output == "json":
        print(json.dumps(document(view), indent=None if args.watch else 2), flush=True)
        return
    journals = _journals_of(view, args)
    _print([*lines(view, is_wide=args.output == "wide"), *journals], args)
    for note in view.notes:
        print(f"elastic: note: {printable(note, 500)}", file=sys.stderr)


def _show_outage(view: JobView, args: argparse.Namespace, message: str) -> None:
    """Print the last status and its age after etcd became unreachable during --watch."""
    print(f"elastic: {printable(message, 500)}", file=sys.stderr)
    if args.output != "json":
        ago = duration(max(0.0, SYSTEM_CLOCK.wall() - view.at_s))
        head = f"etcd does not answer; status {ago} ago:"
        _print([head, *lines(view, is_wide=args.output == "wide")], args)


def _show_last_known(args: argparse.Namespace, run_id: str) -> None:
    if not args.journal:
        print("elastic: --journal FOLDER would show the last known state", file=sys.stderr)
        return
    from elastic.cli.observe.last_known import last_known  # reads journals; slow to import

    known = last_known(args.journal, run_id, SYSTEM_CLOCK.wall())
    known[0] = f"{printable(run_id)}: {known[0]}"
    if args.output != "json":
        _print(known, args)
    else:
        print("\n".join(known), file=sys.stderr)


def _journals_of(view: JobView, args: argparse.Namespace) -> list[str]:
    """What the journals record of a job that is down: the leader's record in etcd has expired."""
    if view.state is not JobCondition.DOWN or not args.journal:
        return []
    from elastic.cli.observe.last_known import last_known  # reads journals; slow to import

    return ["", "from the journals:", *last_known(args.journal, view.run_id, SYSTEM_CLOCK.wall())]


def _print(text: Iterable[str], args: argparse.Namespace) -> None:
    clear = _CLEAR if args.watch and sys.stdout.isatty() else ""
    print(clear + "\n".join(text), flush=True)


# For people --------------------------------------------------------------------------------------


def lines(view: JobView, *, is_wide: bool = False) -> Iterator[str]:
    """The sentence, the known progress, and the nodes."""
    yield f"{printable(view.run_id)}: {sentence(view)}"
    yield from _progress(view)
    if view.nodes:
        yield ""
        rows = [_HEAD + _WIDE_HEAD * is_wide, *_rows(view, is_wide=is_wide)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            yield "   ".join(cells).rstrip()
    broken = view.breakages[-5:]
    if broken:
        yield ""
        yield "recent incidents:"
        for breakage in reversed(broken):
            ago = duration(max(0.0, view.at_s - breakage.time_s))
            yield f"  {ago} ago, generation {breakage.generation}: {incident(breakage)}"


def _progress(view: JobView) -> Iterator[str]:
    if parts := list(progress(view)):
        yield ", ".join(parts)


def progress(view: JobView) -> Iterator[str]:
    """The known progress: step, rate, time left, goodput and checkpoint."""
    known = view.progress
    if view.step is not None:
        planned = known.planned_steps if known is not None else None
        or_later = " or later" if view.is_step_old else ""
        yield f"step {view.step}{or_later}" + (f" of {planned}" if planned is not None else "")
    if (rate := view.steps_per_s) is not None:
        yield f"{rate:.3g} steps/s"
    if (eta_s := view.eta_s) is not None:
        yield f"about {duration(eta_s)} left"
    elif view.state is JobCondition.TRAINING:
        yield "time left unknown"
    if (goodput := view.goodput) is not None and known is not None:
        covers = duration(max(0.0, view.at_s - (known.goodput_since_s or view.at_s)))
        yield f"goodput {goodput:.1%} over {covers}"
    if known is not None and known.checkpoint_step is not None:
        age_s = view.checkpoint_age_s
        ago = f", {duration(age_s)} ago" if age_s is not None else ""
        yield f"last checkpoint of step {known.checkpoint_step}{ago}"


_HEAD = ("NODE", "RANKS", "STATE", "AGE")
_WIDE_HEAD = ("STEP", "HEARTBEAT", "ADDRESS", "GENERATION", "LEADER", "TORCH", "LIBRARY", "NODE ID")


def _rows(view: JobView, *, is_wide: bool) -> Iterator[tuple[str, ...]]:
    for node in (*view.members, *view.joining):
        row: tuple[str, ...] = (
            printable(node.name, 60),
            ranks_of(view, node),
            view.state_of(node),
            duration(max(0.0, view.at_s - node.joined_at_s)),
        )
        if is_wide:
            running = str(node.running.generation) if node.running is not None else "-"
            is_leader = "yes" if view.leader and view.leader.node_id == node.node_id else ""
            heartbeat = view.heartbeat_of(node)
            row += (
                str(heartbeat.step) if heartbeat.step is not None else "-",
                str(heartbeat),
                printable(node.address, 60),
                running,
                is_leader,
                printable(node.torch, 30),
                printable(node.library, 30),
                printable(node.node_id, 40),
            )
        yield row


def ranks_of(view: JobView, node: Node) -> str:
    """``0-7`` in the newest world; ``-`` outside of it."""
    if view.world is None or node.node_id not in view.world.node_ids:
        return "-"
    first = view.world.first_rank_of(node.node_id)
    return str(first) if node.nproc == 1 else f"{first}-{first + node.nproc - 1}"
