"""Each guarantee has a proof in ``make test``; the page says which command runs the others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
PAGES = sorted((REPOSITORY / "docs" / "guarantees").glob("*.md"))
# Marks of tests that are not in `make test`, and the sign of their command on the page.
SIGNS = {"slow": "†", "soak": "‡", "gpu": "‡"}
MARK = re.compile(r"pytest\.mark\.(\w+)")
OF_FILE = re.compile(r"^pytestmark = (\[.*?\]$|.*?$)", re.MULTILINE | re.DOTALL)
FUNCTION = re.compile(r"((?:^[@ )\]#].*\n)*)^def (test_\w+)", re.MULTILINE)
ALONE = re.compile(r"^@pytest\.mark\.\w+(?= *(?:#.*)?$)", re.MULTILINE)
NAMED = re.compile(r"`(tests/[\w/.*]+|test_\w+(?:\.py)?)`([†‡]?)")


@dataclass(frozen=True)
class Proof:
    """A test function in its file, and the sign of the command that runs it."""

    path: str
    name: str
    sign: str


def sign_in(text: str) -> str:
    """The sign of the first mark, of a file or of a function, that excludes it from `make test`."""
    return next((SIGNS[name] for name in MARK.findall(text) if name in SIGNS), "")


def proofs() -> Iterator[Proof]:
    for path in sorted((REPOSITORY / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        of_file = "".join(sign_in(marks) for marks in OF_FILE.findall(text))
        where = str(path.relative_to(REPOSITORY))
        for decorators, name in FUNCTION.findall(text):
            # Marks of some parameters only do not count: the others run.
            own = "".join(sign_in(line) for line in ALONE.findall(decorators))
            yield Proof(where, name, (of_file or own)[:1])
        if ".TestCase\n" in text:
            yield Proof(where, "TestCase", of_file[:1])


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
    lines = [line for page in PAGES for line in page.read_text(encoding="utf-8").splitlines()]
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
