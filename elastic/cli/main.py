"""The ``elastic`` command: finds the subcommand and hands over.

Each subcommand is a module with ``main(argv) -> exit code`` and ``parser()``, imported only when
it runs: ``elastic -h`` must not wait seconds for torch.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from elastic.cli.command_parser import CommandParser, nearest
from elastic.cli.exit_codes import INTERRUPTED, SIGNALLED
from elastic.errors import ConfigError, ElasticError


@dataclass(frozen=True)
class Command:
    """A subcommand: where it lives and its line in ``elastic -h``."""

    module: str
    summary: str


COMMANDS = {
    "checkpoints": Command(
        "elastic.cli.checkpoints", "list, verify, compare and convert checkpoints"
    ),
    "run": Command(
        "elastic.cli.launch.run", "start a training job: torchrun's flags, and a local etcd"
    ),
    "status": Command("elastic.cli.observe.status", "how a job is: its state, step and nodes"),
    "describe": Command("elastic.cli.observe.describe", "a node, an incident, the checkpoint"),
    "wait": Command("elastic.cli.observe.wait", "until a job is done, or reaches a step"),
    "events": Command("elastic.cli.observe.events", "the events of a run, from its journals"),
    "dashboard": Command("elastic.cli.dashboard", "a live page that shows how a job is"),
    "report": Command("elastic.cli.report", "where a run's time went, from its journals"),
    "profile": Command("elastic.cli.profile", "traces of the next steps of a job that trains"),
    "finish": Command(
        "elastic.cli.finish", "wait for a job's end, then scale its StatefulSet to 0"
    ),
    "kube": Command("elastic.cli.kube", "manifests for Kubernetes from a few flags"),
    "env": Command(
        "elastic.cli.env", "the settings of NCCL, torch and gloo on this machine, and their reasons"
    ),
    "doctor": Command(
        "elastic.cli.doctor", "check this machine, etcd, and the network between nodes"
    ),
    "demo": Command("elastic.cli.demo.command", "train on three local nodes, kill one, add one"),
    "completion": Command("elastic.cli.completion", "print a completion script for bash or zsh"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``elastic ARGV``; returns the exit code (see :mod:`elastic.errors`)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        name, rest = _subcommand(arguments)
        module = importlib.import_module(COMMANDS[name].module)
        code = int(module.main(rest))
        sys.stdout.flush()
        return code
    except ElasticError as error:
        say_error(error)
        return error.exit_code
    except BrokenPipeError:  # `| head` has seen enough
        _discard_output()
        return SIGNALLED + signal.SIGPIPE
    except KeyboardInterrupt:
        return INTERRUPTED


def _discard_output() -> None:
    """What is still buffered has no reader: the interpreter's own flush at its end would fail."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def say_error(error: ElasticError) -> None:
    """What happened and what to do, on stderr; a traceback would bury both."""
    print(f"elastic: {error}", file=sys.stderr)


def _subcommand(arguments: list[str]) -> tuple[str, list[str]]:
    width = max(map(len, COMMANDS)) + 2
    parser = CommandParser(
        prog="elastic",
        usage="elastic [-h] [--version] COMMAND ...",
        description="Keeps a PyTorch data-parallel job training while nodes die, hang, leave "
        "and join.",
        epilog="commands:\n"
        + "".join(f"  {name:<{width}}{c.summary}\n" for name, c in COMMANDS.items())
        + "\n`elastic COMMAND -h` shows the arguments of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.version:
        print(f"elastic {_version()}")
        raise SystemExit(0)
    if args.command is None:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    if args.command not in COMMANDS:
        raise ConfigError(
            f"unknown command {args.command!r}{nearest(args.command, COMMANDS)}",
            hint=f"the commands are: {', '.join(COMMANDS)}",
        )
    return args.command, args.rest


def _version() -> str:
    from importlib.metadata import version

    return version("torch-elastic-harness")


if __name__ == "__main__":
    sys.exit(main())
