"""The worlds that are announced to a node's workers while they keep their processes.

On the node's thread. A world is announced once, and only if it is newer than the workers' one.
"""

from __future__ import annotations

from dataclasses import replace

from elastic.agent.supervision.world_message import IN_PROCESS, world_message
from elastic.link.server import LinkServer, Worker
from elastic.membership.records import WorldRecord, WorldState
from elastic.node.context import NodeContext


class AnnouncedWorlds:
    """Across all starts of a node's workers."""

    def __init__(self, context: NodeContext, server: LinkServer) -> None:
        self._at = context
        self._server = server
        self.newest: WorldRecord | None = None  # announced since the workers were last started
        self.have_to_leave = False  # they were asked to leave: their ends are not deaths

    @property
    def current(self) -> WorldRecord | None:
        """The newest world that they have received: by an announcement, or at their start."""
        return self.newest or self._at.status.running

    @property
    def last_generation(self) -> int:
        """The newest generation that this node was in."""
        node = self._at.status.node
        worlds = [w for w in (self._at.status.running, self.newest) if w is not None]
        known = [w.generation for w in worlds if node.node_id in w.node_ids]
        return max([*known, node.arrived_for])

    def welcome(self, worker: Worker) -> None:
        """Send a worker that has just connected its first world, or a newer one if it was formed
        since the worker started."""
        running, newest = self._at.status.running, self.newest
        if newest is not None and (running is None or newest.generation > running.generation):
            self._send(newest, worker)
        elif running is not None:
            self._send(running, worker)

    def learn(self, world: WorldRecord | None) -> None:
        """The newest world: announce it if it concerns workers that need no restart."""
        node = self._at.status.node
        if world is None or not node.in_process:
            return
        if self.newest is not None and world.generation <= self.newest.generation:
            return
        if world.generation <= node.arrived_for:
            return  # it ended when a worker of this node died
        running = node.running
        if running is not None and world.generation <= running.generation:
            return
        is_member = node.node_id in world.node_ids
        if running is None and not is_member:
            return  # a spare: it waits for a world that includes it
        self.newest = world
        if is_member:
            self._at.status.announced_world = world
            self._at.status.before_announcing()  # they may read this node's data about the others
        self._send(world, None)

    def ask_to_leave(self, reason: str) -> None:
        """Ask all workers to leave at their next boundary and save, as a job's last ones do."""
        newest = self.current
        assert newest is not None
        self.newest = replace(
            newest,
            generation=newest.generation + 1,
            members=(),
            mode=IN_PROCESS,
            switch_at_step=None,
            state=WorldState.ACTIVE,
            reason=reason,
        )
        self.have_to_leave = True
        self._send(self.newest, None)

    def forget(self) -> None:
        """The workers are restarted."""
        self.newest = self._at.status.announced_world = None

    def _send(self, world: WorldRecord, to: Worker | None) -> None:
        for worker in self._server.workers() if to is None else (to,):
            self._server.send(world_message(self._at, world, worker), worker)
