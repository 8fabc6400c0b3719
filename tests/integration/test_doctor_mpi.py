"""The operations on MPI: torch's wheels lack MPI, so `mpirun` is a stub that numbers its processes,
and the group is built with gloo.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from elastic.doctor import collectives
from elastic.doctor.checks import Finding, Status
from elastic.doctor.collectives import OPERATIONS, Session, _on_mpi
from elastic.doctor.network import Participant, alone
from elastic.hangs.kernel import process_times
from elastic.testing.waiting import PATIENCE_S, eventually

RANKS = 3
STUB = """#!{python}
import os, runpy, sys
assert sys.argv[1] == "-n", sys.argv
size, program = int(sys.argv[2]), sys.argv[3:]
assert program[3] == "elastic.doctor.rank", program
if os.path.exists({folder!r} + "/refuses"):
    sys.exit("There are not enough slots available in the system")
import elastic.doctor.rank  # and torch, which takes seconds: once for all ranks
ranks = []
for rank in range(size):
    ranks.append(os.fork())
    if ranks[rank] == 0:
        os.environ.update(OMPI_COMM_WORLD_RANK=str(rank), OMPI_COMM_WORLD_SIZE=str(size))
        sys.argv[1:] = program[4:]
        runpy.run_path({folder!r} + "/rank.py", run_name="__main__")
        sys.exit(0)
sys.exit(max(abs(os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])) for rank in ranks))
"""
RANK = """
import os, signal, sys
import torch.distributed as dist
from elastic.doctor import rank as operations
made = dist.init_process_group
rank, size = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
def init(backend):
    assert backend == "mpi"
    made("gloo", init_method="file://{folder}/store", rank=rank, world_size=size)
dist.init_process_group = init
dist.is_mpi_available = lambda: True
def broken(me):
    raise RuntimeError("ProcessGroupMPI does not support reduce_scatter")
operations.OPERATIONS["reduce_scatter"] = broken
if os.path.exists("{folder}/stops") and rank == 1:
    def stops(me):
        open("{folder}/stopped", "w").write(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    operations.OPERATIONS["gather"] = stops
operations.main(sys.argv[1:])
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    stub = tmp_path / "mpirun"
    stub.write_text(STUB.format(python=sys.executable, folder=str(tmp_path)))
    stub.chmod(0o755)
    (tmp_path / "rank.py").write_text(RANK.format(folder=tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def by_operation(found: list[Finding]) -> dict[str, Finding]:
    return {one.name.removeprefix("mpi "): one for one in found}


def has_ended(pid: int) -> bool:
    """Also true for a process that has not been reaped yet."""
    times = process_times(pid)
    return times is None or times.state == "Z"


def test_the_reason_why_mpi_is_unavailable_is_reported(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    assert collectives.why_not(has_mpi=True, nodes=1) == ""
    assert "built without MPI" in collectives.why_not(has_mpi=False, nodes=1)
    assert "--nnodes" in collectives.why_not(has_mpi=True, nodes=2)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "not available, because there is no mpirun" in collectives.why_not(has_mpi=True, nodes=1)


def test_every_operation_runs_and_its_result_is_verified(folder: Path) -> None:
    one = Participant(node_id="a", name="a", host_name="a", address="127.0.0.1", nproc=RANKS)
    session = Session((one,), 0, alone, PATIENCE_S, None, lambda text: None)
    found = by_operation(_on_mpi(session, has_mpi=True))
    assert list(found) == list(OPERATIONS)
    unsupported = found.pop("reduce_scatter")
    assert unsupported.status is Status.SKIPPED and "not support" in unsupported.measured
    assert {one.status for one in found.values()} == {Status.OK}
    assert found["all_reduce"].measured.startswith(f"correct on {RANKS} ranks")


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_all_ranks_are_terminated(folder: Path) -> None:
    (folder / "stops").touch()
    found = by_operation(collectives.examine(RANKS, OPERATIONS, 10.0))
    assert found["all_reduce"].status is Status.OK
    assert found["gather"].status is Status.FAILED
    assert "rank 1" in found["gather"].measured
    pid = int((folder / "stopped").read_text())
    eventually(lambda: has_ended(pid), "the end of the stopped rank")


def test_a_failing_mpirun_is_reported_with_its_output(folder: Path) -> None:
    (folder / "refuses").touch()
    (found,) = collectives.examine(RANKS, OPERATIONS, PATIENCE_S)
    assert found.status is Status.SKIPPED and "not enough slots" in found.measured
