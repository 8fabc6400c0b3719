"""Messages, packaging and documentation name the same torch versions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from elastic import torch_private

REPOSITORY = Path(__file__).parents[3]


def test_the_packaging_allows_the_versions_named_in_messages() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text()
    bounds = f'"torch>={torch_private.OLDEST},<{torch_private.after(torch_private.NEWEST)}"'
    assert bounds in text


def test_no_other_module_states_a_version_range() -> None:
    ranges = re.compile(r"[\"'(].*\b2\.\d+ (?:to|and) 2\.\d+.*[\"')]")
    for top in ("elastic", "checkpoints"):
        for path in (REPOSITORY / top).rglob("*.py"):
            if path.name == "torch_versions.py":
                continue
            code = [ln for ln in path.read_text().splitlines() if not ln.strip().startswith("#")]
            assert not [line for line in code if ranges.search(line)], path


@pytest.mark.parametrize("version", ["2.10.0", "2.16.0", "1.13.1", "3.0.0"])
def test_other_versions_are_unsupported(version: str) -> None:
    assert not torch_private.is_supported(version)


def test_missing_features_are_reported_with_a_hint() -> None:
    error = torch_private.lacks("2.99.0", "torch._a, torch._b", "elastic.join()")
    assert "torch 2.99.0 lacks what elastic.join() needs: torch._a, torch._b" in str(error)
    assert torch_private.SUPPORTED in error.hint


@pytest.mark.parametrize(("python", "is_named"), [((3, 10, 4), True), ((3, 11, 0), False)])
def test_a_python_too_old_for_the_newest_torch_is_named(
    python: tuple[int, int, int], is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.version_info", python)
    assert ("2.15 needs Python 3.11" in torch_private.lacks("2.9", "x", "y").hint) is is_named
