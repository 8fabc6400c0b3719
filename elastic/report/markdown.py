"""A run's report for terminals, chats and issues: ``elastic report --format md``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from elastic.report.model import RunReport, counted
from elastic.telemetry.activities import Activity, Breakdown
from elastic.telemetry.printable import duration, printable, timestamp


def markdown(report: RunReport) -> Iterator[str]:
    """The output of ``--format md``, line by line."""
    goodput = report.goodput
    yield f"# Run {_cell(goodput.run_id or 'without a name')}"
    yield ""
    yield _cell(report.sentence, 1000)
    yield ""
    yield (
        f"{timestamp(goodput.start_s)} to {timestamp(goodput.end_s)}, "
        f"{duration(goodput.duration_s)}: {goodput.breakdown.goodput:.1%} of the time made "
        f"progress. {counted(goodput.steps, 'step')}, {goodput.recomputed_steps:,} of them "
        "recomputed; "
        f"{counted(len(goodput.incidents), 'change')} of the world."
    )
    yield ""
    yield from _breakdown(goodput.breakdown, goodput.duration_s)
    yield from _section(
        "Nodes",
        "| node | present for | productive | largest losses |",
        "|---|---:|---:|---|",
        (
            f"| {_cell(node.node)} | {duration(node.end_s - node.start_s)} | "
            f"{node.breakdown.goodput:.1%} | {_losses(node.breakdown)} |"
            for node in goodput.nodes
        ),
    )
    yield from _incidents(report)
    yield from _findings(report)
    if report.notes:
        yield "## Notes"
        yield ""
        yield from (f"- {_cell(note, 1000)}" for note in report.notes)


def _breakdown(breakdown: Breakdown, duration_s: float) -> Iterator[str]:
    productive_s = breakdown.seconds.get(Activity.PRODUCTIVE, 0.0)
    return _section(
        "Where the time went",
        "| part | time | share |",
        "|---|---:|---:|",
        (
            f"| {activity.value} | {duration(took_s)} | {took_s / duration_s:.1%} |"
            for activity, took_s in ((Activity.PRODUCTIVE, productive_s), *breakdown.losses)
        )
        if duration_s > 0
        else (),
    )


def _incidents(report: RunReport) -> Iterator[str]:
    yield from _section(
        "Changes of the world",
        "| at | generation | reason | idle time | cost | largest phases |",
        "|---|---|---|---:|---:|---|",
        (
            f"| {timestamp(i.start_s)} | {', '.join(map(str, i.generations))} | "
            f"{_cell(i.reason)} | {duration(i.duration_s)} | {duration(i.cost_s)} | "
            f"{_largest(i.phases, 6)} |"
            for i in report.incidents
        ),
    )
    yield from _section(
        "Checkpoints at failures",
        "| generation | last checkpoint | age | steps since |",
        "|---|---|---:|---:|",
        (
            f"| {i.generations[0] - 1} | {_cell(i.checkpoint.name) if i.checkpoint else 'none'} | "
            f"{duration(i.checkpoint_age_s) if i.checkpoint_age_s is not None else ''} | "
            f"{i.steps_at_risk if i.steps_at_risk is not None else ''} |"
            for i in report.failures
        ),
    )


def _findings(report: RunReport) -> Iterator[str]:
    found = report.findings
    yield from _section(
        "Verdicts on failures",
        "| at | generation | node | action | rule | reason |",
        "|---|---|---|---|---|---|",
        (
            f"| {timestamp(v.at_s)} | {_known(v.generation)} | {_cell(v.failed)} | "
            f"{_cell(v.action)} | {_cell(v.rule)} | {_cell(v.reason)} |"
            for v in found.verdicts
        ),
    )
    yield from _section(
        "Hangs",
        "| at | generation | kind | ranks | reason | report |",
        "|---|---|---|---|---|---|",
        (
            f"| {timestamp(h.at_s)} | {_known(h.generation)} | {_cell(h.kind)} | "
            f"{', '.join(map(str, h.ranks[:16]))} | {_cell(h.reason)} | {_cell(h.report)} |"
            for h in found.hangs
        ),
    )
    yield from _section(
        "Stragglers",
        "| at | rank | node | cause | reason |",
        "|---|---|---|---|---|",
        (
            f"| {timestamp(s.at_s)} | {_known(s.rank)} | {_cell(s.node)} | {_cell(s.cause)} | "
            f"{_cell(s.reason)} |"
            for s in found.stragglers
        ),
    )


def _section(title: str, head: str, rule: str, rows: Iterable[str]) -> Iterator[str]:
    """A table with a title; nothing without rows."""
    shown = list(rows)
    if shown:
        yield from (f"## {title}", "", head, rule, *shown, "")


def _losses(breakdown: Breakdown) -> str:
    return _largest(breakdown.losses, 3)


def _largest(losses: Sequence[tuple[Activity, float]], count: int) -> str:
    ordered = sorted(losses, key=lambda pair: -pair[1])[:count]
    return ", ".join(f"{a.value} {duration(s)}" for a, s in ordered if s >= 0.0005)


def _known(number: int | None) -> str:
    return "" if number is None else str(number)


def _cell(text: str, limit: int = 200) -> str:
    """Untrusted text, escaped so that it adds no markup and no cells."""
    shown = printable(text, limit)
    for character in "\\|<>[]`*_":
        shown = shown.replace(character, f"\\{character}")
    return shown
