"""The analysis of a ledger in benchmarks/sharded.py, and its raw stream."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.testing.ledger import LedgerStep, RunLedger, Start

BENCHMARKS = str(Path(__file__).parents[3] / "benchmarks")


@pytest.fixture
def sharded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    before = set(sys.modules)
    yield importlib.import_module("sharded")
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(BENCHMARKS):
            del sys.modules[name]


def done(generation: int, step: int, rank: int, time_s: float) -> LedgerStep:
    return LedgerStep(generation, step, 0, rank, f"node{rank // 2}", (), time_s)


def test_a_pause_ends_with_the_slowest_rank_of_a_node(
    sharded: Any,
) -> None:
    times = {1: 10.0, 2: 10.1, 3: 11.0, 4: 11.6, 5: 12.5}
    steps = [done(1, step, 0, at) for step, at in times.items()]
    steps += [done(1, step, 1, at + (0.3 if step == 3 else 0.0)) for step, at in times.items()]
    steps += [done(1, 1, 2, 0.0), done(1, 2, 2, 99.0)]  # another node
    ledger = RunLedger(steps=tuple(steps))
    assert sharded.pause_of(ledger, {"node0"}, 10.05, 11.7) == pytest.approx(1.2)
    assert sharded.pause_of(ledger, {"node0"}, 11.7, 20.0) == pytest.approx(0.9)
    assert sharded.pause_of(ledger, {"node0"}, 20.0, 30.0) == 0.0


def test_steps_repeated_by_a_later_world_are_counted_once(sharded: Any) -> None:
    starts = (Start(1, 0, 0, 2, "node0", 0.0), Start(2, 2, 0, 2, "node0", 5.0))
    steps = [done(1, step, rank, 1.0) for step in range(4) for rank in (0, 1)]
    again = RunLedger(starts=starts, steps=(*steps, done(2, 2, 0, 6.0)))
    assert sharded.done_again(again) == 2
    lossless = (starts[0], Start(2, 4, 0, 2, "node0", 5.0))
    assert sharded.done_again(RunLedger(starts=lossless, steps=tuple(steps))) == 0


def test_the_raw_stream_moves_bytes_between_pairs_of_processes(sharded: Any) -> None:
    assert sharded.raw_rate(2, 5 << 20) > 0.0
    assert sharded.raw_rate(2, 5 << 20, is_new=True) > 0.0


def test_the_step_time_is_that_of_the_slowest_rank_within_one_world(sharded: Any) -> None:
    steps = [done(1, step, 0, 1.0 * step) for step in range(4)]
    steps += [done(1, step, 1, 1.0 * step + 0.1) for step in range(4)]
    steps += [done(2, step, 0, 100.0 + 3.0 * step) for step in (4, 5)]
    assert sharded.step_time(RunLedger(steps=tuple(steps))) == pytest.approx(1.0)


def test_only_the_first_recovery_after_a_death_is_measured(sharded: Any, tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    folder.mkdir()
    job = SimpleNamespace(cluster=SimpleNamespace(folder=tmp_path))
    assert sharded.recovery_of(job, 3, 1) is None
    took = [(1, 9.0), (2, 0.1), (2, 0.2), (2, 0.6), (3, 5.0)]
    lines = [
        {"event": "recovered", "generation": generation, "duration_s": duration_s, "monotonic": 1.0}
        for generation, duration_s in took
    ]
    text = "".join(json.dumps({"seq": n, **line}) + "\n" for n, line in enumerate(lines))
    (folder / "node0.jsonl").write_text(text)
    assert sharded.recovery_of(job, 3, 1) == pytest.approx(0.2)


def test_a_transfer_rate_uses_all_bytes_and_the_slowest_rank(sharded: Any) -> None:
    mib = 1 << 20
    received = [
        {"sources": [0, 2], "bytes": 100 * mib, "duration_s": 0.5},
        {"sources": [3], "bytes": 60 * mib, "duration_s": 0.8},
    ]
    found = sharded.transfer_of(received)
    assert found.rate == 200.0
    assert (found.pairs, found.sources) == (2, 1)  # the minimum over all ranks
