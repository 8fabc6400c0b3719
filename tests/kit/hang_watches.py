"""A watch for hung workers and its response, with callbacks that do nothing unless a test gives
others."""

from __future__ import annotations

from typing import Any

from elastic.hangs.page import BudgetPolicy
from elastic.hangs.report import HangResponse, ReportFolder
from elastic.hangs.watch import HangWatch
from kit.journal import MemoryJournal


def hang_watch(**given: Any) -> HangWatch:
    """``HangWatch(**given)``."""
    usual: dict[str, Any] = {
        "policy": BudgetPolicy(),
        "node": "n1",
        "tick_s": 0.01,
        "on_facts": lambda generation, ranks: None,
        "on_stopped": lambda worker, facts, stopped_s: None,
        "on_error": lambda error: None,
    }
    return HangWatch(**{**usual, **given})


def hang_response(folder: ReportFolder, **given: Any) -> HangResponse:
    """``HangResponse(**given)``, which writes its reports to ``folder``."""
    usual: dict[str, Any] = {
        "node": "n1",
        "acts": True,
        "stop_grace_s": 1.0,
        "folder": folder,
        "journal": MemoryJournal(),
        "before_kill": lambda pid, reason: None,
        "abort": lambda generation, reason: None,
    }
    return HangResponse(**{**usual, **given})
