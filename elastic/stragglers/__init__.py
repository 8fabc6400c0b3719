"""Stragglers: detects a rank whose own work takes longer than that of the others.

Each worker sums up the time that its steps spend on data, computation, collectives, checkpoints and
its own code (``windows.py``, fed by :mod:`elastic.hangs.phases`), and reports it to its agent once
per window (``facts.py``). Agents publish that (:mod:`elastic.node.step_times`), and the leader
compares the ranks of a world (``detector.py``, which is pure; its caller is
:mod:`elastic.leadership.judges.straggler_judge`).

Start reading with ``facts.py`` and ``detector.py``. Workers and agents use this package, so it
imports neither, and nothing of ``elastic`` except tuning.
"""
