"""How packages import one another: no circle, and docs/architecture.md draws what is so."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).parents[2]
FILES_AT_MOST = 12  # of a package, besides its __init__
LINES_AT_MOST = 400  # of a file


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = REPOSITORY / "scripts" / "package_imports.py"
    spec = importlib.util.spec_from_file_location("package_imports", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def circle_in(imports: dict[str, set[str]]) -> list[str]:
    """One circle, from a name back to itself; nothing if there is none."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for target in sorted(imports.get(name, ())):
            if found := walk(target, [*path, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(imports) if (found := walk(name, []))), [])


def test_a_circle_is_found() -> None:
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_file_imports_one_that_imports_it(script: ModuleType) -> None:
    assert circle_in(script.file_imports()) == []


def test_no_package_imports_one_that_imports_it(script: ModuleType) -> None:
    assert circle_in(script.package_imports(script.file_imports())) == []


def test_the_page_draws_the_imports_as_they_are(script: ModuleType) -> None:
    page = script.PAGE.read_text(encoding="utf-8")
    assert page == script.written(page), "python scripts/package_imports.py"


def packages() -> list[Path]:
    found = [
        *REPOSITORY.glob("elastic/**/__init__.py"),
        *REPOSITORY.glob("checkpoints/**/__init__.py"),
    ]
    return sorted(path.parent for path in found)


@pytest.mark.parametrize("package", packages(), ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_a_package_says_what_it_is_for(package: Path) -> None:
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))) or ""
    assert len(text.split()) >= 6, (
        f"{package}/__init__.py needs a docstring: purpose, where to start"
    )


@pytest.mark.parametrize("package", packages(), ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_a_package_is_small_enough_to_look_through(package: Path) -> None:
    files = [path.name for path in package.glob("*.py") if path.name != "__init__.py"]
    assert len(files) <= FILES_AT_MOST, f"{package}: {len(files)} files; split it by concept"


def test_a_file_is_one_concept_and_so_not_long() -> None:
    files = [path for package in packages() for path in package.glob("*.py")]
    lengths = {str(f.relative_to(REPOSITORY)): f.read_text().count("\n") for f in files}
    assert len(lengths) > 300
    assert {file: n for file, n in lengths.items() if n > LINES_AT_MOST} == {}
