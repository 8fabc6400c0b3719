"""How tests wait: time limits that hold on a slow machine, at little cost."""

from __future__ import annotations

import pytest

from elastic.testing import slowness
from elastic.testing.waiting import pause_s


def test_a_limit_that_holds_needs_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slowness, "measure_slowness", lambda: pytest.fail("measured"))
    assert slowness.is_within(1.9, 2.0)


@pytest.mark.parametrize(("took_s", "holds"), [(5.9, True), (6.0, False)])
def test_a_limit_grows_with_slowness(
    monkeypatch: pytest.MonkeyPatch, took_s: float, holds: bool
) -> None:
    monkeypatch.setattr(slowness, "measure_slowness", lambda: 3.0)
    assert slowness.is_within(took_s, 2.0) is holds


def test_a_costly_condition_is_checked_less_often() -> None:
    assert pause_s(0.0, 0.05) == 0.05
    # At most a fifth of a core.
    assert pause_s(0.1, 0.05) == pytest.approx(0.4)
