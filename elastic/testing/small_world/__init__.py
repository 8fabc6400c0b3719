"""Workers of one script forked from a warm process, under simulated agents: tests of idioms in
milliseconds.

``world`` is what tests use, ``host`` the warm process, ``worker`` one fork of it.
"""
