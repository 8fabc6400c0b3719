"""The tasks of the leading node, and its succession by another one.

Start with ``leader``: it watches the nodes (``roster``), probes suspected ones (``prober``),
asks :mod:`elastic.membership` for the next world and writes it (``world_writer``).
``failure_accounting`` decides which failures count against the job and its nodes;
``failure_timeline`` renders those of a failed job; ``judges`` identify hung and slow ranks.
``succession`` follows the current leader and replaces it; ``election`` is the key in the store for
which nodes compete.

Runs on the node's thread. May import node, liveness, membership and store.
"""
