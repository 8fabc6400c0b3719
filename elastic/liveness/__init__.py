"""Which agents are alive, within milliseconds: connections between the nodes of a job.

``channel`` keeps them open, and spreads the newest world with them; ``connections`` counts who has
lost whom, half of the proof of a death; ``probe`` asks an agent whether it is there, the other
half.

May import membership's records, secure_channel and telemetry.
"""
