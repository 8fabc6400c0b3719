"""Write docs/timeouts.md: every interval of a job, with its default, its formula and its users.

python scripts/timeouts_table.py          # write the page

The source is elastic/tuning and checkpoints/intervals.py: the comment above an interval is its
reason, the expression its formula, and the files that import it depend on it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from checkpoints import intervals as checkpoint_intervals
from elastic.errors import ConfigError
from elastic.tuning import intervals
from elastic.tuning import options as agent_options
from elastic.tuning.options import AgentOptions

MODULES = (intervals, checkpoint_intervals)
ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "timeouts.md"
_HEADING = re.compile(r"# (.+?) -{3,}$")

INTRODUCTION = """\
<!-- Written by scripts/timeouts_table.py from elastic/tuning and checkpoints/intervals.py. -->
# Timeouts

The intervals of a job that can be set, and those that several modules share (`elastic/tuning`;
`checkpoints/intervals.py` for the checkpoint library). Others are constants of the module that
uses them, with their reason. Times are in seconds (`_MS`: milliseconds).
[Tuning](how-to/tune.md) states which ones to raise or lower for a cluster; `elastic env` prints
the settings of torch's and NCCL's own timeouts.

## To set

Set `name` with `--rdzv-conf=name=…`, or as `ELASTIC_<NAME>` in the environment; the command line
takes precedence. The grace period (`termination_grace_s`) determines the time for the last
checkpoint.

"""
DERIVED = """
## Derived

| interval | formula | with the defaults |
|---|---|---|
"""
CHECKED = """
## Checked against each other

Sets that contradict each other are refused when an agent starts, before anything is written:

"""
FIXED = """
## Fixed, and shared

These follow from the protocol, from torch or from the kernel. They are constants, not options.
Connections between nodes have their own limits (`elastic/wire/base.py`), and so has the
orphan reaper (`elastic/agent/reaper.py`): both run without the rest of the package.
"""


class Interval(NamedTuple):
    """A constant, or a field of a set."""

    name: str
    expression: str
    reason: str
    section: str


def page() -> str:
    """The whole page."""
    constants = [i for module in MODULES for i in of(module)]
    return (
        INTRODUCTION
        + "".join(_settable(constants))
        + DERIVED
        + "".join(_derived())
        + CHECKED
        + "".join(_refusals())
        + FIXED
        + "".join(_fixed(constants))
    )


def of(module: object) -> list[Interval]:
    """The intervals that a module defines."""
    path = Path(str(module.__file__))  # type: ignore[attr-defined]
    lines = path.read_text().splitlines()
    tree = ast.parse("\n".join(lines))
    return list(_intervals(tree.body, lines))


def _intervals(body: list[ast.stmt], lines: list[str]) -> Iterator[Interval]:
    for statement in body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
        else:
            continue
        if name.startswith("_") or statement.value is None:
            continue
        reason, section = _above(lines, statement.lineno - 1)
        yield Interval(name, ast.unparse(statement.value), reason, section)


def _above(lines: list[str], index: int) -> tuple[str, str]:
    """The comment directly above a line, and the last heading before it."""
    first = index
    while lines[first - 1].strip().startswith("# "):
        first -= 1
    said = " ".join(line.strip().removeprefix("# ") for line in lines[first:index])
    headings = (m[1] for line in reversed(lines[:index]) if (m := _HEADING.match(line)))
    return said, next(headings, "")


def _settable(constants: list[Interval]) -> Iterator[str]:
    reasons = {c.name: c for c in constants}
    defaults = {i.name: i.expression for i in _options()}
    yield "| name | default | meaning, and formula |\n|---|---|---|\n"
    for option in (f.name for f in fields(AgentOptions) if f.name.endswith("_s")):
        default = getattr(AgentOptions, option)
        constant = reasons[defaults[option]]
        meaning = _cell(constant.reason) + _formula(constant.expression)
        yield f"| `{option}` | {default:g} | {meaning} |\n"


def _options() -> list[Interval]:
    lines = Path(agent_options.__file__).read_text().splitlines()
    tree = ast.parse("\n".join(lines))
    (cls,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "AgentOptions")
    return list(_intervals(cls.body, lines))


def _derived() -> Iterator[str]:
    rows = (
        (
            "from SIGTERM to the end of the workers' last step",
            "`ANNOUNCE_S + STEPS_TO_BOUNDARY * 1.0`",
            intervals.BOUNDARY_S,
        ),
        (
            "from SIGTERM to the end of the workers, `leave_grace_s`",
            "`floor(termination_grace_s - EXIT_GRACE_S)`",
            intervals.leave_grace_s(intervals.TERMINATION_GRACE_S),
        ),
        (
            "the last checkpoint of a leaving node",
            "`leave_grace_s` less that boundary",
            intervals.checkpoint_budget_s(intervals.TERMINATION_GRACE_S),
        ),
        (
            "a node without contact to etcd stops its workers",
            "`takeover_s / 2`",
            intervals.TAKEOVER_S / 2,
        ),
        (
            "workers may train without a message from their agent",
            "7/8 of `takeover_s`, from the last renewal of the lease",
            intervals.permission_s(intervals.TAKEOVER_S),
        ),
    )
    for what, formula, value in rows:
        yield f"| {what} | {formula} | {value:g} |\n"


def _refusals() -> Iterator[str]:
    for options in (
        {"lease_s": 0.2},
        {"lease_s": 100.0},
        {"last_call_s": 600.0},
        {"hang_timeout_s": 900.0},
        {"collective_timeout_s": 600.0},
        {"quarantine_s": 600.0},
        {"termination_grace_s": 12.0},
    ):
        try:
            AgentOptions(**options)
        except ConfigError as error:
            yield f"- {error.message}. To do: {error.hint}.\n"


def _fixed(constants: list[Interval]) -> Iterator[str]:
    users = _users()
    section = ""
    for constant in constants:
        if not re.search(r"_(S|MS)$", constant.name):
            continue
        if constant.section != section:
            section = constant.section
            yield f"\n### {section}\n\n| interval | value | reason, and formula | used by |\n"
            yield "|---|---|---|---|\n"
        value = _value(constant.name)
        used = ", ".join(f"`{user}`" for user in sorted(users.get(constant.name, ()))) or "–"
        reason = _cell(constant.reason) + _formula(constant.expression)
        yield f"| `{constant.name}` | {value:g} | {reason} | {used} |\n"


def _value(name: str) -> float:
    return float(next(getattr(m, name) for m in MODULES if hasattr(m, name)))


def _users() -> dict[str, set[str]]:
    """For each name, the files that use it."""
    found: dict[str, set[str]] = {}
    packages = (ROOT / "elastic", ROOT / "checkpoints")
    for path in sorted(path for package in packages for path in package.rglob("*.py")):
        file = path.relative_to(ROOT).as_posix().removeprefix("elastic/")
        tree = ast.parse(path.read_text())
        names = (n for n in ast.walk(tree) if isinstance(n, ast.Name))
        mentioned = {n.id for n in names if isinstance(n.ctx, ast.Load)}
        mentioned |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        for name in mentioned:
            found.setdefault(name, set()).add(file)
    return found


def _formula(expression: str) -> str:
    """Of one that is not a plain number."""
    return f" `= {expression}`" if re.search(r"[A-Z]", expression) else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
