"""Hostile frames on every listener: each costs its connection, and nothing is left of it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hostile import Attacker
from listeners import ALL, Cost, assert_flat, listening

FRAMES = 2_000  # hostile ones, on each listener
WARM_UP = 200  # before memory is measured
SOAK_FRAMES = 100_000


@pytest.mark.parametrize("kind", ALL)
def test_hostile_frames_cost_their_connection_only(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        fuzz(kind, tmp_path, FRAMES, seed=1)
    lines = [record for record in caplog.records if "disconnected" in record.getMessage()]
    assert len(lines) <= 20, "a flood of bad clients floods the log"


@pytest.mark.soak
@pytest.mark.parametrize("kind", ALL)
def test_a_hundred_thousand_hostile_frames(kind: str, tmp_path: Path) -> None:
    fuzz(kind, tmp_path, SOAK_FRAMES, seed=2)


def fuzz(kind: str, folder: Path, frames: int, *, seed: int) -> None:
    attacker = Attacker(seed)
    with listening(kind, folder) as listener:
        for _ in range(WARM_UP):
            attacker.attack(listener.port)
        listener.serve()
        before, sent = Cost.now(), attacker.sent
        while attacker.sent - sent < frames:
            attacker.attack(listener.port)
            if attacker.sent % 500 == 0:
                listener.serve()
        listener.serve()
        assert_flat(before)
