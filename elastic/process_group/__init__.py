"""A process group that can be aborted: built for one world, taken down with it, never waited for.

Start with ``group``. ``pending`` knows the collectives under way, ``waiting`` and ``releasable``
make waits of the script's and of DDP's end with an abort; ``abort`` shuts down a group's sockets
(gloo), ``communicators`` aborts NCCL's, within a ``deadline``. ``semantics`` says what a finished
collective means on each backend; ``collectives`` are those for small JSON values. Every private
name of torch that workers use is in ``torch_private``.

May import world, link (for sockets in forked children), tuning and telemetry.
"""
