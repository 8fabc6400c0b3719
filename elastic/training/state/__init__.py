"""Keeps state across changes of the world, and rolls back interrupted steps.

Start with ``registry``, where the script registers models, optimizers and loaders; ``job_state``
holds them. ``optimizers`` watches updates, ``snapshot`` and ``copies`` copy state that a step may
change, ``change_watch`` detects other changes, and ``rollback`` restores the copies. ``replicas``
compares ranks, and ``all_ranks`` makes them fail together. ``shards`` and ``untracked`` refuse or
report objects that cannot be kept.

May import ``gradients``, ``data`` and ``step``.
"""
