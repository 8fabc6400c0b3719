"""The node's side of the protocol as torchrun's main thread sees it.

Arrive, wait for a world, enter it, ask whether there is a newer one, leave or finish. The work
happens on the thread of :mod:`elastic.agent.loop`; the two meet on the board.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from dataclasses import replace

from elastic.agent.leaving import Leaving
from elastic.agent.loop import NodeLoop
from elastic.agent.messages import ChangeNode, WorkersStart
from elastic.agent.parking import park
from elastic.agent.workers import IN_PROCESS
from elastic.agent.world_wait import WorldWait
from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.errors import NodeRefused, RecordError
from elastic.events import NodeArrived, NodeLeaving, WorldEntered
from elastic.hangs.watch import Supervised
from elastic.health.endpoints import Routes, routes_of
from elastic.membership.decision import Policy, refusal
from elastic.membership.records import (
    Done,
    Keys,
    Member,
    Node,
    NodeState,
    WorldRecord,
    decode,
)
from elastic.node.oom_kills import OOM_KILL, OomKillCounter
from elastic.node.run_secret import RunSecret
from elastic.node.status import NodeStatus
from elastic.secure_channel.tls import Tls
from elastic.store.keyvalue import Entry, KeyValue
from elastic.telemetry.journal import EventSink
from elastic.tuning.agent_intervals import (
    FINISH_WITHOUT_STORE_S,
    MAIN_THREAD_SLICE_S,
)
from elastic.tuning.agent_options import AgentOptions


class NodeService:
    """One node of the job. Start once, close once."""

    def __init__(
        self,
        *,
        store: KeyValue,
        keys: Keys,
        secret: RunSecret,
        node: Node,
        options: AgentOptions,
        journal: EventSink,
        clock: Clock = SYSTEM_CLOCK,
        last_contact_s: Callable[[], float] | None = None,
        oom_kills: OomKillCounter | None = None,
        tls: Tls | None = None,
    ) -> None:
        self._store = store
        self._keys = keys
        self._options = options
        self._journal = journal
        self._clock = clock
        self._oom_kills = oom_kills if oom_kills is not None else OomKillCounter()
        node = replace(node, tls=tls is not None)  # for all to see who can mix
        self._status = NodeStatus(node, keys, clock.monotonic())
        self._loop = NodeLoop(
            store=store,
            keys=keys,
            secret=secret,
            options=options,
            policy=Policy(
                min_nodes=node.min_nodes,
                max_nodes=node.max_nodes,
                last_call_s=options.last_call_s,
                join_window_s=options.join_window_s,
                join_timeout_s=options.join_timeout_s,
                takeover_s=options.takeover_s,
            ),
            status=self._status,
            clock=clock,
            journal=journal,
            last_contact_s=last_contact_s,
            oom_kills=self._oom_kills,
            tls=tls,
        )
        self._wait = WorldWait(
            store=store,
            keys=keys,
            options=options,
            status=self._status,
            loop=self._loop,
            clock=clock,
        )

    @property
    def node_id(self) -> str:
        return self._status.node.node_id

    @property
    def member(self) -> Member:
        """This node, as a world would name it."""
        return self._status.node.as_member()

    @property
    def running(self) -> WorldRecord | None:
        """The world that this node's workers run."""
        return self._status.node.running

    def position(self) -> dict[str, int | None]:
        """Which world this node's workers run, and the step that they have reported."""
        running, step_rate = self._status.node.running, self._status.step_rate
        return {
            "generation": running.generation if running is not None else None,
            "step": step_rate.step if step_rate is not None else None,
        }

    def peer_addresses(self, world: WorldRecord | None) -> tuple[str, ...]:
        """Where the other nodes of a world are reached, that of rank 0 first.

        None: of the world that runs without this node.
        """
        world = world if world is not None else self._status.world.world
        members = world.members if world is not None else ()
        return tuple(m.liveness_host for m in members if m.node_id != self.node_id)

    def start(self) -> None:
        """Listen and begin to learn; the node registers with its first arrival."""
        port = self._loop.liveness_port
        self._status.change_node(lambda node: replace(node, liveness_port=port))
        self._loop.start()

    def arrive(
        self,
        *,
        nproc: int,
        role: str,
        ports: tuple[int, ...],
        failure: str | None,
        failure_exit_code: int | None,
    ) -> None:
        """Say that this node waits for a world, and why it left the last one.

        Raises:
            NodeRefused: this node cannot mix with the job.
            CoordinationError: the store cannot be asked.
        """
        node = self._status.node
        if node.running is None:
            self._refuse_if_it_cannot_mix(node)
        self._status.stopping = True  # until new workers are started
        after = node.running.generation if node.running else node.arrived_for
        is_oom_kill = failure_exit_code == -signal.SIGKILL and (
            node.failure_is_oom_kill or self._oom_kills.has_killed()
        )
        if is_oom_kill and OOM_KILL not in (failure or ""):
            failure = f"{failure or 'a worker was ended by SIGKILL'}: {OOM_KILL}"
        self._journal.emit(
            NodeArrived(after_generation=after, failure=failure, exit_code=failure_exit_code)
        )
        self._change(
            lambda node: replace(
                node,
                nproc=nproc,
                role=role,
                ports=ports,
                state=NodeState.ARRIVED,
                in_process=False,
                running=None,
                arrived_for=after,
                failure=failure,
                failure_exit_code=failure_exit_code,
                failure_step=self._status.failure_step if failure_exit_code is not None else None,
                failure_is_oom_kill=is_oom_kill,
            )
        )
        # After the change: while the node still counts as running its last world, the next one
        # without it would be told to the workers that are started now.
        self._loop.post(WorkersStart())

    def _refuse_if_it_cannot_mix(self, node: Node) -> None:
        entry = self._store.get(self._keys.world)
        others = self._store.list(self._keys.nodes).entries
        world = decode(WorldRecord, entry.key, entry.value) if entry is not None else None
        reference = _reference(world, others, but=node.node_id)
        said = refusal(node, reference) if reference is not None else None
        if said is not None:
            raise NodeRefused(
                f"node {node.name} cannot join {self._keys.root}: {said}",
                hint="start it with the same --nnodes, library version and kind of connections "
                "(with TLS or without) as the others, "
                "or use another --rdzv-id",
            )

    def wait_for_world(self) -> WorldRecord | None:
        """Block until this node is in a world that it has not run yet.

        None: the job runs without this node and changes worlds without a restart: workers are
        to be started now, and join when they are ready.

        Raises:
            JoinTimeout: none within ``join_timeout_s``, and no healthy world that is full.
            JobFailed, BudgetSpent: the job has ended without success.
            JobSucceeded: it has ended with success.
        """
        return self._wait.run()

    def warm_up(self) -> None:
        """The main thread starts workers that are in no world yet."""
        self._begin_start()
        self._change(lambda node: replace(node, state=NodeState.STARTING, running=None))

    def _begin_start(self) -> None:
        """torchrun starts the workers next: before the node's state says so."""
        self._status.starts += 1
        self._status.stopping = False
        self._status.failure_step = None
        self._oom_kills.mark()

    def enter(self, world: WorldRecord, *, waited_s: float) -> None:
        """The main thread hands ``world`` to its workers."""
        self._begin_start()
        self._journal.emit(
            WorldEntered(
                generation=world.generation,
                first_rank=world.first_rank_of(self.node_id),
                size=world.size,
                waited_s=waited_s,
            )
        )
        self._change(
            lambda node: replace(
                node,
                state=NodeState.STARTING,
                running=world,
                failure=None,
                failure_exit_code=None,
                failure_step=None,
                failure_is_oom_kill=False,
            )
        )

    def newer_world(self) -> bool:
        """Whether the workers of this node run a world that is no longer the newest.

        Raises like :meth:`wait_for_world` once the job has failed.
        """
        with self._status.changed:
            self._status.raise_if_failed()
            entry, node = self._status.world, self._status.node
        world, running = entry.world, node.running
        if world is None:
            return False
        if node.in_process:
            restarts = self._must_restart(world, node, entry.since_s)
            self._wait.raise_if_paused_for_long(world, entry.since_s)
        else:
            restarts = running is not None and world.generation > running.generation
        self._status.stopping = self._status.stopping or restarts
        return restarts

    def _must_restart(self, world: WorldRecord, node: Node, since_s: float) -> bool:
        """Whether workers that could change worlds by themselves cannot enter this one."""
        is_member = node.node_id in world.node_ids
        if node.running is None:  # ready, and in no world yet
            return is_member and world.mode != IN_PROCESS
        if world.generation <= node.running.generation or node.state is NodeState.LEAVING:
            return False
        if not is_member and self._leaves_at_switch(world, since_s):
            return False
        return not is_member or world.mode != IN_PROCESS

    def _leaves_at_switch(self, world: WorldRecord, since_s: float) -> bool:
        """Whether the workers go on until a planned world without this node takes over, as those of
        a node that leaves do: ended before, they would break a step of the others."""
        left_s = since_s + self._options.leave_grace_s - self._clock.monotonic()
        return world.switch_at_step is not None and not self._status.workers_left and left_s > 0

    @property
    def link_path(self) -> str:
        """The socket for this node's workers; empty in restart mode."""
        return self._loop.link_path

    def keep_link_key(self) -> None:
        """Workers are about to start: the key of the link is where they look for it."""
        self._loop.keep_link_key()

    def supervise(self, workers: Iterable[Supervised]) -> None:
        """The processes that torchrun supervises, for the detection of hangs."""
        self._loop.supervise(workers)

    def tell_guard(self, permit: Callable[[float], object]) -> None:
        """Call ``permit`` with the end of the workers' permission whenever it is extended."""
        self._loop.permission.tell_guard = permit

    def allow_replacement(self, is_allowed: bool) -> None:
        """Whether a single worker that dies from now on can be replaced."""
        self._status.can_replace = is_allowed

    @property
    def is_replacing(self) -> bool:
        """Whether workers have died and those in their place are not ready yet."""
        return bool(self._status.to_replace)

    def is_to_be_replaced(self, pid: int) -> bool | None:
        """Whether this worker, which has failed, is to be replaced, and its siblings stay.

        None: the node's thread has not decided it yet.
        """
        status = self._status
        node = status.node
        if pid in status.to_replace:
            return not status.stopping
        is_open = node.in_process and node.state is NodeState.READY
        return None if is_open and status.can_replace and not status.stopping else False

    @property
    def workers_have_joined(self) -> bool:
        """Whether a worker has called elastic.join(), in this start of workers or an earlier one.
        Not known in restart mode."""
        return self._status.workers_joined

    @property
    def has_first_rank(self) -> bool:
        """Whether rank 0 of the present world is one of this node's workers."""
        running = self._status.node.running
        return running is not None and running.node_ids[:1] == (self.node_id,)

    @property
    def can_leave_in_order(self) -> bool:
        """Whether the workers can be asked to leave at a step's boundary."""
        return self._status.node.in_process and self._status.node.running is not None

    @property
    def has_left(self) -> bool:
        """Whether the workers have left the job, after :meth:`leave`."""
        return self._status.workers_left

    def expect_end_of_workers(self) -> None:
        """They are about to be ended in order: that is no failure of theirs."""
        self._status.stopping = True

    @property
    def job_is_done(self) -> bool:
        """Whether the job has ended with success."""
        return self._status.done is not None and self._status.done.exit_code == 0

    def leave(self, reason: str, *, failed: bool = False) -> None:
        """Tell the others to go on without this node. Safe in a signal handler."""
        state = NodeState.FAILED if failed else NodeState.LEAVING
        self._loop.post(ChangeNode(lambda node: replace(node, state=state)))
        self._journal.emit(NodeLeaving(reason=reason))

    @property
    def done(self) -> Done | None:
        """How the job has ended."""
        return self._status.done

    def finished(self) -> None:
        """This node's workers ended well."""
        self._change(lambda node: replace(node, state=NodeState.FINISHED))

    def finish(self, *, patience_s: float = FINISH_WITHOUT_STORE_S) -> Done | None:
        """This node's workers ended well: wait until every live member's have.

        None if the store was out of reach for ``patience_s``: too long to tell.
        """
        self.finished()
        status, trouble_since_s = self._status, None
        with status.changed:
            while status.done is None:
                status.watchdog.beat()
                if status.fatal is not None or not self._loop.alive:
                    return None
                now = self._clock.monotonic()
                trouble_since_s = (trouble_since_s or now) if status.store_problem else None
                if trouble_since_s is not None and now - trouble_since_s > patience_s:
                    return None
                status.changed.wait(MAIN_THREAD_SLICE_S)
            return status.done

    def beat(self) -> None:
        """torchrun's main thread turns."""
        self._status.watchdog.beat()

    @property
    def probes(self) -> Routes:
        """What ``/livez`` and ``/readyz`` answer."""
        return routes_of(self._status, self._options.hung_after_s)

    def fail(self, error: BaseException) -> None:
        """End this node with ``error``: a thread that it needs has died."""
        self._status.fail(error)

    def close(self) -> None:
        """Leave the store in order: resign, delete the node's key, end the lease. Idempotent."""
        self._loop.close()
        self._store.close()

    def park(self, leaving: Leaving) -> None:
        """After :meth:`close`, if the job is over: stay until SIGTERM."""
        if self._status.done is not None:
            park(self._status, self._status.done, leaving, self._journal, self._clock)

    def _change(self, change: Callable[[Node], Node]) -> None:
        """Change the record now, for this thread's own eyes, and have it published."""
        self._status.change_node(change)
        self._loop.post(ChangeNode(lambda node: node))


def _reference(
    world: WorldRecord | None, entries: tuple[Entry, ...], *, but: str
) -> WorldRecord | Node | None:
    """Whose min, max and version count: the world's while any of its members lives, else those
    of the node that came first. Broken records do not count."""
    nodes = []
    for entry in entries:
        try:
            nodes.append(decode(Node, entry.key, entry.value))
        except RecordError:
            continue
    if world is not None and any(n.node_id in world.node_ids for n in nodes):
        return world
    others = (n for n in nodes if n.node_id != but)
    return min(others, key=lambda n: (n.joined_at_s, n.node_id), default=None)
