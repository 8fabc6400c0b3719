"""The tests hold on a machine that is busy: nothing fails only because it took long."""

from __future__ import annotations

import ast
import inspect
import time
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.telemetry.ledger import Ledger
from elastic.testing.cluster import ClusterTimeout, LocalCluster
from elastic.testing.doubles.manual_clock import ManualClock
from elastic.testing.node import LocalNode
from elastic.testing.waiting import PATIENCE_S

TESTS = Path(__file__).parents[1]
# Longer than this is no promise that a test checks, but patience, of which there is one.
LONGEST_PROMISE_S = 14.0


def test_slow_examples_fail_nothing() -> None:
    seen: list[int] = []

    def slowly(number: int) -> int:
        time.sleep(0.25)  # as on a machine where this takes so long
        return number

    @settings(max_examples=12, database=None)
    @given(st.integers().map(slowly))
    def property_of(number: int) -> None:
        seen.append(slowly(number))

    property_of()
    assert len(seen) >= 10


def test_a_clusters_waits_have_one_patience() -> None:
    waits = [m for name, m in vars(LocalCluster).items() if name.startswith("wait_")]
    given = [inspect.signature(wait).parameters["timeout_s"].default for wait in waits]
    assert {limit for limit in given if limit is not inspect.Parameter.empty} == {PATIENCE_S}


class Unharmed(LocalCluster):
    """One whose nodes run, and which has none."""

    @property
    def running(self) -> list[LocalNode]:
        return [MagicMock(spec=LocalNode)]


def test_a_world_trains_once_its_last_rank_has_written(tmp_path: Path) -> None:
    """Until then three nodes look like two."""
    cluster = Unharmed(["127.0.0.1:1"], "train.py", tmp_path)
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
    """Seconds that a file gives to something as numbers; steps and generations are integers."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    waits = [c for c in calls if ast.unparse(c.func).rpartition(".")[2].startswith("wait")]
    given = [value for wait in waits for value in wait.args if isinstance(value, ast.Constant)]
    named = [k.value for c in calls for k in c.keywords if str(k.arg).startswith("timeout")]
    return [
        *(value for value in given if isinstance(value.value, float)),
        *(value for value in named if isinstance(value, ast.Constant) and value.value is not None),
    ]


def test_no_wait_of_a_kill_test_has_a_patience_of_its_own() -> None:
    found = [
        f"{path.name}:{limit.lineno}: {limit.value}"
        for path in sorted((TESTS / "kill").glob("*.py"))
        for limit in limits_in(path)
        if isinstance(limit.value, int | float) and LONGEST_PROMISE_S < limit.value < PATIENCE_S
    ]
    assert found == []
