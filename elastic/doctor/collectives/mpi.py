"""The same operations on MPI, whose processes only ``mpirun`` can start: on one machine.

torch's wheels are built without MPI. With MPI, each rank writes its progress to a file;
ranks receive no commands and are killed after an idle timeout.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

from elastic.child_interpreters import module_command
from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.doctor.collectives import outcomes
from elastic.doctor.collectives.outcomes import ENDED, RUNNING, RankOutcome
from elastic.doctor.collectives.ranks import noted
from elastic.doctor.findings import Finding, skipped
from elastic.tuning.doctor_intervals import DOCTOR_END_S, DOCTOR_MPI_POLL_S, DOCTOR_START_S

NAME = "mpi operations"
MPIRUN = "mpirun"
# A container's only user is root, and a laptop has fewer cores than ranks: Open MPI refuses both.
_ALLOW = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
_LOG_CHARACTERS = 300


def why_not(*, has_mpi: bool, nodes: int) -> str:
    """Why MPI is not tested; "" if it is."""
    if not has_mpi:
        return "not available, because this torch is built without MPI (as all of its wheels are)"
    if nodes > 1:
        return "mpirun connects nodes itself: start the doctor on one node, without --nnodes"
    if shutil.which(MPIRUN) is None:
        return f"not available, because there is no {MPIRUN} in PATH to start its processes"
    return ""


def examine(
    ranks: int, expected: tuple[str, ...], silence_s: float, clock: Clock = SYSTEM_CLOCK
) -> list[Finding]:
    """Run all operations on ``ranks`` ranks of this machine and return the findings."""
    with tempfile.TemporaryDirectory(prefix="elastic-doctor-mpi-") as folder:
        config = json.dumps({"backend": "mpi", "folder": folder})
        program = module_command("elastic.doctor.collectives.operations", [config])
        with open(Path(folder) / "log", "wb") as log:
            process = subprocess.Popen(
                [MPIRUN, "-n", str(ranks), *program],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**_ALLOW, **os.environ},
                start_new_session=True,
            )
        try:
            _wait_while_they_write(process, Path(folder), ranks, silence_s, clock)
            found = _outcomes(Path(folder), ranks)  # before they are ended
        finally:
            _end(process)
        text = (Path(folder) / "log").read_text(errors="replace").strip()[-_LOG_CHARACTERS:]
    if not any(one.pid for one in found):
        return [skipped(NAME, f"not available, because {MPIRUN} started nothing: {text}")]
    return outcomes.findings("mpi", found, expected, silence_s)


def _wait_while_they_write(
    process: subprocess.Popen[bytes], folder: Path, ranks: int, silence_s: float, clock: Clock
) -> None:
    """Wait until all ranks have ended, or none has written anything for ``silence_s`` (longer while
    torch is imported)."""
    before, since_s = 0, clock.monotonic()
    while process.poll() is None:
        sizes = [file.stat().st_size for file in folder.glob("rank-*")]
        if sum(sizes) != before:
            before, since_s = sum(sizes), clock.monotonic()
        have_started = len(sizes) == ranks and all(sizes)
        if clock.monotonic() - since_s > (silence_s if have_started else DOCTOR_START_S):
            return
        clock.sleep(DOCTOR_MPI_POLL_S)


def _outcomes(folder: Path, ranks: int) -> list[RankOutcome]:
    return [_outcome(folder / f"rank-{rank}", rank) for rank in range(ranks)]


def _outcome(file: Path, rank: int) -> RankOutcome:
    found = RankOutcome(rank=rank, node="", pid=0, state=RUNNING)
    try:
        lines = file.read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return replace(found, state=ENDED, how_ended="was not started")
    for line in lines:
        if not line.endswith("\n"):
            break  # it is being written
        message = json.loads(line)
        if message["event"] == "ready":
            found = replace(found, pid=int(message["pid"]))
        else:
            found = noted(found, message)
    has_ended = not found.is_done and not os.path.exists(f"/proc/{found.pid}")
    return replace(found, state=ENDED, how_ended="has ended") if has_ended else found


def _end(process: subprocess.Popen[bytes]) -> None:
    """End mpirun with SIGTERM, on which it ends its ranks: they may be outside of its process
    group. Stopped processes in the group do not receive it."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signum)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(DOCTOR_END_S)
