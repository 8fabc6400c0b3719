"""The nearest known name to one that is not known."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str:
    """``", did you mean 'x'?"`` or nothing: to be put behind an error's first clause.

    >>> nearest("--nnodez", ["--nnodes", "--role"])
    ", did you mean '--nnodes'?"
    >>> nearest("--zzz", ["--nnodes"])
    ''
    """
    found = get_close_matches(name, list(known), n=1)
    return f", did you mean {found[0]!r}?" if found else ""
