"""Programs that launch one job from several processes, as torch's own tests do."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.forks.program import start_python
from elastic.testing.waiting import eventually

PROGRAM = Path(__file__).parent / "meeting_program.py"
APART_S = 8.0  # torch's second process arrives 7 to 17 s after the first, because it imports torch
PATIENCE_S = 120.0


class Node:
    """A program that is ready to launch."""

    def __init__(self, folder: Path, name: str, arguments: list[str]) -> None:
        self.log = folder / name
        with self.log.open("w") as log:
            self.process = start_python(
                [sys.executable, str(PROGRAM), *arguments],
                env={**os.environ, "ELASTIC_NODE_NAME": name, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n", self.log.read_text()

    def launch(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("now\n")
        self.process.stdin.flush()

    def results(self) -> dict[str, list[int]]:
        said, _ = self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode == 0, self.log.read_text()
        found: dict[str, list[int]] = json.loads(said)
        return found


@pytest.fixture
def nodes(tmp_path: Path, shared_etcd: EmbeddedEtcd, root: str) -> Iterator[list[Node]]:
    arguments = [shared_etcd.endpoint, root.rstrip("/"), "meeting"]
    started = [Node(tmp_path, name, arguments) for name in ("first", "second")]
    yield started
    for node in started:
        node.process.kill()
        node.process.wait()


def test_a_node_that_arrives_seconds_later_joins_a_short_job(nodes: list[Node]) -> None:
    first, second = nodes
    first.launch()
    eventually(lambda: "node-arrived" in first.log.read_text(), "the first one has arrived")
    with contextlib.suppress(subprocess.TimeoutExpired):  # ended: the job is over
        first.process.wait(APART_S)
    second.launch()
    assert first.results() | second.results() == {str(rank): [rank, 4] for rank in range(4)}
