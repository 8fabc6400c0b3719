"""Options, intervals and network settings of a job, each with its reason.

``agent_options`` are set by users, ``option_sources`` reads them from the command line and the
environment, ``timeouts`` are the intervals that are checked against each other,
``agent_intervals``, ``worker_intervals`` and ``doctor_intervals`` the fixed ones, ``memory`` the
limits of a node's memory. ``network`` reads a machine's network devices, ``profiles`` derives
variables of NCCL, torch and gloo from them, ``worker_environment`` merges these with the user's.
Nothing here imports torch.

Imports only ``elastic.errors``. Start with ``timeouts`` and ``profiles``.
"""
