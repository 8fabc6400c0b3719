"""Processes that start in milliseconds, forked from one that has already imported torch.

``server`` forks the agents and workers of a test cluster, in a network ``namespace`` where a
launcher requires one, ``program`` runs a program to its end, ``child`` forks a single function.
"""
