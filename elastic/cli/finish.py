"""``elastic finish``: wait for the job's end, then scale its StatefulSet to 0.

A StatefulSet restarts every pod that exits, so finished agents park (ELASTIC_PARK) and this
command scales them down. Its exit code is the job's:
``kubectl wait --for=condition=complete job/...`` succeeds only if training succeeded.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import NoReturn

import tenacity

from elastic.agent import accounting
from elastic.cli.arguments import (
    CommandParser,
    add_job_arguments,
    endpoint_of,
    options_of,
    run_id_of,
)
from elastic.cli.scale import CREDENTIALS, ApiServer, scale_statefulset
from elastic.errors import SYSTEM_CLOCK, StoreUnreachable
from elastic.membership.records import Done, Keys, Outcome, decode
from elastic.store.client import etcd_config
from elastic.store.keyvalue import Disconnected, KeyValue, Put, Reconnected, Reset, WatchEvent
from elastic.tuning.intervals import CLUSTER_BACKOFF_CAP_S, CLUSTER_FIRST_BACKOFF_S
from elastic.tuning.options import AgentOptions

TERMINATED = 128 + signal.SIGTERM


def main(argv: Sequence[str]) -> int:
    """Run ``elastic finish ARGV``; returns the job's exit code."""
    args = parser().parse_args(argv)
    options = options_of(args)
    keys = Keys.of(options.prefix, run_id_of(args))
    endpoint = endpoint_of(args)
    # Check everything before the wait, which may take weeks; a dry run checks the permissions.
    server = ApiServer.of_pod(os.environ, CREDENTIALS)
    namespace = args.namespace or server.own_namespace()
    signal.signal(signal.SIGTERM, _on_sigterm)
    target = f"statefulset/{args.statefulset} in {namespace}"
    scale_statefulset(
        server, namespace=namespace, name=args.statefulset, replicas=0, say=say, dry_run=True
    )
    say(f"{target} can be scaled (verified with a dry run)")
    done = _wait(endpoint, options, keys)
    say(f"the job under {keys.root} has ended: {done.outcome.value}: {done.reason}")
    if accounting.is_wanted(done):
        say(accounting.render(done, keys))
    if done.outcome is Outcome.FAILURE and args.keep_failed:
        say(f"statefulset/{args.statefulset} is not changed (--keep-failed)")
        return _exit_code(done)
    scale_statefulset(server, namespace=namespace, name=args.statefulset, replicas=0, say=say)
    say(f"{target} is scaled to 0")
    return _exit_code(done)


def say(text: str) -> None:
    print(f"elastic: {text}", file=sys.stderr, flush=True)


def _exit_code(done: Done) -> int:
    """The job's exit code; never 0 for a failure."""
    return done.exit_code or (0 if done.outcome is Outcome.SUCCESS else 1)


def _on_sigterm(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(TERMINATED)


# The job's end -----------------------------------------------------------------------------------


def _wait(endpoint: str, options: AgentOptions, keys: Keys) -> Done:
    """Wait without a timeout until the job has ended. Raises CoordinationError, except for an
    etcd that does not answer: that is retried."""
    from elastic.store.etcd import EtcdStore

    config = etcd_config(endpoint, options)
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(StoreUnreachable),
        wait=tenacity.wait_random_exponential(
            multiplier=CLUSTER_FIRST_BACKOFF_S, max=CLUSTER_BACKOFF_CAP_S
        ),
        before_sleep=_report_retry,
        sleep=SYSTEM_CLOCK.sleep,
    )
    store = retrying(EtcdStore, config)
    try:
        say(f"waiting for the end of the job under {keys.root}")
        return wait_for_done(store, keys)
    finally:
        store.close()


def _report_retry(state: tenacity.RetryCallState) -> None:
    assert state.outcome is not None
    say(f"{state.outcome.exception()}\n  trying again in {state.upcoming_sleep:.1f} s")


def wait_for_done(store: KeyValue, keys: Keys) -> Done:
    """Block until the key ``done`` exists. Raises RecordError if it cannot be read."""
    events: queue.SimpleQueue[WatchEvent] = queue.SimpleQueue()
    watch = store.watch([keys.done], events.put, name="elastic-watch-done")
    try:
        while True:
            match events.get():
                case Reset(snapshot):
                    entries = {e.key: e for e in snapshot.entries}
                    entry = entries.get(keys.done)
                case Put(entry):
                    pass
                case Disconnected(error):
                    say(f"etcd is unreachable, reconnecting: {error}")
                    continue
                case Reconnected():
                    say("etcd is reachable again")
                    continue
                case _:
                    continue
            if entry is not None and entry.key == keys.done:
                return decode(Done, entry.key, entry.value)
    finally:
        watch.close()


# The command line --------------------------------------------------------------------------------


def parser(environ: Mapping[str, str] = os.environ) -> argparse.ArgumentParser:
    """The command line of ``elastic finish``."""
    parser = CommandParser(
        prog="elastic finish",
        description="Wait for the end of a job, then scale its StatefulSet to 0. Runs in a pod "
        "whose service account may patch the scale of that StatefulSet.",
        epilog="exit codes: the job's (0 done, 1 the script failed, 65 no valid checkpoint, 70 the "
        "failure budget is spent); 2 usage, 69 etcd or the API server cannot be used. The agents' "
        "options (certificates, user, prefix) are read from the same ELASTIC_* variables.",
    )
    parser.add_argument(
        "--statefulset", required=True, metavar="NAME", help="name of the job's StatefulSet"
    )
    parser.add_argument("--namespace", help="namespace of the StatefulSet (default: this pod's)")
    add_job_arguments(parser, environ)
    parser.add_argument(
        "--keep-failed",
        action="store_true",
        help="leave the pods of a failed job parked for inspection",
    )
    return parser
