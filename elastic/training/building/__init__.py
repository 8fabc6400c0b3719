"""``run.build``: calls the script's function in each world, and holds it to what can be rebuilt.

Start with ``builder``. What becomes of the objects is in :mod:`elastic.training.rebuilding`. May
import ``components`` and everything below it; not ``run``.
"""
