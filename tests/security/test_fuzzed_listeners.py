"""Hostile frames on every listener: each closes its connection, and leaks no resources."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hostile import Attacker
from listeners import ALL, WITH_TLS, Cost, assert_flat, listening

from elastic.telemetry.log import get_logger
from elastic.wire.base import REPORT_EVERY_S

FRAMES = 500  # hostile ones, on each listener
FRAMES_WITH_TLS = 150  # a handshake takes milliseconds at both ends
WARM_UP = 100  # before memory is measured
SOAK_FRAMES = 100_000


@pytest.mark.parametrize("kind", ALL)
def test_hostile_frames_close_only_their_connection(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(get_logger(), "warning", lambda *words: lines.append(str(words)))
    began_s = time.monotonic()
    fuzz(kind, tmp_path, FRAMES_WITH_TLS if kind in WITH_TLS else FRAMES, seed=1)
    # The probe port logs nothing: anyone may query it.
    most = 2 + (time.monotonic() - began_s) / REPORT_EVERY_S
    assert kind == "health" or 1 <= len(lines) <= most, "a flood of bad clients floods the log"


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
            if attacker.sent % 100 == 0:
                listener.serve()
        listener.serve()
        assert_flat(before)
