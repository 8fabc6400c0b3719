"""The leader's verdicts on live nodes: which rank hangs, and which one is slower than the others.

``hang_judge`` reads the nodes' records of a world without progress, ``straggler_judge`` their step
times; both publish the decisions of :mod:`elastic.hangs` and :mod:`elastic.stragglers`.

Start with ``hang_judge``. Used only by :mod:`elastic.leadership.leader`; imports nothing else of
that package.
"""
