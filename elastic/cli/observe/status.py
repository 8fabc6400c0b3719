"""``elastic status``: how a job is, in one sentence and a table, from etcd alone."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from elastic.cli.command_parser import CommandParser
from elastic.cli.job_arguments import add_job_arguments
from elastic.cli.observe.connection import job_store, keys_of
from elastic.cli.observe.job_view import JobState, JobView, incident, read_job, sentence
from elastic.cli.observe.printable import duration, printable
from elastic.clock import SYSTEM_CLOCK
from elastic.errors import StoreUnreachable
from elastic.membership.keys import Keys
from elastic.membership.records import Node
from elastic.telemetry.journal_reader import read_folder
from elastic.tuning.agent_intervals import STATUS_WATCH_S

SCHEMA = 1  # of the JSON document
ABSENT = 1  # exit code: there is no such job
_CLEAR = "\x1b[H\x1b[2J"


def main(argv: Sequence[str]) -> int:
    """Run ``elastic status ARGV``; returns the exit code."""
    args = parser().parse_args(list(argv))
    keys = keys_of(args)
    try:
        return _from_store(args, keys)
    except StoreUnreachable:
        if args.journal:
            print(f"{printable(keys.run_id)}: {last_known(args.journal, SYSTEM_CLOCK.wall())}")
        raise


def _from_store(args: argparse.Namespace, keys: Keys) -> int:
    with job_store(args) as store:
        view = read_job(store, keys, SYSTEM_CLOCK.wall())
        _show(view, args)
        while args.watch:
            SYSTEM_CLOCK.sleep(STATUS_WATCH_S)
            try:
                view = read_job(store, keys, SYSTEM_CLOCK.wall())
            except StoreUnreachable as error:
                print(f"elastic: {error.message}", file=sys.stderr)
                continue
            _show(view, args)
    return ABSENT if view.state is JobState.ABSENT else 0


def parser(environ: Mapping[str, str] = os.environ) -> argparse.ArgumentParser:
    """The command line of ``elastic status``."""
    own = CommandParser(
        prog="elastic status",
        description="Print how a job is: its state in a sentence, its step, its nodes. Reads etcd "
        "and changes nothing.",
        epilog="exit codes: 0, 1 there is no such job, 2 usage, 69 etcd cannot be reached, or "
        "refuses",
    )
    add_job_arguments(own, environ)
    own.add_argument(
        "--journal",
        default=environ.get("ELASTIC_JOURNAL"),
        metavar="FOLDER",
        help="of the job's journals, for its last known state while etcd is away (default: "
        "ELASTIC_JOURNAL)",
    )
    own.add_argument("-w", "--watch", action="store_true", help="again and again, until Ctrl-C")
    own.add_argument(
        "-o", "--output", choices=("table", "wide", "json"), default="table", help="format"
    )
    return own


def _show(view: JobView, args: argparse.Namespace) -> None:
    if args.output == "json":
        print(json.dumps(document(view), indent=None if args.watch else 2), flush=True)
        return
    clear = _CLEAR if args.watch and sys.stdout.isatty() else ""
    print(clear + "\n".join(lines(view, is_wide=args.output == "wide")), flush=True)
    for note in view.notes:
        print(f"elastic: note: {printable(note, 500)}", file=sys.stderr)


def last_known(folder: str, now_s: float) -> str:
    """What the journals say, in words, while etcd does not answer."""
    records, _ = read_folder(folder)
    known = [r for r in records if r.whole("step") is not None]
    if not known:
        return f"state not known: etcd does not answer, and {printable(folder)} tells nothing"
    newest = max(known, key=lambda r: r.time_s)
    return (
        f"last known: step {newest.whole('step')} in generation {newest.whole('generation')}, "
        f"{duration(max(0.0, now_s - newest.time_s))} ago, by the journal of "
        f"{printable(newest.node, 60)}"
    )


# For people --------------------------------------------------------------------------------------


def lines(view: JobView, *, is_wide: bool = False) -> Iterator[str]:
    """The sentence, what is known of the progress, and the nodes."""
    yield f"{printable(view.run_id)}: {sentence(view)}"
    yield from _progress(view)
    if view.nodes:
        yield ""
        rows = [_HEAD + _WIDE_HEAD * is_wide, *_rows(view, is_wide=is_wide)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            yield "   ".join(cells).rstrip()
    broken = view.world.breakages[-5:] if view.world is not None else ()
    if broken:
        yield ""
        yield "recent incidents:"
        for breakage in reversed(broken):
            ago = duration(max(0.0, view.at_s - breakage.time_s))
            yield f"  {ago} ago, generation {breakage.generation}: {incident(breakage)}"


def _progress(view: JobView) -> Iterator[str]:
    said = []
    if view.step is not None:
        said.append(f"step {view.step}")
    if (rate := view.steps_per_s) is not None:
        said.append(f"{rate:.3g} steps/s")
    progress = view.progress
    if progress is not None and progress.checkpoint_step is not None:
        said.append(f"last checkpoint of step {progress.checkpoint_step}")
    if said:
        yield ", ".join(said)


_HEAD = ("NODE", "RANKS", "STATE", "AGE")
_WIDE_HEAD = ("ADDRESS", "GENERATION", "LEADS", "TORCH", "LIBRARY", "NODE ID")


def _rows(view: JobView, *, is_wide: bool) -> Iterator[tuple[str, ...]]:
    for node in (*view.members, *view.joining):
        row: tuple[str, ...] = (
            printable(node.name, 60),
            ranks_of(view, node),
            node.state.value,
            duration(max(0.0, view.at_s - node.joined_at_s)),
        )
        if is_wide:
            running = str(node.running.generation) if node.running is not None else "-"
            leads = "yes" if view.leader and view.leader.node_id == node.node_id else ""
            row += (
                printable(node.address, 60),
                running,
                leads,
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


# For programs ------------------------------------------------------------------------------------


def document(view: JobView) -> dict[str, Any]:
    """What ``-o json`` prints. Times are Unix times, durations seconds."""
    world, progress = view.world, view.progress
    return {
        "schema": SCHEMA,
        "run_id": view.run_id,
        "time": round(view.at_s, 3),
        "state": view.state.value,
        "sentence": sentence(view),
        "generation": world.generation if world is not None else None,
        "cause": world.cause.value if world is not None else None,
        "reason": world.reason if world is not None else None,
        "step": view.step,
        "steps_per_s": view.steps_per_s,
        "checkpoint_step": progress.checkpoint_step if progress is not None else None,
        "min_nodes": world.min_nodes if world is not None else None,
        "max_nodes": world.max_nodes if world is not None else None,
        "leader": view.leader.node_id if view.leader is not None else None,
        "nodes": [_node(view, node) for node in (*view.members, *view.joining)],
        "incidents": [
            {
                "generation": b.generation,
                "time": round(b.time_s, 3),
                "lost": list(b.lost),
                "left": list(b.left),
                "failed": [failure.node for failure in b.failures],
            }
            for b in (world.breakages if world is not None else ())
        ],
        "done": None
        if view.done is None
        else {
            "outcome": view.done.outcome.value,
            "reason": view.done.reason,
            "exit_code": view.done.exit_code,
            "time": round(view.done.time_s, 3),
        },
        "notes": list(view.notes),
    }


def _node(view: JobView, node: Node) -> dict[str, Any]:
    is_member = view.world is not None and node.node_id in view.world.node_ids
    first = view.world.first_rank_of(node.node_id) if view.world and is_member else None
    return {
        "name": node.name,
        "node_id": node.node_id,
        "state": node.state.value,
        "is_member": is_member,
        "first_rank": first,
        "nproc": node.nproc,
        "generation": node.running.generation if node.running is not None else None,
        "address": node.address,
        "torch": node.torch,
        "library": node.library,
        "joined": round(node.joined_at_s, 3),
    }
