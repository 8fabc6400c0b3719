"""Classifies exceptions: those that mean that the world has ended, and failures of the script.

Training recovers from a world fault in the next world; everything else must surface. A world fault
is identified by type, and for gloo by the source file in its text:

- ours: :class:`elastic.errors.WorldLost` and its subclasses;
- torch's DistError (``c10/util/Exception.h``: DistBackendError, DistNetworkError,
  DistStoreError): NCCL and the store;
- gloo raises plain RuntimeErrors, but each begins with the source file that raised it
  (``GLOO_ERROR_MSG`` in gloo's ``common/logging.h``), as in ``[…/gloo/transport/tcp/pair.cc:538]
  Connection closed by peer``. "Broken pipe" or "Timed out waiting" are not sufficient: a script's
  own connections break, too.
"""

from __future__ import annotations

import re

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException

from elastic.errors import ElasticError
from elastic.errors import GroupAborted as GroupAborted
from elastic.errors import GroupBuildFailed as GroupBuildFailed
from elastic.errors import Superseded as Superseded
from elastic.errors import WorldLost as WorldLost

_GLOO = (
    "gloo/transport/",  # connections: closed, reset, timed out (pair.cc, unbound_buffer.cc, …)
    "gloo/rendezvous/",  # while a group is built (store.h, context.cc)
    "Gloo connectFullMesh failed",  # torch's wrapper text
)
# gloo names the peer of a connection that the kernel has timed out (gloo/transport/tcp/pair.cc:
# "Read error [10.0.0.2]:1769: Connection timed out", "timed out connecting: SO_ERROR: Connection
# timed out, remote=[10.0.0.2]:9138$1"). Connections that peers have closed prove nothing.
_TIMED_OUT = (
    re.compile(r"\[([0-9a-fA-F.:]+)\]:\d+: (?:Connection timed out|No route to host)"),
    re.compile(r"(?:Connection timed out|No route to host), remote=\[([0-9a-fA-F.:]+)\]"),
)
# gloo's assertions name their file as well, but they report mismatched sizes and shapes.
_GLOO_ASSERTION = "enforce fail at"
# These take precedence anywhere in the chain: a signal may arrive while a fault is handled, or
# memory may run out before a collective in a `finally` is aborted.
_ALWAYS_SURFACE = (SignalException, torch.OutOfMemoryError)
# A CUDA context in which a kernel has failed is unusable in the next world, too.
_BROKEN_DEVICE = ("device-side assert", "CUDA error:")


def is_world_fault(error: BaseException) -> bool:
    """Whether ``error``, or a cause of it, means that peers or the connections to them are lost."""
    if isinstance(error, ElasticError) and not isinstance(error, WorldLost):
        return False  # it has a hint, and may have been raised while a fault was handled
    chain = causes(error)
    return not any(_must_surface(e) for e in chain) and any(_is_fault(e) for e in chain)


def unreachable_peers(error: BaseException) -> tuple[str, ...]:
    """The addresses of peers that stopped responding, as reported by gloo.

    >>> unreachable_peers(RuntimeError("Read error [10.0.0.2]:1769: Connection timed out."))
    ('10.0.0.2',)
    >>> unreachable_peers(RuntimeError("Connection closed by peer [10.0.0.2]:1769."))
    ()
    """
    text = "\n".join(str(one) for one in causes(error))
    return tuple(sorted({found for words in _TIMED_OUT for found in words.findall(text)}))


def may_stem_from_aborted_output(error: BaseException) -> bool:
    """Whether ``error`` may have been raised because an aborted collective left garbage in its
    output: on a stream nothing else indicates the abort (:mod:`elastic.process_group.semantics`).

    False for this library's errors, which have a hint, and for those that would recur in the next
    world.
    """
    chain = causes(error)
    return not any(_must_surface(e) or isinstance(e, ElasticError) for e in chain)


def causes(error: BaseException) -> list[BaseException]:
    """The exception with all its causes and contexts, each once, as in a printed traceback."""
    found: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left:
        failure = left.pop()
        if failure is None or any(failure is known for known in found):
            continue
        found.append(failure)
        left.append(failure.__cause__)
        if not failure.__suppress_context__:
            left.append(failure.__context__)
    return found


def _must_surface(error: BaseException) -> bool:
    if isinstance(error, _ALWAYS_SURFACE) or not isinstance(error, Exception):
        return True  # KeyboardInterrupt, SystemExit
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _BROKEN_DEVICE)


def _is_fault(error: BaseException) -> bool:
    if isinstance(error, WorldLost | dist.DistError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return any(part in text for part in _GLOO) and _GLOO_ASSERTION not in text
