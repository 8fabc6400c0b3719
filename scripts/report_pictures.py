"""Draw the pictures of docs/how-to/report.md from the journals of a run of the demo.

python scripts/report_pictures.py             # runs the demo, about a minute
python scripts/report_pictures.py FOLDER      # the journals of a run that is over
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from elastic.report.model import report_of
from elastic.report.render import breakdown_chart, svg, timeline_chart, variables
from elastic.telemetry.reader import merge, read_folder

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"


def draw(journals: Path) -> None:
    report = report_of(merge(*read_folder(journals)))
    if not report.goodput.nodes:
        raise SystemExit(f"there are no events in {journals}")
    pictures = {
        "report-timeline": timeline_chart(report.timeline),
        "report-breakdown": breakdown_chart(report.goodput.breakdown),
    }
    style = (
        f"<style>{variables('svg')}svg{{font-family:sans-serif;background:var(--paper)}}</style>"
    )
    for name, chart in pictures.items():
        # A picture is a file of its own, without the page's style sheet.
        head, title, rest = svg(chart).partition("<title")
        (IMAGES / f"{name}.svg").write_text(f"{head}{style}{title}{rest}\n", encoding="utf-8")


def main() -> None:
    own = argparse.ArgumentParser(description=__doc__)
    own.add_argument("folder", nargs="?", type=Path, help="of journals")
    given = own.parse_args().folder
    if given is not None:
        draw(given)
        return
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "elastic.cli.main", "demo", "--keep"],
            env={**os.environ, "TMPDIR": folder},
            check=True,
        )
        (journals,) = Path(folder).glob("elastic-demo-*/journal")
        draw(journals)


if __name__ == "__main__":
    main()
