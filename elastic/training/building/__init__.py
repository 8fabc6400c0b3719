"""Parts of a run's interface in files of their own: ``run.build`` and ``run.reduce_gradients``.

Start with ``builder``, which calls the script's function in each world and checks what it returns;
:mod:`elastic.training.rebuilding` manages the returned objects. ``stages`` reduces the gradients
of pipeline stages. May import ``components`` and everything below it, but not ``run``.
"""
