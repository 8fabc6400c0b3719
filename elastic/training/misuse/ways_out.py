"""Determines how the script has left a loop over one of our generators.

Python closes a generator in three cases that it does not distinguish: the loop was left by `break`
or `return`, an exception passes through the function, or the last reference is gone.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import os
import sys
from types import CodeType, FrameType

# The instruction that removes a loop's iterator: POP_ITER since Python 3.14.
_REMOVES_ITERATOR = {dis.opmap[name] for name in ("POP_TOP", "POP_ITER") if name in dis.opmap}
_OWN = (
    os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep,
    contextlib.__file__,
)


def is_own(code: CodeType) -> bool:
    """Whether code is part of this package, or of contextlib, which it uses."""
    return code.co_filename.startswith(_OWN)


def is_left_on_purpose() -> bool:
    """Whether the script is in a `break` or `return` that leaves the loop over the calling
    generator.

    False if that is unknown, as for a generator in a variable. A generator around it, such as a
    progress bar's, is closed first.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not is_own(code):
            if code.co_code[frame.f_lasti] in _REMOVES_ITERATOR:
                return True
            if not code.co_flags & inspect.CO_GENERATOR:
                return False
        frame = frame.f_back
    return False
