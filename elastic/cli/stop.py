"""``elastic stop``: save, and train no more until ``elastic resume``."""

from __future__ import annotations

import argparse
import getpass
import os
import socket
from collections.abc import Mapping, Sequence

from elastic.cli.arguments import (
    CommandParser,
    add_job_arguments,
    endpoint_of,
    nearest,
    options_of,
)
from elastic.cli.jobs import read_jobs
from elastic.cli.view import JobCondition, JobView, job_store, keys_of, read_job, seconds_of
from elastic.errors import SYSTEM_CLOCK, Clock, ConfigError, StoreUnreachable
from elastic.membership.records import Keys, Stop, encode
from elastic.store.keyvalue import KeyValue
from elastic.telemetry.log import printable
from elastic.telemetry.runs import is_loopback

# Between two looks at a job that stops.
STOP_POLL_S = 0.5
TIMED_OUT = 124

CODES = (
    "exit codes: 0 success, {more}2 usage, or no such job, 69 etcd unreachable, or access denied"
)


def main(argv: Sequence[str]) -> int:
    """Run ``elastic stop ARGV``; returns the exit code."""
    args = parser().parse_args(list(argv))
    within_s = seconds_of(args.timeout, "--timeout")
    keys = keys_of(args)
    with job_store(args) as store:
        request_stop(store, keys, args)
        name = printable(keys.run_id)
        try:
            view = wait_for_stop(store, keys, within_s, SYSTEM_CLOCK)
        except StoreUnreachable as error:
            if not is_loopback(endpoint_of(args)):
                raise
            print(f"{name} has ended with its etcd on this machine: {printable(error.message)}")
            return 0
    if view.done is not None:
        print(f"{name} has ended before it stopped: {printable(view.done.reason)}")
        return 0
    if view.state is not JobCondition.STOPPED:
        print(f"{name} still stops after {args.timeout}; see elastic status {name}")
        return TIMED_OUT
    step = f" at step {view.step} or later" if view.step is not None else ""
    # An embedded etcd ends with its job, and with it the record of the stop.
    here = (
        ", or starting it again if its etcd was embedded" if is_loopback(endpoint_of(args)) else ""
    )
    print(f"{name} is stopped{step}; elastic resume {name} lets it go on{here}")
    return 0


def parser(environ: Mapping[str, str] = os.environ) -> argparse.ArgumentParser:
    """The command line of ``elastic stop``."""
    own = CommandParser(
        prog="elastic stop",
        description="Stop a job: its workers save at the next step boundary, and all nodes leave "
        "it with exit code 75. Nodes that Kubernetes or Slurm start in their place wait, until "
        "`elastic resume`.",
        epilog=CODES.format(more="124 it still stops, "),
    )
    add_job_arguments(own, environ)
    own.add_argument(
        "--timeout",
        default="10m",
        metavar="TIME",
        help="how long to wait until no node trains, such as 90s, 10m, 2h (default: %(default)s)",
    )
    return own


def request_stop(store: KeyValue, keys: Keys, args: argparse.Namespace) -> None:
    """Record that the job is to stop, unless it has ended. Raises ConfigError."""
    record = encode(Stop(by=_user(), time_s=SYSTEM_CLOCK.wall()))
    written = None
    while written is None:  # it may end after it was read
        running_job(store, keys, args)
        written = store.compare_and_swap(
            keys.stop, record, expected_revision=None, basis=[(keys.done, 0)]
        )


def wait_for_stop(store: KeyValue, keys: Keys, within_s: float, clock: Clock) -> JobView:
    """Wait until no node of the job trains, or it has ended, at most ``within_s``; returns its
    last view."""
    until_s = clock.monotonic() + within_s
    while True:
        view = read_job(store, keys, clock.wall())
        is_over = view.state is JobCondition.STOPPED or view.done is not None
        if is_over or clock.monotonic() >= until_s:
            return view
        clock.sleep(STOP_POLL_S)


def existing_job(store: KeyValue, keys: Keys, args: argparse.Namespace) -> JobView:
    """The job. Raises ConfigError that names the jobs that exist."""
    view = read_job(store, keys, SYSTEM_CLOCK.wall())
    if view.state is JobCondition.ABSENT:
        names = [job.run_id for job in read_jobs(store, options_of(args).prefix, view.at_s)]
        raise ConfigError(
            f"there is no job {printable(keys.run_id)}{nearest(keys.run_id, names)}",
            hint=f"this etcd has {', '.join(map(printable, names[:10])) or 'none'}",
        )
    return view


def running_job(store: KeyValue, keys: Keys, args: argparse.Namespace) -> JobView:
    """The job, which has not ended. Raises ConfigError."""
    view = existing_job(store, keys, args)
    if view.done is not None:
        raise ConfigError(
            f"{printable(keys.run_id)} has ended: {printable(view.done.reason)}",
            hint="a finished job stays finished; `elastic forget` removes what it left in etcd",
        )
    return view


def _user() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
