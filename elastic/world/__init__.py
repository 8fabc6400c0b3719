"""The world as its workers see it, and how the ranks of one meet.

``world`` is the record. ``discovery`` and ``arrival`` bring its ranks together at ``world_store``,
a store that rank 0 serves; ``faults`` lists the exceptions that mean the end of a world,
``failure`` how a worker reports why it failed.

May import secure_channel and telemetry; neither torch's process groups nor the agent.
"""
