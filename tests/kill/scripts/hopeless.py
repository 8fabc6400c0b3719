"""Fails early and identically every time: it imports nothing."""

raise SystemExit(3)
