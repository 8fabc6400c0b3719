"""What is known of a job while etcd does not answer, and what changes there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic.cli.view import JobView, incident, sentence
from elastic.errors import StoreUnreachable
from elastic.telemetry.log import duration, printable
from elastic.telemetry.reader import JournalFolder, JournalRecord
from elastic.tracebacks import exception_line

# ----------------------------------------------------------------------------
# Changes of a job seen in etcd, as events, for use where not all journals can be read.
#
# etcd keeps the newest world and the last incidents, no history: a reader that starts late
# sees less than a journal has.

_LONGEST_NAME = 60
_LONGEST_REASON = 200


@dataclass(frozen=True, kw_only=True)
class JobChange:
    """A change of a job's state, as seen in etcd."""

    key: tuple[object, ...]  # equal for the same change
    at_s: float
    name: str  # of the corresponding event in journals
    generation: int | None
    text: str

    def as_record(self) -> JournalRecord:
        """The change as a journal record."""
        data = {"event": self.name, "time": self.at_s, "node": "etcd", "writer": "etcd"}
        more = {"generation": self.generation, "text": self.text}
        return JournalRecord(
            self.name, "etcd", 0, self.at_s, 0.0, line={**data, **more}, at_s=self.at_s
        )


def changes_of(view: JobView) -> Iterator[JobChange]:
    """The changes visible now: incidents, the newest world, live nodes, the job's end."""
    world = view.world
    for breakage in view.breakages:
        why = f": {printable(breakage.verdict, _LONGEST_REASON)}" if breakage.verdict else ""
        yield JobChange(
            key=("world-broken", breakage.generation, breakage.time_s),
            at_s=breakage.time_s,
            name="world-broken",
            generation=breakage.generation,
            text=f"generation {breakage.generation} ended: {incident(breakage)}{why}",
        )
    if world is not None:
        yield JobChange(
            key=("world-formed", world.generation),
            at_s=world.time_s,
            name="world-formed",
            generation=world.generation,
            text=f"generation {world.generation} with {len(world.members)} nodes, {world.size} "
            f"workers: {printable(world.reason, _LONGEST_REASON)}",
        )
    for node in view.nodes:
        yield JobChange(
            key=("node-arrived", node.node_id),
            at_s=node.joined_at_s,
            name="node-arrived",
            generation=None,
            text=f"{printable(node.name, _LONGEST_NAME)} has joined",
        )
    if view.done is not None:
        yield JobChange(
            key=("job-ended",),
            at_s=view.done.time_s,
            name="job-ended",
            generation=view.done.generation,
            text=sentence(view),
        )


class EtcdChanges:
    """Yields each change once, except changes recorded in a journal."""

    def __init__(self, read: Callable[[], JobView]) -> None:
        self._read = read
        self._known: set[tuple[object, ...]] = set()
        self._held_back: list[JobChange] = []
        self.problem = ""  # why the last read of etcd failed

    def exclude(self, records: Iterable[JournalRecord]) -> None:
        """Exclude the changes that these journal records describe."""
        self._known.update(key for record in records if (key := _key(record)) is not None)

    def take(self, *, at_once: bool) -> list[JournalRecord]:
        """New changes; unless ``at_once``, deferred to the next call, as a journal may record them.

        Raises CoordinationError if etcd denies access.
        """
        due, self._held_back = self._held_back, list(self._look())
        if at_once:
            due += self._held_back
            self._held_back = []
        due = [change for change in due if change.key not in self._known]
        self._known.update(change.key for change in due)
        return [change.as_record() for change in due]

    def _look(self) -> Iterator[JobChange]:
        try:
            view = self._read()
        except StoreUnreachable as error:
            self.problem = error.message
            return
        self.problem = ""
        yield from (change for change in changes_of(view) if change.key not in self._known)


def _key(record: JournalRecord) -> tuple[object, ...] | None:
    """The key of the change that a journal's event describes."""
    match record.name:
        case "world-formed":
            return record.name, record.whole("generation")
        case "node-arrived":
            return record.name, record.text("node_id")
        case "job-ended":
            return (record.name,)
    return None


# ----------------------------------------------------------------------------
# The last known state of a job from its journals, while etcd does not answer or has lost it.

_INCIDENTS = ("node-lost", "worker-died", "node-leaving", "hang-found")
_MAX_INCIDENTS = 5
_MAX_NODES = 64


def last_known(folder: str, run_id: str, now_s: float) -> list[str]:
    """The state according to the journals in ``folder``. Reads only the ends of the files."""
    records = sorted(JournalFolder(Path(folder)).read_tails(run_id), key=lambda r: r.time_s)
    if not records:
        return [f"last state unknown: {printable(folder)} has no events of this run"]
    return list(_lines(records, now_s))


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What the journals of a run say of it; None: nothing."""

    outcome: str | None = None  # "success" or "failure"; None: it has not ended
    exit_code: int | None = None
    nodes: int | None = None  # of its last world
    step: int | None = None


def summary(folder: str, run_id: str) -> RunSummary:
    """A run's result, nodes and step. Reads only the ends of the files."""
    records = sorted(JournalFolder(Path(folder)).read_tails(run_id), key=lambda r: r.time_s)
    ended, formed = _last(records, "job-ended"), _last(records, "world-formed")
    if ended is not None and _goes_on_after(ended, records):
        ended = None
    nodes = formed.data.get("nodes") if formed is not None else None
    return RunSummary(
        outcome=ended.text("outcome") if ended is not None else None,
        exit_code=ended.whole("exit_code") if ended is not None else None,
        nodes=len(nodes) if isinstance(nodes, list) else None,
        step=max((s for r in records if (s := r.whole("step")) is not None), default=None),
    )


def _lines(records: Sequence[JournalRecord], now_s: float) -> Iterator[str]:
    yield _state(records, now_s)
    if (saved := _last(records, "checkpoint-saved")) is not None:
        yield f"last checkpoint of step {saved.whole('step')}, {_ago(saved, now_s)}"
    yield from _nodes(records, now_s)
    incidents = [r for r in records if r.name in _INCIDENTS][-_MAX_INCIDENTS:]
    if incidents:
        yield "recent incidents:"
        yield from (f"  {_ago(r, now_s)}: {incident_of(r)}" for r in reversed(incidents))


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
    if (ended := _last(records, "job-ended")) is not None and not _goes_on_after(ended, records):
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


def in_generation(folder: str, run_id: str, generation: int) -> str:
    """The first incident of a generation, from the journals; "" if they have none."""
    current: int | None = None
    for record in sorted(JournalFolder(Path(folder)).read_tails(run_id), key=lambda r: r.time_s):
        if record.name == "world-formed":
            current = record.whole("generation")
        elif record.name in _INCIDENTS and current == generation:
            return incident_of(record)
    return ""


def incident_of(record: JournalRecord) -> str:
    """A short description of an incident."""
    why = printable(exception_line(record.text("reason")), 200)
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


def _goes_on_after(ended: JournalRecord, records: Sequence[JournalRecord]) -> bool:
    """Whether the job was started again, in a later generation. Workers write their last times
    after its end."""
    generations = [(r.time_s, r.whole("generation") or 0) for r in records]
    last = max((each for time_s, each in generations if time_s <= ended.time_s), default=0)
    return any(time_s > ended.time_s and each > last for time_s, each in generations)


def _last(records: Sequence[JournalRecord], name: str) -> JournalRecord | None:
    return next((r for r in reversed(records) if r.name == name), None)


def _ago(record: JournalRecord, now_s: float) -> str:
    return f"{duration(max(0.0, now_s - record.time_s))} ago"
