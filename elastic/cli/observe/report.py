"""``elastic report``: what a run did with its time, from its journals, as Markdown or JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any

from elastic.cli.command_parser import CommandParser
from elastic.cli.observe.events import folder_of
from elastic.cli.observe.printable import duration, printable, timestamp
from elastic.errors import ConfigError
from elastic.telemetry.activities import Activity, Breakdown
from elastic.telemetry.goodput import Goodput, IncidentGoodput, goodput_of
from elastic.telemetry.journal_reader import read_folder
from elastic.telemetry.merging import merge

SCHEMA = 1  # of the JSON document


def main(argv: Sequence[str]) -> int:
    """Run ``elastic report ARGV``; returns the exit code."""
    args = parser().parse_args(list(argv))
    folder = folder_of(args.folder)
    goodput = goodput_of(merge(*read_folder(folder)), args.run_id)
    if not goodput.nodes:
        of_run = f" of run {printable(args.run_id)}" if args.run_id else ""
        raise ConfigError(
            f"there are no events{of_run} in {printable(str(folder))}",
            hint="journals are written where ELASTIC_JOURNAL is set for the job's agents",
        )
    if args.format == "json":
        print(json.dumps(document(goodput), indent=2))
    else:
        print("\n".join(markdown(goodput)))
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line of ``elastic report``."""
    own = CommandParser(
        prog="elastic report",
        description="Print which part of a run's time made progress, where the rest went, and what "
        "each change of the world has cost. From journals alone: the job may be over or run.",
    )
    own.add_argument(
        "folder", nargs="?", metavar="RUN", help="the journals' folder (default: ELASTIC_JOURNAL)"
    )
    own.add_argument(
        "--run-id", "--rdzv-id", help="of several runs in the folder (default: the last)"
    )
    own.add_argument("--format", choices=("md", "json"), default="md")
    return own


# JSON --------------------------------------------------------------------------------------------


def document(goodput: Goodput) -> dict[str, Any]:
    """What ``--format json`` prints. Times are Unix times, durations seconds."""
    return {
        "schema": SCHEMA,
        "run_id": goodput.run_id,
        "start": round(goodput.start_s, 3),
        "end": round(goodput.end_s, 3),
        "duration_s": round(goodput.duration_s, 3),
        "steps": goodput.steps,
        "recomputed_steps": goodput.recomputed_steps,
        "goodput": round(goodput.breakdown.goodput, 6),
        "seconds": _seconds(goodput.breakdown),
        "nodes": [
            {
                "node": node.node,
                "start": round(node.start_s, 3),
                "end": round(node.end_s, 3),
                "goodput": round(node.breakdown.goodput, 6),
                "seconds": _seconds(node.breakdown),
            }
            for node in goodput.nodes
        ],
        "incidents": [
            {
                "generations": list(incident.generations),
                "cause": incident.cause,
                "reason": incident.reason,
                "start": round(incident.start_s, 3),
                "duration_s": round(incident.duration_s, 3),
                "nodes": list(incident.nodes),
                "cost_s": round(incident.breakdown.total_s, 3),
                "seconds": _seconds(incident.breakdown),
            }
            for incident in goodput.incidents
        ],
        "notes": list(goodput.notes),
    }


def _seconds(breakdown: Breakdown) -> dict[str, float]:
    return {a.value: round(s, 3) for a in Activity if (s := breakdown.seconds.get(a, 0.0)) > 0}


# Markdown ----------------------------------------------------------------------------------------


def markdown(goodput: Goodput) -> Iterator[str]:
    """What ``--format md`` prints, line by line."""
    yield f"# Run {_cell(goodput.run_id or 'without a name')}"
    yield ""
    yield (
        f"{timestamp(goodput.start_s)} to {timestamp(goodput.end_s)}, "
        f"{duration(goodput.duration_s)}: {goodput.breakdown.goodput:.1%} of the time made "
        f"progress. {goodput.steps} steps, {goodput.recomputed_steps} of them made twice or more; "
        f"{_count(len(goodput.incidents), 'change')} of the world."
    )
    yield ""
    yield "## Where the time went"
    yield ""
    yield "| part | time | share |"
    yield "|---|---:|---:|"
    for activity, took_s in (
        (Activity.PRODUCTIVE, goodput.breakdown.seconds.get(Activity.PRODUCTIVE, 0.0)),
        *goodput.breakdown.losses,
    ):
        yield f"| {activity.value} | {duration(took_s)} | {took_s / goodput.duration_s:.1%} |"
    yield ""
    yield "## Nodes"
    yield ""
    yield "| node | there for | productive | largest losses |"
    yield "|---|---:|---:|---|"
    for node in goodput.nodes:
        there_s = node.end_s - node.start_s
        yield (
            f"| {_cell(node.node)} | {duration(there_s)} | {node.breakdown.goodput:.1%} | "
            f"{_losses(node.breakdown)} |"
        )
    yield ""
    yield from _incidents(goodput.incidents)
    if goodput.notes:
        yield "## Notes"
        yield ""
        yield from (f"- {_cell(note, 1000)}" for note in goodput.notes)


def _incidents(incidents: Sequence[IncidentGoodput]) -> Iterator[str]:
    if not incidents:
        return
    yield "## Changes of the world"
    yield ""
    yield "| at | generation | cause | standstill | cost | of it |"
    yield "|---|---|---|---:|---:|---|"
    for incident in incidents:
        generations = ", ".join(map(str, incident.generations))
        yield (
            f"| {timestamp(incident.start_s)} | {generations} | {_cell(incident.reason)} | "
            f"{duration(incident.duration_s)} | {duration(incident.breakdown.total_s)} | "
            f"{_losses(incident.breakdown, 6)} |"
        )
    yield ""


def _losses(breakdown: Breakdown, count: int = 3) -> str:
    losses = [f"{a.value} {duration(s)}" for a, s in breakdown.losses[:count] if s >= 0.0005]
    return ", ".join(losses)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _cell(text: str, limit: int = 200) -> str:
    """Text of others: no markup, and no cell of its own."""
    shown = printable(text, limit)
    for character in "\\|<>[]`*_":
        shown = shown.replace(character, f"\\{character}")
    return shown
