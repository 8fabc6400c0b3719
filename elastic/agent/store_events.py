"""The store's events for a node (the world, the leader, the job's end), and its failures.

On the node's thread: the watch on the job's keys posts its events into the node's inbox.
"""

from __future__ import annotations

import logging

from elastic.agent.ending.job_end import record_end
from elastic.agent.isolation import IsolationDetector
from elastic.agent.messages import BaseEvent
from elastic.agent.registration import Registration
from elastic.agent.supervision.supervisor import WorkerSupervisor
from elastic.errors import CoordinationError, ElasticError, LeaseGone, RecordError, StoreUnreachable
from elastic.events import StoreProblem
from elastic.leadership.succession import Succession
from elastic.membership.records import Done, decode
from elastic.node.context import NodeContext
from elastic.store.keyvalue import (
    Deleted,
    Disconnected,
    Entry,
    Put,
    Reconnected,
    Reset,
    Watch,
    WatchEvent,
)


def watch_job(context: NodeContext) -> Watch:
    """Watch the job's keys, except those that only a leader watches, and post changes to the
    inbox."""
    keys = context.keys
    return context.store.watch(
        [keys.leader, keys.world, keys.done, keys.hang_verdict, keys.hang_stacks, keys.profile],
        lambda event: context.post(BaseEvent(event)),
        name="elastic-watch-world",
    )


class StoreEvents:
    """Handles the watch's events, and reports the store's failures."""

    def __init__(
        self,
        context: NodeContext,
        *,
        succession: Succession,
        registration: Registration,
        supervisor: WorkerSupervisor,
        isolation: IsolationDetector,
    ) -> None:
        self._at = context
        self._succession = succession
        self._registration = registration
        self._supervisor = supervisor
        self._isolation = isolation

    # ── the watch ────────────────────────────────────────────────────────────────────────

    def handle(self, event: WatchEvent) -> None:
        """An event of the watch on the job's keys."""
        keys, status = self._at.keys, self._at.status
        self._isolation.watch_is_cut = isinstance(event, Disconnected)
        match event:
            case Reset(snapshot, reason):
                self._on_reset({e.key: e for e in snapshot.entries}, reason)
            case Put(entry) if entry.key == keys.leader:
                self._succession.learn(entry)
            case Put(entry) if entry.key == keys.world:
                self.learn_world(entry)
            case Put(entry) if entry.key == keys.done:
                record_end(self._at, decode(Done, entry.key, entry.value))
            case Put(entry):
                self._supervisor.on_entry(entry)
            case Deleted(key, revision) if key == keys.leader:
                self._succession.learn_absent(revision)
            case Deleted(key, revision) if key == keys.world:
                if revision > status.world.mod_revision:
                    status.set_world_revision(0)
            case Disconnected(error):
                self.report(StoreUnreachable(error), "training continues; reconnecting")
            case Reconnected():
                self._at.journal.emit(StoreProblem(error="", consequence="the store is back"))

    def _on_reset(self, entries: dict[str, Entry], reason: str) -> None:
        keys, status = self._at.keys, self._at.status
        if reason == "wiped":
            self._at.journal.emit(
                StoreProblem(
                    error="the store was wiped or replaced",
                    consequence="this node registers again",
                ),
                level=logging.WARNING,
            )
            self._registration.expire()
            self._succession.forget()
            status.set_world_revision(0)
        if (leader := entries.get(keys.leader)) is not None:
            self._succession.learn(leader)
        else:
            self._succession.learn_absent()
        if (verdict := entries.get(keys.hang_verdict)) is not None:
            self._supervisor.on_entry(verdict)
        if (done := entries.get(keys.done)) is not None:
            record_end(self._at, decode(Done, done.key, done.value))
        if (world := entries.get(keys.world)) is not None:
            self.learn_world(world)
        else:
            status.set_world_revision(0)

    def learn_world(self, entry: Entry) -> None:
        """The world as read by this node."""
        self._at.status.learn_world(entry, self._at.clock.monotonic())

    def learn_pushed(self, record: bytes) -> None:
        """The leader's world, ahead of the watch."""
        self._at.status.learn_pushed(record, self._at.clock.monotonic())

    # ── failures ─────────────────────────────────────────────────────────────────────────

    def on_broken_record(self, error: RecordError) -> bool:
        """A record is invalid. Returns whether the node continues, and retries."""
        if self._at.status.node.running is None and self._at.status.world.world is None:
            self._at.status.fail(error)  # a joining node cannot handle it in a meaningful way
            return False
        self.report(error, "training continues")
        return True

    def on_failed_call(self, error: CoordinationError) -> bool:
        """The store has refused a call or not responded. Returns whether the node continues, and
        retries."""
        if isinstance(error, LeaseGone):
            self._registration.expire()
        elif not isinstance(error, StoreUnreachable) and self._at.status.node.running is None:
            self._at.status.fail(error)
            return False
        consequence = "training continues; trying again"
        if error.hint and not isinstance(error, StoreUnreachable):
            consequence += f"; {error.hint}"
        self.report(error, consequence)
        return True

    def report(self, error: ElasticError, consequence: str) -> None:
        """Write a problem of the store to the journal, unless it is the current one."""
        known, self._at.status.store_problem = self._at.status.store_problem, error
        if known is None or error.message != known.message:
            self._at.journal.emit(
                StoreProblem(error=error.message, consequence=consequence), level=logging.WARNING
            )
