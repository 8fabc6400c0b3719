"""Stragglers: a rank whose own work takes longer than that of the others, who wait for it.

Who does what: each worker adds up what its steps spend on data, computation, collectives,
checkpoints and its own code (``windows.py``, fed by :mod:`elastic.hangs.phases`), and tells its
agent once a window (``facts.py``). Agents publish that (:mod:`elastic.node.step_times`), and the
leader compares the ranks of a world (``detector.py``: pure;
:mod:`elastic.leadership.judges.straggler_judge` is its edge).

Start reading with ``facts.py`` and ``detector.py``. Workers and agents use this package, so it
imports neither, and nothing of ``elastic`` but tuning.
"""
