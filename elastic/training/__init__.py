"""Training in a world that changes: what ``run = elastic.join()`` gives to a script.

Start with ``run``, the public API, and ``components``, which puts the parts together. From the top:
``attempts`` (calls of the training function), ``shutdown`` and ``preemption`` (the end of the
process), :mod:`~elastic.training.loop` (epochs, steps, commits),
:mod:`~elastic.training.recovery` (from one world to the next), ``lifecycle`` (the present world
and its phase), :mod:`~elastic.training.observers` (metrics, progress, profiles),
:mod:`~elastic.training.checkpointing`, ``current_step``,
:mod:`~elastic.training.state` (what must survive), :mod:`~elastic.training.gradients`,
:mod:`~elastic.training.data`, and ``step``. Each imports only what comes after it.

May import everything of a worker's; never grpc, etcd or the agent.
"""
