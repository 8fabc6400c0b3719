"""The message that announces a world to one worker of this node."""

from __future__ import annotations

from elastic.link.protocol import WorldMessage
from elastic.link.server import Worker
from elastic.membership.records import Node, WorldRecord
from elastic.messages.world import RankAssignment, WorldSpec, derive
from elastic.node.context import NodeContext
from elastic.node.run_secret import STORE

IN_PROCESS = "in-process"


def world_message(at: NodeContext, world: WorldRecord, worker: Worker) -> WorldMessage:
    """The world and the worker's place in it; without a place, the process has to end."""
    node = at.status.node
    # A world of the other mode is entered by a restart, which ends these processes.
    runs_it = node.running is not None and node.running.generation == world.generation
    is_member = node.node_id in world.node_ids and (world.mode == IN_PROCESS or runs_it)
    return WorldMessage(
        world=derive(WorldSpec, world),
        assignment=_assignment(world, node, worker) if is_member else None,
        node_rank=world.node_ids.index(node.node_id) if is_member else 0,
        nodes=len(world.members),
        nodes_leaving=_nodes_leaving(at.status.running, world),
        store_key=at.secret.key(STORE).text,
        store_tls=at.tls.files if at.tls is not None else None,
    )


def _nodes_leaving(running: WorldRecord | None, world: WorldRecord) -> int:
    return len(running.id_set - world.id_set) if running is not None else 0


def _assignment(world: WorldRecord, node: Node, worker: Worker) -> RankAssignment:
    return RankAssignment(
        rank=world.first_rank_of(node.node_id) + worker.local_rank,
        size=world.size,
        local_rank=worker.local_rank,
        local_size=node.nproc,
    )
