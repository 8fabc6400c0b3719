"""``elastic completion``: completion for bash and zsh, generated from the commands' parsers."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

from elastic.cli.arguments import CommandParser
from elastic.cli.main import COMMANDS
from elastic.errors import ConfigError

SHELLS = ("bash", "zsh")


def main(argv: Sequence[str]) -> int:
    """Run ``elastic completion ARGV``; returns the exit code."""
    args = parser().parse_args(list(argv))
    try:
        import shtab
    except ImportError as error:
        raise ConfigError(
            "completion scripts need the package shtab, which is not installed",
            hint="pip install 'torch-elastic-harness[completion]'",
        ) from error
    print(shtab.complete(complete_parser(), shell=args.shell))
    return 0


def complete_parser() -> argparse.ArgumentParser:
    """The complete command line as one parser. Imports every command."""
    complete = argparse.ArgumentParser(prog="elastic")
    complete.add_argument("--version", action="store_true", help="print the version and exit")
    commands = complete.add_subparsers(dest="command")
    for name, command in COMMANDS.items():
        own = importlib.import_module(command.module).parser()
        commands.add_parser(name, parents=[own], add_help=False, help=command.summary)
    return complete


def parser() -> argparse.ArgumentParser:
    """The command line of ``elastic completion``."""
    own = CommandParser(
        prog="elastic completion",
        description="Print a completion script: `elastic completion bash > "
        "~/.local/share/bash-completion/completions/elastic`, or `elastic completion zsh > "
        "_elastic` in a folder of zsh's $fpath.",
    )
    own.add_argument("shell", choices=SHELLS)
    return own
