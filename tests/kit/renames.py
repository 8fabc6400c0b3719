"""File systems that cannot rename: mounted buckets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def refuse_renames(patch: pytest.MonkeyPatch, number: int, *, of_files: bool = False) -> None:
    """Let this process's renames of folders fail with this errno, and those of files."""
    rename = os.rename

    def refuse(old: Path, new: Path) -> None:
        if of_files or os.path.isdir(old):
            raise OSError(number, os.strerror(number), old)
        rename(old, new)

    patch.setattr(os, "rename", refuse)
