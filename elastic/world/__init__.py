"""The world of a worker, and the rendezvous of its ranks.

Start with ``world``, the record. ``discovery`` and ``arrival`` bring its ranks together at
``world_store``, a store hosted by rank 0; ``faults`` lists the exceptions that indicate the end of
a world, ``failure`` reports why a worker failed.

May import secure_channel and telemetry; neither torch's process groups nor the agent.
"""
