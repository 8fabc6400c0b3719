"""Generated pages and golden files are current: ``python scripts/generated.py`` writes them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import generated  # noqa: E402  found by the line above


@pytest.mark.parametrize(
    "path", generated.GENERATED, ids=lambda path: str(path.relative_to(REPOSITORY))
)
def test_a_generated_file_is_current(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("ELASTIC_", "PET_"))]:
        monkeypatch.delenv(name)  # defaults of flags
    current, text = generated.text_of(path)
    assert current == text, "python scripts/generated.py"
