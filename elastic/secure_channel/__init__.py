"""Authenticated, bounded connections, used by every port of a job.

Both ends prove possession of a secret key before either accepts the other's first message
(``handshake``). Every message is a frame with a hard limit, every wait has a deadline, and
unauthenticated clients use a bounded number of descriptors for a bounded time (``limits``). Nothing
received is executed.

- ``hub.Hub``: many connections on one thread, without blocking; listeners.
- ``channel.Channel``: one blocking connection that sends bulk data without copies; for clients, and
  threads that serve one client each.
- ``tls``: wraps both if nodes have certificates.
- ``strict_json``, ``frames``: the contents.

Start with ``handshake``. Uses only the standard library, and nothing else of ``elastic``, so that
``checkpoints`` may import it. docs/security.md states what it protects against, and what it does
not.
"""
