"""What the leading node does, and how another takes its place.

Start with ``leader``: it watches the nodes (``roster``), probes those in question (``prober``),
asks :mod:`elastic.membership` for the next world and writes it (``world_writer``).
``failure_accounting`` decides what counts against the job and its nodes; ``failure_timeline``
renders that of a failed job; ``judges`` say who hangs and who is slower than the others.
``succession`` follows the current leader and replaces it; ``election`` is the key in the store that
they compete for.

Runs on the node's thread. May import node, liveness, membership and store.
"""
