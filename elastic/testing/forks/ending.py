"""The exit of a fork of the server: like any interpreter's, without touching the server's memory.

Each page that a fork writes to is copied first. In the exit of an empty program, that took 0.1 s of
processor time, three times as long as the fork [measured].
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import functools
import gc
import itertools
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

# Called after all atexit functions of programs and libraries.
_called_last: list[Callable[[], None]] = []
# Offset of ma_version_tag in PyDictObject, after reference count, type and length (PEP 509).
_VERSION_AT = 3 * ctypes.sizeof(ctypes.c_void_p)
_STAY = ("builtins", "sys", "contextlib", "ctypes", "gc", __name__)  # what the exit itself calls
_status: int | None = None  # exit code of the program, once it has ended


def prepare() -> None:
    """Call this before all imports: atexit calls the first registered function last."""
    atexit.register(lambda: [call() for call in _called_last])


def keep_modules() -> None:
    """Never free imported modules, which takes 0.2 s of CPU time in a fork that shares them.

    An interpreter clears its modules when it exits, and so writes to each page of their contents,
    which copies it. With an additional reference to these contents, it frees only the objects that
    the program has created.
    """
    modules = dict(sys.modules)
    contents = {name: dict(vars(module)) for name, module in modules.items()}
    ctypes.pythonapi.Py_IncRef(ctypes.py_object((modules, contents)))
    for finalizer in list(vars(weakref.finalize)["_registry"]):
        finalizer.atexit = False
    if _shows_changes():
        _called_last.append(functools.partial(_free_and_exit, _Baseline(modules)))


class _Baseline:
    """The modules of the server, and the versions of their contents.

    In a fork, even a reference to a module writes to its page, so they are found by their address.
    """

    def __init__(self, modules: Mapping[str, types.ModuleType]) -> None:
        self._names = list(modules)
        self._addresses = array.array("Q", (id(vars(m)) for m in modules.values()))
        self._versions = array.array("Q", map(_version_at, self._addresses))

    def changed(self) -> list[str]:
        """The names of modules that the program has imported, after those that it has changed."""
        known = zip(self._names, self._addresses, self._versions, strict=True)
        names = [name for name, at, version in known if _version_at(at) != version]
        last = self._names[-1]
        names += [*itertools.takewhile(lambda name: name != last, reversed(sys.modules))][::-1]
        return [name for name in names if name not in _STAY]


def _free_and_exit(baseline: _Baseline) -> None:
    """Free the program's objects as the interpreter would, and exit before it visits all others.

    In the order of ``finalize_modules`` (CPython, Python/pylifecycle.c): modules are dropped, those
    that are still referenced are cleared, and circles are collected each time. Does nothing after
    an uncaught exception, whose exit code is not known here.
    """
    if _status is None:
        return
    _flush()
    names = dict.fromkeys(["__main__", *baseline.changed()])
    left = [weakref.ref(module) for name in names if (module := sys.modules.pop(name, None))]
    del module
    gc.collect()
    for reference in reversed(left):
        if (still := reference()) is not None:
            ctypes.pythonapi["_PyModule_Clear"](ctypes.py_object(still))
            del still
    gc.collect()
    _flush()
    ctypes.PyDLL(None).exit(_status)  # with the interpreter's lock: no other thread continues


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, or replaced
            stream.flush()


def _version_at(address: int) -> int:
    """A number that changes with each change of the dict at this address. Values are not compared,
    which would copy their pages."""
    return ctypes.c_uint64.from_address(address + _VERSION_AT).value


def _shows_changes() -> bool:
    """Whether dicts have versions: CPython 3.10 to 3.12."""
    content: dict[str, Any] = {"same": 0}
    versions = [_version_at(id(content)), _version_at(id(content))]
    content["same"] = 1
    return sys.version_info < (3, 13) and versions[0] == versions[1] != _version_at(id(content))


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
    global _status
    _end_before_libraries()
    try:
        if run is not None:
            run()
        sys.exit(0)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            _status = end.code or 0
        raise
