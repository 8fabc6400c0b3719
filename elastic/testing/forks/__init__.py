"""Processes forked from one that has imported torch already, to start in milliseconds.

``server`` forks the agents and workers of a test cluster, in a network ``namespace`` where a
launcher requires one, ``program`` runs a program to its end, ``child`` forks a single function.
"""
