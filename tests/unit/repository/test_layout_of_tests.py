"""Any combination of test folders can be passed to pytest."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[2]
# Not on pytest's path: programs that tests start, data, and a package.
PROGRAMS = {"scripts", "refused", "data", "kit"}


def modules() -> list[Path]:
    """All modules that pytest puts on sys.path, by the folder that holds them."""
    found = TESTS.rglob("*.py")
    return [path for path in found if not PROGRAMS & set(path.relative_to(TESTS).parts)]


def imported_by(path: Path) -> set[str]:
    """The first parts of the names of all modules that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


def test_nothing_is_imported_from_a_conftest() -> None:
    # Every folder has one, so that the name refers to the one imported last.
    assert [str(p) for p in modules() if "conftest" in imported_by(p)] == []


def test_no_two_modules_have_the_same_name() -> None:
    names = Counter(path.name for path in modules() if path.name != "conftest.py")
    assert [name for name, number in names.items() if number > 1] == []


def test_unit_tests_are_beside_the_package_that_they_test() -> None:
    packages = {path.parent.name for path in (TESTS.parent / "elastic").glob("*/__init__.py")}
    folders = {path.parent.relative_to(TESTS / "unit") for path in (TESTS / "unit").rglob("*.py")}
    assert {str(folder) for folder in folders} <= packages | {"checkpoints", "repository"}
