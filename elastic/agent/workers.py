"""This node's workers, as their links show them: who is there, how far, what they saw.

Everything here runs on the node's thread; the link's thread only posts into its inbox. Workers
that call ``run.retry`` say *ready*: from then on their node changes worlds without a restart.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace

from elastic.agent.failure_reporter import FailureReporter, nodes_at, nodes_of
from elastic.agent.messages import ChangeNode
from elastic.events import WorkerDied, WorkerTrouble, WorldEntered
from elastic.link.protocol import (
    Bye,
    CollectiveFailure,
    Entered,
    FlightAsk,
    Heartbeat,
    Hello,
    Left,
    MeasureSteps,
    Message,
    Permit,
    Ready,
    SigtermAnswer,
    SigtermAsk,
    WorldMessage,
)
from elastic.link.server import LinkServer, Worker, WorkerDeath
from elastic.membership.records import (
    Node,
    NodeState,
    WorldRecord,
    WorldState,
)
from elastic.membership.step_rate import StepRate
from elastic.messages.world import RankAssignment, WorldSpec, derive
from elastic.node.context import NodeContext
from elastic.node.oom_kills import OOM_KILL, OomKillCounter
from elastic.node.run_secret import STORE

IN_PROCESS = "in-process"
HUNG_EXIT_CODE = 1


@dataclass(frozen=True)
class LinkSaid:
    """A worker said something."""

    worker: Worker
    message: Message


@dataclass(frozen=True)
class WorkerEnded:
    """A worker's process is gone."""

    worker: Worker
    death: WorkerDeath


class Workers:
    """One per agent, over all starts of its workers."""

    def __init__(self, context: NodeContext, oom_kills: OomKillCounter | None = None) -> None:
        self._at = context
        self._oom_kills = oom_kills if oom_kills is not None else OomKillCounter()
        self._server = LinkServer(
            on_message=lambda worker, message: context.post(LinkSaid(worker, message)),
            on_death=lambda worker, death: context.post(WorkerEnded(worker, death)),
            on_error=context.status.fail,
        )
        self._ready: set[int] = set()  # pids
        self._left: set[int] = set()
        self._entered: dict[int, int] = {}  # pid to generation
        self._starts: dict[int, int] = {}  # pid to the start of workers that it belongs to
        self._pushed: WorldRecord | None = None  # the newest world they were told
        self.reporter = FailureReporter(context)
        self._has_parted = False  # told to leave: their ends are no deaths
        self._permit: Permit | None = None  # the last one
        self._hung: dict[int, str] = {}  # pids that this agent ends, and why

    @property
    def path(self) -> str:
        """Of the socket: ``ELASTIC_LINK`` in the workers' environment."""
        return self._server.path

    def start(self) -> None:
        self._server.start()

    def keep_key(self) -> None:
        """Workers are about to start, and to read it. From any thread."""
        self._server.keep_key()

    def close(self) -> None:
        self._server.close()

    @property
    def world(self) -> WorldRecord | None:
        """The newest world that they were told."""
        return self._pushed or self._node.running

    def ask_for_flights(self) -> None:
        """Have them say which collectives they began, for the report of a hang."""
        self._server.send(FlightAsk())

    # ── what workers say ─────────────────────────────────────────────────────────────────

    def on_said(self, worker: Worker, message: Message) -> None:
        """A message from the link."""
        match message:
            case Hello():
                self._starts[worker.pid] = self._at.status.starts
                self._at.status.workers_joined = True
                self._welcome(worker)
            case Ready():
                self._on_ready(worker)
            case Heartbeat():
                self._on_heartbeat(worker, message)
            case Entered(generation=generation, step=step):
                self._on_entered(worker, generation, step)
            case CollectiveFailure():
                self._on_failure(worker, message)
            case Left():
                self._left.add(worker.pid)
                self._note_left()
            case SigtermAsk():
                leaving = self._node.state is NodeState.LEAVING and not self._at.status.stopping
                self._server.send(SigtermAnswer(leaving=leaving), worker)
            case Bye():
                pass  # comes back with the worker's death
            case _:
                pass

    @property
    def _node(self) -> Node:
        return self._at.status.node

    def _welcome(self, worker: Worker) -> None:
        """A first world stands already; a newer one may have come since the worker began."""
        if self._permit is not None:
            self._server.send(self._permit, worker)
        if self._at.options.straggler_action != "off":
            self._server.send(MeasureSteps(window_s=self._at.options.straggler_window_s), worker)
        running = self._node.running
        if self._pushed is not None and (
            running is None or self._pushed.generation > running.generation
        ):
            self._send(self._pushed, worker)
        elif running is not None:
            self._send(running, worker)

    def _on_ready(self, worker: Worker) -> None:
        self._ready.add(worker.pid)
        present = {w.pid for w in self._server.workers()}
        if len(self._ready & present) < self._node.nproc:
            return
        if self._node.state is NodeState.STARTING:
            self._at.status.to_replace.clear()
            self._change(lambda n: replace(n, in_process=True, state=NodeState.READY))

    def _on_heartbeat(self, worker: Worker, beat: Heartbeat) -> None:
        # Without a step's duration nobody can say when a step will begin.
        if worker.local_rank == 0 and beat.generation and beat.step_time_s > 0:
            now = self._at.clock.monotonic()
            self._at.status.step_rate = StepRate(beat.generation, beat.step, beat.step_time_s, now)

    def _on_entered(self, worker: Worker, generation: int, step: int) -> None:
        self._entered[worker.pid] = generation
        now = self._at.clock.monotonic()
        if worker.local_rank == 0 and (step_rate := self._at.status.step_rate) is not None:
            self._at.status.step_rate = StepRate(generation, step, step_rate.step_time_s, now)
        present = [w.pid for w in self._server.workers()]
        everybody = sum(self._entered.get(pid) == generation for pid in present)
        if everybody < self._node.nproc:
            return
        world = self._pushed
        if world is None or world.generation != generation:
            return
        self._at.journal.emit(
            WorldEntered(
                generation=generation,
                first_rank=world.first_rank_of(self._node.node_id),
                size=world.size,
                waited_s=0.0,
            )
        )
        self._at.status.failure_step = None
        self._change(
            lambda n: replace(
                n,
                running=world,
                failure=None,
                failure_exit_code=None,
                failure_step=None,
                failure_is_oom_kill=False,
            )
        )

    def _on_failure(self, worker: Worker, said: CollectiveFailure) -> None:
        generation, error = said.generation, said.error
        newest = self._pushed or self._node.running
        if newest is not None and generation < newest.generation and not newest.switch_at_step:
            return  # already answered
        if self.reporter.has_reported(generation):
            return
        self._at.journal.emit(
            WorkerTrouble(generation=generation, local_rank=worker.local_rank, error=error)
        )
        accused = (
            *nodes_of(newest, generation, said.missing),
            *nodes_at(newest, generation, said.unreachable),
        )
        self.reporter.report(generation, error, accused=accused)

    def is_hung(self, pid: int, reason: str) -> None:
        """A worker is about to be ended."""
        self._hung[pid] = reason

    def world_is_hung(self, generation: int, reason: str) -> None:
        """The workers wait for each other, and all live: the same ranks form another world."""
        if self.world is None or self.world.generation > generation:
            return
        self.reporter.report(generation, reason)

    def _note_left(self) -> None:
        present = {w.pid for w in self._server.workers()}
        if self._left and present <= self._left:
            with self._at.status.changed:
                self._at.status.workers_left = True
                self._at.status.changed.notify_all()

    # ── what becomes of them ─────────────────────────────────────────────────────────────

    def on_ended(self, worker: Worker, death: WorkerDeath) -> None:
        """A process is gone: tell the others now, torchrun notices later."""
        was_ready = worker.pid in self._ready
        hung = self._hung.pop(worker.pid, None)
        for known in (self._ready, self._left):
            known.discard(worker.pid)
        self._entered.pop(worker.pid, None)
        start = self._starts.pop(worker.pid, self._at.status.starts)
        if self._has_parted or self._node.state is NodeState.LEAVING:
            self._note_left()
            return
        if self._at.status.stopping or start != self._at.status.starts:
            return  # torchrun ends them, or has ended them, to start them in another world
        bye = death.said_bye
        is_unknown = death.exit_code is None and death.signal is None
        if death.exit_code == 0 or (is_unknown and bye is not None and bye.clean):
            return
        _kill_group(worker.pid)
        is_failure = was_ready and self._node.state in (NodeState.READY, NodeState.STARTING)
        is_killed = death.signal == signal.SIGKILL and hung is None
        # Asked once for each failure: of what it has been told, the counter says no more.
        is_oom_kill = is_failure and is_killed and self._oom_kills.has_killed()
        text = hung or (bye.error if bye is not None and bye.error else _how(worker, death))
        if is_oom_kill:
            text = f"{text}: {OOM_KILL}"
        self._at.status.failure_step = bye.step if bye is not None else None
        self._at.journal.emit(WorkerDied(pid=worker.pid, local_rank=worker.local_rank, reason=text))
        if not is_failure:
            return  # torchrun restarts it; the others have not trained with it without a restart
        generation = self._generation
        is_replaced = self._can_be_replaced(worker)
        if is_replaced:  # before the state: the main thread reads both
            self._pushed = None
            self._at.status.to_replace.add(worker.pid)
        self._change(
            lambda n: replace(
                n,
                state=NodeState.STARTING if is_replaced else NodeState.ARRIVED,
                in_process=False,
                running=None,
                arrived_for=generation,
                failure=text,
                # What this agent has ended was not killed from outside: it is held against it.
                failure_exit_code=_exit_code(death) if hung is None else HUNG_EXIT_CODE,
                failure_step=self._at.status.failure_step,
                failure_is_oom_kill=is_oom_kill,
            )
        )

    def _can_be_replaced(self, worker: Worker) -> bool:
        """Whether its siblings can wait for another process in its place, with their state."""
        status, node = self._at.status, self._node
        siblings = [w.pid for w in self._server.workers() if w.pid != worker.pid]
        return (
            status.can_replace
            and (node.in_process or bool(status.to_replace))
            and any(pid in self._ready for pid in siblings)
            and not self._left
        )

    @property
    def _generation(self) -> int:
        """The newest generation that this node was in."""
        running, pushed = self._node.running, self._pushed
        known = [w.generation for w in (running, pushed) if w is not None and self._is_in(w)]
        return max([*known, self._node.arrived_for])

    def _is_in(self, world: WorldRecord) -> bool:
        return self._node.node_id in world.node_ids

    # ── what they are told ───────────────────────────────────────────────────────────────

    def learn(self, world: WorldRecord | None) -> None:
        """The newest world: hand it on if it concerns workers that need no restart."""
        node = self._node
        if world is None or not node.in_process:
            return
        if self._pushed is not None and world.generation <= self._pushed.generation:
            return
        if world.generation <= node.arrived_for:
            return  # over, since a worker of this node died in it
        running = node.running
        if running is not None and world.generation <= running.generation:
            return
        is_member = node.node_id in world.node_ids
        if running is None and not is_member:
            return  # a spare: it waits for a world with it
        self._pushed = world
        self._send(world, None)

    def permit(self, until_s: float) -> None:
        """Let them train until then, by this machine's boot time."""
        self._permit = Permit(until_s=until_s)
        self._server.send(self._permit)

    @property
    def are_all_here(self) -> bool:
        """Whether every worker of this node has said hello, and so heeds its permission."""
        return len(self._server.workers()) >= self._node.nproc > 0

    def part(self, reason: str) -> None:
        """Have all workers leave at their next boundary, and save, as the last ones of a job do."""
        newest = self._pushed or self._node.running
        assert newest is not None
        self._pushed = replace(
            newest,
            generation=newest.generation + 1,
            members=(),
            mode=IN_PROCESS,
            switch_at_step=None,
            state=WorldState.ACTIVE,
            reason=reason,
        )
        self._has_parted = True
        self._send(self._pushed, None)

    def forget(self) -> None:
        """The workers are started anew."""
        self._ready.clear()
        self._left.clear()
        self._entered.clear()
        self._pushed = None
        self._at.status.workers_left = False
        self._at.status.to_replace.clear()

    def _send(self, world: WorldRecord, to: Worker | None) -> None:
        for worker in self._server.workers() if to is None else (to,):
            self._server.send(self._message(world, worker), worker)

    def _message(self, world: WorldRecord, worker: Worker) -> WorldMessage:
        node = self._node
        # A world of the other mode is entered by a restart: to these processes it is the end.
        runs_it = node.running is not None and node.running.generation == world.generation
        is_member = node.node_id in world.node_ids and (world.mode == IN_PROCESS or runs_it)
        return WorldMessage(
            world=derive(WorldSpec, world),
            assignment=self._assignment(world, worker) if is_member else None,
            node_rank=world.node_ids.index(node.node_id) if is_member else 0,
            nodes=len(world.members),
            store_key=self._at.secret.key(STORE).text,
            store_tls=tls.files if (tls := self._at.tls) is not None else None,
        )

    def _assignment(self, world: WorldRecord, worker: Worker) -> RankAssignment:
        return RankAssignment(
            rank=world.first_rank_of(self._node.node_id) + worker.local_rank,
            size=world.size,
            local_rank=worker.local_rank,
            local_size=self._node.nproc,
        )

    def _change(self, change: Callable[[Node], Node]) -> None:
        """At once for the eyes of the main thread; published with the next registration."""
        self._at.status.change_node(change)
        self._at.post(ChangeNode(lambda node: node))


def _kill_group(pid: int) -> None:
    """What the dead worker left: its data workers hold its sockets open, so that peers would not
    notice its death. torchrun makes every worker the leader of a group of its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgrp() != pid:
            os.killpg(pid, signal.SIGKILL)


def _how(worker: Worker, death: WorkerDeath) -> str:
    who = f"local rank {worker.local_rank} (pid {worker.pid})"
    if death.signal is not None:
        return f"{who} was ended by {signal.Signals(death.signal).name}"
    if death.exit_code is not None:
        return f"{who} ended with exit code {death.exit_code}"
    return f"{who} is gone"


def _exit_code(death: WorkerDeath) -> int:
    if death.signal is not None:
        return -death.signal
    return death.exit_code if death.exit_code is not None else 1
