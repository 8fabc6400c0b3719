"""The versions of torch that this package was tested with, and the message for other ones.

The only place for these numbers: the messages, ``pyproject.toml`` and ``docs/compatibility.md``
agree with it (``tests/unit/test_torch_versions.py``). ``make compat`` verifies them. Imports
nothing but :mod:`elastic.errors`, so that both sides of the control plane may use it.
"""

from __future__ import annotations

import sys

from elastic.errors import ConfigError

OLDEST, NEWEST = "2.11", "2.15"
SUPPORTED = f"{OLDEST} to {NEWEST}"
NEWEST_NEEDS_PYTHON = (3, 11)


def lacks(version: object, names: str, needed_by: str) -> ConfigError:
    """The error to raise if the installed torch lacks some of torch's private names.

    Args:
        version: of the installed torch.
        names: the missing ones, as torch spells them.
        needed_by: what cannot work without them.
    """
    python = ".".join(map(str, NEWEST_NEEDS_PYTHON))
    of_python = (
        f"; {NEWEST} needs Python {python}" if sys.version_info < NEWEST_NEEDS_PYTHON else ""
    )
    return ConfigError(
        f"torch {version} lacks what {needed_by} needs: {names}",
        hint=f"use a torch from {SUPPORTED} (pip install 'torch>={OLDEST},<{after(NEWEST)}'"
        f"{of_python}), or a newer torch-elastic-harness",
    )


def is_supported(version: object) -> bool:
    """Whether a torch of this version was run with this package.

    >>> [is_supported(v) for v in ("2.10.1", "2.11.0", "2.15.0+cpu", "2.16.0a0+git", "3.0")]
    [False, True, True, False, False]
    """
    return _release(OLDEST) <= _release(str(version)) <= _release(NEWEST)


def after(version: str) -> str:
    """The minor version that follows.

    >>> after("2.15")
    '2.16'
    """
    major, minor = _release(version)
    return f"{major}.{minor + 1}"


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
