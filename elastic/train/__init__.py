"""The training loop of a worker: data, steps, gradients, state, recovery and saving.

Start reading in ``loop`` (a step from its first batch to its commit), then ``recovery``. ``run`` is
the object that scripts use. May import every package of a worker; agents never import it.
"""
