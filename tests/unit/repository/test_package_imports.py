"""Imports between packages: no cycles, and docs/architecture.md shows the actual imports."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = REPOSITORY / "scripts" / "package_imports.py"
    spec = importlib.util.spec_from_file_location("package_imports", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def cycle_in(imports: dict[str, set[str]]) -> list[str]:
    """One cycle, from a name back to itself; empty if there is none."""
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


def test_an_import_cycle_is_found() -> None:
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_files_have_no_import_cycles(script: ModuleType) -> None:
    assert cycle_in(script.file_imports()) == []


def test_packages_have_no_import_cycles(script: ModuleType) -> None:
    assert cycle_in(script.package_imports(script.file_imports())) == []
