"""Connects a read-only command to the store of the job named on the command line."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from elastic.cli.job_arguments import endpoint_of, options_of, run_id_of
from elastic.cli.observe.printable import printable
from elastic.membership.keys import Keys
from elastic.store.etcd.options import etcd_config
from elastic.store.keyvalue import KeyValue
from elastic.tuning.agent_intervals import SAY_CONNECTING_S


def keys_of(args: argparse.Namespace) -> Keys:
    """The keys of the job. Raises ConfigError."""
    return Keys.of(options_of(args).prefix, run_id_of(args))


@contextmanager
def job_store(args: argparse.Namespace, *, reports_delay: bool = True) -> Iterator[KeyValue]:
    """Connect for the duration of the block. Raises ConfigError and CoordinationError.

    ``reports_delay``: print a line to stderr if etcd does not answer within SAY_CONNECTING_S.
    """
    from elastic.store.etcd.store import EtcdStore

    endpoint, options = endpoint_of(args), options_of(args)
    line = (
        f"elastic: etcd at {printable(endpoint, 200)} has not answered yet; waiting up to "
        f"{options.connect_timeout_s:g} s (connect_timeout_s in --rdzv-conf)"
    )
    with _print_if_slow(line) if reports_delay else nullcontext():
        store = EtcdStore(etcd_config(endpoint, options))
    try:
        yield store
    finally:
        store.close()


@contextmanager
def _print_if_slow(line: str) -> Iterator[None]:
    """Print ``line`` to stderr if the block takes longer than ``SAY_CONNECTING_S``."""
    timer = threading.Timer(SAY_CONNECTING_S, print, (line,), {"file": sys.stderr, "flush": True})
    timer.name, timer.daemon = "elastic-slow-connection", True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
