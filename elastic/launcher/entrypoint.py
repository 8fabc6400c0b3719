"""What torch loads in each process: the entry point of the rendezvous backend."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

# ----------------------------------------------------------------------------
# torch's registry of rendezvous backends: the only private name that workers' imports use.
#
# Separate from :mod:`elastic.launcher.torch_agent`, whose imports are the agent's: torch loads
# this while it imports its own rendezvous package.


def replace_backend(name: str, create: Callable[[Any], Any]) -> None:
    """Have the rendezvous backend ``name`` create its handlers with ``create``.

    torch's registry refuses to register a name twice. If a torch version has no such registry, its
    own backend of that name remains.
    """
    from torch.distributed.elastic.rendezvous import api

    registry = getattr(api.rendezvous_handler_registry, "_registry", None)
    if isinstance(registry, dict):
        registry[name] = create


# ----------------------------------------------------------------------------
# The module that torch loads whenever its rendezvous package is imported, in workers too: it
# imports almost nothing.
#
# The entry point group ``torchrun.handlers`` names :func:`handlers` as ``etcd-v3``. It is called
# without arguments and returns the creator. It also replaces torch's backend ``etcd``, whose
# stock handler uses etcd's v2 API, which etcd 3.6 removed; ``ELASTIC_STOCK_ETCD=1`` keeps it.


def handlers() -> Callable[[Any], Any]:
    """The creator of the ``etcd-v3`` rendezvous handler."""
    if os.environ.get("ELASTIC_STOCK_ETCD", "") not in ("1", "true", "yes"):
        replace_backend("etcd", create_handler)
    return create_handler


def create_handler(parameters: Any) -> Any:
    """Create the handler; all expensive imports happen here, only in the agent.

    torchrun exits with 1 and a traceback for any exception: errors of a node are logged as a
    sentence instead, and its exit code indicates whether a launcher should retry. A program that
    calls ``elastic_launch`` gets one of torch's rendezvous errors.
    """
    from elastic.agent.ending import leave_at_once
    from elastic.errors import ElasticError
    from elastic.launcher import torch_agent
    from elastic.launcher.handler import create, exit_on_signal
    from elastic.launcher.launch import ProgramSignals, ending

    launcher = torch_agent.launcher()
    try:
        signals = ProgramSignals()
    except ElasticError as error:
        raise ending(error, launcher) from error
    # Until the launch has its own: reaching etcd may take a while.
    signals.handle(leave_at_once(exit_on_signal(launcher)))
    handler = None
    try:
        handler = create(parameters, launcher, signals)
    except ElasticError as error:
        raise ending(error, launcher) from error
    finally:
        # A program's next call may fail in torch, before they could be restored.
        is_over = handler is None and launcher is not torch_agent.Launcher.TORCHRUN
        if is_over or launcher is torch_agent.Launcher.PROGRAM:
            signals.restore()
    return handler
