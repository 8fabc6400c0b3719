"""The leader's verdicts on nodes that live: which one hangs, and which one is slower than others.

``hang_judge`` reads what the nodes say of a world without progress, ``straggler_judge`` the times
of their steps; both write or report what :mod:`elastic.hangs` and :mod:`elastic.stragglers` decide.

Used by :mod:`elastic.leadership.leader` alone, and imports nothing of that package.
"""
