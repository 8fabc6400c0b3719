"""The worker side: the API behind ``run = elastic.join()`` and its components.

Start with ``run``, the public API, and ``components``, which assembles the parts. From the top:
``attempts`` (calls of the training function), ``shutdown`` and ``preemption`` (the end of the
process), :mod:`~elastic.training.loop` (epochs, steps, commits),
:mod:`~elastic.training.recovery` (from one world to the next),
:mod:`~elastic.training.misuse` (scripts that would silently be wrong), ``lifecycle`` (the current
world and its phase), :mod:`~elastic.training.observers` (metrics, progress, profiles),
:mod:`~elastic.training.checkpointing`, ``current_step``,
:mod:`~elastic.training.state` (the job's state), :mod:`~elastic.training.gradients`,
:mod:`~elastic.training.data`, and ``step``. Each imports only those after it.

May import all worker packages; never grpc, etcd or the agent.
"""
