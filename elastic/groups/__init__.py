"""Process groups that can be aborted, one set for each world, and their collectives.

Start reading in ``group``. ``pending`` has every change to torch, and how it is undone.
"""
