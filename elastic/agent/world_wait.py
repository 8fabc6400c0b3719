"""torchrun's main thread waits until its node is in a world that it has not run yet."""

from __future__ import annotations

from elastic.agent.loop import NodeLoop
from elastic.agent.supervision.world_message import IN_PROCESS
from elastic.errors import CoordinationError, JoinTimeout
from elastic.leadership.job_progress import decode_progress
from elastic.membership.records import Node, NodeState, WorldRecord, WorldState, decode
from elastic.node.context import NodeContext
from elastic.tuning.agent_intervals import ASK_MEMBERS_S, MAIN_THREAD_SLICE_S


class WorldWait:
    """One per node. Reads the node's status, and queries the store for the state of its members."""

    def __init__(self, context: NodeContext, loop: NodeLoop) -> None:
        self._store = context.store
        self._keys = context.keys
        self._options = context.options
        self._status = context.status
        self._clock = context.clock
        self._loop = loop

    def run(self) -> WorldRecord | None:
        """Block until this node is in a world that it has not run yet.

        None: the job runs without this node and changes worlds without a restart: workers are
        to be started now, and join when they are ready.

        Raises:
            JoinTimeout: none within ``join_timeout_s``, and no healthy world that is full.
            JobFailed, BudgetSpent: the job has ended without success.
            JobSucceeded: it has ended with success.
        """
        status = self._status
        deadline = self._clock.monotonic() + self._options.join_timeout_s
        ask_at_s = 0.0
        while True:
            status.watchdog.heartbeat()
            with status.changed:
                status.raise_if_over()
                if not self._loop.alive:
                    raise CoordinationError("this node's service was closed while it waited")
                world = status.world.world
                if world is not None and self.is_for_us(world):
                    return world
                now = self._clock.monotonic()
                if self._is_spare(world):
                    deadline = now + self._options.join_timeout_s
            # Not under the lock: this calls the store.
            if now >= deadline:
                raise self._join_timeout(world)
            if world is not None and now >= ask_at_s:
                if self._is_to_be_joined(world):
                    return None
                ask_at_s = now + ASK_MEMBERS_S
            with status.changed:
                if status.world.world is world:
                    status.changed.wait(min(MAIN_THREAD_SLICE_S, max(0.0, deadline - now)))

    def is_for_us(self, world: WorldRecord) -> bool:
        """Whether this node starts workers for this world."""
        # (A world whose members keep their workers is never entered by starting some: if it
        # contains this node, it was written before the leader detected their end.)
        return (
            world.state is WorldState.ACTIVE
            and world.mode != IN_PROCESS
            and self._status.node.node_id in world.node_ids
            and world.generation > self._status.node.arrived_for
        )

    def _is_to_be_joined(self, world: WorldRecord) -> bool:
        """Whether the members keep their workers, so that ours warm up and join them."""
        if self._status.node.node_id in world.node_ids or not self._loop.supervisor.link_path:
            return False
        return world.mode == IN_PROCESS or self._members_keep_workers(world)

    def _members_keep_workers(self, world: WorldRecord) -> bool:
        """Whether all members of a first world have reported that their workers are ready."""
        try:
            # Asked twice a second, by every spare: of a script that keeps no workers, the first
            # member alone says so.
            first = self._store.get(self._keys.node(world.node_ids[0])) if world.members else None
            if first is not None and not decode(Node, first.key, first.value).in_process:
                return False
            entries = self._store.list(self._keys.nodes).entries
            nodes = [decode(Node, entry.key, entry.value) for entry in entries]
        except CoordinationError:
            return False
        members = [n for n in nodes if n.node_id in world.id_set]
        return len(members) > 0 and all(n.in_process for n in members)

    def _is_spare(self, world: WorldRecord | None) -> bool:
        """Whether a healthy world has no room for this node, or lacks the other nodes of its
        replica: a spare waits without a time limit."""
        return (
            world is not None
            and world.state is WorldState.ACTIVE
            and self._status.node.node_id not in world.node_ids
            and (len(world.members) >= world.max_nodes or world.nodes_per_replica > 1)
        )

    def _join_timeout(self, world: WorldRecord | None) -> JoinTimeout:
        node = self._status.node
        members = f"the last world: {world.reason}" if world else "no world was ever formed"
        problem = self._status.store_problem
        report = f"; the store: {problem.message}" if problem is not None else ""
        why = self._why_waiting()
        return JoinTimeout(
            f"no world with this node within join_timeout_s={self._options.join_timeout_s:g} "
            f"under {self._keys.root} (min {node.min_nodes}, max {node.max_nodes}; "
            f"{f'not admitted: {why}; ' if why else ''}{members}{report})",
            hint="start more nodes with the same --rdzv-id, lower the minimum of --nnodes, "
            "or raise join_timeout_s",
        )

    def _why_waiting(self) -> str:
        """The leader's reason not to admit this node; empty if there is none."""
        try:
            entry = self._store.get(self._keys.progress)
            progress = decode_progress(entry.key, entry.value) if entry is not None else None
        except CoordinationError:
            return ""
        mine = self._status.node.node_id
        waiting = progress.waiting if progress is not None else ()
        return next((w.reason for w in waiting if w.node_id == mine), "")

    def must_restart(self, world: WorldRecord, node: Node, since_s: float) -> bool:
        """Whether workers that could change worlds in process cannot enter this one."""
        is_member = node.node_id in world.node_ids
        if node.running is None:  # ready, and in no world yet
            # The world in which a worker died stays the newest until the leader learns that its
            # replacement is ready.
            is_over = world.generation <= node.arrived_for
            return is_member and world.mode != IN_PROCESS and not is_over
        if world.generation <= node.running.generation or node.state is NodeState.LEAVING:
            return False
        if not is_member and self._leaves_at_switch(world, since_s):
            return False
        return not is_member or world.mode != IN_PROCESS

    def _leaves_at_switch(self, world: WorldRecord, since_s: float) -> bool:
        """Whether the workers continue until a planned world without this node begins, as those of
        a leaving node do: ending them earlier would interrupt a step of the others."""
        left_s = since_s + self._options.leave_grace_s - self._clock.monotonic()
        # (A world without members: the last replica leaves, all its nodes at the same boundary.)
        is_planned = world.switch_at_step is not None or not world.members
        return is_planned and not self._status.workers_left and left_s > 0

    def raise_if_paused_for_long(self, world: WorldRecord, since_s: float) -> None:
        paused_s = self._clock.monotonic() - since_s
        if world.state is WorldState.PAUSED and paused_s > self._options.join_timeout_s:
            raise self._join_timeout(world)
