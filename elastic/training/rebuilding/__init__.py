"""Rebuilds models in each world: the objects of ``run.build(fn)`` and their state.

This is for models that are sharded over the whole world (FSDP2 without replicas): a change of the
world destroys the shards' group and DeviceMesh, and no rank has the complete state. So the objects
are created again on a mesh of the next world, and their state is loaded from the shards in the
nodes' memory.

Start with ``built``: the objects of one world, which end with it, and refuse later use.
``loading`` loads each rank's shards from a checkpoint, ``shares`` weights the gradients of ranks
with different numbers of samples, ``checks`` refuses models that would train incorrectly, and
``garbage`` frees the objects of an ended world.

May import gradients, data and checkpoints, but neither state nor packages above it.
"""
