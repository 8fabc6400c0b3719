"""A worker process before and between worlds.

Start reading in ``worlds``.
"""
