"""The structure of the package ``checkpoints``: exports, sub-packages, import directions."""

from __future__ import annotations

import ast
import graphlib
import inspect
from pathlib import Path

import checkpoints

ROOT = Path(checkpoints.__file__).parent


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sorted(ROOT.rglob("*.py"))}


def imports_of(path: Path) -> set[str]:
    """The modules of this package that a file imports, at any place in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (submodules & MODULES.keys()) or {node.module}
    return found & MODULES.keys()


def test_exports_are_sorted_and_distinct() -> None:
    assert checkpoints.__all__ == sorted(set(checkpoints.__all__))


def test_every_exported_name_exists_and_is_documented() -> None:
    for name in checkpoints.__all__:
        exported = getattr(checkpoints, name)
        if not inspect.isclass(exported) and not inspect.isfunction(exported):
            continue  # a type alias has the docstring of its target
        text = exported.__doc__ or ""
        assert text and not text.startswith(f"{name}("), f"{name} has no docstring of its own"


def test_every_imported_name_is_exported() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text())
    imported = {a.name for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert imported == set(checkpoints.__all__)


def test_sub_packages_are_documented() -> None:
    for folder in {path.parent for path in MODULES.values()} - {ROOT}:
        text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
        # What it is for, what it may import, where to start reading.
        assert "ay import" in text or "ay otherwise import" in text, folder
        assert "Start reading at" in text, folder


def test_there_are_no_import_cycles() -> None:
    graph = {name: imports_of(path) for name, path in MODULES.items()}
    ordered = tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError
    assert set(MODULES) <= set(ordered)
