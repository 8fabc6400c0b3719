"""The part of the preflight that a worker can request: ``elastic.join(preflight=True)``.

Runs in a separate process (:mod:`elastic.worker.preflight` starts it): workers import neither the
doctor nor etcd's client. Checks that need etcd or the agent's address are the agent's
part (:mod:`elastic.doctor.preflight`).
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from elastic.doctor import machine, machine_verdicts
from elastic.doctor.findings import Finding, skipped
from elastic.doctor.probes import Probe
from elastic.tuning.doctor_intervals import PREFLIGHT_PROBES_S


def examine(folder: str | None, *, machine_is_checked: bool) -> list[Finding]:
    """Run the checks. ``folder``: for checkpoints. ``machine_is_checked``: by the agent."""
    gpu = folder_probe = None
    if not machine_is_checked and machine.has_gpu_driver():
        gpu = Probe("gpu", (), deadline_s=PREFLIGHT_PROBES_S)
    if folder is not None:
        place = _existing(folder)
        folder_probe = Probe("folder", (place,), deadline_s=PREFLIGHT_PROBES_S)
    found: list[Finding] = []
    if not machine_is_checked:
        found += [
            machine_verdicts.of_shm(machine.shm()),
            *machine_verdicts.of_limits(machine.limits()),
            *(machine_verdicts.of_gpu(gpu.result()) if gpu else [skipped("GPU", "no GPU")]),
        ]
    if folder_probe is not None and folder is not None:
        found += machine_verdicts.of_folder(folder, folder_probe.result())
    return found


def _existing(folder: str) -> str:
    """The folder, or its nearest existing parent."""
    path = Path(folder).absolute()
    return str(next((p for p in (path, *path.parents) if p.exists()), path))


def main(arguments: Sequence[str] | None = None) -> None:
    """In the child process: a JSON list of findings on stdout."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--folder")
    parser.add_argument("--machine-is-checked", action="store_true")
    options = parser.parse_args(arguments)
    machine.die_with_parent(options.parent)
    found = examine(options.folder, machine_is_checked=options.machine_is_checked)
    os.write(1, json.dumps([asdict(finding) for finding in found]).encode())


if __name__ == "__main__":
    main()
