"""Detects within milliseconds which agents are alive, by connections between a job's nodes.

Start with ``channel``, which keeps them open and distributes the newest world over them.
``connections`` records lost connections, one half of the proof of a death; ``probe`` checks whether
an agent responds, the other half. ``heartbeats`` use the same connections and are shown to users.

May import membership's records, secure_channel and telemetry.
"""
