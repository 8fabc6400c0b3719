"""The script's frames, and their variables."""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import linecache
import sys
import tokenize
from collections.abc import Iterator
from os import sep
from types import CodeType, FrameType

from elastic.training.misuse.ways_out import is_own

LIBRARIES = f"{sep}site-packages{sep}"


def frames_of_script(frame: FrameType | None) -> Iterator[FrameType | None]:
    """From the loop over the loader to the call of run.retry, which is None."""
    has_begun = False
    while frame is not None:
        if not is_own(frame.f_code):
            has_begun = True
            yield frame
        elif has_begun:
            if frame.f_code.co_name == "retry":
                yield None
            return
        frame = frame.f_back


def variables(frame: FrameType) -> Iterator[dict[str, object]]:
    """The variables of each frame of the script, and the global ones of its modules.

    Local variables need Python 3.13. Before, reading them changes the dict that the script may have
    got from ``locals()``, and keeps their objects alive, such as a loss.
    """
    modules: set[int] = set()
    for one in frames_of_script(frame):
        if one is None or LIBRARIES in one.f_code.co_filename:
            continue
        if sys.version_info >= (3, 13) and one.f_code.co_flags & inspect.CO_OPTIMIZED:
            yield dict(one.f_locals)
        if id(one.f_globals) not in modules:
            modules.add(id(one.f_globals))
            yield one.f_globals


def assigned_globals(frame: FrameType) -> frozenset[str]:
    """The global variables that functions of the script assign (``global step``), of those that are
    being called. Variables of a loop at the top level of a module are not among them."""
    calls = [one.f_code for one in frames_of_script(frame) if one is not None]
    return frozenset().union(*map(_assigned_globals, calls))


@functools.cache
def _assigned_globals(code: CodeType) -> frozenset[str]:
    found = (one for one in dis.get_instructions(code) if one.opname == "STORE_GLOBAL")
    return frozenset(one.argval for one in found)


def tree_of(frame: FrameType) -> ast.AST:
    """The source of a frame's function, with the line numbers of its file; empty if unknown."""
    # Not inspect.getsourcelines, which first resolves the path of every imported module: 0.1 s.
    code = frame.f_code
    lines = linecache.getlines(code.co_filename, frame.f_globals)
    first = 1 if code.co_name == "<module>" else code.co_firstlineno
    try:
        source = "".join(lines if first == 1 else inspect.getblock(lines[first - 1 :]))
        is_indented = source[:1].isspace()
        tree = ast.parse(f"if True:\n{source}" if is_indented else source)
    except (SyntaxError, ValueError, tokenize.TokenError):
        return ast.Module(body=[], type_ignores=[])  # no source
    ast.increment_lineno(tree, first - 1 - is_indented)
    return tree
