"""Converts a world received from the agent: to the worker's world, its group, its environment."""

from __future__ import annotations

import os

from elastic.link.protocol import ReplicaMeet, WorldMessage
from elastic.messages.environment import world_variables
from elastic.messages.world import derive
from elastic.secure_channel.keys import SecretKey
from elastic.tuning.timeouts import peer_silence_of
from elastic.world.arrival import GroupSpec
from elastic.world.world import World, node_name


def world_of(message: WorldMessage) -> World:
    """The world, as the training code uses it."""
    return derive(World, message.world, message.assignment, node=node_name(), is_launched=True)


def group_spec(message: WorldMessage) -> GroupSpec:
    """The parameters from which the world's process group is built."""
    return derive(
        GroupSpec,
        message.world,
        message.assignment,
        store_key=SecretKey.parse(message.store_key),
        store_tls=message.store_tls,
        silence_s=peer_silence_of(os.environ),
    )


def replica_spec(message: ReplicaMeet, size: int) -> GroupSpec | None:
    """The parameters of the group of a replica of ``size`` ranks; None if one node holds it."""
    if not message.port:
        return None
    return GroupSpec(
        generation=0,
        nonce=message.nonce,
        rank=message.rank,
        size=size,
        store_host=message.host,
        store_port=message.port,
        store_key=SecretKey.parse(message.store_key),
        store_tls=message.store_tls,
        silence_s=peer_silence_of(os.environ),
    )


def write_environment(message: WorldMessage) -> None:
    """Set the environment variables that torchrun would have set, had it started this world."""
    assert message.assignment is not None, "this node is not in the world"
    variables = world_variables(
        message.world,
        message.assignment,
        node_rank=message.node_rank,
        nodes=message.nodes,
        store_host=message.world.store_host,
        store_port=message.world.store_port,
    )
    os.environ.update(variables)
