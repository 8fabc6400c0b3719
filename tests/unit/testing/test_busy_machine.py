"""The tests tolerate a busy machine: none fails only because it is slow."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from kit.manual_clock import ManualClock

from elastic.telemetry.ledger import Ledger
from elastic.testing.cluster import ClusterTimeout, LocalCluster
from elastic.testing.node import LocalNode
from elastic.testing.waiting import PATIENCE_S

TESTS = Path(__file__).parents[2]
# A longer limit is not an asserted latency but a timeout, of which there is only one.
LONGEST_LATENCY_S = 14.0


def test_all_waits_of_a_cluster_have_the_same_timeout() -> None:
    waits = [m for name, m in vars(LocalCluster).items() if name.startswith("wait_")]
    given = [inspect.signature(wait).parameters["timeout_s"].default for wait in waits]
    assert {limit for limit in given if limit is not inspect.Parameter.empty} == {PATIENCE_S}


class FakeCluster(LocalCluster):
    """A cluster that reports a running node without starting any."""

    @property
    def running(self) -> list[LocalNode]:
        return [MagicMock(spec=LocalNode)]


def test_a_world_counts_as_training_once_its_last_rank_has_written(tmp_path: Path) -> None:
    """Until then a world of three nodes looks like one of two."""
    cluster = FakeCluster(["127.0.0.1:1"], "train.py", tmp_path)
    clocks = [ManualClock(float(rank)) for rank in range(3)]
    ledgers = [Ledger(str(tmp_path / "ledger"), clock=clock) for clock in clocks]
    for rank, ledger in enumerate(ledgers):
        ledger.start(generation=1, step=0, rank=rank, size=3, node=f"node{rank}")
    for rank in (0, 1):
        ledgers[rank].step(generation=1, step=0, epoch=0, rank=rank, samples=[rank])
    for nodes in (2, 3):
        with pytest.raises(ClusterTimeout):
            cluster.wait_training(nodes=nodes, timeout_s=0.0)
    ledgers[2].step(generation=1, step=0, epoch=0, rank=2, samples=[2])
    assert cluster.wait_training(nodes=3) == 1


def limits_in(path: Path) -> list[ast.Constant]:
    """Time limits that a file passes as literals; integer arguments are steps or generations."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    waits = [c for c in calls if ast.unparse(c.func).rpartition(".")[2].startswith("wait")]
    given = [value for wait in waits for value in wait.args if isinstance(value, ast.Constant)]
    named = [k.value for c in calls for k in c.keywords if str(k.arg).startswith("timeout")]
    return [
        *(value for value in given if isinstance(value.value, float)),
        *(value for value in named if isinstance(value, ast.Constant) and value.value is not None),
    ]


def test_kill_tests_define_no_timeouts_of_their_own() -> None:
    found = [
        f"{path.name}:{limit.lineno}: {limit.value}"
        for path in sorted((TESTS / "kill").glob("*.py"))
        for limit in limits_in(path)
        if isinstance(limit.value, int | float) and LONGEST_LATENCY_S < limit.value < PATIENCE_S
    ]
    assert found == []
