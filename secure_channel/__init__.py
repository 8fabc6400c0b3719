"""Authenticated, bounded connections: what every port of a job is served with.

Both ends prove that they know a secret key before either takes the other's first message
(:mod:`~secure_channel.handshake`). Every message is a frame with a hard limit, every wait has a
deadline, and whoever has not proved itself costs a bounded number of descriptors for a bounded
time (:mod:`~secure_channel.limits`). Nothing received is executed.

- :class:`~secure_channel.hub.Hub`: many connections on one thread, without blocking; listeners.
- :class:`~secure_channel.channel.Channel`: one blocking connection, with bulk bytes that are not
  copied; clients, and threads that serve one client each.
- :mod:`~secure_channel.strict_json`, :mod:`~secure_channel.frames`: what is inside.

Uses the standard library alone, so that ``elastic`` and ``checkpoints`` may both import it; it
imports neither. What it protects against, and what it does not: docs/security.md.
"""
