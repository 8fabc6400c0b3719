"""Processes forked from one that has imported torch already, to start in milliseconds.

``server`` forks the agents and workers of a test cluster, ``child`` a single function.
"""
