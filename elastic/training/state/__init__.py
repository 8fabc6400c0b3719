"""State that survives a world change, and the rollback of interrupted steps.

Start with ``registry``, where the script registers models, optimizers and loaders; ``job_state``
holds them. ``optimizers`` watches updates, ``snapshot``, ``copies`` and ``change_watch`` keep state
that a step may change, ``rollback`` undoes it; ``replicas`` compares ranks, ``all_ranks`` makes
them fail together.

May import ``gradients``, ``data`` and ``step``.
"""
