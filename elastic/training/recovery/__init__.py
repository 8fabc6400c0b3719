"""Recovery: from one world to the next, by a restart or in process.

Start with ``strategy``, the interface of ``restart`` and ``in_process``; ``selection`` knows which
of them is active, ``bootstrap`` enters the first world. ``progress`` tracks which step a rank's
weights belong to and undoes an interrupted one; ``training_state`` combines it with the current
step and the registered objects. ``reconfiguration`` brings the ranks of a new world to one state
(``agreement``, ``transfer``); ``step_timer`` measures steps for heartbeats.

May import ``lifecycle``, ``checkpointing`` and everything below them; neither the loops nor
``run``.
"""
