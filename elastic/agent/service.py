"""The node's side of the protocol, for torchrun's main thread.

Arrive, wait for a world, enter it, check for a newer one, leave or finish. The work happens on the
thread of :mod:`elastic.agent.loop`; the two share the node's status.
"""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable, Iterable
from dataclasses import replace

from elastic.agent.admission import refuse_if_incompatible
from elastic.agent.ending.leaving import Leaving
from elastic.agent.ending.parking import park
from elastic.agent.loop import NodeLoop
from elastic.agent.messages import ChangeNode, ReplacementEnded, WorkersStart, publish_change
from elastic.agent.world_wait import WorldWait
from elastic.errors import ElasticError, StoreFull
from elastic.events import NodeArrived, NodeLeaving, WorldEntered
from elastic.hangs.watch import Supervised
from elastic.health.endpoints import Routes, routes_of
from elastic.membership.records import Done, Member, Node, NodeState, WorldRecord
from elastic.metrics import page as metrics_page
from elastic.metrics.counting import NodeMetrics
from elastic.metrics.page import MetricsPage
from elastic.metrics.readings import NodeReadings
from elastic.node.context import NodeContext
from elastic.node.oom_kills import OOM_KILL, OomKillCounter
from elastic.tuning.agent_intervals import (
    FINISH_WHEN_FULL_S,
    FINISH_WITHOUT_STORE_S,
    MAIN_THREAD_SLICE_S,
)


class NodeService:
    """One node of the job. Start once, close once."""

    def __init__(
        self,
        context: NodeContext,
        *,
        last_contact_s: Callable[[], float] | None = None,
        oom_kills: OomKillCounter | None = None,
        metrics: NodeMetrics | None = None,
    ) -> None:
        self._at = context
        self._journal = context.journal
        self._oom_kills = oom_kills if oom_kills is not None else OomKillCounter()
        self._status = context.status
        self.loop = NodeLoop(
            context, oom_kills=self._oom_kills, last_contact_s=last_contact_s, metrics=metrics
        )
        self._readings = NodeReadings(
            status=self._status,
            metrics=metrics if metrics is not None else NodeMetrics(context.clock),
            node_states=self.loop.node_states,
            etcd_contact_age_s=lambda: (
                context.clock.monotonic() - last_contact_s() if last_contact_s is not None else None
            ),
        )
        self.world_wait = WorldWait(context, self.loop)

    @property
    def node_id(self) -> str:
        return self._status.node.node_id

    @property
    def member(self) -> Member:
        """This node as a member of a world."""
        return self._status.node.as_member()

    @property
    def running(self) -> WorldRecord | None:
        """The world that this node's workers run."""
        return self._status.running

    @property
    def announced_world(self) -> WorldRecord | None:
        """The newest world with this node that was announced to its workers: they run it, or are
        about to."""
        return self._status.announced_world or self._status.running

    def before_announcing(self, act: Callable[[], object]) -> None:
        """Call ``act`` before a new world is announced to workers, on the node's thread."""
        self._status.before_announcing = act

    def position(self) -> dict[str, int | None]:
        """The generation that this node's workers run, and the step that they have reported."""
        running, step_rate = self._status.node.running, self._status.step_rate
        return {
            "generation": running.generation if running is not None else None,
            "step": step_rate.step if step_rate is not None else None,
        }

    def peer_addresses(self, world: WorldRecord | None) -> tuple[str, ...]:
        """The addresses of the other nodes of a world, that of rank 0 first.

        None: those of the world that runs without this node.
        """
        world = world if world is not None else self._status.world.world
        members = world.members if world is not None else ()
        return tuple(m.liveness_host for m in members if m.node_id != self.node_id)

    def start(self) -> None:
        """Listen and begin to learn; the node registers with its first arrival."""
        port = self.loop.liveness_port
        self._status.change_node(lambda node: replace(node, liveness_port=port))
        self.loop.start()

    def arrive(
        self,
        *,
        nproc: int,
        role: str,
        ports: tuple[int, ...],
        failure: str | None,
        failure_exit_code: int | None,
    ) -> None:
        """Register that this node waits for a world, and why it left the last one.

        Raises:
            NodeRefused: this node is incompatible with the job.
            CoordinationError: the store cannot be read.
        """
        node = self._status.node
        if node.running is None:
            refuse_if_incompatible(self._at.store, self._at.keys, replace(node, nproc=nproc))
        self._status.stopping = True  # until new workers are started
        after = node.running.generation if node.running else node.arrived_for
        is_oom_kill = failure_exit_code == -signal.SIGKILL and (
            node.failure_is_oom_kill or self._oom_kills.has_killed()
        )
        kernel_log = self._at.kernel_log.excerpt().lines if failure_exit_code is not None else ()
        if is_oom_kill and OOM_KILL not in (failure or ""):
            failure = f"{failure or 'a worker was ended by SIGKILL'}: {OOM_KILL}"
        is_recovery = after > 0 and failure is None  # of others: the leader's log has their origin
        self._journal.emit(
            NodeArrived(after_generation=after, failure=failure, exit_code=failure_exit_code),
            level=logging.DEBUG if is_recovery else logging.INFO,
        )
        self.change(
            lambda node: replace(
                node,
                nproc=nproc,
                role=role,
                ports=ports,
                state=NodeState.ARRIVED,
                in_process=False,
                running=None,
                replica_start="",
                replica=(),
                mesh="",
                arrived_for=after,
                # A worker without an error file, as after sys.exit(), has announced its error.
                failure=failure if failure_exit_code is None else failure or node.failure,
                failure_exit_code=failure_exit_code,
                failure_step=self._status.failure_step if failure_exit_code is not None else None,
                failure_generation=node.last_run if failure_exit_code is not None else None,
                failure_is_oom_kill=is_oom_kill,
                failure_kernel_log=node.failure_kernel_log or kernel_log,
            )
        )
        # After the change: while the node still counts as running its last world, the next one
        # without it would be announced to the workers that are started now.
        self.loop.post(WorkersStart())

    def wait_for_world(self) -> WorldRecord | None:
        """Block until this node is in a world that it has not run yet.

        None: the job runs without this node and changes worlds without a restart: workers are
        to be started now, and join when they are ready.

        Raises:
            JoinTimeout: none within ``join_timeout_s``, and no healthy world that is full.
            JobFailed, BudgetSpent: the job has ended without success.
            JobSucceeded: it has ended with success.
        """
        return self.world_wait.run()

    def warm_up(self) -> None:
        """The main thread starts workers that are in no world yet."""
        self._begin_start()
        self.change(lambda node: replace(node, state=NodeState.STARTING, running=None))

    def _begin_start(self) -> None:
        """torchrun is about to start the workers: called before the node's state changes."""
        self._status.starts += 1
        self._status.stopping = False
        self._status.failure_step = None
        self._oom_kills.mark()
        self._at.kernel_log.mark()

    def enter(self, world: WorldRecord, *, waited_s: float) -> None:
        """The main thread passes ``world`` to its workers."""
        self._begin_start()
        self._journal.emit(
            WorldEntered(
                generation=world.generation,
                first_rank=world.first_rank_of(self.node_id),
                size=world.size,
                waited_s=waited_s,
            ),
            level=logging.DEBUG if self._status.starts > 1 else logging.INFO,
        )
        self.change(
            lambda node: replace(
                node,
                state=NodeState.STARTING,
                running=world,
                failure=None,
                failure_exit_code=None,
                failure_step=None,
                failure_generation=None,
                failure_is_oom_kill=False,
                failure_kernel_log=(),
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
            restarts = self.world_wait.must_restart(world, node, entry.since_s)
            self.world_wait.raise_if_paused_for_long(world, entry.since_s)
        else:
            restarts = running is not None and world.generation > running.generation
            # (Its workers wait for the rest of a replica, and it was taken into a first world.)
            restarts |= bool(node.replica_start) and self.world_wait.is_for_us(world)
        restarts = restarts or self._status.replica_is_lost
        self._status.stopping = self._status.stopping or restarts
        return restarts

    @property
    def link_path(self) -> str:
        """The unix socket for this node's workers; empty in restart mode."""
        return self.loop.supervisor.link_path

    def write_link_key(self) -> None:
        """Write the key of the link to the file that starting workers read."""
        self.loop.supervisor.write_link_key()

    def supervise(self, workers: Iterable[Supervised]) -> None:
        """Set the processes that torchrun supervises, for the detection of hangs."""
        self.loop.supervisor.supervise(workers)

    def on_permission(self, permit: Callable[[float], object]) -> None:
        """Call ``permit`` with the end of the workers' permission whenever it is extended."""
        self.loop.permission.on_permission = permit

    def allow_replacement(self, is_allowed: bool) -> None:
        """Whether a single worker that dies from now on can be replaced."""
        # A death ends the collectives of all workers of a replica: if a replica takes several
        # nodes, the siblings have no state to keep.
        self._status.can_replace = is_allowed and self._status.node.nodes_per_replica == 1

    @property
    def is_replacing(self) -> bool:
        """Whether workers have died and their replacements are not ready yet."""
        return bool(self._status.to_replace)

    def is_to_be_replaced(self, pid: int) -> bool | None:
        """Whether this failed worker is to be replaced while its siblings keep their processes.

        None: the node's thread has not decided it yet.
        """
        return self._status.is_to_be_replaced(pid)

    def replacement_started(self, pid: int) -> None:
        """A process was started in the place of a dead worker."""
        self._status.unconnected.add(pid)

    def replacement_ended(self, pid: int, local_rank: int, exit_code: int) -> None:
        """Notify the node's thread that a worker has ended, unless the link has noticed it."""
        if pid in self._status.unconnected:
            self.loop.post(ReplacementEnded(pid, local_rank, exit_code))

    @property
    def workers_have_joined(self) -> bool:
        """Whether a worker has called elastic.join(), in this start of workers or an earlier one.
        Not known in restart mode."""
        return self._status.workers_joined

    @property
    def has_first_rank(self) -> bool:
        """Whether rank 0 of the current world is one of this node's workers."""
        running = self._status.running
        return running is not None and running.node_ids[:1] == (self.node_id,)

    @property
    def can_leave_gracefully(self) -> bool:
        """Whether the workers can be asked to leave at a step boundary."""
        return self._status.node.in_process and self._status.node.running is not None

    @property
    def has_left(self) -> bool:
        """Whether the workers have left the job, after :meth:`leave`."""
        return self._status.workers_left

    def expect_end_of_workers(self) -> None:
        """The workers are about to be ended deliberately: that is not a failure."""
        self._status.stopping = True

    @property
    def job_is_done(self) -> bool:
        """Whether the job has ended with success."""
        return self._status.done is not None and self._status.done.exit_code == 0

    def leave(self, reason: str, *, failed: bool = False) -> None:
        """Let the others continue without this node. Safe in a signal handler."""
        state = NodeState.FAILED if failed else NodeState.LEAVING
        self.loop.post(ChangeNode(lambda node: replace(node, state=state)))
        self._journal.emit(NodeLeaving(reason=reason))

    @property
    def done(self) -> Done | None:
        """How the job has ended."""
        return self._status.done

    def finished(self) -> None:
        """This node's workers succeeded."""
        self.change(lambda node: replace(node, state=NodeState.FINISHED))

    def finish(self, *, patience_s: float = FINISH_WITHOUT_STORE_S) -> Done | None:
        """This node's workers succeeded: wait until those of every live member have.

        None if the store was unreachable for ``patience_s``, or is full: the outcome is unknown,
        and :attr:`store_problem` says why.
        """
        self.finished()
        status, problem_since_s = self._status, None
        # A full store does not recover by itself. (Its last answer may precede this node's end.)
        when_full_s = FINISH_WHEN_FULL_S if math.isfinite(patience_s) else patience_s
        with status.changed:
            while status.done is None:
                status.watchdog.heartbeat()
                if status.fatal is not None or not self.loop.alive:
                    return None
                now = self._at.clock.monotonic()
                problem_since_s = (problem_since_s or now) if status.store_problem else None
                limit_s = when_full_s if isinstance(status.store_problem, StoreFull) else patience_s
                if problem_since_s is not None and now - problem_since_s > limit_s:
                    return None
                status.changed.wait(MAIN_THREAD_SLICE_S)
            return status.done

    @property
    def store_problem(self) -> ElasticError | None:
        """Why the store cannot be used now, if it cannot."""
        return self._status.store_problem

    def heartbeat(self) -> None:
        """torchrun's main thread makes progress."""
        self._status.watchdog.heartbeat()

    @property
    def readings(self) -> NodeReadings:
        """The data from which metrics are read."""
        return self._readings

    @property
    def probes(self) -> Routes:
        """The responses of ``/livez``, ``/readyz`` and ``/metrics``."""
        probes = routes_of(self._status, self._at.options.hung_after_s)
        return {**probes, "/metrics": self._metrics_page}

    def _metrics_page(self) -> MetricsPage:
        run_id, node = self._at.keys.run_id, self._status.node.name
        return metrics_page.render(self._readings, run_id=run_id, node=node)

    def fail(self, error: BaseException) -> None:
        """End this node with ``error``: a thread that it needs has died."""
        self._status.fail(error)

    def close(self) -> None:
        """Leave the store gracefully: resign, delete the key, end the lease. Idempotent."""
        self.loop.close()
        self._at.store.close()
        self._at.kernel_log.close()

    def park(self, leaving: Leaving) -> None:
        """After :meth:`close`, if the job has ended: keep running until SIGTERM."""
        if self._status.done is not None:
            park(self._status, self._status.done, leaving, self._journal, self._at.clock)

    def change(self, change: Callable[[Node], Node]) -> None:
        """Change the node's record immediately, as seen by this thread, and publish it."""
        publish_change(self._at, change)
