"""Which world comes next: pure decisions over what the leader knows. No I/O, no clock, no torch.

Start with ``decision``; its arguments and answers are in ``view``, what is in the store in
``records`` and ``keys``. ``surviving_world`` continues a world with surviving members,
``joining_nodes`` selects the nodes to admit, ``proposal`` turns the choice into a record.
``member_status``, ``step_rate``, ``failure_budget`` and ``escalation`` are facts and counters that
decisions depend on.

Imports nothing of ``elastic`` but its errors, and the facts and verdicts of :mod:`elastic.hangs`.
"""
