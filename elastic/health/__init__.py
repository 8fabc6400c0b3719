"""Probes over HTTP: ``/livez`` and ``/readyz`` of an agent.

``endpoints`` is pure: facts come in, a verdict goes out. ``server`` serves it.
"""
