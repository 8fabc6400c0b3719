"""docs/timeouts.md matches what scripts/timeouts_table.py generates from elastic/tuning."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

from elastic.tuning.options import AgentOptions

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def table() -> ModuleType:
    path = REPOSITORY / "scripts" / "timeouts_table.py"
    spec = importlib.util.spec_from_file_location("timeouts_table", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def page(table: ModuleType) -> str:
    return str(table.page())


def test_every_option_is_listed_with_its_meaning(page: str) -> None:
    rows = page.splitlines()
    for option in (f.name for f in fields(AgentOptions) if f.name.endswith("_s")):
        (row,) = (line for line in rows if line.startswith(f"| `{option}` |"))
        assert len(row.split("|")[3].strip()) > 20, row


def test_every_interval_lists_its_users(page: str) -> None:
    """An unused interval has to be removed."""
    assert [line for line in page.splitlines() if line.endswith("| – |")] == []


def test_error_messages_are_quoted_with_names_and_values(page: str) -> None:
    assert "lease_s=100 and takeover_s=300 are incompatible" in page
    assert "lease_s=100 and takeover_s=300 are incompatible" in page
