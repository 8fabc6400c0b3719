"""Whatever is wrong with a node that joins, the others train on, and its status says what it is."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from training_job import SCRIPTS, TrainingJob, Workload

from elastic.membership.progress import decode_progress
from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.waiting import PATIENCE_S

WORKLOAD = Workload(samples=480, epochs=600, step_s=0.2)
IN_THE_LOOP = """
import runpy, sys, urllib.error
import elastic.testing.pacing

def fail(*arguments):
    {}

elastic.testing.pacing.pause_after_step = fail
sys.path.insert(0, {!r})
runpy.run_path({!r}, run_name="__main__")
"""


def in_the_loop(line: str) -> str:
    return IN_THE_LOOP.format(line, str(SCRIPTS), str(SCRIPTS / "failing.py"))


SCRIPTS_THAT_FAIL = {
    "syntax": "def main(:\n",
    "usage": "import sys; sys.exit(2)",
    "name": in_the_loop("undefined_name"),
    "exit-65": in_the_loop("sys.exit(65)"),
    "unauthorized": in_the_loop(
        'raise urllib.error.HTTPError("https://data", 401, "Unauthorized", None, None)'
    ),
    "denied": in_the_loop(
        'raise RuntimeError("An error occurred (AccessDenied) when calling GetObject")'
    ),
    "expired": in_the_loop(
        'raise RuntimeError("An error occurred (ExpiredToken) when calling PutObject")'
    ),
    "limited": in_the_loop('raise RuntimeError("429 Too Many Requests")'),
}
BEFORE_JOIN = ("syntax", "usage")


@pytest.mark.slow
def test_a_joining_node_that_fails_in_any_way_does_not_end_the_job(
    shared_etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    with TrainingJob(
        [shared_etcd.endpoint],
        tmp_path,
        script=SCRIPTS / "failing.py",
        workload=WORKLOAD,
        min_nodes=2,
        max_nodes=3,
        conf={"quarantine_s": 300.0, "last_call_s": 1.0},
    ) as job:
        (job.folder / "may-end").touch()
        healthy = job.start_nodes(2)
        job.wait_training(nodes=2)
        before = {node.name: node.workers()[0].pid for node in healthy}

        def quarantined(name: str) -> str | None:
            entry = job.store.get(job.keys.progress)
            progress = decode_progress(entry.key, entry.value) if entry is not None else None
            reasons = (w.reason for w in progress.waiting) if progress is not None else ()
            return next((reason for reason in reasons if f"{name} is quarantined" in reason), None)

        for name, text in SCRIPTS_THAT_FAIL.items():
            job.script = tmp_path / f"{name}.py"
            job.script.write_text(text)
            node = job.start_node(name)
            if name in BEFORE_JOIN:
                # (Of its own accord, or after --max-restarts.)
                assert node.wait(PATIENCE_S) == 1
            else:
                reason = job.wait_for(
                    partial(quarantined, name), PATIENCE_S, f"{name}'s quarantine"
                )
                assert f"{name} is quarantined: " in reason
            job.wait_progress(2)
            assert {node.name: node.workers()[0].pid for node in healthy} == before
