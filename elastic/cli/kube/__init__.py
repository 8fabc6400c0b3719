"""``elastic kube``: a job's manifests from a few flags, without editing YAML.

Start with ``command``. ``options`` makes of the flags a record (``job``), each value checked by
``names``, ``components`` or ``stores``; ``overlay`` and ``patches`` make of the record a
kustomization upon one of deploy/overlays. kubectl renders it.
"""

from __future__ import annotations

from elastic.cli.kube.command import main, render, write
from elastic.cli.kube.options import parser

__all__ = ["main", "parser", "render", "write"]
