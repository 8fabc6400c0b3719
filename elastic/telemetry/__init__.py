"""Events, journals, and the account of where time went.

Start reading in ``events``.
"""
