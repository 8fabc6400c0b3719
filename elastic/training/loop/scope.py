"""The part of the API that the script is inside of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Scope:
    """One per process."""

    in_retry: bool = False  # within run.retry, run.attempts, or after run.begin
    owns_epochs: bool = False  # run.epochs counts them, otherwise each pass of a loader is one
    passes: int = 0  # of this attempt, over loaders without ``run.epochs``
