"""Programs that call ``torch.distributed.launcher``: results, and resources left behind."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.forks.program import run_program

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
Seen = dict[str, Any]
RANK_AND_NODE = {"spawn": 3, "fork": 4, "forkserver": 5, "forkserver again": 6, "again": 7}
GIVE_RESULTS = [*RANK_AND_NODE, "script", "none", "none again"]
RAISE = ["fails", "used", "none, 1:2", "wrong option", "no etcd", "not enough nodes"]


@pytest.fixture(scope="module")
def seen(shared_etcd: EmbeddedEtcd, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """The results of one program that launches many times."""
    folder = tmp_path_factory.mktemp("launching")
    arguments = [shared_etcd.endpoint, f"/test/{folder.name}", folder.name]
    done = run_program(
        [sys.executable, str(HERE / "launching_program.py"), *arguments],
        {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
        timeout_s=540,  # twenty launches
    )
    log_tail = "\n".join(done.stderr.splitlines()[-40:])
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines, f"ended with {done.returncode}\n{log_tail}"
    found: Seen = json.loads(lines[-1])
    found["log"] = done.stderr
    return found


@pytest.mark.parametrize("launch", GIVE_RESULTS)
def test_a_launch_returns_its_results(seen: Seen, launch: str) -> None:
    assert seen[launch]["raised"] == [], seen[launch]
    workers = 1 if launch.startswith(("spawn", "forkserver")) else 2
    assert set(seen[launch]["result"]) == {str(rank) for rank in range(workers)}


def test_results_are_keyed_by_rank_and_each_node_has_one_id(seen: Seen) -> None:
    nodes = set()
    for launch, number in RANK_AND_NODE.items():
        result = seen[launch]["result"]
        assert [r[:2] for r in result.values()] == [[int(rank), number] for rank in result]
        assert len({r[2] for r in result.values()}) == 1
        nodes.add(result["0"][2])
    assert len(nodes) == len(RANK_AND_NODE)


@pytest.mark.parametrize("launch", [*GIVE_RESULTS, *RAISE, "torch fails first", "unused"])
def test_a_launch_leaves_no_resources_in_the_program(seen: Seen, launch: str) -> None:
    after = seen[launch]
    assert after["other handlers"] == []
    assert after["new in the environment"] == []
    assert after["threads"] == []
    assert after["left"] == []


def test_a_launch_restores_the_signal_handlers_of_the_program(seen: Seen) -> None:
    assert seen["heard"] == ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"]


def test_workers_end_by_sigterm_for_every_start_method(seen: Seen) -> None:
    for launch in RANK_AND_NODE:
        assert all(result[3] for result in seen[launch]["result"].values()), launch


@pytest.mark.parametrize(
    ("launch", "kind", "said"),
    [
        ("used", "RendezvousClosedError", "use another --rdzv-id"),
        ("used, main", "RendezvousClosedError", "use another --rdzv-id"),
        ("used, run", "RendezvousClosedError", "use another --rdzv-id"),
        ("none, 1:2", "RendezvousError", "LaunchConfig(run_id=NAME)"),
        ("wrong option", "RendezvousError", "did you mean lease_s?"),
        ("no etcd", "RendezvousConnectionError", "127.0.0.1:"),
        ("not enough nodes", "RendezvousTimeoutError", "join_timeout_s=1"),
    ],
)
def test_a_failed_launch_raises_an_error_of_torch(
    seen: Seen, launch: str, kind: str, said: str
) -> None:
    raised = seen[launch]["raised"]
    assert kind in raised and "Exception" in raised
    assert said in seen[launch]["said"]
    if launch == "used, run":  # also called by commands: uncaught, it exits
        assert seen[launch]["code"] == 0
    else:
        assert "SystemExit" not in raised


def test_a_single_node_job_without_an_id_gets_a_unique_one(seen: Seen) -> None:
    first, second = (set(seen[launch]["result"].values()) for launch in ("none", "none again"))
    assert len(first) == len(second) == 1
    assert first != second and "none" not in first | second


def test_threads_launch_concurrently(seen: Seen) -> None:
    one, other, used = seen["thread"]["result"]
    assert one["raised"] == other["raised"] == []
    nodes = [{r[2] for r in launch["result"].values()} for launch in (one, other)]
    assert [len(ids) for ids in nodes] == [1, 1] and nodes[0] != nodes[1]
    assert "RendezvousClosedError" in used["raised"]
    assert seen["thread"]["left"] == seen["thread"]["new in the environment"] == []


def test_the_reason_for_leaving_is_a_sentence(seen: Seen) -> None:
    reasons = [line for line in seen["log"].splitlines() if "node-leaving" in line]
    assert reasons and not any("NoneType" in line for line in reasons)
