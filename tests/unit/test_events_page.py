"""docs/reference/events.md is what scripts/events_table.py writes from elastic/events/."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from elastic import events
from elastic.telemetry.journal import kebab_name

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def table() -> ModuleType:
    path = REPOSITORY / "scripts" / "events_table.py"
    spec = importlib.util.spec_from_file_location("events_table", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(table: ModuleType) -> None:
    assert table.PAGE.read_text() == table.page(), "python scripts/events_table.py"


def test_every_event_is_on_the_page(table: ModuleType) -> None:
    kinds = [getattr(events, name) for name in events.__all__ if name != "Event"]
    on_page = [line for line in table.page().splitlines() if line.startswith("### ")]
    assert sorted(on_page) == sorted(f"### `{kebab_name(kind)}`" for kind in kinds)


def test_every_field_has_a_meaning(table: ModuleType) -> None:
    assert [line for line in table.page().splitlines() if line.endswith("|  |")] == []
