"""``elastic kube``: a job's manifests from a few flags, without editing YAML.

Start with ``command``. ``options`` turns the flags into a record (``job``), each value checked by
``names``, ``components`` or ``stores``; ``overlay`` and ``patches`` turn the record into a
kustomization based on one of deploy/overlays, which kubectl renders. May import errors, tuning, and
the parsers of the other commands.
"""

from __future__ import annotations

from elastic.cli.kube.command import main, render, write
from elastic.cli.kube.options import parser

__all__ = ["main", "parser", "render", "write"]
