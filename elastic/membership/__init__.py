"""The decision on the next world: pure functions of the leader's view. No I/O, clock or torch.

Start with ``decision``; its arguments and results are in ``view``, the store's contents in
``records`` and ``keys``. ``surviving_world`` continues a world with surviving members,
``joining_nodes`` selects the nodes to admit, ``proposal`` turns the choice into a record.
``member_status``, ``step_rate``, ``failure_budget`` and ``escalation`` are facts and counters that
decisions depend on.

May import messages, tuning, and the facts and verdicts of hangs, stragglers and failures.
"""
