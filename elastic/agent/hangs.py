"""This node's part in hang detection: publish its workers' state, execute verdicts.

A separate thread watches the workers (:mod:`elastic.hangs.watch`) and posts into the node's inbox;
the leader judges (:mod:`elastic.agent.judges`). As long as every rank makes
progress, nothing is published.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from elastic.agent.node import NodeContext
from elastic.hangs import stacks
from elastic.hangs.page import MAX_SHOWN_RANKS, BudgetPolicy, RankFacts, StackGroup
from elastic.hangs.report import HangResponse, Judged, ReportFolder, Share
from elastic.hangs.stacks import StackSource
from elastic.hangs.verdict import FlightEntry, HangAction, Judgment, describe_wait
from elastic.hangs.watch import HangWatch
from elastic.link.link import ProgressPage, Worker
from elastic.membership.records import (
    HangFacts,
    HangStacks,
    HangVerdict,
    RankFlight,
    WorldRecord,
    decode,
    encode,
)
from elastic.store.keyvalue import Entry, Lease
from elastic.telemetry.runs import chosen_journal
from elastic.tuning import intervals
from elastic.tuning.intervals import HANG_KILL_S
from elastic.tuning.options import AgentOptions

Flights = Iterable[tuple[int, tuple[FlightEntry, ...]]]  # by rank


@dataclass(frozen=True)
class RanksAreQuiet:
    """The ranks of this node that make no progress; empty if all do."""

    generation: int
    ranks: tuple[RankFacts, ...]


@dataclass(frozen=True)
class StacksTaken:
    """Stacks of this node's ranks, for the report of the acting node."""

    generation: int
    stacks: tuple[StackGroup, ...]
    flights: tuple[RankFlight, ...]


@dataclass(frozen=True)
class WorkerHung:
    """A worker is about to be ended."""

    pid: int
    reason: str


@dataclass(frozen=True)
class WorkerUnkillable:
    """A worker still exists although it was killed."""

    pid: int
    reason: str


@dataclass(frozen=True)
class WorldHung:
    """The ranks of this generation must form another world."""

    generation: int
    reason: str


def policy_of(options: AgentOptions) -> BudgetPolicy:
    """The budgets that follow from the options."""
    return BudgetPolicy(
        hang_timeout_s=options.hang_timeout_s, outside_step_s=options.hang_script_timeout_s
    )


def _unkillable(pid: int, facts: RankFacts) -> str:
    return (
        f"SIGKILL has had no effect on pid {pid} for {HANG_KILL_S:g} s ({describe_wait(facts)}): "
        "this node cannot be used until that process has ended"
    )


class Hangs:
    """One per agent, unless its options turn it off. On the node's thread."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        options, node = context.options, context.status.node
        folder = chosen_journal()
        self._response = HangResponse(
            node=node.name,
            acts=options.hang_detection == "on",
            stop_grace_s=min(intervals.STOP_GRACE_S, options.hang_timeout_s / 2),
            folder=ReportFolder(folder),
            journal=context.journal,
            before_kill=lambda pid, reason: context.post(WorkerHung(pid, reason)),
            abort=lambda generation, reason: context.post(WorldHung(generation, reason)),
            clock=context.clock,
        )
        self.watch = HangWatch(
            policy=policy_of(options),
            node=node.name,
            tick_s=min(intervals.HANG_TICK_S, options.hang_timeout_s / 5),
            on_facts=lambda generation, ranks: context.post(RanksAreQuiet(generation, ranks)),
            on_stopped=lambda worker, facts, stopped_s: self._response.on_stopped(
                self.watch, worker, facts, stopped_s
            ),
            on_error=context.status.fail,
            on_unkillable=lambda worker, facts: context.post(
                WorkerUnkillable(worker.pid, _unkillable(worker.pid, facts))
            ),
            clock=context.clock,
        )
        self._generation = 0
        self._nodes = 0  # of the newest world, if this is one of them
        self._quiet = RanksAreQuiet(0, ())
        self._is_due = False
        self._is_written = False
        self._stacks: StacksTaken | None = None  # to be published
        self._taken: StacksTaken | None = None  # the last ones

    # ── watched workers ──────────────────────────────────────────────────────────────────

    def on_page(self, worker: Worker, page: ProgressPage) -> None:
        """A worker has reported the location of its page."""
        source = StackSource(page.stacks_fd, page.stacks_signal)
        self.watch.add(worker.pid, worker.local_rank, page.fd, source)

    def watch_world(self, world: WorldRecord | None) -> None:
        """The newest world that the workers have received."""
        if world is None or world.generation == self._generation:
            return
        self._generation = world.generation
        node_id = self._context.status.node.node_id
        is_member = node_id in world.node_ids
        first_rank = world.first_rank_of(node_id) if is_member else None
        self._nodes = len(world.members) if is_member else 0
        self.watch.enter_world(world.generation, first_rank)

    # ── facts for the leader ─────────────────────────────────────────────────────────────

    def on_quiet(self, quiet: RanksAreQuiet) -> None:
        """The result of the watch."""
        self._quiet, self._is_due = quiet, True

    def publish(self, lease: Lease) -> None:
        """Write the state, or delete it. Called with the node's live lease."""
        node_id = self._context.status.node.node_id
        if (taken := self._stacks) is not None:
            self._stacks = None
            record = HangStacks(
                node_id=node_id,
                generation=taken.generation,
                stacks=taken.stacks,
                flights=taken.flights,
            )
            self._context.store.put(
                self._context.keys.hang_stack(node_id), encode(record), lease=lease
            )
        if not self._is_due:
            return
        key = self._context.keys.hang(node_id)
        if self._quiet.ranks:
            facts = HangFacts(
                node_id=node_id, generation=self._quiet.generation, ranks=self._quiet.ranks
            )
            self._context.store.put(key, encode(facts), lease=lease)
            self._is_written = True
        elif self._is_written:
            self._context.store.delete(key)
            self._is_written = False
        self._is_due = False

    def register_again(self) -> None:
        """The lease is new: keys of the old one are deleted."""
        self._is_written, self._is_due = False, bool(self._quiet.ranks)

    # ── the leader's verdict ─────────────────────────────────────────────────────────────

    def on_verdict(self, entry: Entry) -> None:
        """Execute it if this is the acting node. Raises RecordError."""
        record = decode(HangVerdict, entry.key, entry.value)
        if record.node_id != self._context.status.node.node_id:
            self._take_stacks(record)
            return
        judged = Judged(
            verdict=Judgment(
                action=record.action,
                kind=record.kind,
                culprits=record.culprits,
                culprit=record.culprit,
                confidence=record.confidence,
                reason=record.reason,
            ),
            generation=record.generation,
            size=record.size,
            ranks=record.ranks,
        )
        self.watch.post(lambda: self._response.carry_out(self.watch, judged))

    def _take_stacks(self, record: HangVerdict) -> None:
        """Take the distinct stacks of this node's ranks for another node's report."""
        is_wanted = record.action in (HangAction.KILL, HangAction.ABORT_AND_REFORM)
        # Every node watches the stacks: of a large job, those of the verdict's ranks are enough.
        name = self._context.status.node.name
        is_shown = any(r.node == name for r in record.ranks) or len(record.ranks) < MAX_SHOWN_RANKS
        if not is_wanted or not self._nodes or not is_shown:
            return
        share = Share.of(self._nodes, record.size)

        def send(groups: tuple[StackGroup, ...], flights: Flights) -> None:
            shown = (RankFlight(rank=r, entries=f[-share.flight_entries :]) for r, f in flights)
            self._context.post(StacksTaken(record.generation, groups, tuple(shown)))

        def take() -> None:
            workers = {self.watch.facts(worker).rank: worker for worker in self.watch.workers}
            taken_of = ((r, stacks.take(w.pid, w.stacks)) for r, w in workers.items())
            groups = stacks.group(taken_of, record.culprits)
            flights = self.watch.flights_of(
                record.generation, lambda rank, flight: send((), [(rank, flight)])
            ).items()
            send(stacks.within(groups, share.characters), flights)

        self.watch.post(take)

    def on_stacks_taken(self, taken: StacksTaken) -> None:
        """Have the stacks written to the store in the node's next iteration."""
        last = self._taken
        if last is not None and last.generation == taken.generation and not taken.stacks:
            taken = replace(last, flights=(*last.flights, *taken.flights))  # late ones
        self._stacks = self._taken = taken

    def on_stacks(self, entry: Entry) -> None:
        """Stacks of another node have arrived. Raises RecordError."""
        record = decode(HangStacks, entry.key, entry.value)
        if record.node_id == self._context.status.node.node_id:
            return
        flights = {flight.rank: flight.entries for flight in record.flights}
        self.watch.post(
            lambda: self._response.add_stacks(self.watch, record.generation, record.stacks, flights)
        )
