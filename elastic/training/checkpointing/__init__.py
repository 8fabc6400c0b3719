"""When, where and how a job saves.

Start with ``manager``, the only module that the rest of training uses, besides ``options``, what
scripts configure. ``restore`` loads, ``saver`` saves and ``last_save`` does so for the last time;
``due`` decides when, ``writers`` are the ranks that do, ``outcomes`` reports, ``folder`` and
``ownership`` are about the shared storage, ``memory_tier`` and ``memory_limit`` about the nodes'
memory.

May import ``state`` and everything below it, and :mod:`checkpoints`.
"""
