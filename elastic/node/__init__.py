"""The properties of one node: its identity, addresses, status and the resources that it hosts.

Start with ``context``, which bundles the objects shared by the parts of a node's thread; that
thread and torchrun's main thread share ``status``. ``identity``, ``address``, ``ports``,
``run_secret`` and ``tls_options`` are determined before the node joins. The agent creates
``checkpoint_memory`` and ``orphan_reaper``, which must outlive its workers. ``step_times``
publishes the durations of its workers' steps, ``oom_kills`` counts processes that the kernel killed
for lack of memory.

May import the store, membership and telemetry; decides nothing about worlds.
"""
