"""``elastic dashboard``: how a job is, as a live page that changes nothing.

Start with ``command``. ``feed`` watches etcd and the journals, once for all clients, and makes
snapshots; ``page`` renders one to HTML, ``publisher`` hands the rendered bytes to every client,
``application`` (Starlette) serves them, and ``access`` decides who may see them. Only
``application``, ``guard`` and ``server`` need the extra ``dashboard``.
"""

from __future__ import annotations

from elastic.cli.dashboard.command import main, parser

__all__ = ["main", "parser"]
