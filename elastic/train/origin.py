"""Whose code it is: the script's, this package's, or a library's."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from types import CodeType, FunctionType, ModuleType

_OWN = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    contextlib.__file__,
)
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep


def is_own(code: CodeType) -> bool:
    """Whether code is part of this package, or of contextlib, which it uses."""
    return code.co_filename.startswith(_OWN)


def is_installed(code: CodeType) -> bool:
    """Whether code is part of an installed package."""
    return is_file_installed(code.co_filename)


def is_file_installed(file: str) -> bool:
    """Whether a source file is part of an installed package."""
    return any(folder in file for folder in _INSTALLED)


def is_of_script(code: CodeType) -> bool:
    """Whether code is the script's, or of a module beside it."""
    return _is_file_of_script(code.co_filename)


def is_defined_by_script(one: FunctionType | type | ModuleType) -> bool:
    """Whether the script, or a module beside it, defines a function, class or module."""
    if isinstance(one, FunctionType):
        return is_of_script(one.__code__)
    name = one.__name__ if isinstance(one, ModuleType) else one.__module__
    file = getattr(sys.modules.get(name), "__file__", None)
    return _is_file_of_script(file) if file else name == "__main__"


def _is_file_of_script(file: str) -> bool:
    return not (is_file_installed(file) or file.startswith((_STANDARD_LIBRARY, *_OWN)))
