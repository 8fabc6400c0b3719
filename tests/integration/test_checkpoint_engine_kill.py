"""An asynchronously saving program is killed at random times: listed checkpoints are complete."""

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


def state_of(generation: int, step: int) -> dict[str, Any]:
    """Every tensor and value encodes generation and step, so that a mixture is detected."""
    value = generation * 1_000_000 + step
    return {
        "weight": torch.full((ELEMENTS,), value),
        "small": [torch.full((3,), value) for _ in range(20)],
        "value": value,
    }


def assert_whole(root: Path, info: checkpoints.CheckpointInfo) -> None:
    state = checkpoints.load(root, info.name).state
    expected = state_of(info.generation, info.step)
    assert state["value"] == expected["value"]
    assert torch.equal(state["weight"], expected["weight"])
    assert all(map(torch.equal, state["small"], expected["small"]))


def train(root: Path, generation: int, size: int, pipe: int) -> None:
    """Start like a new world; then every step changes the state being saved."""
    nonce = f"{generation:04x}"
    checkpoints.collect_garbage(root, generation=generation, nonce=nonce)
    origin = checkpoints.latest(root).checkpoint
    lineage = checkpoints.derive_lineage(origin, generation)
    step = origin.step if origin else 0
    state = state_of(0, 0)
    engines = [
        checkpoints.Engine(root, keep=checkpoints.LatestN(KEEP), busy="wait") for _ in range(size)
    ]
    while True:
        step += 1
        now = state_of(generation, step)
        state["weight"].copy_(now["weight"])
        for mine, new in zip(state["small"], now["small"], strict=True):
            mine.copy_(new)
        state["value"] = now["value"]
        for rank, engine in enumerate(engines):
            world = checkpoints.WriterGroup(
                nonce=nonce, generation=generation, rank=rank, size=size, lineage=lineage
            )
            engine.save_async(state, step=step, world=world)
            for outcome in engine.outcomes():
                if outcome.status is checkpoints.SaveStatus.COMMITTED:
                    os.write(pipe, f"{outcome.name}\n".encode())


def kill_after_start(root: Path, generation: int, delay_s: float) -> set[str]:
    """Kill a training child ``delay_s`` after its first commit; return all commits that it
    reported.
    """
    reader, writer = os.pipe()
    pid = fork(lambda: train(root, generation, 1 + generation % 3, writer))
    os.close(writer)
    try:
        assert select.select([reader], [], [], 60)[0], "the child saves nothing"
        time.sleep(delay_s)  # the time of the kill is random
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with os.fdopen(reader) as reported:
        names = set(reported.read().split())
    assert names, "the child died by itself"
    return names


@pytest.mark.parametrize(
    "kills",
    [
        5,
        pytest.param(50, marks=pytest.mark.slow),
        pytest.param(1000, marks=pytest.mark.soak),
    ],
)
def test_listed_checkpoints_of_the_engine_are_complete_after_a_kill(
    tmp_path: Path, kills: int
) -> None:
    chance = random.Random(11)
    last_step = 0
    for generation in range(1, kills + 1):
        reported = kill_after_start(tmp_path, generation, chance.uniform(0, 0.02))
        listed = checkpoints.list_checkpoints(tmp_path)
        for info in listed:
            assert_whole(tmp_path, info)
        # Every reported commit is listed, or was removed by the retention of a newer one.
        newest_told = max(reported)
        assert listed[0].name >= newest_told and listed[0].generation == generation
        found = checkpoints.latest(tmp_path)
        assert found.checkpoint is not None and found.skipped == ()
        assert found.checkpoint.name == listed[0].name
        assert found.checkpoint.step > last_step  # every run advances
        last_step = found.checkpoint.step
    checkpoints.collect_garbage(tmp_path, generation=kills + 1, nonce="ff")
    assert list(tmp_path.glob(".tmp-*")) == []
