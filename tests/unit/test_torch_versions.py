"""The versions of torch that messages, packaging and documentation name are the same ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from elastic import torch_versions

REPOSITORY = Path(__file__).parents[2]


def test_the_packaging_allows_what_messages_name() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text()
    bounds = f'"torch>={torch_versions.OLDEST},<{torch_versions.after(torch_versions.NEWEST)}"'
    assert bounds in text


def test_no_other_module_names_a_range_in_a_message() -> None:
    ranges = re.compile(r"[\"'(].*\b2\.\d+ (?:to|and) 2\.\d+.*[\"')]")
    for top in ("elastic", "checkpoints"):
        for path in (REPOSITORY / top).rglob("*.py"):
            if path.name == "torch_versions.py":
                continue
            code = [ln for ln in path.read_text().splitlines() if not ln.strip().startswith("#")]
            assert not [line for line in code if ranges.search(line)], path


@pytest.mark.parametrize("version", ["2.10.0", "2.16.0", "1.13.1", "3.0.0"])
def test_others_are_none_of_them(version: str) -> None:
    assert not torch_versions.is_supported(version)


def test_what_is_missing_is_said_with_a_remedy() -> None:
    error = torch_versions.lacks("2.99.0", "torch._a, torch._b", "elastic.join()")
    assert "torch 2.99.0 lacks what elastic.join() needs: torch._a, torch._b" in str(error)
    assert torch_versions.SUPPORTED in error.hint


@pytest.mark.parametrize(("python", "is_said"), [((3, 10, 4), True), ((3, 11, 0), False)])
def test_a_python_that_is_too_old_for_the_newest_is_named(
    python: tuple[int, int, int], is_said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.version_info", python)
    assert ("2.15 needs Python 3.11" in torch_versions.lacks("2.9", "x", "y").hint) is is_said
