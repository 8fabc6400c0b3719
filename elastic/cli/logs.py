"""``elastic logs``: what the workers and agents of a job on this machine have written.

Each node's output is kept on its own machine (:mod:`elastic.launcher.output`). Streams that
torchrun redirects to files are read from there; their lines have no times.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic.cli.arguments import (
    CommandParser,
    add_job_arguments,
    at_least,
    local_run,
    nearest,
    run_id_of,
    unknown_run,
)
from elastic.cli.events import FOLLOW_S, time_of
from elastic.cli.view import job_store, keys_of, read_job
from elastic.errors import SYSTEM_CLOCK, Clock, ConfigError, CoordinationError
from elastic.telemetry.log import printable
from elastic.telemetry.output import with_origin
from elastic.telemetry.reader import JournalFolder, JournalRecord
from elastic.telemetry.runs import LocalRun, kept_output, local_runs

_MAX_NAMED = 10  # nodes in a note
_CHUNK_BYTES = 1 << 20


def main(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run ``elastic logs ARGV``; returns the exit code."""
    args = parser(environ).parse_args(list(argv))
    since_s = time_of(args.since, SYSTEM_CLOCK.wall()) if args.since else None
    run = _run(args)
    output = KeptLines(kept_output(run.run_id, environ))
    lines = output.read_new()
    elsewhere = _elsewhere(run, args, output.nodes)
    if args.node is not None and args.node not in output.nodes:
        raise _unknown_node(args.node, output.nodes, elsewhere, run)
    wanted = [line for line in lines if _is_wanted(line, args, since_s)]
    skipped = max(0, len(wanted) - args.tail) if args.tail is not None else 0
    _print(wanted[skipped:], output)
    if args.node is None and args.rank is None and elsewhere:
        _note(_incomplete(elsewhere, run))
    if not output.nodes:
        _note(f"no output of {printable(run.run_id, 80)} is kept on this machine")
    elif args.rank is not None and not any(line.rank == args.rank for line in lines):
        ranks = sorted({line.rank for line in lines if line.rank is not None})
        kept = f"ranks {ranks[0]} to {ranks[-1]} have written" if ranks else "no rank has written"
        _note(f"there is no line of rank {args.rank}: {kept} on this machine")
    if args.follow:
        _follow(output, args, since_s, run, SYSTEM_CLOCK)
    return 0


def parser(environ: Mapping[str, str] = os.environ) -> argparse.ArgumentParser:
    """The command line of ``elastic logs``."""
    own = CommandParser(
        prog="elastic logs",
        description="Print what the workers and agents of a job on this machine have written, in "
        "order of time. Names the nodes whose logs are on other machines.",
        epilog="exit codes: 0 success, 2 usage, or no such run or node",
    )
    add_job_arguments(own, environ)
    own.add_argument("--node", metavar="NAME", help="only lines of this node")
    own.add_argument(
        "--rank",
        type=at_least(0),
        metavar="N",
        help="only lines that the worker of this rank has written; ranks change with the nodes",
    )
    own.add_argument(
        "-f", "--follow", action="store_true", help="print new lines until the job ends here"
    )
    own.add_argument(
        "--tail", type=at_least(0), metavar="N", help="only the last N lines (default: all)"
    )
    own.add_argument(
        "--since",
        metavar="TIME",
        help="only later lines: an age such as 90s, 10m, 2h, 1d, or a time in UTC such as "
        "2026-01-31T12:00",
    )
    return own


def _run(args: argparse.Namespace) -> LocalRun:
    """The run of this machine that the arguments mean. Raises ConfigError."""
    args.rdzv_id = args.run or args.rdzv_id
    run = local_run(args, or_last=True)
    if run is None and args.rdzv_id is None and not local_runs():
        raise ConfigError(
            "no job has run on this machine", hint="run `elastic logs` where its nodes run"
        )
    if run is None:
        raise unknown_run(run_id_of(args), local_runs())
    args.rdzv_id = run.run_id
    if not args.rdzv_endpoint:
        args.rdzv_endpoint = run.endpoint
        args.rdzv_conf = ",".join(filter(None, [args.rdzv_conf, f"prefix={run.prefix}"]))
    return run


# ----------------------------------------------------------------------------
# Lines that are kept on this machine.


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a worker or, without a local rank, of an agent."""

    at_s: float | None  # None: in a file of torchrun's
    node: str
    local_rank: int | None
    rank: int | None  # global; None: the agent's, unknown, or not in a world
    text: str


class KeptLines:
    """The lines of one run, each read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = JournalFolder(folder)
        self._redirected: dict[str, _RedirectedFile] = {}
        self.nodes: set[str] = set()
        self.workers: set[tuple[str, int]] = set()

    def read_new(self) -> list[Line]:
        """The lines written since the last call, in order of time."""
        lines: list[Line] = []
        for record in sorted(self._folder.read_new(), key=lambda record: record.time_s):
            self.nodes.add(record.node)
            lines += self._lines(record)
        for file in self._redirected.values():
            lines += file.read_new()
        self.workers |= {(li.node, li.local_rank) for li in lines if li.local_rank is not None}
        return lines

    def _lines(self, record: JournalRecord) -> Iterator[Line]:
        local_rank, rank = record.whole("local_rank"), record.whole("rank")
        path = record.text("path")
        if record.name == "output-redirected":
            self._redirected.setdefault(path, _RedirectedFile(record.node, local_rank, Path(path)))
        elif record.name == "output":
            for text in record.text("text").split("\n"):
                yield Line(record.time_s, record.node, local_rank, rank, text)


@dataclass
class _RedirectedFile:
    """A file to which torchrun has redirected a worker's stream, while it grows."""

    node: str
    local_rank: int | None
    path: Path
    offset: int = 0

    def read_new(self) -> Iterator[Line]:
        try:
            with self.path.open("rb") as stream:
                stream.seek(self.offset)
                while complete := stream.read(_CHUNK_BYTES).rpartition(b"\n"):
                    data, line_break, rest = complete
                    if not line_break:
                        data, rest = rest, b""
                    if not data:
                        break
                    self.offset += len(data) + len(line_break)
                    stream.seek(self.offset)
                    for line in data.split(b"\n"):
                        text = line.decode(errors="replace")
                        yield Line(None, self.node, self.local_rank, None, text)
        except OSError:
            return  # removed


def _is_wanted(line: Line, args: argparse.Namespace, since_s: float | None) -> bool:
    if args.node is not None and line.node != args.node:
        return False
    if args.rank is not None and line.rank != args.rank:
        return False
    return since_s is None or line.at_s is None or line.at_s >= since_s


def _print(lines: Sequence[Line], output: KeptLines) -> None:
    """With the node and rank of each line, if there is more than one node or worker."""
    are_several = max(len(output.nodes), len(output.workers)) > 1
    for line in lines:
        name = printable(line.node, 80)
        rank = f" r{line.rank}" if line.rank is not None else ""
        print(with_origin(f"{name}{rank}", name, line.text) if are_several else line.text)
    sys.stdout.flush()


def _follow(
    output: KeptLines,
    args: argparse.Namespace,
    since_s: float | None,
    run: LocalRun,
    clock: Clock,
) -> None:
    """Print new lines until no agent of the run is on this machine."""
    is_running = True
    while is_running:
        now = next((known for known in local_runs() if known.run_id == run.run_id), None)
        is_running = now is not None and now.is_running  # first: its last lines are read below
        _print([li for li in output.read_new() if _is_wanted(li, args, since_s)], output)
        if is_running:
            clock.sleep(FOLLOW_S)


# ----------------------------------------------------------------------------
# Nodes whose output is on other machines.


def _elsewhere(run: LocalRun, args: argparse.Namespace, here: set[str]) -> dict[str, str]:
    """The nodes of the run without output here, and their machines as far as they are known."""
    hosts = _in_journals(run)
    if run.is_running:
        hosts |= _in_etcd(args)
    return {node: host for node, host in sorted(hosts.items()) if node not in here}


def _in_journals(run: LocalRun) -> dict[str, str]:
    if not run.journal:
        return {}
    hosts: dict[str, str] = {}
    for record in JournalFolder(Path(run.journal)).read_tails(run.run_id):
        names = record.data.get("nodes") if record.name == "world-formed" else None
        for name in names if isinstance(names, list) else ():
            if isinstance(name, str):
                hosts.setdefault(name, "")
        if record.name == "journal-opened" and record.text("run_id") == run.run_id:
            hosts[record.node] = record.text("host")
    return hosts


def _in_etcd(args: argparse.Namespace) -> dict[str, str]:
    """Nothing if etcd does not answer: the lines are the answer."""
    try:
        with job_store(args) as store:
            view = read_job(store, keys_of(args), SYSTEM_CLOCK.wall())
    except CoordinationError:
        return {}
    return {node.name: node.process.host for node in view.nodes}


def _incomplete(elsewhere: Mapping[str, str], run: LocalRun) -> str:
    nodes = list(elsewhere)
    named = ", ".join(_with_host(node, elsewhere[node]) for node in nodes[:_MAX_NAMED])
    more = f" and {len(nodes) - _MAX_NAMED} more" if len(nodes) > _MAX_NAMED else ""
    noun = "node" if len(nodes) == 1 else "nodes"
    return f"incomplete: {noun} {named}{more} missing: {_where_to_look(nodes[0], run)}"


def _with_host(node: str, host: str) -> str:
    if not host or host == node:
        return printable(node, 80)
    if host == socket.gethostname():
        return f"{printable(node, 80)} (on this machine, not kept)"
    return f"{printable(node, 80)} (on {printable(host, 80)})"


def _where_to_look(node: str, run: LocalRun) -> str:
    name, run_id = printable(node, 80), printable(run.run_id, 80)
    return (
        f"their logs are on their machines: there, `elastic logs {run_id} --node {name}`; in "
        f"Kubernetes, `kubectl logs {name}`"
    )


def _unknown_node(
    node: str, here: set[str], elsewhere: Mapping[str, str], run: LocalRun
) -> ConfigError:
    if node in elsewhere:
        return ConfigError(
            f"the logs of node {_with_host(node, elsewhere[node])} are not on this machine",
            hint=_where_to_look(node, run),
        )
    known = sorted(here)
    return ConfigError(
        f"there is no output of node {printable(node, 80)}{nearest(node, known)}",
        hint=f"this machine has that of {', '.join(printable(n, 80) for n in known) or 'none'}",
    )


def _note(text: str) -> None:
    print(f"elastic: note: {text}", file=sys.stderr, flush=True)
