"""Options, intervals and network settings of a job, each with its reason.

``agent_options`` are what users set, ``option_sources`` reads them from the command line and the
environment, ``timeouts`` are the intervals that are checked against each other,
``agent_intervals``, ``worker_intervals`` and ``doctor_intervals`` the fixed ones, ``memory`` what
fits into a node's. ``network`` reads what a machine is connected with, ``profiles`` says which
variables of NCCL, torch and gloo follow from that, ``worker_environment`` merges them with the
user's. Nothing here imports torch.

Imports ``elastic.errors`` alone. Start with ``timeouts`` and ``profiles``.
"""
