"""Examples of frameworks as jobs of real nodes: one is killed, the others finish in process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.cluster import LocalCluster
from elastic.testing.forks.server import shared_fork_server
from elastic.testing.node import worker_pids
from elastic.testing.waiting import PATIENCE_S

EXAMPLES = Path(__file__).parents[2] / "examples"
EPOCHS = 15
# Its file, what it needs, and what it prints after each epoch.
JOBS = [
    ("accelerate_loop.py", "accelerate", r"epoch (\d+): accuracy (0\.\d+)"),
    pytest.param(
        "fabric_loop.py",
        "lightning",
        r"epoch (\d+): accuracy (0\.\d+)",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("example, needs, line", JOBS, ids=["accelerate", "lightning"])
def test_the_others_finish_when_a_node_dies(
    etcd: EmbeddedEtcd, tmp_path: Path, example: str, needs: str, line: str
) -> None:
    pytest.importorskip(needs)
    pytest.importorskip("sklearn")
    text = (EXAMPLES / example).read_text()
    script = tmp_path / example
    script.write_text(re.sub(r"^EPOCHS = \d+$", f"EPOCHS = {EPOCHS}", text, flags=re.MULTILINE))
    arguments = [str(tmp_path / "checkpoints")]
    with LocalCluster(
        [etcd.endpoint], script, tmp_path / "job", args=arguments, fork_server=shared_fork_server()
    ) as job:
        nodes = [job.start_node() for _ in range(3)]
        job.wait_for(lambda: re.search(line, nodes[0].log_text()), PATIENCE_S, "a first epoch")
        before = worker_pids(nodes[:2])
        nodes[2].kill()
        job.wait_for(lambda: job.generation() > 1, PATIENCE_S, "a world without it")
        assert worker_pids(nodes[:2]) == before, "a worker was restarted"
        ended = job.wait_ended()
    assert {ended[node.name] for node in nodes[:2]} == {0}
    for node in nodes[:2]:
        epoch, accuracy = re.findall(line, node.log_text())[-1]
        assert int(epoch) == EPOCHS - 1 and float(accuracy) > 0.9


# Its file, what it needs, its updates in a world of three, and what it logs before the last.
TRAINERS = [
    pytest.param("hf_trainer.py", ("transformers", "accelerate"), 80, marks=pytest.mark.slow),
    pytest.param("trl_sft.py", ("trl", "peft", "datasets"), 50, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("example, needs, updates", TRAINERS)
def test_a_trainer_makes_the_same_number_of_updates_when_rank_0_dies(
    etcd: EmbeddedEtcd, tmp_path: Path, example: str, needs: tuple[str, ...], updates: int
) -> None:
    for package in needs:
        pytest.importorskip(package, reason=f"{package} is not installed")
    arguments = [str(tmp_path / "trained")]
    script = EXAMPLES / example
    with LocalCluster(
        [etcd.endpoint], script, tmp_path / "job", args=arguments, fork_server=shared_fork_server()
    ) as job:
        nodes = [job.start_node() for _ in range(3)]
        logged = r"'loss': .*'epoch'"
        job.wait_for(
            lambda: any(re.search(logged, n.log_text()) for n in nodes), PATIENCE_S, "a log"
        )
        (first,) = [node for node in nodes if re.search(logged, node.log_text())]
        others = [node for node in nodes if node is not first]
        before = worker_pids(others)
        first.kill()
        job.wait_for(lambda: job.generation() > 1, PATIENCE_S, "a world without it")
        assert worker_pids(others) == before, "a worker was restarted"
        ended = job.wait_ended()
    assert {ended[node.name] for node in others} == {0}
    said = "".join(node.log_text() for node in others)
    assert re.findall(r"(\d+) updates, loss", said) == [str(updates)]
