"""Writers as real processes: killed at random times, racing each other, changing in number."""

from __future__ import annotations

import os
import random
import select
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoints
from elastic.testing.forks.child import fork

KEEP = 3
ELEMENTS = 40_000  # of 8 bytes: large enough to be killed in the middle of a write


def _state(generation: int, step: int) -> dict[str, Any]:
    """Every tensor and value encodes generation and step, so that a mixture is detected."""
    value = generation * 1_000_000 + step
    return {
        "model": {"weight": torch.full((ELEMENTS,), value), "bias": torch.full((7,), value)},
        "optimizer": {0: torch.tensor(float(value))},
        "value": value,
    }


def _assert_whole(root: Path, name: str) -> None:
    loaded = checkpoints.load(root, name)
    expected = _state(loaded.info.generation, loaded.info.step)
    state = loaded.state
    assert state["value"] == expected["value"]
    assert torch.equal(state["model"]["weight"], expected["model"]["weight"])
    assert torch.equal(state["model"]["bias"], expected["model"]["bias"])
    assert torch.equal(state["optimizer"][0], expected["optimizer"][0])


def _save_forever(root: Path, generation: int, world_size: int, pipe: int) -> None:
    """Start like a new world, then save every step and report each commit to the parent."""
    nonce = f"{generation:04x}"
    checkpoints.collect_garbage(root, generation=generation, nonce=nonce)
    origin = checkpoints.latest(root).checkpoint
    lineage = checkpoints.derive_lineage(origin, generation)
    step = origin.step if origin else 0
    while True:
        step += 1
        state = _state(generation, step)
        for rank in range(world_size):
            saved = checkpoints.save(
                root,
                state,
                step=step,
                generation=generation,
                nonce=nonce,
                lineage=lineage,
                rank=rank,
                world_size=world_size,
                keep=checkpoints.LatestN(KEEP),
            )
        assert saved.committed
        os.write(pipe, f"{saved.name}\n".encode())


def _kill_after_start(root: Path, generation: int, delay_s: float) -> str:
    """Kill a saving child ``delay_s`` after its first commit; return the last commit that it
    reported.
    """
    reader, writer = os.pipe()
    pid = fork(lambda: _save_forever(root, generation, 1 + generation % 3, writer))
    os.close(writer)
    try:
        assert select.select([reader], [], [], 60)[0], "the child saves nothing"
        time.sleep(delay_s)  # the time of the kill is random
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with os.fdopen(reader) as reported:
        lines = reported.read().splitlines()
    assert lines, "the child died by itself"
    return lines[-1]


@pytest.mark.parametrize("kills", [10, pytest.param(40, marks=pytest.mark.slow)])
def test_listed_checkpoints_are_complete_after_a_kill(tmp_path: Path, kills: int) -> None:
    chance = random.Random(7)
    last_step, last_lineage = 0, checkpoints.derive_lineage(None, 0)
    for generation in range(1, kills + 1):
        reported = _kill_after_start(tmp_path, generation, chance.uniform(0, 0.03))
        listed = checkpoints.list_checkpoints(tmp_path)
        names = [info.name for info in listed]
        assert reported in names[:2]  # at most one more was committed but not reported
        assert len(names) <= KEEP + 1  # one more if it died between a commit and retention
        for name in names:
            _assert_whole(tmp_path, name)
        found = checkpoints.latest(tmp_path)
        assert found.checkpoint is not None
        assert found.checkpoint.name == names[0]
        assert found.skipped == ()
        assert found.checkpoint.step > last_step  # every run advances
        last_step, last_lineage = found.checkpoint.step, found.checkpoint.lineage
    assert len(last_lineage) == kills
    checkpoints.collect_garbage(tmp_path, generation=kills + 1, nonce="ff")
    assert list(tmp_path.glob(".tmp-*")) == []


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_concurrent_writer_processes_commit_one_checkpoint(tmp_path: Path, world_size: int) -> None:
    """They race for the commit at each step without waiting for each other."""
    steps = 10

    def write(rank: int) -> None:
        for step in range(1, steps + 1):
            checkpoints.save(
                tmp_path,
                _state(0, step),
                step=step,
                nonce="aa",
                rank=rank,
                world_size=world_size,
                keep=None,
            )

    pids = [fork(lambda rank=rank: write(rank)) for rank in range(world_size)]  # type: ignore[misc]
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * world_size
    listed = checkpoints.list_checkpoints(tmp_path)
    assert [info.step for info in listed] == list(range(steps, 0, -1))
    for info in listed:
        _assert_whole(tmp_path, info.name)
        assert len(list((tmp_path / info.name).iterdir())) == world_size + 1
    assert list(tmp_path.glob(".tmp-*")) == []
