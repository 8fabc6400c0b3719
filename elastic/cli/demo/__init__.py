"""``elastic demo``: train on three local nodes, kill one, add one.

Start with ``command``. ``plan`` decides when to kill and to add a node, ``journal`` follows the
nodes, ``view`` shows them, ``summary`` checks the result, ``report`` writes an HTML page. The only
package that may import :mod:`elastic.testing`.
"""
