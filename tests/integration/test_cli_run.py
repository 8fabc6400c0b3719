"""``elastic run`` with real agents, workers and etcd: signals and exit codes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic.cli import run as processes
from elastic.telemetry.reader import read_folder
from elastic.testing.forks.program import run_program, start_python

DEADLINE_S = 240.0  # two agents with a worker each, on a busy machine

MEET = r"""
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
ranks = [torch.zeros(1) for _ in range(dist.get_world_size())]
dist.all_gather(ranks, torch.tensor([float(dist.get_rank())]))
met = f"met {sorted(int(r) for r in ranks)} on {os.environ.get('ELASTIC_NODE_NAME')}\n"
os.write(1, met.encode())  # in one piece: workers share the output
dist.destroy_process_group()
"""

FAIL_ALONE = """
import os, time
if os.environ["ELASTIC_NODE_NAME"] == "local-0":
    raise SystemExit(3)
time.sleep(3600)
"""
STAY = """
import os, time
print("worker", os.getpid(), flush=True)
time.sleep(600)
"""

# Ignores every signal except SIGKILL.
STUBBORN = f"""
import signal
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
{STAY}
"""


REQUIRE = """
import torch, elastic
run = elastic.join(checkpoints=elastic.Checkpoints("checkpoints", required=True))
model = run.wrap(torch.nn.Linear(1, 1))
data = torch.utils.data.TensorDataset(torch.zeros(4, 1))
loader = run.loader(torch.utils.data.DataLoader(data, batch_size=2), global_batch=2)
for _ in run.epochs(1):
    for (x,) in loader:
        pass
"""

# A different exit code in every generation, so that no error repeats.
VARY = """
import json, os
assert os.environ["ELASTIC_COLLECTIVE_TIMEOUT_S"] == "14400"
raise SystemExit(10 + json.loads(os.environ["ELASTIC_WORLD"])["generation"])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "require.py").write_text(REQUIRE)
    (tmp_path / "vary.py").write_text(VARY)
    (tmp_path / "meet.py").write_text(MEET)
    (tmp_path / "stay.py").write_text(STAY)
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    (tmp_path / "fail.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "fail_alone.py").write_text(FAIL_ALONE)
    return tmp_path


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "elastic.cli.main", "run", *words]


def environment() -> dict[str, str]:
    own = {k: v for k, v in os.environ.items() if not k.startswith(("ELASTIC_", "PET_"))}
    return {**own, "OMP_NUM_THREADS": "1"}


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run_program(command(*words), environment(), cwd=folder, timeout_s=DEADLINE_S)


class Running:
    """``elastic run`` in the background, its output in a file."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.output = folder / "output.txt"
        with self.output.open("w") as file:
            self.process = start_python(
                command(*words),
                cwd=folder,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def text(self) -> str:
        return self.output.read_text()

    def workers(self, count: int) -> list[int]:
        """Wait until this many workers have reported their pid."""

        def pids() -> list[int]:
            return [int(pid) for pid in re.findall(r"worker (\d+)", self.text())]

        self.wait_for(lambda: len(pids()) >= count)
        return pids()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < until, f"deadline; it said:\n{self.text()}"
            time.sleep(0.05)

    def wait_for_the_end_of(self, pids: list[int]) -> None:
        self.wait_for(lambda: not any(processes.tree(pid) for pid in pids))


@pytest.fixture
def staying(folder: Path, request: pytest.FixtureRequest) -> Iterator[Running]:
    """Two nodes whose workers run for ten minutes."""
    script = getattr(request, "param", "stay.py")
    running = Running(folder, "--nodes-local=2", "--nnodes=2", "--embedded-etcd", script)
    yield running
    if running.process.poll() is None:
        processes.kill_tree(running.process.pid)
        running.process.wait()


def test_two_local_nodes_train_together_and_finish_the_job(folder: Path) -> None:
    """All processes are started as in production."""
    done = subprocess.run(
        command("--nodes-local=2", "--nnodes=2", "--embedded-etcd", "meet.py"),
        cwd=folder,
        env={**environment(), "XDG_STATE_HOME": str(folder / "state")},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = sorted(line for line in done.stdout.splitlines() if "met" in line)
    assert said == [
        "[local-0] met [0, 1] on local-0",
        "[local-1] met [0, 1] on local-1",
    ]
    assert "--rdzv-id=" in done.stderr
    (run_folder,) = (folder / "state" / "elastic").iterdir()
    assert f"from another terminal: elastic status {run_folder.name}" in done.stderr
    assert done.stderr.endswith(
        f"elastic: done; what happened: elastic events {run_folder.name}; where the time went: "
        f"elastic report {run_folder.name}\n"
    )
    names = {record.name for record in read_folder(run_folder / "journal")[0]}
    assert {"world-formed", "job-ended"} <= names, "recorded without ELASTIC_JOURNAL"
    logs = run_program(
        [sys.executable, "-m", "elastic.cli.main", "logs", "--node=local-1"],
        {**environment(), "XDG_STATE_HOME": str(folder / "state")},
        timeout_s=DEADLINE_S,
    ).stdout
    assert re.search(r"^\[local-1 r[01]\] met \[0, 1\] on local-1$|^met ", logs, re.MULTILINE)
    assert "world-entered" in logs and "on local-0" not in logs


@pytest.mark.parametrize("more", [[], ["--virtual-local-rank"]], ids=["", "virtual"])
def test_without_local_nodes_the_process_itself_is_the_agent(
    folder: Path, more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if more:  # torchrun takes one of them for each worker, even without a driver
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    data = folder / "etcd-data"
    words = ["--embedded-etcd", f"--etcd-data={data}", "--nproc-per-node=2", *more]
    done = run(folder, *words, "meet.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("met [0, 1]") == 2
    assert any(data.iterdir())


def test_a_failing_script_exits_with_1(folder: Path) -> None:
    done = run(
        folder, "--nodes-local=2", "--nnodes=2", "--max-restarts=0", "--embedded-etcd", "fail.py"
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert re.search(r"elastic: exit code 1; what it wrote: elastic logs job-\w+; ", done.stderr)


@pytest.mark.slow
def test_a_node_that_cannot_reach_min_nodes_is_terminated(folder: Path) -> None:
    words = ["--nodes-local=2", "--nnodes=2", "--max-restarts=0", "--embedded-etcd"]
    done = run(folder, *words, "fail_alone.py")
    assert done.returncode == 1, done.stderr
    assert "fewer than 2 nodes remain and none will join: ending 1" in done.stderr
    warning = "--max-restarts=0 with --nnodes=2:2: torchrun ends this node as soon as"
    assert warning in done.stdout + done.stderr, "of fixed sizes, too"
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_missing_required_checkpoint_exits_with_65(folder: Path) -> None:
    done = run(folder, "--nodes-local=1", "--nnodes=1", "--embedded-etcd", "require.py")
    assert done.returncode == 65, done.stderr
    assert "checkpoints" in done.stdout + done.stderr
    assert re.match("elastic: use the folder of the job", done.stderr.splitlines()[-1])


def test_an_exhausted_failure_budget_exits_with_70(folder: Path) -> None:
    conf = "--rdzv-conf=failure_budget=3,hang_script_timeout_s=7200"
    done = run(folder, "--nodes-local=1", "--nnodes=1", "--embedded-etcd", conf, "vary.py")
    assert done.returncode == 70, done.stderr
    assert "4 worlds broke within 600 s" in done.stdout + done.stderr
    timeline = done.stderr.partition("Failure timeline of ")[2]
    assert timeline.count(": lived") == 4 and "exit code 70" in timeline
    assert timeline.index("ended the job with exit code 70") < timeline.index("What to do next")


@pytest.mark.parametrize("nodes", [pytest.param([], marks=pytest.mark.slow), ["--nodes-local=2"]])
def test_an_unreachable_etcd_exits_with_69_and_is_named(folder: Path, nodes: list[str]) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound but not listening: refuses, and stays reserved
        endpoint = f"127.0.0.1:{held.getsockname()[1]}"
        conf = "--rdzv-conf=connect_timeout_s=2"
        done = run(folder, *nodes, f"--rdzv-endpoint={endpoint}", conf, "meet.py")
    assert done.returncode == 69, done.stderr
    assert endpoint in done.stderr and "Traceback" not in done.stderr


def test_an_unknown_option_exits_with_2_and_suggests_the_closest_match(folder: Path) -> None:
    done = run(folder, "--embedded-etcd", "--rdzv-conf=leese_s=4", "meet.py")
    assert done.returncode == 2, done.stderr
    assert "leese_s" in done.stderr and "lease_s" in done.stderr
    assert "Traceback" not in done.stderr
    assert "elastic logs" not in done.stderr, "no agent has begun: there is nothing to show"


@pytest.mark.parametrize("staying", ["stubborn.py"], indirect=True)
def test_a_second_interrupt_kills_all_processes(staying: Running) -> None:
    workers = staying.workers(2)
    tree = processes.tree(staying.process.pid)
    staying.process.send_signal(signal.SIGINT)
    staying.wait_for(lambda: "SIGINT passed on" in staying.text())
    staying.process.send_signal(signal.SIGINT)
    assert staying.process.wait(DEADLINE_S) == 130
    staying.wait_for_the_end_of([*workers, *tree])


def test_sigterm_makes_every_node_leave_gracefully(staying: Running) -> None:
    workers = staying.workers(2)
    tree = processes.tree(staying.process.pid)
    staying.process.terminate()
    assert staying.process.wait(DEADLINE_S) == 75, staying.text()
    staying.wait_for_the_end_of([*workers, *tree])


def test_all_processes_end_with_a_killed_launcher(staying: Running) -> None:
    workers = staying.workers(2)
    tree = processes.tree(staying.process.pid)
    assert set(workers) < set(tree)
    staying.process.kill()
    staying.process.wait()
    staying.wait_for_the_end_of([*workers, *tree])
