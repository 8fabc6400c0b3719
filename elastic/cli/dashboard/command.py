"""``elastic dashboard``: arguments, and assembly of the parts."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from elastic.cli.command_parser import CommandParser
from elastic.cli.dashboard.access import AccessPolicy, checked_token, policy_of, read_token
from elastic.cli.dashboard.feed.event_log import EventLog
from elastic.cli.dashboard.feed.job_feed import JobFeed
from elastic.cli.dashboard.feed.journal_feed import JournalFeed
from elastic.cli.dashboard.feed.snapshot import JobSnapshot
from elastic.cli.job_arguments import add_job_arguments
from elastic.cli.observe.connection import job_store, keys_of
from elastic.cli.observe.events import folder_of
from elastic.cli.observe.printable import printable
from elastic.errors import ConfigError
from elastic.store.keyvalue import KeyValue

DEFAULT_PORT = 8630
TOKEN_VARIABLE = "ELASTIC_DASHBOARD_TOKEN"


def main(argv: Sequence[str]) -> int:
    """Run ``elastic dashboard ARGV``; returns the exit code."""
    args = parser().parse_args(list(argv))
    token = token_of(args)
    policy_of(args.host, args.port, token)  # before anything is started
    _require_extra()
    _serve(args, token)
    return 0


def parser(environ: Mapping[str, str] = os.environ) -> argparse.ArgumentParser:
    """The command line of ``elastic dashboard``."""
    own = CommandParser(
        prog="elastic dashboard",
        description="Serve a live, read-only page with a job's status: state, nodes, incidents, "
        "where its time goes, and events. Reads etcd, and the journals if --journal is given. "
        "See docs/how-to/observe.md.",
        epilog="exit codes: 0 success, 2 usage, 130 Ctrl-C",
    )
    add_job_arguments(own, environ)
    own.add_argument(
        "--journal",
        default=environ.get("ELASTIC_JOURNAL"),
        metavar="FOLDER",
        help="journal folder, for events and charts; required without --rdzv-endpoint (default: "
        "ELASTIC_JOURNAL)",
    )
    own.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="listen address; any but a loopback address needs a token (default: %(default)s)",
    )
    own.add_argument(
        "--port",
        type=int,
        default=DEFAULT_PORT,
        help="TCP port; 0: any free port (default: %(default)s)",
    )
    own.add_argument(
        "--token-file",
        metavar="FILE",
        help=f"file whose first line is the access token (default: ${TOKEN_VARIABLE})",
    )
    own.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="additional host name to accept in requests; may be repeated",
    )
    return own


def token_of(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> str | None:
    """The access token, or None. Raises ConfigError."""
    if args.token_file:
        return read_token(args.token_file)
    if TOKEN_VARIABLE in environ:
        return checked_token(environ[TOKEN_VARIABLE], TOKEN_VARIABLE)
    return None


def _require_extra() -> None:
    try:
        import starlette
        import uvicorn
    except ImportError as error:
        raise ConfigError(
            f"the dashboard needs the package {error.name}, which is not installed",
            hint="pip install 'torch-elastic-harness[dashboard]'",
        ) from error
    del starlette, uvicorn


def _serve(args: argparse.Namespace, token: str | None) -> None:
    from elastic.cli.dashboard.application import application
    from elastic.cli.dashboard.publisher import Publisher
    from elastic.cli.dashboard.server import DashboardServer, listening

    publisher = Publisher(secrets.token_hex(4))
    died: list[BaseException] = []

    def end(error: BaseException) -> None:
        died.append(error)
        server.should_exit = True

    feed = _feed_of(args, publisher.publish, end)
    with listening(args.host, args.port) as listener:
        port = listener.getsockname()[1]
        policy = policy_of(args.host, port, token, tuple(args.allowed_host))
        server = DashboardServer(application(publisher, policy, lambda: feed.is_alive), publisher)
        publisher.publish(feed.snapshot)
        feed.start()
        print(_address_line(args.host, port, policy), flush=True)
        try:
            server.serve_on(listener)
        finally:
            feed.close()
    if died:
        raise died[0]


def _feed_of(
    args: argparse.Namespace,
    on_change: Callable[[JobSnapshot], object],
    on_error: Callable[[BaseException], object],
) -> JobFeed:
    """The feed of the job. Raises ConfigError if neither etcd nor journals are given."""
    uses_etcd = bool(args.rdzv_endpoint)
    if not uses_etcd and not args.journal:
        raise ConfigError(
            "neither --rdzv-endpoint nor --journal is given",
            hint="give etcd's endpoint, the folder of the job's journals, or both",
        )
    keys = keys_of(args) if uses_etcd else None
    log = EventLog()
    journals = None
    if args.journal:
        run_id = keys.run_id if keys is not None else (args.rdzv_id or "")
        # A job that has not started has no journals yet: with etcd, the folder may appear later.
        folder = Path(args.journal) if uses_etcd else folder_of(args.journal)
        if not folder.is_dir():
            print(
                f"elastic dashboard: there is no folder {printable(args.journal)} yet: events come "
                "from etcd only, and there are no charts",
                file=sys.stderr,
            )
        journals = JournalFeed(folder, run_id, log)
    return JobFeed(
        keys,
        StoreOpener(args) if uses_etcd else None,
        journals,
        log,
        on_change=on_change,
        on_error=on_error,
    )


class StoreOpener:
    """Connects to the job's store. Only the first attempt is reported on stderr: the page shows
    since when etcd is unreachable."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._is_first = True

    def __call__(self) -> AbstractContextManager[KeyValue]:
        is_first, self._is_first = self._is_first, False
        return job_store(self._args, reports_delay=is_first)


def _address_line(host: str, port: int, policy: AccessPolicy) -> str:
    name = f"[{host}]" if ":" in host else host
    suffix = "?token=TOKEN" if policy.token is not None else ""
    return f"elastic dashboard: http://{name}:{port}/{suffix} (Ctrl-C ends it)"
