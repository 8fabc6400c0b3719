"""Authenticated channels between nodes, and the messages of agents and workers.

Start reading in ``hub``. Imports the standard library only, except for ``messages``.
"""
