"""All generated files: pages of the documentation, and golden files of the public interface.

python scripts/generated.py          # write those that are not current

A golden file (``tests/golden/``) is what users can rely on, so that a diff shows each change of it:
public names with their signatures, commands with their flags, exit codes. Events and metrics are on
their pages; the manifests are files themselves.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
RESULTS = ROOT / "benchmarks" / "results"
PUBLIC = ("elastic", "checkpoints")
OWN_FLAGS = ("--rdzv", "--nnodes")  # of torch's parser, with defaults of this package
sys.path.insert(0, str(ROOT / "scripts"))


# Pages -----------------------------------------------------------------------------------------


def page_of(script: str) -> Callable[[str], str]:
    """A page that a script of this folder writes as a whole."""
    return lambda _: str(importlib.import_module(script).page())


def idioms_page(_: str) -> str:
    sys.path.insert(0, str(ROOT / "tests" / "idioms"))
    return str(importlib.import_module("catalogue").page())


def architecture(current: str) -> str:
    return str(importlib.import_module("package_imports").written(current))


def migration(current: str) -> str:
    return str(importlib.import_module("migration_diffs").renewed(current))


def readme(current: str) -> str:
    """The README with the measured pauses of its comparison, from ``benchmarks/results``."""
    ours = (
        f"{_pause('recovery', 'kill node', 'elastic')}, "
        f"{_pause('recovery-secured', 'kill node', 'elastic')} with authenticated connections; "
        f"{_pause('restart', 'kill -9', 'elastic')} for unmodified scripts"
    )
    torchft = (
        f"{_pause('recovery', 'kill node', 'torchft tight')} with the shortest timeouts; "
        f"{_pause('recovery-busy', 'kill node', 'torchft default')} by default; "
        f"nightly {_torchft_version()}"
    )
    measured = {
        "**torch-elastic-harness**": ours,
        "[torchrun]": _torchrun(),
        "[torchft]": torchft,
    }
    lines = current.splitlines()
    for number, line in enumerate(lines):
        cells = line.split(" | ")
        tool = next((t for t in measured if line.startswith(f"| {t}")), None)
        if tool is not None:
            lines[number] = " | ".join((*cells[:2], measured[tool], *cells[3:]))
    return "\n".join(lines) + "\n"


def _row(result: str, case: str, subject: str) -> dict[str, Any]:
    """The row of a stored benchmark whose case and subject begin like this."""
    document = json.loads((RESULTS / f"{result}.json").read_text(encoding="utf-8"))
    rows = (r for r in document["rows"] if r["case"].startswith(case))
    row: dict[str, Any] = next(r for r in rows if r["subject"].startswith(subject))
    return row


def _pause(result: str, case: str, subject: str) -> str:
    """The median of kills from which all recovered, their range and number."""
    row = _row(result, case, subject)
    assert not row["failed"], row
    unit, factor = ("ms", 1000.0) if row["median"] < 1 else ("s", 1.0)
    digits = 0 if unit == "ms" or row["median"] >= 10 else 1
    median, low, high = (f"{row[k] * factor:.{digits}f}" for k in ("median", "min", "max"))
    return f"{median} {unit} ({low}–{high}, {row['n']} kills)"


def _torchrun() -> str:
    """All kills of a node under torchrun's own rendezvous: few, since each takes minutes."""
    cases = (("recovery", "kill node"), ("recovery-busy", "kill node"), ("restart", "kill -9"))
    rows = [_row(result, case, "torchrun-c10d") for result, case in cases]
    pauses_s = [pause_s for row in rows for pause_s in row["samples"]]
    kills = len(pauses_s) + sum(row["failed"] for row in rows)
    span = f"{min(pauses_s):.0f}–{max(pauses_s):.0f} s"
    return f"{span}; {len(pauses_s)} of {kills} kills recovered within 120 s (c10d)"


def _torchft_version() -> str:
    subject = _row("recovery", "kill node", "torchft tight")["subject"]
    return str(subject).partition("(")[2].rstrip(")")


# The public interface --------------------------------------------------------------------------


def public_api(_: str) -> str:
    """Every exported name: signature, members and bases."""
    return "\n".join(line for module in PUBLIC for line in _names_of(module)) + "\n"


def _names_of(module: str) -> Iterator[str]:
    package = importlib.import_module(module)
    for name in sorted(package.__all__):
        exported = getattr(package, name)
        if inspect.isclass(exported):
            yield from _members_of(f"{module}.{name}", exported)
        else:
            text = _signature(exported) if inspect.isfunction(exported) else f" = {exported}"
            yield f"{module}.{name}{text}"


def _members_of(where: str, kind: type) -> Iterator[str]:
    bases = ", ".join(base.__name__ for base in kind.__bases__ if base is not object)
    yield f"class {where}({bases})"
    if issubclass(kind, enum.Enum):
        yield from (f"    {member.name} = {member.value!r}" for member in kind)
        return
    is_protocol = getattr(kind, "_is_protocol", False)
    if not is_protocol and (dataclasses.is_dataclass(kind) or "__init__" in vars(kind)):
        yield f"    __init__{_signature(kind.__init__)}"
    for name, member in sorted(inspect.getmembers_static(kind)):
        if name.startswith("_") or not _is_own(kind, name):
            continue
        if isinstance(member, property):
            yield f"    {name} -> {_returned(member)}"
        elif callable(getattr(member, "__func__", member)):
            yield f"    {name}{_signature(getattr(member, '__func__', member))}"


def _is_own(kind: type, name: str) -> bool:
    """Whether the member is defined by this project, not by torch or Python."""
    owner = next(base for base in kind.__mro__ if name in vars(base))
    return owner.__module__.partition(".")[0] in PUBLIC


def _returned(member: property) -> str:
    return str(inspect.signature(member.fget).return_annotation) if member.fget else ""


def _signature(called: Any) -> str:
    return str(inspect.signature(called))


def commands(_: str) -> str:
    """The help of every command, without the line breaks, which differ between Python versions, and
    without torchrun's texts, which differ between torch versions."""
    from elastic.cli.main import COMMANDS
    from elastic.cli.run import torchrun_parser

    of_torch = {*torchrun_parser()._option_string_actions, "training_script"}
    of_torch |= {"training_script_args"}
    lines = [f"{name:12} {command.summary}" for name, command in COMMANDS.items()]
    for name, command in COMMANDS.items():
        parser = importlib.import_module(command.module).parser()
        lines += ["", *_help_of(f"elastic {name}", parser, of_torch)]
    return "\n".join(lines) + "\n"


def _help_of(command: str, parser: argparse.ArgumentParser, of_torch: set[str]) -> Iterator[str]:
    yield f"{command}: {parser.description}"
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, own in action.choices.items():
                yield from _help_of(f"{command} {name}", own, of_torch)
            continue
        flags = action.option_strings or [action.dest]
        is_of_torch = command == "elastic run" and not of_torch.isdisjoint(flags)
        if "-h" in flags or (is_of_torch and not flags[0].startswith(OWN_FLAGS)):
            continue
        shown = f" {action.metavar}" if action.option_strings and action.metavar else ""
        chosen = f" {{{','.join(map(str, action.choices))}}}" if action.choices else ""
        default = "" if action.default in (None, False) else f" = {action.default!r}"
        text = action.help if not is_of_torch and action.help != argparse.SUPPRESS else None
        values = {**vars(action), "prog": parser.prog}
        yield f"    {', '.join(flags)}{shown}{chosen}{default}" + (
            f": {text % values}" if text else ""
        )
    if parser.epilog:
        yield from (f"  {line}".rstrip() for line in parser.epilog.splitlines())


def exit_codes(_: str) -> str:
    """The exit code of each error."""
    errors = importlib.import_module("elastic.errors")
    kinds = sorted(_subclasses(errors.ElasticError), key=lambda kind: kind.__name__)
    return "".join(f"{kind.exit_code:3} {kind.__name__}\n" for kind in kinds)


def _subclasses(kind: Any) -> set[Any]:
    own = {kind} if kind.__module__ == "elastic.errors" else set()
    return own.union(*map(_subclasses, kind.__subclasses__()))


# All of them -----------------------------------------------------------------------------------

GENERATED: dict[Path, Callable[[str], str]] = {
    ROOT / "README.md": readme,
    ROOT / "docs" / "architecture.md": architecture,
    ROOT / "docs" / "idioms.md": idioms_page,
    ROOT / "docs" / "metrics.md": page_of("metrics_table"),
    ROOT / "docs" / "timeouts.md": page_of("timeouts_table"),
    ROOT / "docs" / "reference" / "events.md": page_of("events_table"),
    ROOT / "docs" / "reference" / "failures.md": page_of("failure_rules"),
    ROOT / "examples" / "migrate" / "README.md": migration,
    GOLDEN / "api.txt": public_api,
    GOLDEN / "commands.txt": commands,
    GOLDEN / "exit_codes.txt": exit_codes,
}


def text_of(path: Path) -> tuple[str, str]:
    """The text as it is, and as it should be."""
    current = path.read_text(encoding="utf-8") if path.exists() else ""
    return current, GENERATED[path](current)


if __name__ == "__main__":
    for name in [name for name in os.environ if name.startswith(("ELASTIC_", "PET_"))]:
        del os.environ[name]  # defaults of flags
    for path in GENERATED:
        current, text = text_of(path)
        if current != text:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            sys.stderr.write(f"written: {path.relative_to(ROOT)}\n")
