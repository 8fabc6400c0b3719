"""Invalid checkpoints and data, under real torchrun on real etcd."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from training_job import TrainingJob, Workload

import checkpoints
from elastic.errors import ConfigError, Preempted
from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.journal import read_journal
from elastic.testing.waiting import PATIENCE_S

WORKLOAD = Workload(samples=250, epochs=3, save_every=10)


@pytest.fixture
def job(shared_etcd: EmbeddedEtcd, tmp_path: Path) -> Iterator[TrainingJob]:
    """A job of one node, with torchrun's own default: the first failure ends it."""
    with one_node(shared_etcd, tmp_path) as job:
        yield job


def one_node(
    etcd: EmbeddedEtcd, folder: Path, workload: Workload = WORKLOAD, **settings: Any
) -> TrainingJob:
    options: dict[str, Any] = {"min_nodes": 1, "max_nodes": 1, "max_restarts": 0, **settings}
    return TrainingJob([etcd.endpoint], folder, workload=workload, **options)


def journal(folder: Path, event: str) -> list[dict[str, Any]]:
    """All events of that name, from all processes, ordered by time."""
    return [e for e in read_journal(folder / "journal") if e["event"] == event]


# torchrun's code for a worker that fails without restarts, or the job's, which ends at once.
REFUSED = (1, ConfigError.exit_code)


def test_an_unwritable_folder_is_reported_before_training(job: TrainingJob) -> None:
    # Not with mode bits: root may write anywhere.
    (job.folder / "file").write_text("in the way")
    folder = str(job.folder / "file" / "checkpoints")
    node = job.start_node(env={"ELASTIC_CHECKPOINTS": folder})
    assert node.wait(PATIENCE_S) in REFUSED
    assert folder in node.log_text()
    assert "cannot be written" in node.log_text()
    assert job.ledger().last_step == -1


@pytest.mark.slow
def test_a_full_disk_does_not_stop_training_or_remove_checkpoints(
    shared_etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    """The disk has room for one checkpoint: weights and momenta of 650 KB on 1 MB."""
    if subprocess.run(["unshare", "-rm", "true"], check=False).returncode != 0:
        pytest.skip("needs user namespaces to mount a small disk")
    workload = replace(WORKLOAD, epochs=40, step_s=0.1, extra=("--width=4096",))
    with one_node(shared_etcd, tmp_path, workload, max_restarts=5) as job:
        disk = str(tmp_path / "checkpoints")
        mount = f'mount -t tmpfs -o size=1m none {disk} && exec "$@"'
        node = job.start_node(launcher=["unshare", "-rm", "sh", "-c", mount, "sh"])
        job.wait_for(lambda: journal(tmp_path, "checkpoint-skipped"), PATIENCE_S, "a full disk")
        saved = [e["step"] for e in journal(tmp_path, "checkpoint-saved")]
        assert saved == [WORKLOAD.save_every]
        reason = str(journal(tmp_path, "checkpoint-skipped")[0]["reason"])
        assert "space" in reason.lower()
        job.wait_progress(3)
        generation = job.generation()
        node.kill_worker()
        job.wait_training(nodes=1, after_generation=generation)
        assert {s.step for s in job.ledger().starts if s.generation > generation} == set(saved)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """The job's checkpoint folder: a file system of one mebibyte."""
    disk = tmp_path / "checkpoints"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False).returncode != 0:
        pytest.skip("needs root to mount a small disk")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_does_not_prevent_a_restore(
    shared_etcd: EmbeddedEtcd, tmp_path: Path, small_disk: Path
) -> None:
    """Nothing can be written to the folder, not even which job owns it."""
    with one_node(shared_etcd, tmp_path, replace(WORKLOAD, epochs=400, step_s=0.05)) as job:
        first = job.start_node()
        job.wait_for(lambda: journal(tmp_path, "checkpoint-saved"), PATIENCE_S, "a checkpoint")
        first.terminate()
        assert first.wait(PATIENCE_S) == Preempted.exit_code
        (saved, *_) = checkpoints.list_checkpoints(small_disk)
        with (
            contextlib.suppress(OSError),
            (small_disk / "filler").open("wb", buffering=0) as filler,
        ):
            while True:
                filler.write(bytes(4096))
        job.start_node()
        job.wait_step(saved.step + 3)
        assert {start.step for start in job.ledger().starts} == {0, saved.step}


def test_a_corrupt_newest_checkpoint_is_skipped(shared_etcd: EmbeddedEtcd, tmp_path: Path) -> None:
    with one_node(shared_etcd, tmp_path) as job:
        job.hurry()
        job.start_node()
        assert set(job.wait_ended().values()) == {0}
    folder = tmp_path / "checkpoints"
    newest, previous = checkpoints.list_checkpoints(folder)[:2]
    tensors = next((folder / newest.name).glob("*.safetensors"))
    content = bytearray(tensors.read_bytes())
    content[-5] ^= 0x10
    tensors.write_bytes(content)

    with one_node(shared_etcd, tmp_path) as again:
        again.start_node()
        assert set(again.wait_ended().values()) == {0}, again.report()
        again.ledger().assert_exactly_once(WORKLOAD.samples, WORKLOAD.epochs)
    resumed = [e["source"] for e in journal(tmp_path, "state-restored")]
    assert resumed == ["initial", previous.name]
    assert newest.name in [e["name"] for e in journal(tmp_path, "checkpoint-skipped")]

    # The same folder for another model: nothing may be loaded from it.
    wider = replace(WORKLOAD, extra=("--width=32",))
    with one_node(shared_etcd, tmp_path, wider) as other:
        node = other.start_node()
        assert node.wait(PATIENCE_S) == 1
        assert "module.0.weight" in node.log_text() or "0.weight" in node.log_text()


@pytest.mark.parametrize(
    ("workload", "nproc", "says"),
    [
        (replace(WORKLOAD, batch=1), 2, "smaller than the world of 2"),
        (replace(WORKLOAD, samples=0), 1, "empty"),
    ],
)
def test_invalid_data_is_reported(
    shared_etcd: EmbeddedEtcd, tmp_path: Path, workload: Workload, nproc: int, says: str
) -> None:
    with one_node(shared_etcd, tmp_path, workload, nproc=nproc) as job:
        node = job.start_node()
        assert node.wait(PATIENCE_S) in REFUSED
        assert says in node.log_text()
        job.assert_nothing_left()


def test_elastic_nodes_without_restarts_cause_a_warning(
    shared_etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    conf = {"last_call_s": 0.1}
    with one_node(shared_etcd, tmp_path, max_nodes=2, conf=conf) as job:
        job.hurry()
        node = job.start_node()
        assert node.wait(PATIENCE_S) == 0
        warning = next(x for x in node.log_text().splitlines() if "--max-restarts=0" in x)
        assert "1:2" in warning
        assert "elastic run" in warning
