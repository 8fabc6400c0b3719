"""Who belongs to the next world: records, views and decisions. Pure: no I/O.

Start reading in ``decision``.
"""
