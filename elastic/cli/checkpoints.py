"""``elastic checkpoints``: list, verify, compare and convert the checkpoints of a folder."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from elastic.cli.arguments import CommandParser, add_output
from elastic.errors import ConfigError
from elastic.telemetry.log import printable

# As in checkpoints.tools, which imports torch: help and usage errors should not take seconds.
FORMATS = ("torch", "dcp", "safetensors")


def main(argv: Sequence[str]) -> int:
    """Run ``elastic checkpoints ARGV``; returns the exit code."""
    args = parser().parse_args(argv)
    if args.run != "import":
        _require_folder(args.folder)
    from elastic.cli import checkpoint_commands

    return checkpoint_commands.run(args)


def parser() -> argparse.ArgumentParser:
    """The command line of ``elastic checkpoints``."""
    parser = CommandParser(
        prog="elastic checkpoints",
        description="List, verify, compare, prune and convert saved checkpoints.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=CommandParser)

    def add(name: str, text: str) -> Any:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=name)
        command.add_argument("folder", help="checkpoint folder or URL")
        add_output(command, "table", "json")
        return command

    add("ls", "list the committed checkpoints, newest first")
    add("show", "show the tensors and metadata of a checkpoint").add_argument(
        "name", nargs="?", help="checkpoint name (default: the newest)"
    )
    add("verify", "read and verify every byte of one checkpoint or of all").add_argument(
        "name", nargs="?", help="checkpoint name (default: all)"
    )
    diff = add("diff", "compare two checkpoints, tensor by tensor")
    diff.add_argument("old", help="name of the first checkpoint")
    diff.add_argument("new", help="name of the second checkpoint")
    prune = add("prune", "remove old checkpoints, never the newest")
    prune.add_argument("--keep", type=int, metavar="N", help="keep the N newest")
    prune.add_argument(
        "--every", type=int, metavar="STEPS", help="also keep every multiple of STEPS"
    )
    sure = prune.add_mutually_exclusive_group()
    sure.add_argument("--yes", action="store_true", help="remove them")
    sure.add_argument("--dry-run", action="store_true", help="only list what would be removed")
    export = add("export", "convert a checkpoint to another format")
    export.add_argument("name", help="checkpoint name, or latest")
    export.add_argument("target", help="file or folder to write")
    export.add_argument("--to", choices=FORMATS, required=True, help="format to write")
    export.add_argument(
        "--model",
        nargs="?",
        const=True,
        default=False,
        metavar="NAME",
        help="only the state dict of this model, or of the only one",
    )
    bring = add("import", "create a checkpoint from a file of another format")
    bring.add_argument("source", help="file or folder to read")
    bring.add_argument(
        "--from", dest="form", choices=FORMATS, required=True, help="format of the source"
    )
    bring.add_argument("--step", type=int, required=True, help="step of the new checkpoint")
    bring.add_argument(
        "--trust",
        action="store_true",
        help="with --from dcp only: trust the pickle in its metadata, which can execute code",
    )
    return parser


def _require_folder(folder: str) -> None:
    """Raise ConfigError for a folder that does not exist: its name may be misspelled. Object stores
    have no folders."""
    if "://" in folder or os.path.isdir(folder):
        return
    raise ConfigError(
        f"{printable(folder)} is not a folder"
        if os.path.exists(folder)
        else f"there is no folder {printable(folder)}",
        hint="give the folder that the script passes to elastic.join(checkpoints=…)",
    )
