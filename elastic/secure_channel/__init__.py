"""Authenticated, bounded connections: what every port of a job is served with.

Both ends prove that they know a secret key before either takes the other's first message
(``handshake``). Every message is a frame with a hard limit, every wait has a deadline, and whoever
has not proved itself costs a bounded number of descriptors for a bounded time (``limits``). Nothing
received is executed.

- ``hub.Hub``: many connections on one thread, without blocking; listeners.
- ``channel.Channel``: one blocking connection, with bulk bytes that are not copied; clients, and
  threads that serve one client each.
- ``tls``: what both are wrapped in where nodes have certificates.
- ``strict_json``, ``frames``: what is inside.

Uses only the standard library, and nothing else of ``elastic``, so that ``checkpoints`` may import
it. What it protects against, and what it does not: docs/security.md.
"""
