"""Fails in the same way every time, and soon: it imports nothing."""

raise SystemExit(3)
