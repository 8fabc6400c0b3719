"""What one node is and has: its identity, addresses, status and the resources that it hosts.

``context`` bundles what the parts of a node's thread share; ``status`` is what that thread and
torchrun's main thread both see. ``identity``, ``address``, ``ports``, ``run_secret`` and
``tls_options`` are settled before the node joins. ``checkpoint_memory`` and ``orphan_reaper`` are
made by the agent because they must outlive its workers. ``step_times`` publishes how long its
workers' steps take, ``oom_kills`` counts what the kernel killed for want of memory.

May import the store, membership and telemetry; decides nothing about worlds.
"""
