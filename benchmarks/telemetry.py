"""What observing a job costs.

    python benchmarks/telemetry.py                      every section, as a table
    python benchmarks/telemetry.py --json               one JSON object (measurement.py)
    python benchmarks/telemetry.py --only report        one section
    python benchmarks/telemetry.py --events 100000      less of it

How each number is measured:

report
    `elastic report` as a process of its own, on the journals of a simulated run
    (benchmarks/long_journal.py: 64 workers on 16 nodes, 40 worlds, 1,000,000 events in files of
    about 400 MB): its wall time from start to end, and the size of its page. Budget: 10 s, 250 kB.

step
    What a step gets longer by everything that is called in one, with `run.log` of two values
    (benchmarks/step_telemetry.py says what). Budget: 50 us, and 1 % of 20 ms.

status
    `elastic status` and `elastic --help` as processes of their own (benchmarks/watching.py).
    Budget: 0.5 s and 0.3 s.

dashboard
    CPU that `elastic dashboard` takes while the job steps, without and with 200 pages open, in
    seconds per second, and the size of its page. Budget: 200 pages slow no step; 250 kB.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from long_journal import write_journals
from measurement import Report, Row
from step_telemetry import step_rows
from watching import dashboard_rows, status_rows

SEED = 7
WORLDS = 40


def report_rows(args: argparse.Namespace) -> list[Row]:
    """Reading a long journal."""
    with tempfile.TemporaryDirectory() as folder:
        journals = Path(folder) / "journals"
        journals.mkdir()
        events = write_journals(journals, args.events, WORLDS)
        rows, page = [], Path(folder) / "report.html"
        for form in ("json", "html"):
            seconds = tuple(_report_s(journals, form, page) for _ in range(args.times))
            rows.append(Row(f"report of {events:,} events", form, "s", seconds))
        rows.append(Row("size of the page", "html", "kB", (page.stat().st_size / 1000,)))
    return rows


def _report_s(journals: Path, form: str, page: Path) -> float:
    command = [sys.executable, "-m", "elastic.cli.main", "report", str(journals)]
    where = [f"--format={form}", "-o", str(page.with_suffix(f".{form}"))]
    began_s = time.perf_counter()
    subprocess.run([*command, *where], check=True, stderr=subprocess.DEVNULL, env=os.environ)
    return time.perf_counter() - began_s


# One function a section: it returns rows. Document what it measures in the docstring above.
SECTIONS: Mapping[str, Callable[[argparse.Namespace], list[Row]]] = {
    "report": report_rows,
    "step": step_rows,
    "status": status_rows,
    "dashboard": dashboard_rows,
}


def main() -> None:
    own = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    own.add_argument("--json", action="store_true", help="print the result as one object")
    own.add_argument("--only", choices=tuple(SECTIONS), action="append", help="may be repeated")
    own.add_argument("--events", type=int, default=1_000_000, help="of the long journal")
    own.add_argument("--times", type=int, default=3, help="how often each is measured")
    args = own.parse_args()
    rows = [row for name in args.only or SECTIONS for row in SECTIONS[name](args)]
    result = Report("telemetry", SEED, tuple(rows))
    if args.json:
        print(result.to_json())
    else:
        result.print_table()


if __name__ == "__main__":
    main()
