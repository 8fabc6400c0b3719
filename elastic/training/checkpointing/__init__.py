"""Saving and restoring a job's checkpoints.

Start with ``manager``, the only module that the rest of training uses, besides ``options``, which
scripts configure. ``restore`` loads, ``saver`` saves, ``last_save`` saves before the process ends;
``due`` decides when to save, ``writers`` are the saving ranks, ``outcomes`` reports, ``folder`` and
``ownership`` are about the shared storage, ``memory_tier``, ``memory_interval`` and
``memory_limit`` about the nodes' memory.

May import ``state`` and everything below it, and :mod:`checkpoints`.
"""
