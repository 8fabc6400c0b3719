"""Changes of a job seen in etcd, as events, for use where not all journals can be read.

etcd keeps the newest world and the last incidents, no history: a reader that starts late
sees less than a journal has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from elastic.cli.observe.job_view import JobView
from elastic.cli.observe.printable import printable
from elastic.cli.observe.sentence import incident, sentence
from elastic.errors import StoreUnreachable
from elastic.telemetry.journal_reader import JournalRecord

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
