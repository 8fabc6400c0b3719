"""Takes a rank from one world to the next, by a restart or in process.

Start with ``strategy``, the interface of ``restart`` and ``in_process``; ``selection`` holds the
active one, and ``bootstrap`` enters the first world. ``progress`` tracks the step that a rank's
weights belong to, and undoes an interrupted step; ``training_state`` combines it with the current
step and the registered objects. ``reconfiguration`` gives the ranks of a new world the same state
(``agreement``, ``transfer``). ``redone_rates`` compares learning rates of repeated steps, and
``step_timer`` measures steps for heartbeats.

May import ``lifecycle``, ``checkpointing`` and everything below them, but neither the loops nor
``run``.
"""
