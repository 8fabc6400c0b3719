"""The ``elastic`` command: dispatches to a subcommand.

Each subcommand is a module with ``main(argv) -> exit code`` and ``parser()``, imported only when
it runs: ``elastic -h`` must not wait seconds for torch.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from elastic.cli.arguments import INTERRUPTED, SIGNALLED, CommandParser, nearest
from elastic.errors import ConfigError, ElasticError


@dataclass(frozen=True)
class Command:
    """A subcommand: its module and its line in ``elastic -h``."""

    module: str
    summary: str


# In order of use.
COMMANDS = {
    "run": Command(
        "elastic.cli.run",
        "start or join a training job, with torchrun's flags",
    ),
    "list": Command("elastic.cli.jobs", "list the jobs in an etcd, or on this machine"),
    "status": Command("elastic.cli.status", "show a job's status: state, step and nodes"),
    "events": Command("elastic.cli.events", "print the events of a run from its journals"),
    "logs": Command(
        "elastic.cli.logs", "print what the workers and agents of this machine have written"
    ),
    "report": Command("elastic.cli.report", "show where a run's time went, from its journals"),
    "dashboard": Command("elastic.cli.dashboard", "serve a live page with a job's status"),
    "describe": Command("elastic.cli.describe", "show a node or an incident of a job"),
    "wait": Command("elastic.cli.wait", "wait until a job is done or reaches a step"),
    "stop": Command("elastic.cli.stop", "save, and train no more until `elastic resume`"),
    "resume": Command("elastic.cli.resume", "let a stopped job go on"),
    "forget": Command("elastic.cli.forget", "remove what a job has left in etcd"),
    "profile": Command(
        "elastic.cli.profile", "record torch.profiler traces of a running job's next steps"
    ),
    "checkpoints": Command(
        "elastic.cli.checkpoints", "list, verify, compare and convert checkpoints"
    ),
    "check": Command(
        "elastic.cli.check", "run a script with deaths at random lines and compare the results"
    ),
    "doctor": Command(
        "elastic.cli.doctor", "check this machine, etcd, and the network between nodes"
    ),
    "env": Command(
        "elastic.cli.env", "show the NCCL, torch and gloo settings for this machine, with reasons"
    ),
    "kube": Command("elastic.cli.kube", "render Kubernetes manifests from a few flags"),
    "finish": Command(
        "elastic.cli.finish", "wait for a job's end, then scale its StatefulSet to 0"
    ),
    "demo": Command("elastic.cli.demo", "train on three local nodes, kill one, add one"),
    "tutorial": Command("elastic.cli.tutorial", "write the scripts of the tutorial"),
    "completion": Command("elastic.cli.completion", "print a completion script for bash or zsh"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``elastic ARGV``; returns the exit code (see :mod:`elastic.errors`)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal with another encoding shows \u2588 for a block: no reason to end a job.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        name, rest = _subcommand(arguments)
        module = importlib.import_module(COMMANDS[name].module)
        code = int(module.main(rest))
        sys.stdout.flush()
        return code
    except ElasticError as error:
        say_error(error)
        return error.exit_code
    except BrokenPipeError:  # the reader, such as `head`, has exited
        _discard_output()
        return SIGNALLED + signal.SIGPIPE
    except KeyboardInterrupt:
        return INTERRUPTED


def _discard_output() -> None:
    """Discard buffered output: the interpreter's flush at exit would fail without a reader."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def say_error(error: ElasticError) -> None:
    """Print what happened and what to do to stderr; a traceback would bury both."""
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
