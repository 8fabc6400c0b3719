"""Telemetry of a job: log lines, events, and the samples that took effect.

``log`` writes lines to stderr, ``journal`` events as JSON, ``ledger`` the samples of each step.
"""
