"""Detects scripts whose result would silently be wrong after a death, or on several ranks.

``early_leave`` finds ranks that leave the loop before the others. Each check raises an error that
names the lines to write instead, and costs nothing in the steps of a correct script.
"""
