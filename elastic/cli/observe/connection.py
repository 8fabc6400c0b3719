"""The store of the job that the command line names, for a command that only reads."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from elastic.cli.job_arguments import endpoint_of, options_of, run_id_of
from elastic.membership.keys import Keys
from elastic.store.etcd.options import etcd_config
from elastic.store.keyvalue import KeyValue


def keys_of(args: argparse.Namespace) -> Keys:
    """The job's. Raises ConfigError."""
    return Keys.of(options_of(args).prefix, run_id_of(args))


@contextmanager
def job_store(args: argparse.Namespace) -> Iterator[KeyValue]:
    """Connect, and close at the end. Raises ConfigError and CoordinationError."""
    from elastic.store.etcd.store import EtcdStore

    store = EtcdStore(etcd_config(endpoint_of(args), options_of(args)))
    try:
        yield store
    finally:
        store.close()
