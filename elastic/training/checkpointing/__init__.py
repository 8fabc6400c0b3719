"""When, where and how a job saves.

``options`` is what scripts say, ``due`` the decision, ``saver`` the saves; ``writer`` and
``memory_tier`` do them; ``last_save`` and ``preemption`` are for the end of a process; ``folder``
and ``ownership`` for a new world's first look at it.
"""
