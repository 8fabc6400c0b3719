"""Each guarantee has a proof in ``make test``; the page says which command runs the others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
PAGE = REPOSITORY / "docs" / "guarantees.md"
# Marks of tests that are not in `make test`, and the sign of their command on the page.
SIGNS = {"slow": "†", "soak": "‡", "gpu": "‡"}
NAMED = re.compile(r"`(tests/[\w/.*]+|test_\w+(?:\.py)?)`([†‡]?)")


@dataclass(frozen=True)
class Proof:
    """A test function in its file, and the sign of the command that runs it."""

    path: str
    name: str
    sign: str


def marks_in(nodes: list[ast.expr]) -> str:
    """The sign of the first mark, of a file or of a function, that excludes it from `make test`."""
    names = [n.attr for node in nodes for n in ast.walk(node) if isinstance(n, ast.Attribute)]
    return next((SIGNS[name] for name in names if name in SIGNS), "")


def proofs() -> Iterator[Proof]:
    for path in sorted((REPOSITORY / "tests").rglob("test_*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        assigned = [node for node in body if isinstance(node, ast.Assign)]
        of_file = marks_in([n.value for n in assigned if ast.unparse(n.targets[0]) == "pytestmark"])
        for node in body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                # Marks of some parameters only do not count: the others run.
                marks = [d for d in node.decorator_list if not isinstance(d, ast.Call)]
                where = str(path.relative_to(REPOSITORY))
                yield Proof(where, node.name, of_file or marks_in(marks))
            elif isinstance(node, ast.Assign) and ast.unparse(node.value).endswith(".TestCase"):
                yield Proof(str(path.relative_to(REPOSITORY)), "TestCase", of_file)


def sign_of(name: str, known: list[Proof]) -> str:
    """Of a test, a file, or a folder: none if any of its tests is in `make test`."""
    if name.startswith("test_") and not name.endswith(".py"):
        named = [proof for proof in known if proof.name == name]
    else:
        pattern = name if name.startswith("tests/") else f"tests/*/{name}"
        named = [
            proof
            for proof in known
            if Path(proof.path).match(pattern) or proof.path.startswith(f"{pattern.rstrip('/')}/")
        ]
    assert named, f"there is no {name}"
    return min(proof.sign for proof in named)


def rows() -> list[str]:
    """The last column of each table: by which tests a guarantee is verified."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    tables = [line for line in lines if line.startswith("| ")]
    return [line.rstrip(" |").rpartition(" | ")[2] for line in tables if "verified by" not in line]


@pytest.fixture(scope="module")
def known() -> list[Proof]:
    return list(proofs())


def test_each_guarantee_is_verified_in_make_test() -> None:
    lacking = [row for row in rows() if not any(not s for _, s in NAMED.findall(row))]
    assert lacking == []


def test_the_signs_say_which_command_runs_a_test(known: list[Proof]) -> None:
    wrong = [
        f"{name}{sign} instead of {name}{sign_of(name, known)}"
        for row in rows()
        for name, sign in NAMED.findall(row)
        if sign != sign_of(name, known)
    ]
    assert wrong == []
