"""The files and functions that the walks through the code name exist."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
SOURCES = ("elastic", "checkpoints")
# `agent/node.py: NodeStatus.set_world`, and without its file where that was just named.
IN_FILE = re.compile(r"`((?:\w+/)+\w+\.py):\s+([\w.]+)`")
METHOD = re.compile(r"`([A-Z]\w*\.\w+)`")


def names_in(body: list[ast.stmt]) -> set[str]:
    """The names that these statements define: ``function``, ``Class`` and ``Class.member``."""
    names = set()
    for statement in body:
        match statement:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.Assign(targets=targets):
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(statement, ast.ClassDef):
            names |= {f"{statement.name}.{member}" for member in names_in(statement.body)}
            set_in_methods = (
                node.attr
                for node in ast.walk(statement)
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            )
            names |= {f"{statement.name}.{attribute}" for attribute in set_in_methods}
    return names


@functools.cache
def defined() -> dict[str, set[str]]:
    """The names that each source file defines, by its path."""
    return {
        str(path.relative_to(REPOSITORY)): names_in(ast.parse(path.read_bytes()).body)
        for root in SOURCES
        for path in (REPOSITORY / root).rglob("*.py")
    }


def test_every_stop_of_the_walks_exists() -> None:
    """A reader of these pages finds each function in the file that they name."""
    pages = ("architecture.md", "explanation/walks.md")
    page = "".join((REPOSITORY / "docs" / name).read_text(encoding="utf-8") for name in pages)
    stops = IN_FILE.findall(page)
    missing = [
        f"{path}: {name}"
        for path, name in stops
        if name not in defined().get(path, set()) | defined().get(f"elastic/{path}", set())
    ]
    anywhere = set().union(*defined().values())
    missing += [name for name in METHOD.findall(page) if name not in anywhere]
    assert len(stops) > 80
    assert not missing, "\n".join(missing)
