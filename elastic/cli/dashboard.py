"""``elastic dashboard``: a live page of one job."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from elastic.cli.arguments import CommandParser, add_job_arguments, find_job
from elastic.cli.dashboard_feed import EventLog, JobFeed, JournalFeed
from elastic.cli.events import existing_folder
from elastic.cli.view import job_store, keys_of
from elastic.errors import ConfigError
from elastic.store.keyvalue import KeyValue
from elastic.telemetry.log import printable

DEFAULT_PORT = 8630
TOKEN_VARIABLE = "ELASTIC_DASHBOARD_TOKEN"


def main(argv: Sequence[str]) -> int:
    """Run ``elastic dashboard ARGV``; returns the exit code."""
    args = parser().parse_args(list(argv))
    _require_extra()
    _serve(args)
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
    from elastic.cli.dashboard_server import checked_token, read_token

    if args.token_file:
        return read_token(args.token_file)
    if TOKEN_VARIABLE in environ:
        return checked_token(environ[TOKEN_VARIABLE], TOKEN_VARIABLE)
    return None


def _require_extra() -> None:
    for package in ("jinja2", "starlette", "uvicorn"):
        if package in sys.modules and sys.modules[package] is not None:
            continue
        if package in sys.modules or importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"the dashboard needs the package {package}, which is not installed",
                hint="pip install 'torch-elastic-harness[dashboard]'",
            )


def _serve(args: argparse.Namespace) -> None:
    from elastic.cli.dashboard_server import application, listening, policy_of, serve, server_of

    token = token_of(args)
    policy_of(args.host, args.port, token)  # before anything is started
    died: list[BaseException] = []

    def end(error: BaseException) -> None:
        died.append(error)
        server.should_exit = True

    feed = _feed_of(args, end)
    with listening(args.host, args.port) as listener:
        port = listener.getsockname()[1]
        policy = policy_of(args.host, port, token, tuple(args.allowed_host))
        server = server_of(application(feed, policy))
        feed.start()
        name = f"[{args.host}]" if ":" in args.host else args.host
        suffix = "?token=TOKEN" if token is not None else ""
        print(f"elastic dashboard: http://{name}:{port}/{suffix} (Ctrl-C ends it)", flush=True)
        try:
            serve(server, listener)
        finally:
            feed.close()
    if died:
        raise died[0]


def _feed_of(args: argparse.Namespace, on_error: Callable[[BaseException], object]) -> JobFeed:
    """The feed of the job. Raises ConfigError if neither etcd nor journals are given."""
    if not args.journal:
        run = find_job(args)
        args.journal = run.journal if run is not None else None
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
        folder = Path(args.journal) if uses_etcd else existing_folder(args.journal)
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
