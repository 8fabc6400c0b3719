"""Read-only commands on a job: ``elastic status``, ``describe``, ``wait`` and ``events``. Start
with ``status``.

Untrusted text (names, reasons, tracebacks) is passed through ``printable``.
They import neither torch nor, to read journals alone, grpc.
"""
