"""The parser of every command: an error is a ConfigError (exit code 2) with a hint."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, NoReturn

from elastic.errors import ConfigError


class CommandParser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would print its usage and exit."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown arguments here: those of a subcommand are reported by its parent in
        argparse, whose ``-h`` does not list the right ones."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            if not flag.startswith("-"):
                self.error(f"unexpected argument {unknown[0]!r}")
            known = [s for action in self._actions for s in action.option_strings]
            self.error(f"unknown flag {flag}{nearest(flag, known)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, hint=f"`{self.prog} -h` lists its arguments")


def nearest(name: str, known: Iterable[str]) -> str:
    """``", did you mean 'x'?"`` or nothing: a suffix for the first clause of an error.

    >>> nearest("--nnodez", ["--nnodes", "--role"])
    ", did you mean '--nnodes'?"
    >>> nearest("--zzz", ["--nnodes"])
    ''
    """
    found = get_close_matches(name, list(known), n=1)
    return f", did you mean {found[0]!r}?" if found else ""
