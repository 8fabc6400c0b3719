"""``elastic dashboard``: a live, read-only page with a job's status.

Start with ``command``. ``feed`` watches etcd and the journals, once for all clients, and produces
snapshots; ``page`` renders one to HTML, ``publisher`` hands the rendered bytes to every client,
``application`` (Starlette) serves them, and ``access`` authorizes requests. Only ``application``,
``request_filter`` and ``server`` need the extra ``dashboard``. May import
:mod:`elastic.cli.observe` and what :mod:`elastic.cli` may.
"""

from __future__ import annotations

from elastic.cli.dashboard.command import main, parser

__all__ = ["main", "parser"]
