"""torchrun's argument parser without the import of torch, which takes seconds.

``elastic run -h`` and usage errors need only torchrun's flags. So the
function that builds the parser (``torch.distributed.run.get_args_parser``) is read from the
installed torch's source and executed together with the few definitions it refers to. If that
fails, because a torch version builds its parser from something heavier, torch is imported.
``tests/contract/test_torchrun_parser.py`` compares the two parsers.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any, cast

_MODULE, _FUNCTION = "torch.distributed.run", "get_args_parser"


def torchrun_parser() -> argparse.ArgumentParser:
    """The parser of the installed torchrun, ``-h`` included."""
    if _MODULE in sys.modules:
        return imported_parser()
    try:
        parser = _Sources().load(_MODULE, _FUNCTION)()
    except _CANNOT_BE_READ:
        return imported_parser()
    return cast("argparse.ArgumentParser", parser)


def imported_parser() -> argparse.ArgumentParser:
    """The same parser from torch itself. Imports torch: seconds."""
    from torch.distributed.run import get_args_parser

    return get_args_parser()


class _TooHeavy(Exception):
    """The definition needs more of torch than its source code."""


# Raised for an unknown torch whose source cannot be read this way; then torch is imported.
_CANNOT_BE_READ = (
    _TooHeavy,
    ImportError,
    NameError,
    AttributeError,
    SyntaxError,
    OSError,
    RecursionError,
)


class _Sources:
    """Executes single definitions of torch's modules, with the definitions they refer to."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            raise _TooHeavy("torch is not installed as a folder")
        self._root = Path(spec.origin).parent
        self._loaded: dict[tuple[str, str], Any] = {}
        self._trees: dict[str, ast.Module] = {}

    def load(self, module: str, name: str) -> Any:
        """The object that ``from module import name`` would bind."""
        key = module, name
        if key not in self._loaded:
            self._loaded[key] = self._load(module, name)
        return self._loaded[key]

    def _load(self, module: str, name: str) -> Any:
        statement = self._binding(module, name)
        if isinstance(statement, ast.ImportFrom):
            return self._imported_from(statement, name)
        if isinstance(statement, ast.Import):
            return self._imported(statement, name)
        namespace: dict[str, Any] = {"__name__": module}
        for free in _names_read(statement):
            if free != name and _binds(self._tree(module), free) is not None:
                namespace[free] = self.load(module, free)
        code = ast.Module([statement], type_ignores=[])
        exec(compile(code, str(self._file(module)), "exec", dont_inherit=True), namespace)
        return namespace[name]

    def _imported_from(self, statement: ast.ImportFrom, name: str) -> Any:
        source = statement.module or ""
        original = next(a.name for a in statement.names if (a.asname or a.name) == name)
        if statement.level or source == "torch":
            raise _TooHeavy(f"{name} is imported from {'.' * statement.level}{source}")
        if source.startswith("torch."):
            return self.load(source, original)
        return getattr(importlib.import_module(source), original)

    def _imported(self, statement: ast.Import, name: str) -> Any:
        original = next(a.name for a in statement.names if (a.asname or a.name) == name)
        if original.partition(".")[0] == "torch":
            raise _TooHeavy(f"{name} is {original}")
        return importlib.import_module(original)

    def _binding(self, module: str, name: str) -> ast.stmt:
        statement = _binds(self._tree(module), name)
        if statement is None:
            raise _TooHeavy(f"{module} has no {name}")
        return statement

    def _tree(self, module: str) -> ast.Module:
        if module not in self._trees:  # parsing is slow: each file once
            self._trees[module] = ast.parse(self._file(module).read_bytes())
        return self._trees[module]

    def _file(self, module: str) -> Path:
        parts = module.split(".")[1:]
        folder = self._root.joinpath(*parts)
        return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


def _binds(tree: ast.Module, name: str) -> ast.stmt | None:
    """The top-level statement that gives ``name`` its value: a definition or an import."""
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            bound = {statement.name}
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            bound = {alias.asname or alias.name for alias in statement.names}
        elif isinstance(statement, ast.Assign):
            bound = {target.id for target in statement.targets if isinstance(target, ast.Name)}
        else:
            continue
        if name in bound:
            return statement
    return None


def _names_read(statement: ast.stmt) -> set[str]:
    return {
        node.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
