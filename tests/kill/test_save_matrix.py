"""The checkpoints on disk after a worker's death, SIGTERM and a clean end, for every wiring of a
script and every launcher: the documented checkpoint exists, and the next start resumes from it.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pytest
from training_job import SCRIPTS, TrainingJob, Workload

import checkpoints
from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.forks.server import ForkedPopen, can_fork, shared_fork_server
from elastic.testing.ledger import LedgerReader
from elastic.testing.waiting import PATIENCE_S, eventually

# In the short suite, test_leaving_matrix.py has the signals, and test_siblings.py the deaths.
pytestmark = pytest.mark.slow

SCRIPT = SCRIPTS / "wiring.py"
EVERY = 5
WORKLOAD = Workload(samples=48, batch=24, epochs=50, step_s=0.1, save_every=EVERY)
WIRINGS = ("retry", "none", "foreign")
LAUNCHERS = ("etcd-v3", "c10d", "python")


class Job(Protocol):
    """One node of two workers, or a process without any launcher."""

    def start(self) -> None: ...

    def kill_worker(self) -> None:
        """A worker dies; the job's processes are started again."""

    def terminate(self) -> None:
        """SIGTERM to the node, and wait for its end."""

    def ended(self) -> bool: ...


class Launched:
    """Under torchrun."""

    def __init__(self, job: TrainingJob) -> None:
        self.job = job

    def start(self) -> None:
        self.job.start_node()

    def kill_worker(self) -> None:
        self.job.running[0].kill_worker(1)

    def terminate(self) -> None:
        node = self.job.running[0]
        node.terminate()
        node.wait(PATIENCE_S)

    def ended(self) -> bool:
        return not self.job.running


class Plain:
    """``python train.py``, started manually."""

    def __init__(self, folder: Path, workload: Workload) -> None:
        dropped = ("ELASTIC", "TORCHELASTIC")
        self._env = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
        self._env |= {
            "ELASTIC_CHECKPOINTS": str(folder / "checkpoints"),
            "ELASTIC_LEDGER": str(folder / "ledger"),
            "ELASTIC_NODE_NAME": "alone",
            "OMP_NUM_THREADS": "1",
        }
        (folder / "ledger").mkdir()
        self._command = [sys.executable, str(SCRIPT), *workload.arguments(folder)]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        server = shared_fork_server()
        if server is not None and can_fork(self._command, self._env):
            self.process = ForkedPopen(server.client, self._command, env=self._env)
        else:
            self.process = subprocess.Popen(self._command, env=self._env)

    def kill_worker(self) -> None:
        self._end_by(signal.SIGKILL)
        self.start()

    def terminate(self) -> None:
        self._end_by(signal.SIGTERM)

    def ended(self) -> bool:
        assert self.process is not None
        return self.process.poll() is not None

    def _end_by(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(PATIENCE_S)


@contextmanager
def launched(launcher: str, etcd: EmbeddedEtcd, folder: Path, workload: Workload) -> Iterator[Job]:
    """A job that is not started yet."""
    if launcher == "python":
        plain = Plain(folder, workload)
        try:
            yield plain
        finally:
            if plain.process is not None:
                plain.process.kill()
                plain.process.wait()
        return
    # Port 0: a free one, as with --standalone.
    endpoint = etcd.endpoint if launcher == "etcd-v3" else "127.0.0.1:0"
    with TrainingJob(
        [endpoint],
        folder,
        script=SCRIPT,
        workload=workload,
        backend=launcher,
        nproc=2,
        max_nodes=1,
        # A group of the script's own: see https://github.com/pytorch/pytorch/issues/135712
        env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    ) as job:
        yield Launched(job)


@pytest.mark.parametrize(("launcher", "wiring"), [*itertools.product(LAUNCHERS, WIRINGS)])
def test_each_launcher_and_wiring_saves_the_documented_checkpoints(
    etcd: EmbeddedEtcd, tmp_path: Path, launcher: str, wiring: str
) -> None:
    workload = replace(WORKLOAD, extra=(f"--wiring={wiring}",))

    ledger = LedgerReader(tmp_path / "ledger").read

    def newest() -> int:
        listed = checkpoints.list_checkpoints(tmp_path / "checkpoints")
        return max((info.step for info in listed), default=0)

    def wait_start(after: int) -> int:
        """The first step of the next world."""
        eventually(lambda: ledger().last_generation > after, "the next world")
        begun = ledger()
        return min(s.step for s in begun.starts if s.generation == begun.last_generation)

    with launched(launcher, etcd, tmp_path, workload) as job:
        job.start()
        # The last save of the policy is on disk: no older checkpoint may be restored.
        eventually(lambda: newest() >= 2 * EVERY, "saves by the policy")
        saved, generation = newest(), ledger().last_generation
        job.kill_worker()
        began_at = wait_start(generation)
        killed_at = 1 + max(s.step for s in ledger().steps if s.generation == generation)
        assert began_at >= saved, "not older than the policy allows"
        if launcher != "python":  # the sibling has saved
            assert began_at >= killed_at, "the sibling held a later step"

        eventually(lambda: ledger().last_step >= began_at + EVERY, "progress")
        job.terminate()
        done = ledger().last_step + 1
        assert newest() == done, "SIGTERM leaves the last committed step"
        generation = ledger().last_generation
        job.start()
        assert wait_start(generation) == done

        (tmp_path / "hurry").touch()
        eventually(job.ended, "the end")
        assert newest() == workload.steps, "a clean end leaves the last step"
        ledger().assert_exactly_once(workload.samples, workload.epochs)
        ledger().final_hash()
