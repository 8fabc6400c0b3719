"""The memory tier: parts of checkpoints in the memory of nodes, replicated to a peer node.

The only package here that opens sockets, and the only one that imports
:mod:`elastic.secure_channel`. May otherwise import: :mod:`checkpoints.policies`,
:mod:`checkpoints.storage`, :mod:`checkpoints.format`, :mod:`checkpoints.errors`. Start reading at
:mod:`checkpoints.memory.node_memory`, then :mod:`checkpoints.memory.host`.
"""
