"""What took longest in several runs of pytest, from their JUnit files: the end of `make test`.

python scripts/slowest_tests.py build/durations
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from xml.etree import ElementTree

TESTS, FILES = 20, 10


def read(reports: Iterable[Path]) -> dict[str, float]:
    """Seconds by test, fixtures included, of all runs."""
    took_s: dict[str, float] = defaultdict(float)
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            took_s[f"{case.get('classname')}::{case.get('name')}"] += float(case.get("time", "0"))
    return took_s


def lines(took_s: Mapping[str, float]) -> list[str]:
    """The slowest tests, then the slowest files."""
    by_file: dict[str, float] = defaultdict(float)
    for name, seconds in took_s.items():
        by_file[name.partition("::")[0]] += seconds
    return [
        "slowest tests, fixtures included:",
        *_most(took_s, TESTS),
        "slowest files:",
        *_most(by_file, FILES),
    ]


def _most(took_s: Mapping[str, float], count: int) -> list[str]:
    slowest = sorted(took_s.items(), key=lambda item: item[1], reverse=True)[:count]
    return [f"{seconds:7.1f} s  {name}" for name, seconds in slowest]


if __name__ == "__main__":
    for line in lines(read(Path(sys.argv[1]).glob("*.xml"))):
        sys.stdout.write(f"{line}\n")
