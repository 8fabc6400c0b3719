"""``elastic resume``: let a job go on that ``elastic stop`` has stopped."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence

from elastic.cli.arguments import CommandParser, add_job_arguments
from elastic.cli.stop import CODES, running_job
from elastic.cli.view import job_store, keys_of
from elastic.telemetry.log import counted, printable


def main(argv: Sequence[str]) -> int:
    """Run ``elastic resume ARGV``; returns the exit code."""
    args = parser().parse_args(list(argv))
    keys = keys_of(args)
    with job_store(args) as store:
        view = running_job(store, keys, args)
        was_stopped = store.delete(keys.stop)
    name = printable(keys.run_id)
    if not was_stopped:
        print(f"{name} is not stopped")
    elif view.waiting:
        names = ", ".join(printable(node.name, 60) for node in view.waiting[:10])
        print(f"{name} goes on with {counted(len(view.waiting), 'waiting node')}: {names}")
    else:
        print(f"{name} goes on when a node is started")
    return 0


def parser(environ: Mapping[str, str] = os.environ) -> argparse.ArgumentParser:
    """The command line of ``elastic resume``."""
    own = CommandParser(
        prog="elastic resume",
        description="Let a job go on that `elastic stop` has stopped: from its newest checkpoint, "
        "with the nodes that wait.",
        epilog=CODES.format(more=""),
    )
    add_job_arguments(own, environ)
    return own
