"""``elastic demo``: three local nodes train on real images, one is killed, one is added.

Start with ``command``. ``plan`` decides when to kill and when to add, ``journal`` follows the
nodes, ``view`` shows them, ``summary`` checks every promise at the end, ``report`` leaves a page.
"""
