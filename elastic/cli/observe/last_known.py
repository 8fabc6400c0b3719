"""The last known state of a job from its journals, while etcd does not answer or has lost it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from elastic.cli.observe.printable import duration, printable
from elastic.telemetry.journal_reader import JournalFolder, JournalRecord

_INCIDENTS = ("node-lost", "worker-died", "node-leaving", "hang-found")
_MAX_INCIDENTS = 5
_MAX_NODES = 64


def last_known(folder: str, run_id: str, now_s: float) -> list[str]:
    """The state according to the journals in ``folder``. Reads only the ends of the files."""
    records = sorted(JournalFolder(Path(folder)).read_tails(run_id), key=lambda r: r.time_s)
    if not records:
        return [f"last state unknown: {printable(folder)} has no events of this run"]
    return list(_lines(records, now_s))


def _lines(records: Sequence[JournalRecord], now_s: float) -> Iterator[str]:
    yield _state(records, now_s)
    if (saved := _last(records, "checkpoint-saved")) is not None:
        yield f"last checkpoint of step {saved.whole('step')}, {_ago(saved, now_s)}"
    yield from _nodes(records, now_s)
    found = [r for r in records if r.name in _INCIDENTS][-_MAX_INCIDENTS:]
    if found:
        yield "recent incidents:"
        yield from (f"  {_ago(r, now_s)}: {incident_of(r)}" for r in reversed(found))


def _nodes(records: Sequence[JournalRecord], now_s: float) -> Iterator[str]:
    """The last event of each node, if there are several; most recent first."""
    newest = {record.node: record for record in records}
    if len(newest) < 2:
        return
    steps = {r.node: r.whole("step") for r in records if r.whole("step") is not None}
    yield "nodes, from their journals:"
    for node, last in sorted(newest.items(), key=lambda n: -n[1].time_s)[:_MAX_NODES]:
        step = f"step {steps[node]}, " if node in steps else ""
        yield f"  {printable(node, 60)}: {step}last event {_ago(last, now_s)}"


def _state(records: Sequence[JournalRecord], now_s: float) -> str:
    if (ended := _last(records, "job-ended")) is not None and ended.time_s >= _newest_step_s(
        records
    ):
        return (
            f"last known: the job has ended, {printable(ended.text('outcome'), 60)}, "
            f"{_ago(ended, now_s)}: {printable(ended.text('reason'))}"
        )
    stepped = [r for r in records if r.whole("step") is not None]
    if not stepped:
        newest = records[-1]
        return (
            f"last known: {printable(newest.name, 60)}, {_ago(newest, now_s)}, from the journal of "
            f"{printable(newest.node, 60)}"
        )
    newest = stepped[-1]
    formed = _last(records, "world-formed")
    nodes = formed.data.get("nodes") if formed is not None else None
    with_nodes = f" with {len(nodes)} nodes" if isinstance(nodes, list) else ""
    generation = newest.whole("generation")
    is_same = formed is not None and formed.whole("generation") == generation
    return (
        f"last known: step {newest.whole('step')} in generation {generation}"
        f"{with_nodes if is_same else ''}, {_ago(newest, now_s)}, from the journal of "
        f"{printable(newest.node, 60)}"
    )


def incident_of(record: JournalRecord) -> str:
    """A short description of an incident."""
    why = printable(record.text("reason").strip().rpartition("\n")[2], 200)
    match record.name:
        case "node-lost":
            what = f"{printable(record.text('lost'), 60)} was lost"
        case "worker-died":
            what = f"a worker of {printable(record.node, 60)} died"
        case "hang-found":
            what = f"generation {record.whole('generation')} made no progress"
        case _:
            what = f"{printable(record.node, 60)} leaves"
    return f"{what}: {why}" if why else what


def _newest_step_s(records: Sequence[JournalRecord]) -> float:
    return max((r.time_s for r in records if r.name == "rank-times"), default=0.0)


def _last(records: Sequence[JournalRecord], name: str) -> JournalRecord | None:
    return next((r for r in reversed(records) if r.name == name), None)


def _ago(record: JournalRecord, now_s: float) -> str:
    return f"{duration(max(0.0, now_s - record.time_s))} ago"
