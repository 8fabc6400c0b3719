"""Probes over HTTP: ``/livez`` and ``/readyz`` of an agent, and ``/metrics`` on the same port.

Start with ``endpoints``, which is pure: it turns facts into a verdict. ``server`` serves it. May
import node and the packages below it.
"""
