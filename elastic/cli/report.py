"""``elastic report``: where a run's time went, from its journals: HTML, Markdown or JSON."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from elastic.cli.arguments import CommandParser
from elastic.cli.events import RUN_OR_FOLDER, find_journals, no_journals
from elastic.errors import ConfigError
from elastic.report.model import RunReport, report_of
from elastic.report.render import document, html, markdown
from elastic.telemetry.files import replacing
from elastic.telemetry.log import printable
from elastic.telemetry.reader import merge, read_folder

_BY_SUFFIX = {".html": "html", ".htm": "html", ".md": "md", ".json": "json"}


def main(argv: Sequence[str]) -> int:
    """Run ``elastic report ARGV``; returns the exit code."""
    args = parser().parse_args(list(argv))
    output = args.output_file
    form = format_of(args.output, output, is_terminal=sys.stdout.isatty())
    source = find_journals(args)
    if source is None:
        raise no_journals(args)
    with _no_garbage_collection():
        report = report_of(merge(*read_folder(source.folder)), source.run_id)
    if not report.goodput.nodes:
        of_run = f" of run {printable(source.run_id)}" if source.run_id else ""
        raise ConfigError(
            f"there are no events{of_run} in {printable(str(source.folder))}",
            hint="give the folder that ELASTIC_JOURNAL named when the job ran, or a run id",
        )
    text = rendered(report, form)
    if output is None:
        try:
            print(text, flush=True)
        except BrokenPipeError:  # the reader, such as `head`, has exited
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    else:
        write_report(output, text)
        print(f"elastic: the report is in {printable(str(output))}", file=sys.stderr)
    return 0


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Turn garbage collection off: events form no cycles, and scanning a million takes as long as
    reading them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def parser() -> argparse.ArgumentParser:
    """The command line of ``elastic report``."""
    own = CommandParser(
        prog="elastic report",
        description="Show how much of a run's time made progress, where the rest went, and the "
        "cost of each change of the world. Reads journals only; the job may have ended or still "
        "be running. --output-file report.html writes one self-contained page with charts.",
    )
    own.add_argument("run", nargs="?", metavar="RUN", help=RUN_OR_FOLDER)
    own.add_argument(
        "--rdzv-id",
        metavar="NAME",
        help="the run to report, if the folder has several (default: last)",
    )
    own.set_defaults(rdzv_endpoint=None)
    own.add_argument(
        "-o",
        "--output",
        choices=("html", "md", "json"),
        help="output format (default: by FILE's extension; md on stdout)",
    )
    own.add_argument(
        "--output-file",
        type=Path,
        metavar="FILE",
        help="write to this file: report.html (default: stdout)",
    )
    return own


def format_of(given: str | None, output: Path | None, *, is_terminal: bool) -> str:
    """The output format. Raises ConfigError if it is ambiguous, or HTML for a terminal."""
    if output is None:
        if given == "html" and is_terminal:
            raise ConfigError(
                "refusing to write HTML to a terminal",
                hint="give a file: --output-file report.html",
            )
        return given or "md"
    chosen = given or _BY_SUFFIX.get(output.suffix.lower())
    if chosen is None:
        shown = printable(str(output))
        raise ConfigError(
            f"--output-file={shown}: the extension determines no format",
            hint="for example --output-file=report.html, or add -o html|md|json",
        )
    return chosen


def rendered(report: RunReport, form: str) -> str:
    """The report in a format."""
    if form == "html":
        return html(report)
    if form == "json":
        return json.dumps(document(report), indent=2)
    return "\n".join(markdown(report))


def write_report(path: Path, text: str) -> None:
    """Replace the file atomically. Raises ConfigError."""
    try:
        with replacing(path) as new:
            new.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(
            f"{printable(str(path))} cannot be written: {error.strerror}",
            hint="give a file in a folder that exists and can be written",
        ) from None
