"""Telemetry of a job: log lines, events, and the samples that took effect.

Start with ``log``, which writes lines to stderr; ``journal`` writes events as JSON, ``ledger`` the
samples of each step. May import events, messages and tuning.
"""
