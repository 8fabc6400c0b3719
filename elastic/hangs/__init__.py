"""Finds hangs and stragglers: the page that workers write, the verdict, and the report.

Start reading in ``watch``.
"""
