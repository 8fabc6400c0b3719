"""A worker's world, and the rendezvous of its ranks.

Start with ``world``, the record. ``discovery`` and ``arrival`` bring the ranks together at
``world_store``, a store hosted by rank 0. ``faults`` classifies the exceptions that indicate the
end of a world, and ``failure`` reports why a worker failed.

May import secure_channel and telemetry, but neither torch's process groups nor the agent.
"""
