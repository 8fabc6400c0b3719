"""The commands of ``elastic checkpoints``; those that read tensors import torch."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from rich.console import Console, Group
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.table import Table

import checkpoints
from checkpoints.commit import committed_names, read_manifest
from checkpoints.manifest import info_of
from checkpoints.objects import storage_for
from checkpoints.policies import RetentionPolicy
from elastic.cli.view import table_console
from elastic.errors import SYSTEM_CLOCK, ConfigError, ElasticError
from elastic.telemetry.log import printable

DAMAGED = 65  # sysexits' EX_DATAERR, as for a job that finds no valid checkpoint


class DamagedCheckpoint(ElasticError):
    """An error raised by the checkpoint library, with its hint."""

    exit_code = DAMAGED


def run(args: argparse.Namespace) -> int:
    """Run the command ``args.run``; returns the exit code."""
    try:
        return _COMMANDS[args.run](args)
    except checkpoints.ArgumentError as error:
        raise ConfigError(error.message, hint=error.hint) from error
    except checkpoints.CheckpointError as error:
        raise DamagedCheckpoint(error.message, hint=error.hint) from error


def _ls(args: argparse.Namespace) -> int:
    infos = checkpoints.list_checkpoints(args.folder)
    if not infos and args.output != "json":
        print(f"elastic: there is no checkpoint in {printable(args.folder)}", file=sys.stderr)
        return 0
    table = _table("name", "step", "generation", "age", "size", "world", "tensors")
    for info in infos:
        table.add_row(
            info.name,
            str(info.step),
            str(info.generation),
            age(SYSTEM_CLOCK.wall() - info.wall_time_s),
            size(info.size_bytes),
            str(info.world_size),
            str(info.tensor_count),
        )
    return _say(args, [asdict(info) for info in infos], table)


def _show(args: argparse.Namespace) -> int:
    manifest = read_manifest(storage_for(args.folder), args.name or _newest(args.folder))
    info = info_of(manifest)
    table = _table("tensor", "dtype", "shape", "size")
    tensors = []
    for name, tensor in manifest.tensors.items():
        spec = tensor.spec
        table.add_row(
            printable(name), printable(spec.dtype), str(list(spec.shape)), size(spec.size_bytes)
        )
        tensors.append({"name": name, "dtype": spec.dtype, "shape": list(spec.shape)})
    return _say(args, {**asdict(info), "tensors": tensors}, Group(_headline(info), table))


def _headline(info: checkpoints.CheckpointInfo) -> str:
    return (
        f"{info.name}: step {info.step}, {age(SYSTEM_CLOCK.wall() - info.wall_time_s)} old, "
        f"{size(info.size_bytes)}, written by {info.world_size} "
        f"rank{'' if info.world_size == 1 else 's'}"
    )


def _verify(args: argparse.Namespace) -> int:
    infos = {info.name: info.size_bytes for info in checkpoints.list_checkpoints(args.folder)}
    # All committed names: list_checkpoints() omits checkpoints with an unreadable manifest.
    every = (str(n) for n in committed_names(storage_for(args.folder)))
    names = [args.name] if args.name else list(every)
    if not names:
        raise checkpoints.CheckpointNotFound(f"there is no checkpoint in {args.folder}")
    table = _table("name", "result")
    results = []
    with _progress("verifying", sum(infos.get(name, 0) for name in names)) as advance:
        for name in names:
            try:
                checkpoints.verify(args.folder, name, progress=advance)
                reason = ""
            except checkpoints.LoadError as error:
                reason = error.message
            table.add_row(printable(name), printable(reason or "valid"))
            results.append({"name": name, "valid": not reason, "reason": reason})
    _say(args, results, table)
    return DAMAGED if any(not result["valid"] for result in results) else 0


def _diff(args: argparse.Namespace) -> int:
    manifests = [read_manifest(storage_for(args.folder), name) for name in (args.old, args.new)]
    total = sum(t.spec.size_bytes for m in manifests for t in m.tensors.values())
    with _progress("comparing", total) as advance:
        differences = checkpoints.compare(args.folder, args.old, args.new, progress=advance)
    table = _table("tensor", "difference")
    for difference in differences:
        table.add_row(printable(difference.tensor), printable(difference.what))
    rows = [{"tensor": d.tensor, "difference": d.what} for d in differences]
    return _say(args, rows, table if rows else "no tensor differs")


def _prune(args: argparse.Namespace) -> int:
    if not (args.yes or args.dry_run):
        raise ConfigError("prune removes checkpoints", hint="pass --dry-run or --yes")
    policies: list[RetentionPolicy] = []
    if args.keep is not None:
        policies.append(checkpoints.LatestN(args.keep))
    if args.every is not None:
        policies.append(checkpoints.EveryNSteps(args.every))
    if not policies:
        raise ConfigError(
            "prune needs a retention policy", hint="pass --keep N, --every STEPS, or both"
        )
    keep = policies[0] if len(policies) == 1 else policies[0] | policies[1]
    names = checkpoints.prune(args.folder, keep, dry_run=args.dry_run)
    table = _table("would be removed" if args.dry_run else "removed")
    for name in names:
        table.add_row(printable(name))
    shown = table if names else "there is nothing to remove"
    return _say(args, {"removed": [] if args.dry_run else names, "chosen": names}, shown)


def _export(args: argparse.Namespace) -> int:
    name = _newest(args.folder) if args.name == "latest" else args.name
    info = info_of(read_manifest(storage_for(args.folder), name))
    with _progress("exporting", info.size_bytes) as advance:
        checkpoints.export_to(
            args.folder, name, args.target, args.to, model=args.model, progress=advance
        )
    return _say(args, {"target": args.target}, f"wrote {args.target}")


def _import(args: argparse.Namespace) -> int:
    if not os.path.exists(args.source):
        raise ConfigError(
            f"there is no file or folder {printable(args.source)}",
            hint="`elastic checkpoints import FOLDER SOURCE` reads SOURCE",
        )
    with _progress("importing", None) as advance:
        state = checkpoints.import_from(args.source, args.form, trust=args.trust)
        saved = checkpoints.save(
            args.folder,
            state,
            step=args.step,
            nonce=checkpoints.new_nonce(),
            keep=None,
            progress=advance,
        )
    return _say(args, {"name": saved.name}, f"saved {saved.name}")


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "ls": _ls,
    "show": _show,
    "verify": _verify,
    "diff": _diff,
    "prune": _prune,
    "export": _export,
    "import": _import,
}


def _newest(folder: str) -> str:
    infos = checkpoints.list_checkpoints(folder)
    if not infos:
        raise checkpoints.CheckpointNotFound(f"there is no checkpoint in {folder}")
    return infos[0].name


def _table(*columns: str) -> Table:
    table = Table()
    for number, column in enumerate(columns):  # the first has the names, which are copied
        table.add_column(column, overflow="fold", no_wrap=number == 0)
    return table


def _say(args: argparse.Namespace, data: object, shown: object) -> int:
    if args.output == "json":
        print(json.dumps(data, indent=1))
    else:
        table_console().print(shown)
    return 0


@contextmanager
def _progress(what: str, total: int | None) -> Iterator[Callable[[int], object]]:
    """A progress bar on stderr if it is a terminal; indeterminate if the total is unknown."""
    bar = Progress(
        TextColumn(what),
        BarColumn(),
        DownloadColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


def size(count: float) -> str:
    """A size in readable units.

    >>> size(3 << 30), size(12)
    ('3.0 GiB', '12 B')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def age(seconds: float) -> str:
    """A duration in readable units.

    >>> age(75), age(7300), age(-3)
    ('1 min', '2 h', '0 s')
    """
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(int(seconds), 0)} s"
