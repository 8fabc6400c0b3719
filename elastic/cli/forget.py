"""``elastic forget``: remove what a job without nodes has left in etcd and in the state folder."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence

from elastic.cli.arguments import CommandParser, add_job_arguments
from elastic.cli.stop import CODES, existing_job
from elastic.cli.view import job_store, keys_of, read_job
from elastic.errors import SYSTEM_CLOCK, ConfigError, StoreUnreachable
from elastic.membership.records import Keys
from elastic.store.keyvalue import KeyValue
from elastic.telemetry import runs
from elastic.telemetry.log import printable


def main(argv: Sequence[str]) -> int:
    """Run ``elastic forget ARGV``; returns the exit code."""
    args = parser().parse_args(list(argv))
    keys = keys_of(args)
    name = printable(keys.run_id)
    is_known = any(run.run_id == keys.run_id for run in runs.local_runs())
    try:
        with job_store(args) as store:
            if not is_known:
                existing_job(store, keys, args)
            number = forget(store, keys)
        print(f"{name}: {number} keys are deleted from etcd")
    except StoreUnreachable as error:
        run = next((run for run in runs.local_runs() if run.run_id == keys.run_id), None)
        if run is None or run.is_running or not runs.is_loopback(run.endpoint):
            raise
        print(f"{name}: its etcd no longer runs ({printable(error.message, 200)})")
    if runs.forget(keys.run_id):
        print(f"{name}: this machine's entry of it is removed")
    print("its checkpoints, and the journals beside them, are unchanged")
    return 0


def forget(store: KeyValue, keys: Keys) -> int:
    """Delete all keys of a job without nodes; returns their number. Raises ConfigError."""
    nodes = read_job(store, keys, SYSTEM_CLOCK.wall()).nodes
    if nodes:
        raise ConfigError(
            f"{printable(keys.run_id)} has {len(nodes)} nodes: "
            f"{', '.join(printable(node.name, 60) for node in nodes[:10])}",
            hint="end their agents first; `elastic stop` ends their training",
        )
    # The secret last: a run whose other keys are left could not be joined without it.
    entries = sorted(store.list(keys.root).entries, key=lambda entry: entry.key == keys.secret)
    return sum(store.delete(entry.key) for entry in entries)


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
