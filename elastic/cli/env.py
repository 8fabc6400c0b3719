"""``elastic env``: the variables of NCCL, torch and gloo that workers on this machine would get.

Prints what an agent started here with the same options would set, with source and reason.
Reads the machine and the environment; neither imports torch nor opens connections.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from elastic.cli.arguments import (
    CommandParser,
    add_options_argument,
    add_output,
    options_of,
)
from elastic.cli.run import node_range
from elastic.cli.view import table_console
from elastic.errors import ConfigError
from elastic.tuning.environment import (
    DEFAULT,
    WorkerEnvironment,
    choose_route,
    effective,
    given_settings,
)
from elastic.tuning.network import Network, configured_address, read_network, source_address
from elastic.tuning.options import AgentOptions

IN_PROCESS = "in-process"


def main(argv: Sequence[str]) -> int:
    """Run ``elastic env ARGV``; returns the exit code."""
    args = parser().parse_args(list(argv))
    options = options_of(args)
    settings = of_this_machine(args, options, os.environ, read_network())
    if args.output == "json":
        print(json.dumps(_document(settings), indent=2))
    else:
        _print_table(settings, is_wide=args.output == "wide")
    for warning in settings.warnings:
        print(f"elastic: {warning}", file=sys.stderr)
    return 0


def parser(environ: Mapping[str, str] = os.environ) -> argparse.ArgumentParser:
    """The command line of ``elastic env``."""
    own = CommandParser(
        prog="elastic env",
        description="Print the variables of NCCL, torch and gloo that workers on this machine get: "
        "the value, where it comes from, and why.",
    )
    add_options_argument(own, environ)
    own.add_argument(
        "--nnodes", default="1:2", metavar="MIN:MAX", help="as in torchrun (default: %(default)s)"
    )
    own.add_argument(
        "--local-addr",
        metavar="ADDRESS",
        help="address at which other nodes reach this one, as in torchrun",
    )
    own.add_argument(
        "--leader",
        metavar="ADDRESS",
        help="address of the leader or any other node; selects the interface on the route to it",
    )
    add_output(
        own,
        "table",
        "wide",
        "json",
        text="wide: also the source of each value (default: %(default)s)",
    )
    return own


def of_this_machine(
    args: argparse.Namespace, options: AgentOptions, environ: Mapping[str, str], network: Network
) -> WorkerEnvironment:
    """The environment that an agent with these options gives its workers."""
    _, max_nodes = node_range(args.nnodes)
    address = configured_address(args.local_addr, options.network, network.addresses())
    peers = [args.leader] if args.leader else []
    if args.leader and source_address(args.leader) is None:
        raise ConfigError(
            f"--leader={args.leader}: no route to this address, or the name does not resolve",
            hint="give the address of another node of the job",
        )
    route = choose_route(
        network,
        max_nodes=max_nodes,
        own_address=address,
        is_configured=bool(address),
        peers=peers,
        own_network=options.network,
    )
    return effective(
        given_settings(environ),
        network,
        profile=options.profile,
        is_in_process=options.mode == IN_PROCESS,
        max_nodes=max_nodes,
        route=route,
    )


def _document(settings: WorkerEnvironment) -> dict[str, Any]:
    return {
        "profile": settings.profile._asdict(),
        "interface": settings.route._asdict() if settings.route is not None else None,
        "variables": [
            {**asdict(variable), "is_set": variable.origin != DEFAULT}
            for variable in settings.entries
        ],
        "warnings": list(settings.warnings),
    }


def _print_table(settings: WorkerEnvironment, *, is_wide: bool) -> None:
    from rich.table import Table

    print(f"profile {settings.profile.name}: {settings.profile.reason}")
    if settings.route is None:
        print("interface: unknown without a leader; pass --leader=ADDRESS")
    else:
        print(f"interface {settings.route.interface}: {settings.route.reason}")
    columns = ("variable", "value", "from", "why", *(("source",) if is_wide else ()))
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column in ("variable", "value", "from"))
    for variable in settings.entries:
        row = [variable.name, variable.value, variable.origin, variable.reason]
        table.add_row(*row, *((variable.source,) if is_wide else ()))
    table_console().print(table)
