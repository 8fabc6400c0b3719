"""``make test`` ends with a list of the slowest tests of all its pytest runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "slowest_tests.py"
REPORT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest">{}</testsuite></testsuites>
"""
CASE = '<testcase classname="tests.{}" name="test_{}" time="{}"/>'


def output_of(folder: Path) -> list[str]:
    command = [sys.executable, str(SCRIPT), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_the_slowest_tests_and_files_of_all_runs_are_listed(tmp_path: Path) -> None:
    cases = {"unit": [("one", "a", 1.0), ("one", "b", 2.5)], "cluster": [("other", "c[x]", 3.0)]}
    for run, of in cases.items():
        text = REPORT.format("".join(CASE.format(*case) for case in of))
        (tmp_path / f"{run}.xml").write_text(text)
    assert output_of(tmp_path) == [
        "slowest tests, fixtures included:",
        "    3.0 s  tests.other::test_c[x]",
        "    2.5 s  tests.one::test_b",
        "    1.0 s  tests.one::test_a",
        "slowest files:",
        "    3.5 s  tests.one",
        "    3.0 s  tests.other",
    ]


def test_a_missing_folder_is_not_an_error(tmp_path: Path) -> None:
    assert len(output_of(tmp_path / "build")) == 2
