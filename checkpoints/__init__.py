"""Checkpoints that are listed only when whole, durable and verified."""
