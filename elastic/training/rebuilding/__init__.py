"""Models that are built anew in each world: what ``run.build(fn)`` has made, and its state.

For models sharded over the whole world (FSDP2 without replicas): a world that changes takes the
shards' group and DeviceMesh down, and no rank holds all of the state. So the objects are made again
on a mesh of the next world, and their state is loaded from the shards that the nodes' memory holds.

Start with ``built``: the objects of one world, how they end with it, and what becomes of one that
is used afterwards. ``loading`` fills them from a checkpoint, each rank its own shards;
``shares`` weights the gradients of ranks with different numbers of samples; ``checks`` refuses what
would train something else than was meant.

May import gradients and data, and checkpoints; neither state nor what is above it.
"""
