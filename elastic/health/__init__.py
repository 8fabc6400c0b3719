"""Probes over HTTP: ``/livez`` and ``/readyz`` of an agent, and ``/metrics`` on the same port.

``endpoints`` is pure: facts come in, a verdict goes out. ``server`` serves it.
"""
