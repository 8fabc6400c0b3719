"""What torch loads whenever its rendezvous package is imported, in workers too: next to nothing.

The entry point group ``torchrun.handlers`` names :func:`handlers` as ``etcd-v3``. It is called
without arguments and returns the creator. On the way it takes over the literal ``etcd``, whose
stock handler speaks etcd's v2 API that etcd 3.6 removed; ``ELASTIC_STOCK_ETCD=1`` keeps it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def handlers() -> Callable[[Any], Any]:
    """The creator of the ``etcd-v3`` rendezvous handler."""
    if os.environ.get("ELASTIC_STOCK_ETCD", "") not in ("1", "true", "yes"):
        _take_over_etcd()
    return create_handler


def create_handler(parameters: Any) -> Any:
    """Make the handler; everything heavy is imported here, in the agent alone."""
    from elastic.agent.handler import create

    return create(parameters)


def _take_over_etcd() -> None:
    from torch.distributed.elastic.rendezvous import api

    registry = getattr(api.rendezvous_handler_registry, "_registry", None)
    if isinstance(registry, dict):
        registry["etcd"] = create_handler
