"""Training in a world that changes: what ``run = elastic.join()`` gives to a script.

Start with ``run``, the public API, and ``session``, what a worker is in the middle of.
:mod:`elastic.training.data` deals samples out, :mod:`elastic.training.gradients` reduces, and
watches optimizers; :mod:`elastic.training.state` is what must survive,
:mod:`elastic.training.recovery` the way from one world to the next, and
:mod:`elastic.training.checkpointing` saves beside training.

May import everything of a worker's; never grpc, etcd or the agent.
"""
