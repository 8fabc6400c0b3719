"""Derived settings, checked against each other.

``timeouts`` has every interval of a job, ``memory`` what fits into a node's.
"""
