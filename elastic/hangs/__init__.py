"""Hangs: detects, identifies and ends a worker that is alive but makes no progress.

Each worker maintains a page of shared memory with its step, phase and collective (``page.py``,
``phases.py``). A thread of its agent reads the pages and /proc a few times a second (``watch.py``,
``kernel.py``). A node whose ranks make no progress publishes their state (``facts.py``); the leader
judges the facts of all nodes (``verdict.py``, with the budgets of ``budgets.py``: both pure), and
the agent of the culprit acts and writes the hang report (``response.py``, ``stacks.py``,
``report.py``). The agent's part, which uses etcd, is :mod:`elastic.agent.supervision.hangs`.

Start reading with ``facts.py`` and ``verdict.py``. Workers and agents use this package, so it
imports neither. Within ``elastic``, it may import telemetry and the packages below it.
"""
