"""How a fork of the server ends: as any interpreter does, but it leaves the server's part alone.

Each page that it writes to is copied first. The end of a program that did nothing took 0.1 s of
processor time for that, three times what its fork takes [measured].
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

# Called after all that programs and libraries have registered with atexit.
_called_last: list[Callable[[], None]] = []
# Of ma_version_tag in PyDictObject, after the reference count, the type and the length: PEP 509.
_VERSION_AT = 3 * ctypes.sizeof(ctypes.c_void_p)
_LONGER_THAN_THE_END_S = 60.0


def prepare() -> None:
    """Before all imports: what is registered with atexit first is called last."""
    atexit.register(lambda: [call() for call in _called_last])


def keep_modules() -> None:
    """Never free what was imported: that takes a fork, which shares it, 0.2 s of CPU time.

    An interpreter that ends empties its modules, and so writes to each page of their contents, of
    which the fork has no copy yet. With another reference to all that is in them it frees what the
    program has made, in the usual order, and nothing that the server had. Modules that the program
    has not changed are not emptied at all, and torch's operators stay registered.
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
    """Take these modules from those that the interpreter empties at its end."""
    unchanged = [
        name
        for name, module in modules.items()
        if sys.modules.get(name) is module and _version(vars(module)) == versions[name]
        if name not in ("builtins", "sys")
    ]
    # In one call, and the last one: no thread that still runs is to import them again.
    sys.setswitchinterval(_LONGER_THAN_THE_END_S)
    collections.deque(map(sys.modules.__delitem__, unchanged), maxlen=0)


def _version(content: dict[str, Any]) -> int:
    """A number that changes with each change of a dict. No value is touched: comparing them would
    cost what is to be saved."""
    return ctypes.c_uint64.from_address(id(content) + _VERSION_AT).value


def _shows_changes() -> bool:
    """Whether this Python has it: 3.10 to 3.12 of CPython."""
    content: dict[str, Any] = {"same": 0}
    versions = [_version(content), _version(content)]
    content["same"] = 1
    return sys.version_info < (3, 13) and versions[0] == versions[1] != _version(content)


def _end_before_libraries() -> None:
    """Leave out the last act of this process's exit: torch's libraries take their registrations
    back, one operator after the other, for 0.15 s of CPU time.

    What the program registers with C from now on, and all that Python does at its end, comes
    before: on_exit(3). Processes that are not forked end as ever.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)
    libc["__cxa_atexit"](libc.fflush, None, None)  # what exit(3) does last


def leave(run: Callable[[], None] | None) -> NoReturn:
    """Run it and end as an interpreter does."""
    _end_before_libraries()
    if run is not None:
        run()
    sys.exit(0)
