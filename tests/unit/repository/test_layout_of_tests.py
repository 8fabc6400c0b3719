"""Any combination of test folders can be passed to pytest."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[2]
# Not on pytest's path: programs that tests start, data, and a package.
PROGRAMS = {"scripts", "refused", "data", "kit"}


def modules() -> list[Path]:
    """All modules that pytest puts on sys.path, by the folder that holds them."""
    found = TESTS.rglob("*.py")
    return [path for path in found if not PROGRAMS & set(path.relative_to(TESTS).parts)]


def test_nothing_is_imported_from_a_conftest() -> None:
    # Every folder has one, so that the name refers to the one imported last.
    imports = re.compile(r"^\s*(import|from) conftest\b", re.MULTILINE)
    assert [str(p) for p in modules() if imports.search(p.read_text())] == []


def test_no_two_modules_have_the_same_name() -> None:
    names = Counter(path.name for path in modules() if path.name != "conftest.py")
    assert [name for name, number in names.items() if number > 1] == []


def test_unit_tests_are_beside_the_package_that_they_test() -> None:
    packages = {path.parent.name for path in (TESTS.parent / "elastic").glob("*/__init__.py")}
    folders = {path.parent.relative_to(TESTS / "unit") for path in (TESTS / "unit").rglob("*.py")}
    assert {str(folder) for folder in folders} <= packages | {"checkpoints", "repository"}
