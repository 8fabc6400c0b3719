"""torch's registry of rendezvous backends: the only private name that workers' imports use.

Separate from :mod:`elastic.rendezvous.torch_private`, whose imports are the agent's: torch loads
this while it imports its own rendezvous package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def replace_backend(name: str, create: Callable[[Any], Any]) -> None:
    """Have the rendezvous backend ``name`` create its handlers with ``create``.

    torch's registry refuses to register a name twice. If a torch version has no such registry, its
    own backend of that name remains.
    """
    from torch.distributed.elastic.rendezvous import api

    registry = getattr(api.rendezvous_handler_registry, "_registry", None)
    if isinstance(registry, dict):
        registry[name] = create
