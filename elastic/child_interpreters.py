"""Command lines of this package's own child processes.

``python -m`` and ``python -c`` put the current folder in front of ``sys.path``: a module of the
user's that is called like one of this package, of its dependencies or of the standard library
would be imported instead. ``python -P`` prevents that from Python 3.11 on only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

_LEAVE_FOLDER = "import sys; sys.path[:1] = [] if sys.path[0] == '' else sys.path[:1]\n"
_RUN_MODULE = (
    "from runpy import run_module; run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def module_command(module: str, arguments: Sequence[str] = ()) -> list[str]:
    """``python -m module arguments``."""
    return code_command(_RUN_MODULE, [module, *arguments])


def code_command(code: str, arguments: Sequence[str] = ()) -> list[str]:
    """``python -c code arguments``."""
    return [sys.executable, "-c", _LEAVE_FOLDER + code, *arguments]
