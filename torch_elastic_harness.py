"""Code that ``import torch`` runs in a worker, so that a script's exception reaches its agent.

torchrun reads the file ``TORCHELASTIC_ERROR_FILE`` of each worker, but only scripts decorated with
``@record`` write it. For all others an agent only has an exit code: it can neither distinguish
faults of the machine from errors of the script, nor the first failure from its consequences.

torch calls the entry points of the group ``torch.backends`` when it is imported (torch 2.5 and
later, ``torch/__init__.py``, ``_import_device_backends``). This one does nothing outside of a
worker of this project. It is a separate module because the import of torch fails if that of an
entry point does: a user's own folder may be named ``elastic``, and would precede this package
(docs/decisions/0028).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import TracebackType

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
# Processes that a worker starts inherit its environment: their failures are not the worker's.
_OWNER = "ELASTIC_ERROR_FILE_OWNER"


def on_import_of_torch() -> None:
    """Record an exception that ends this process, if it is a worker of an agent of ours."""
    environ, pid = os.environ, str(os.getpid())
    if not environ.get("TORCHELASTIC_ERROR_FILE") or not environ.get("ELASTIC_NODE_ID"):
        return
    if environ.setdefault(_OWNER, pid) != pid:
        return
    next_hook: _Hook = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, Exception) and os.getpid() == int(pid):
            _record(error)
        next_hook(kind, error, trace)

    sys.excepthook = hook


def _record(error: Exception) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if os.path.exists(path) and os.path.getsize(path) > 0:
        return  # @record, or elastic.join(), has done it
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        raise error  # torch's handler takes the exception that is being handled
    except Exception as raised:  # noqa: BLE001  it is the one just raised
        get_error_handler().record_exception(raised)
