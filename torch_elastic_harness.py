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
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
# Processes that a worker starts inherit its environment: their failures are not the worker's.
_OWNER = "ELASTIC_ERROR_FILE_OWNER"
_HIDDEN = 2  # elastic.errors.ConfigError.exit_code
_PACKAGES = ("elastic", "checkpoints")


def on_import_of_torch() -> None:
    """Record an exception that ends this process, if it is a worker of an agent of ours. End an
    agent that cannot import this project's packages: torch would use another backend ``etcd``."""
    environ, pid = os.environ, str(os.getpid())
    if is_agent(sys.orig_argv, environ) and (sentence := hidden_package()):
        sys.stderr.write(sentence)
        sys.exit(_HIDDEN)
    if not environ.get("TORCHELASTIC_ERROR_FILE") or not environ.get("ELASTIC_NODE_ID"):
        return
    if environ.setdefault(_OWNER, pid) != pid:
        return
    next_hook: _Hook = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, Exception) and os.getpid() == int(pid):
            _record(error)
        next_hook(kind, error, trace)
        # `import elastic` has found the script's own module.
        is_named = any(f"'{name}" in str(error) for name in _PACKAGES)
        if isinstance(error, (AttributeError, ImportError)) and is_named:
            sys.stderr.write(hidden_package())

    sys.excepthook = hook


def is_agent(argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether a command line is torchrun's, with a rendezvous backend of this project."""
    if not any(a == "torch.distributed.run" or Path(a).name == "torchrun" for a in argv[1:3]):
        return False
    backend = environ.get("PET_RDZV_BACKEND", "")
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        flag, is_joined, value = argument.partition("=")
        if flag in ("--rdzv-backend", "--rdzv_backend"):
            backend = value if is_joined else following
    is_stock = environ.get("ELASTIC_STOCK_ETCD", "") in ("1", "true", "yes")
    return backend == "etcd-v3" or (backend == "etcd" and not is_stock)


def hidden_package() -> str:
    """A sentence about a module that precedes a package of this project on the search path, as
    ``python -m`` puts the working folder first; empty if there is none."""
    for name in _PACKAGES:
        own, spec = Path(__file__).with_name(name) / "__init__.py", find_spec(name)
        found = spec.origin if spec is not None else None
        if found is not None and own.exists() and not own.samefile(found):
            return (
                f"elastic: {found} hides the package {name} of torch-elastic-harness "
                f"({own.parent})\n"
                "  rename it, or start the job with torchrun, not "
                "python -m torch.distributed.run, without that folder in PYTHONPATH\n"
            )
    return ""


def _record(error: Exception) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if os.path.exists(path) and os.path.getsize(path) > 0:
        return  # @record, or elastic.join(), has done it
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        raise error  # torch's handler takes the exception that is being handled
    except Exception as raised:  # noqa: BLE001  it is the one just raised
        get_error_handler().record_exception(raised)
