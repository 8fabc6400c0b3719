"""Warnings about a node's memory, before the kernel's OOM killer acts."""

from __future__ import annotations

import logging

import pytest

from elastic.telemetry.log import get_logger
from elastic.train.checkpointing import MemoryLimit, resident_bytes
from elastic.tuning.environment import shm_shortages, staging_shortage

GIB = 1 << 30


def test_shared_memory_that_may_exceed_the_limit_is_reported() -> None:
    (said,) = shm_shortages(8 * GIB, 16 * GIB)
    assert "16.0 GiB" in said and "8.0 GiB" in said and "sizeLimit" in said


def test_a_container_runtimes_default_is_reported() -> None:
    (said,) = shm_shortages(8 * GIB, 64 << 20)
    assert "64 MiB" in said


def test_sufficient_shared_memory_is_not_reported() -> None:
    assert shm_shortages(8 * GIB, 2 * GIB) == ()


@pytest.mark.parametrize(
    ("limit", "fits"),
    # Two workers of 10 GiB, whose shares of 1 GiB are an eighth of the state. Alone each
    # stages four times as much, twice.
    [(20 + 12, True), (20 + 11, False)],
)
def test_the_shortage_is_that_of_a_node_that_stages_alone(limit: int, fits: bool) -> None:
    said = staging_shortage(limit * GIB, 10 * GIB, 1 * GIB, 8, 2)
    assert (said is None) == fits
    if said is not None:
        assert f"{20 + 12}.0 GiB" in said


def test_a_worker_logs_the_warning_once() -> None:
    said: list[logging.LogRecord] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record)

    listener = Listener()
    get_logger().addHandler(listener)
    try:
        environ = {"ELASTIC_MEMORY_LIMIT_BYTES": str(8 * GIB), "LOCAL_WORLD_SIZE": "1"}
        limit = MemoryLimit(environ, lambda: 7 * GIB)
        limit.saw_share(GIB // 4, 1)
        assert said == []
        limit.saw_share(GIB // 4, 8)
        limit.saw_share(GIB // 4, 8)
    finally:
        get_logger().removeHandler(listener)
    (record,) = said
    assert "Raise the limit" in record.getMessage()


def test_without_a_limit_nothing_is_measured() -> None:
    asked = []

    def measure() -> int:
        asked.append(True)
        return 0

    MemoryLimit({}, measure).saw_share(GIB, 8)
    assert asked == []


def test_the_size_of_the_own_process_is_measured() -> None:
    before = resident_bytes()
    kept = bytearray(b"x") * (64 << 20)
    assert resident_bytes() - before > 32 << 20
    del kept
