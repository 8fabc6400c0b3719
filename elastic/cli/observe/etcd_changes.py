"""What etcd shows of a job as events, for where its journals cannot be read, or not all of them.

etcd keeps the newest world and what broke the last ones, no history: a reader that starts late
sees less than a journal tells.
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
    """Something that has happened to the job."""

    key: tuple[object, ...]  # equal for the same change
    at_s: float
    name: str  # as of the event that journals have of it
    generation: int | None
    text: str

    def as_record(self) -> JournalRecord:
        """As a line of a journal that etcd would write."""
        data = {"event": self.name, "time": self.at_s, "node": "etcd", "writer": "etcd"}
        more = {"generation": self.generation, "text": self.text}
        return JournalRecord(
            self.name, "etcd", 0, self.at_s, 0.0, line={**data, **more}, at_s=self.at_s
        )


def changes_of(view: JobView) -> Iterator[JobChange]:
    """What is to be seen now, oldest kinds first."""
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
    """Gives each change once, and none that a journal tells."""

    def __init__(self, read: Callable[[], JobView]) -> None:
        self._read = read
        self._known: set[tuple[object, ...]] = set()
        self._held_back: list[JobChange] = []
        self.problem = ""  # why etcd could not be read at last

    def told(self, records: Iterable[JournalRecord]) -> None:
        """Journals tell these."""
        self._known.update(key for record in records if (key := _key(record)) is not None)

    def take(self, *, at_once: bool) -> list[JournalRecord]:
        """What is new. Else than ``at_once`` with the next call: a journal may be about to tell it.

        Raises CoordinationError where etcd refuses.
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
    """Of the change that an event of a journal is about."""
    match record.name:
        case "world-formed":
            return record.name, record.whole("generation")
        case "node-arrived":
            return record.name, record.text("node_id")
        case "job-ended":
            return (record.name,)
    return None
