"""Chooses the number of steps between two saves to the nodes' memory.

Start with ``choice``, the decision as a pure function of measured costs. ``meter`` measures them
on one rank; ``agreed`` holds the interval in use, and combines the measurements of the ranks
of a world.

May import :mod:`elastic.process_group` and everything below it.
"""
