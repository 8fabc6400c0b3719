"""``run.build``: calls the script's function in each world and checks what it returns.

Start with ``builder``. :mod:`elastic.training.rebuilding` manages the returned objects. May
import ``components`` and everything below it, but not ``run``.
"""
