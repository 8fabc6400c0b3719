"""Which agents are alive, within milliseconds: connections between the nodes of a job.

``channel`` keeps them open, and spreads the newest world with them; ``connections`` counts lost
connections, half of the proof of a death; ``probe`` checks whether an agent answers, the other
half. ``heartbeats`` go over the same connections, for people.

May import membership's records, secure_channel and telemetry.
"""
