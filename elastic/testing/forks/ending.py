"""The exit of a fork of the server: like any interpreter's, without touching the server's memory.

Each page that a fork writes to is copied first. In the exit of an empty program, that took 0.1 s of
processor time, three times as long as the fork [measured].
"""

from __future__ import annotations

import atexit
import collections
import ctypes
import functools
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

# Called after all atexit functions of programs and libraries.
_called_last: list[Callable[[], None]] = []
# Offset of ma_version_tag in PyDictObject, after reference count, type and length (PEP 509).
_VERSION_AT = 3 * ctypes.sizeof(ctypes.c_void_p)
_LONGER_THAN_THE_END_S = 60.0


def prepare() -> None:
    """Call this before all imports: atexit calls the first registered function last."""
    atexit.register(lambda: [call() for call in _called_last])


def keep_modules() -> None:
    """Never free imported modules, which takes 0.2 s of CPU time in a fork that shares them.

    An interpreter clears its modules when it exits, and so writes to each page of their contents,
    which copies it. With an additional reference to these contents, it frees only the objects that
    the program has created, in the usual order. Modules that the program has not changed are not
    cleared at all, and torch's operators stay registered.
    """
    modules = dict(sys.modules)
    contents = {name: dict(vars(module)) for name, module in modules.items()}
    ctypes.pythonapi.Py_IncRef(ctypes.py_object((modules, contents)))
    for finalizer in list(vars(weakref.finalize)["_registry"]):
        finalizer.atexit = False
    if _shows_changes():
        versions = {name: _version(vars(module)) for name, module in modules.items()}
        _called_last.append(functools.partial(_forget_unchanged, modules, versions))


def _forget_unchanged(modules: Mapping[str, types.ModuleType], versions: Mapping[str, int]) -> None:
    """Remove unchanged modules from those that the interpreter clears when it exits."""
    unchanged = [
        name
        for name, module in modules.items()
        if sys.modules.get(name) is module and _version(vars(module)) == versions[name]
        if name not in ("builtins", "sys")
    ]
    # In one call, which is the last: no other thread may import them again.
    sys.setswitchinterval(_LONGER_THAN_THE_END_S)
    collections.deque(map(sys.modules.__delitem__, unchanged), maxlen=0)


def _version(content: dict[str, Any]) -> int:
    """A number that changes with each change of a dict. Values are not compared, which would copy
    their pages."""
    return ctypes.c_uint64.from_address(id(content) + _VERSION_AT).value


def _shows_changes() -> bool:
    """Whether dicts have versions: CPython 3.10 to 3.12."""
    content: dict[str, Any] = {"same": 0}
    versions = [_version(content), _version(content)]
    content["same"] = 1
    return sys.version_info < (3, 13) and versions[0] == versions[1] != _version(content)


def _end_before_libraries() -> None:
    """Skip the last part of this process's exit, in which torch's libraries deregister each
    operator for 0.15 s of CPU time.

    Exit functions that the program registers from now on, and Python's own, still run before it
    (on_exit(3)). Processes that are not forked exit as usual.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)
    libc["__cxa_atexit"](libc.fflush, None, None)  # the last action of exit(3)


def leave(run: Callable[[], None] | None) -> NoReturn:
    """Call ``run`` and exit like an interpreter."""
    _end_before_libraries()
    if run is not None:
        run()
    sys.exit(0)
