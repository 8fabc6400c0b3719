"""Models that are rebuilt in each world: the objects of ``run.build(fn)`` and their state.

For models sharded over the whole world (FSDP2 without replicas): a change of the world destroys the
shards' group and DeviceMesh, and no rank has the complete state. So the objects are recreated
on a mesh of the next world, and their state is loaded from the shards in the nodes' memory.

Start with ``built``: the objects of one world, their end with it, and errors on later use.
``loading`` loads them from a checkpoint, each rank its own shards;
``shares`` weights the gradients of ranks with different numbers of samples; ``checks`` refuses
models that would not be trained as intended.

May import gradients, data and checkpoints, but neither state nor packages above it.
"""
