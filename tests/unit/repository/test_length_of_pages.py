"""The documentation can be read: a page answers one question, and all pages are a short book."""

from __future__ import annotations

import re
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import generated  # noqa: E402  by the line above

ALL_WORDS = 40_000
PAGE_WORDS = 1_500
# A part that a script writes. Other generated files are tables as a whole.
WRITTEN = re.compile(r"<!-- packages: .*?<!-- end of packages -->", re.DOTALL)
PARTLY_WRITTEN = {REPOSITORY / "README.md", REPOSITORY / "docs" / "architecture.md"}


def pages() -> list[Path]:
    """README, reference, and every page that a person has written, without decisions."""
    folders = (REPOSITORY / "docs", REPOSITORY / "deploy")
    written = [path for folder in folders for path in folder.rglob("*.md")]
    tables = generated.GENERATED.keys() - PARTLY_WRITTEN
    return [
        REPOSITORY / "README.md",
        *(path for path in written if path not in tables and "decisions" not in path.parts),
    ]


def words(path: Path) -> int:
    """Of text, tables and code: whatever has a letter or a digit, so no borders of tables."""
    text = WRITTEN.sub("", path.read_text(encoding="utf-8"))
    return sum(re.search(r"\w", word) is not None for word in text.split())


def test_every_page_and_all_together_are_short() -> None:
    counts = {path.relative_to(REPOSITORY).as_posix(): words(path) for path in pages()}
    assert len(counts) > 40
    assert {name: count for name, count in counts.items() if count > PAGE_WORDS} == {}
    assert sum(counts.values()) <= ALL_WORDS
