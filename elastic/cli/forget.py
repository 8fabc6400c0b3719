"""``elastic forget``: remove what a job without nodes has left in etcd and in the state folder."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence

from elastic.cli.arguments import CommandParser, add_job_arguments
from elastic.cli.stop import CODES, existing_job
from elastic.cli.view import job_store, keys_of
from elastic.errors import ConfigError, RecordError, StoreUnreachable
from elastic.membership.records import Keys, Node, decode
from elastic.store.keyvalue import Entry, KeyValue, Snapshot
from elastic.telemetry import runs
from elastic.telemetry.log import counted, printable


def main(argv: Sequence[str]) -> int:
    """Run ``elastic forget ARGV``; returns the exit code."""
    args = parser().parse_args(list(argv))
    keys = keys_of(args)
    name = printable(keys.run_id)
    is_known = any(run.run_id == keys.run_id for run in runs.local_runs())
    try:
        with job_store(args) as store:
            number = forget(store, keys)
            if not (number or is_known):
                existing_job(store, keys, args)
        print(f"{name}: {number} keys are deleted from etcd")
    except StoreUnreachable:
        run = next((run for run in runs.local_runs() if run.run_id == keys.run_id), None)
        if run is None or run.is_running or not runs.is_loopback(run.endpoint):
            raise
        print(f"{name}: its etcd no longer runs")
    if runs.forget(keys.run_id):
        print(f"{name}: this machine's entry of it is removed")
    print("its checkpoints, and the journals beside them, are unchanged")
    return 0


def forget(store: KeyValue, keys: Keys) -> int:
    """Delete all keys of a job without nodes; returns their number. Raises ConfigError.

    At once, and only if a node has not registered since they were read: it would be left without a
    key of its own. One that registers later writes the run's secret again.
    """
    while True:
        snapshot = store.list(keys.root)
        own = keys.of_job(entry.key for entry in snapshot.entries)
        if names := _nodes(keys, snapshot):
            raise ConfigError(
                f"{printable(keys.run_id)} has {counted(len(names), 'node')}: "
                f"{', '.join(printable(name, 60) for name in names[:10])}",
                hint="end their agents first; `elastic stop` ends their training",
            )
        if store.delete_unchanged(own, revision=snapshot.revision):
            folders = tuple(key for key in own if key.endswith("/"))
            return sum(e.key in own or e.key.startswith(folders) for e in snapshot.entries)


def _nodes(keys: Keys, snapshot: Snapshot) -> list[str]:
    """The nodes that hold a lease, which only agents do. (Records of nodes that have left or
    finished have none.)"""
    leased = [entry for entry in snapshot.entries if entry.lease_id]
    names = [_name(entry) for entry in leased if entry.key.startswith(keys.nodes)]
    # A finished node may lead until the others have, too.
    return names or ["its leader" for entry in leased if entry.key == keys.leader]


def _name(entry: Entry) -> str:
    try:
        return decode(Node, entry.key, entry.value).name
    except RecordError:  # of another version
        return entry.key.rpartition("/")[2]


def parser(environ: Mapping[str, str] = os.environ) -> argparse.ArgumentParser:
    """The command line of ``elastic forget``."""
    own = CommandParser(
        prog="elastic forget",
        description="Delete a job's keys from etcd, and this machine's entry of it with the "
        "journals in the user's state folder: its run id is new again. Refused while it has nodes. "
        "Checkpoints, and journals beside them, are unchanged.",
        epilog=CODES.format(more=""),
    )
    add_job_arguments(own, environ)
    return own
