"""``elastic doctor``: checks whether this machine, etcd and the network are ready for training."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from elastic.cli.arguments import CommandParser, add_job_arguments, options_of
from elastic.cli.view import table_console
from elastic.doctor.checks import HEALTHY, Finding, Status, exit_code, summary
from elastic.doctor.collectives import rate
from elastic.doctor.examination import ExaminationPlan, Report, examine
from elastic.errors import ConfigError
from elastic.tuning.environment import human

_COLOURS = {
    Status.OK: "green",
    Status.WARNING: "yellow",
    Status.FAILED: "bold red",
    Status.SKIPPED: "dim",
}


def main(argv: Sequence[str]) -> int:
    """Run ``elastic doctor ARGV``; returns 0 if no check failed, else 1."""
    args = parser().parse_args(argv)
    report = examine(_plan(args), _say)
    if args.output == "json":
        print(json.dumps(as_json(report), indent=1))
    else:
        _print_tables(report)
    return exit_code(report.findings)


def as_json(report: Report) -> dict[str, object]:
    """The document that ``-o json`` prints."""
    return {
        "healthy": exit_code(report.findings) == HEALTHY,
        "nodes": list(report.nodes),
        "findings": [{**asdict(f), "status": f.status.value} for f in report.findings],
        "speeds": [asdict(speed) for speed in report.speeds],
    }


def _say(text: str) -> None:
    """Progress messages for an interactive terminal."""
    if sys.stderr.isatty():
        print(f"elastic: {text}", file=sys.stderr, flush=True)


# The tables ----------------------------------------------------------------------------------


def _print_tables(report: Report) -> None:
    console = table_console()
    several = len(report.nodes) > 1
    console.print(_findings_table(report.findings, several=several))
    if report.speeds:
        console.print(_speeds_table(report))
    console.print(summary(report.findings), highlight=False)


def _findings_table(findings: Sequence[Finding], *, several: bool) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table("check", *(["node"] if several else []), "status", "measured, → remedy")
    for one in folded(findings):
        measured = f"{one.measured}\n→ {one.remedy}" if one.remedy else one.measured
        status = Text(one.status.value, style=_COLOURS[one.status])
        table.add_row(
            Text(one.name), *([Text(one.node)] if several else []), status, Text(measured)
        )
    return table


def folded(findings: Sequence[Finding]) -> list[Finding]:
    """Merge equal findings of several nodes into one row: with the first node's name and a count if
    the check passed or was skipped, else with all names."""
    rows: dict[tuple[str, ...], list[Finding]] = {}
    for number, one in enumerate(findings):
        key: tuple[str, ...] = (str(number),)
        if one.node:
            problem = () if _is_fine(one) else (one.measured, one.remedy)
            key = (one.name, one.status.value, *problem)
        rows.setdefault(key, []).append(one)
    return [replace(same[0], node=_nodes_of(same)) for same in rows.values()]


def _is_fine(finding: Finding) -> bool:
    return finding.status in (Status.OK, Status.SKIPPED)


def _nodes_of(same: Sequence[Finding]) -> str:
    if _is_fine(same[0]) and len(same) > 1:
        return f"{same[0].node} +{len(same) - 1}"
    return ", ".join(one.node for one in same)


def _speeds_table(report: Report) -> Any:
    from rich.table import Table

    table = Table(
        *("backend", "ranks", "size", "torch", "raw TCP"),
        title="one way between two ranks",
        title_justify="left",
    )
    for row in report.speeds:
        table.add_row(
            row.backend,
            f"0-{row.peer}",
            human(row.size_bytes),
            *(
                f"{one_way_ms:.3f} ms, {rate(row.size_bytes, one_way_ms):.3f} GB/s"
                for one_way_ms in (row.torch_ms, row.raw_ms)
            ),
        )
    return table


# The command line --------------------------------------------------------------------------------


def parser(environ: Mapping[str, str] = os.environ) -> argparse.ArgumentParser:
    """The command line of ``elastic doctor``."""
    parser = CommandParser(
        prog="elastic doctor",
        description="Check this machine, etcd, and every operation of torch.distributed. To check "
        "the connections between N nodes, too, run it with --nnodes=N on each of them.",
        epilog="exit codes: 0 no check failed (there may be warnings), 1 a check failed, "
        "2 usage. The agents' options (certificates, user, prefix) are read from the same "
        "ELASTIC_* variables.",
    )
    add_job_arguments(parser, environ)
    parser.add_argument(
        "--nnodes",
        type=_positive,
        default=1,
        metavar="N",
        help="number of nodes that run this command (default: 1)",
    )
    parser.add_argument(
        "--nproc-per-node",
        type=_positive,
        metavar="N",
        help="processes on this node (default: 2 on one node, 1 on several)",
    )
    parser.add_argument("--local-addr", default="", metavar="ADDR", help="this node's address")
    parser.add_argument(
        "--checkpoints",
        metavar="DIR",
        help="also check this checkpoint folder: space, fsync, file://",
    )
    parser.add_argument(
        "--ports",
        default="",
        metavar="PORT,...",
        help="also try these TCP ports between all nodes (MASTER_PORT, for example)",
    )
    parser.add_argument(
        "--local",
        action="store_true",
        help="check only the machine and etcd; takes seconds, starts no process groups",
    )
    parser.add_argument(
        "--deadline",
        type=_seconds,
        default=ExaminationPlan.deadline_s,
        metavar="S",
        help="timeout for one operation without output (default: %(default)g)",
    )
    parser.add_argument(
        "--join-timeout",
        type=_seconds,
        default=ExaminationPlan.join_timeout_s,
        metavar="S",
        help="how long to wait for the other nodes (default: %(default)g)",
    )
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    return parser


def _plan(args: argparse.Namespace) -> ExaminationPlan:
    """The examination that the arguments request. Raises ConfigError."""
    if args.nnodes > 1 and not (args.rdzv_endpoint and args.rdzv_id):
        lacking = "--rdzv-endpoint" if not args.rdzv_endpoint else "--rdzv-id"
        raise ConfigError(
            f"--nnodes={args.nnodes} without {lacking}: the nodes find each other through etcd",
            hint="give all of them the same --rdzv-endpoint=HOST:PORT and --rdzv-id=NAME",
        )
    return ExaminationPlan(
        options=options_of(args),
        endpoint=args.rdzv_endpoint,
        run_id=args.rdzv_id,
        nnodes=args.nnodes,
        nproc=args.nproc_per_node or (2 if args.nnodes == 1 else 1),
        local_addr=args.local_addr,
        folder=args.checkpoints,
        ports=_ports(args.ports),
        only_local=args.local,
        deadline_s=args.deadline,
        join_timeout_s=args.join_timeout,
    )


def _ports(text: str) -> tuple[int, ...]:
    numbers = [part.strip() for part in text.split(",") if part.strip()]
    for number in numbers:
        if not (number.isdigit() and 1 <= int(number) <= 65535):
            raise ConfigError(
                f"--ports={text}: {number!r} is not a valid port", hint="--ports=29500,29501"
            )
    return tuple(map(int, numbers))


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"{text} is not greater than zero")
    return number
