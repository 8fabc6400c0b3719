"""Hangs: a worker that lives and does not go on is found, named, and ended.

Who does what: each worker keeps a page of shared memory up to date (``page.py``,
``phases.py``: which step, which phase, which collective). A thread of its agent reads the pages
and /proc a few times a second (``watch.py``, ``kernel.py``). A node whose ranks do not go on
publishes what it knows (``facts.py``); the leader judges over the facts of all nodes
(``verdict.py``, with the budgets of ``budgets.py``: both pure), and the agent of the culprit acts
and writes the hang report (``response.py``, ``stacks.py``, ``report.py``). The agent's part, which
talks to etcd, is in :mod:`elastic.agent.supervision.hangs`.

Start reading with ``facts.py`` and ``verdict.py``. Workers and agents use this package, so it
imports neither; of ``elastic`` it may import telemetry, and what is below that.
"""
