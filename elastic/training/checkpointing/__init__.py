"""Saving and restoring a job's checkpoints.

Start with ``manager``, the only module that the rest of training uses, apart from ``options``, with
which scripts configure checkpoints. ``restore`` loads, ``saver`` saves, and ``last_save`` saves
before the process ends. ``due`` decides when to save, ``writers`` tracks the saving ranks, and
``outcomes`` reports. ``folder`` and ``ownership`` manage the shared storage, ``memory_tier``,
``memory_interval`` and ``memory_limit`` the nodes' memory.

May import ``state`` and everything below it, and :mod:`checkpoints`.
"""
