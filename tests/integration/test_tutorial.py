"""The commands of the tutorial, entered one after the other as a reader does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import tutorial_output


@pytest.mark.slow
def test_the_tutorials_output_is_what_its_commands_print(tmp_path: Path) -> None:
    page = tutorial_output.PAGE.read_text(encoding="utf-8")
    new = tutorial_output.renewed(page, tmp_path)
    both = zip(tutorial_output.masked(page), tutorial_output.masked(new), strict=True)
    changed = [(shown, printed) for shown, printed in both if shown != printed]
    lines = [
        "\n".join(["on the page:", *shown, "printed:", *printed]) for shown, printed in changed
    ]
    assert not changed, "\n".join(["python scripts/tutorial_output.py", *lines])


def test_only_what_differs_between_two_runs_is_masked() -> None:
    first = """```text
[0] Epoch 1
2026-11-27T17:02:38.044Z INFO    [local-0 g1] worker-died pid=31770 …
job-8bd5c71538fe: training, 1 min 2 s ago
```"""
    again = """```text
2026-11-28T07:12:01.004Z INFO    [local-2 g1] worker-died pid=7 …
[1] Epoch 12
job-661dcc36946b: training, 91 ms ago
```"""
    assert tutorial_output.masked(first) == tutorial_output.masked(again)
    for word, other in (("died", "left"), ("training", "paused"), (" …", "")):
        assert tutorial_output.masked(first) != tutorial_output.masked(again.replace(word, other))
