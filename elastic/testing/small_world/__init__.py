"""Workers of one script forked from a warm process, under simulated agents: tests of idioms in
milliseconds.

Start with ``world``, which tests use; ``host`` is the warm process, ``worker`` one fork of it. May
import what :mod:`elastic.testing` may.
"""
