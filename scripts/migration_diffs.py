"""Writes the diffs of ``examples/migrate`` into its README, and counts their lines.

    python scripts/migration_diffs.py

The text between ``<!-- diff NAME -->`` and ``<!-- end -->`` is replaced, and so is the table
between ``<!-- counts -->`` and ``<!-- end -->``.
"""

import difflib
import re
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples" / "migrate"
_PLACE = re.compile(r"<!-- (counts|diff (\w+)) -->\n.*?<!-- end -->", re.DOTALL)
Change = tuple[str, int, int, int, int]  # as difflib gives it


def changed_lines(before: Path, after: Path) -> int:
    """Rows in which the two differ side by side: a replaced line counts once, as do an added and
    a deleted one; blank lines do not count."""
    return sum(
        max(last - first, last_after - first_after)
        for change, first, last, first_after, last_after in _changes(before, after)
        if change != "equal"
    )


def added_and_removed(before: Path, after: Path) -> tuple[int, int]:
    """As ``git diff --stat`` counts them, without blank lines."""
    changes = [change for change in _changes(before, after) if change[0] != "equal"]
    return sum(c[4] - c[3] for c in changes), sum(c[2] - c[1] for c in changes)


def renewed(page: str) -> str:
    """The README with the diffs of the scripts as they are."""
    return _PLACE.sub(_renewed_place, page)


def _renewed_place(place: re.Match[str]) -> str:
    what, name = place.groups()
    text = _counts() if what == "counts" else f"```diff\n{_diff(name)}```\n"
    return f"<!-- {what} -->\n{text}<!-- end -->"


def _pairs() -> list[tuple[str, Path, Path]]:
    folders = sorted(path.parent for path in EXAMPLES.glob("*/before.py"))
    return [(folder.name, folder / "before.py", folder / "after.py") for folder in folders]


def _counts() -> str:
    rows = ["| | changed lines | added | removed |", "|---|---|---|---|"]
    for name, before, after in _pairs():
        added, removed = added_and_removed(before, after)
        rows.append(f"| `{name}` | {changed_lines(before, after)} | {added} | {removed} |")
    return "\n".join(rows) + "\n"


def _diff(name: str) -> str:
    before, after = (EXAMPLES / name / f"{which}.py" for which in ("before", "after"))
    lines = difflib.unified_diff(
        before.read_text().splitlines(keepends=True),
        after.read_text().splitlines(keepends=True),
        f"{name}/before.py",
        f"{name}/after.py",
        n=1,
    )
    return "".join("\n" if line == " \n" else line for line in lines)


def _changes(before: Path, after: Path) -> list[Change]:
    old, new = _lines(before), _lines(after)
    return list(difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes())


def _lines(script: Path) -> list[str]:
    return [line for line in script.read_text().splitlines() if line.strip()]


if __name__ == "__main__":
    readme = EXAMPLES / "README.md"
    readme.write_text(renewed(readme.read_text()))
