"""docs/timeouts.md is complete. (That it is current: test_generated_files.py.)"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from elastic.tuning.options import AgentOptions

PAGE = (Path(__file__).parents[3] / "docs" / "timeouts.md").read_text(encoding="utf-8")


def test_every_option_is_listed_with_its_meaning() -> None:
    rows = PAGE.splitlines()
    for option in (f.name for f in fields(AgentOptions) if f.name.endswith("_s")):
        (row,) = (line for line in rows if line.startswith(f"| `{option}` |"))
        assert len(row.split("|")[3].strip()) > 20, row


def test_every_interval_lists_its_users() -> None:
    """An unused interval has to be removed."""
    assert [line for line in PAGE.splitlines() if line.endswith("| – |")] == []


def test_error_messages_are_quoted_with_names_and_values() -> None:
    assert "lease_s=100 and takeover_s=300 are incompatible" in PAGE
