"""Ownership of a checkpoint folder that two jobs use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kit.manual_clock import ManualClock

from checkpoints import LocalStorage
from elastic.errors import ConfigError
from elastic.train.folder import (
    INSTANCE,
    OWNER_FILE,
    OWNER_SILENCE_S,
    OWNER_WATCH_S,
    Ownership,
    _process,
)


@pytest.fixture
def claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ownership]:
    """One rank 0 under a launcher; ``on_sleep`` runs whenever it waits."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "x"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")

    def make(run_id: str, on_sleep: Callable[[], object] = lambda: None) -> Ownership:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
        monkeypatch.setenv("ELASTIC_NODE_NAME", f"node-of-{run_id}")
        return Ownership(LocalStorage(tmp_path), said.append, Patient(on_sleep))

    said: list[str] = []
    return make


class Patient(ManualClock):
    """A clock that calls ``on_sleep`` on every sleep."""

    def __init__(self, on_sleep: Callable[[], object]) -> None:
        super().__init__()
        self._on_sleep = on_sleep

    def sleep(self, seconds: float) -> None:
        self._on_sleep()
        super().sleep(seconds)


def test_a_second_job_is_rejected_with_the_folder_and_its_owner(
    claim: Callable[..., Ownership], tmp_path: Path
) -> None:
    first = claim("one")
    assert first.claim() is None
    with pytest.raises(ConfigError) as told:
        claim("two", on_sleep=first.heartbeat).claim()
    assert str(tmp_path) in str(told.value) and "'one'" in str(told.value)
    assert "node-of-one" in str(told.value)


def test_the_same_run_id_is_accepted_at_once(claim: Callable[..., Ownership]) -> None:
    first = claim("one")
    first.claim()
    again = claim("one", on_sleep=lambda: pytest.fail("it waits"))
    before = again.claim()
    assert before is not None and before.failures == 1, "it was never released"


def record_of(tmp_path: Path, **changes: Any) -> None:
    """Change the record, as if it were of another process or machine."""
    record = json.loads((tmp_path / OWNER_FILE).read_text())
    (tmp_path / OWNER_FILE).write_text(json.dumps({**record, **changes}))


def test_two_jobs_with_one_run_id_never_share_a_folder(
    claim: Callable[..., Ownership], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started by mistake, with separate etcds."""
    monkeypatch.setenv(INSTANCE, "etcd-1")
    claim("one").claim()

    def heartbeat() -> None:
        counter = json.loads((tmp_path / OWNER_FILE).read_text())["counter"]
        record_of(tmp_path, counter=counter + 1)

    monkeypatch.setenv(INSTANCE, "etcd-2")
    record_of(tmp_path, writer="another machine", node="n7")
    with pytest.raises(ConfigError, match="'one', rank 0 on node n7"):
        claim("one", on_sleep=heartbeat).claim()
    with subprocess.Popen(["sleep", "60"]) as rank_0:  # on this machine
        record_of(tmp_path, writer=_process(rank_0.pid))
        with pytest.raises(ConfigError, match="another job saves"):
            claim("one", on_sleep=heartbeat).claim()
        rank_0.kill()


def test_a_continued_job_claims_its_folder_without_a_wait(
    claim: Callable[..., Ownership], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def waits() -> None:
        pytest.fail("it waits")

    monkeypatch.setenv(INSTANCE, "etcd-1")
    claim("one").claim()
    record_of(tmp_path, writer="another machine")
    claim("one", on_sleep=waits).claim()  # the next rank 0, of the same etcd
    monkeypatch.setenv(INSTANCE, "etcd-2")  # wiped
    with subprocess.Popen(["sleep", "60"]) as rank_0:
        dead = _process(rank_0.pid)
        rank_0.kill()
    record_of(tmp_path, writer=dead)
    claim("one", on_sleep=waits).claim()
    record_of(tmp_path, writer="another machine", instance="etcd-1")  # requeued elsewhere
    status = os.stat(tmp_path / OWNER_FILE)
    os.utime(tmp_path / OWNER_FILE, (status.st_atime, status.st_mtime - OWNER_SILENCE_S - 1))
    claim("one", on_sleep=waits).claim()


def test_a_job_of_the_same_run_id_waits_for_a_silent_owner_of_another_machine(
    claim: Callable[..., Ownership], tmp_path: Path
) -> None:
    claim("one").claim()
    record_of(tmp_path, writer="another machine")
    slept: list[None] = []
    claim("one", on_sleep=lambda: slept.append(None)).claim()
    assert 0 < len(slept) * 0.25 <= OWNER_SILENCE_S + 1


def test_an_owner_that_was_replaced_commits_nothing_more(
    claim: Callable[..., Ownership], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(INSTANCE, "etcd-1")
    first = claim("one")
    first.claim()
    first.hold()
    assert first.may_commit()
    record_of(tmp_path, writer="another machine", instance="etcd-2")  # it was stopped meanwhile
    first._clock.sleep(1.0)
    assert not first.may_commit() and first.is_lost
    first.close(release=True)
    assert json.loads((tmp_path / OWNER_FILE).read_text())["instance"] == "etcd-2"


def test_the_next_rank_0_of_a_running_job_succeeds_without_a_claim(
    claim: Callable[..., Ownership], tmp_path: Path
) -> None:
    claim("one").claim()
    record_of(tmp_path, writer="another machine")
    successor = claim("one", on_sleep=lambda: pytest.fail("it waits"))
    successor.hold()
    while json.loads((tmp_path / OWNER_FILE).read_text())["writer"] != _process(os.getpid()):
        assert successor.may_commit()
    successor.close(release=False)
    assert successor.may_commit()


def test_a_record_of_an_earlier_version_is_read(
    claim: Callable[..., Ownership], tmp_path: Path
) -> None:
    claim("one").claim()
    record = json.loads((tmp_path / OWNER_FILE).read_text())
    del record["writer"], record["instance"]
    (tmp_path / OWNER_FILE).write_text(json.dumps(record))
    slept: list[None] = []
    before = claim("two", on_sleep=lambda: slept.append(None)).claim()
    assert before is not None and len(slept) * 0.25 >= OWNER_WATCH_S


def test_a_job_that_has_ended_releases_the_folder(claim: Callable[..., Ownership]) -> None:
    first = claim("one")
    first.claim()
    first.hold()
    first.close(release=True)
    before = claim("two", on_sleep=lambda: pytest.fail("it waits")).claim()
    assert before is not None and before.failures == 0


def test_the_folder_of_a_stopped_job_is_taken_over(
    claim: Callable[..., Ownership], caplog: pytest.LogCaptureFixture
) -> None:
    first = claim("one")
    first.claim()
    slept: list[None] = []
    second = claim("two", on_sleep=lambda: slept.append(None))
    second.claim()
    assert len(slept) * 0.25 >= OWNER_WATCH_S
    assert "last used by job 'one', rank 0 on node node-of-one" in caplog.text
    assert "waiting up to 30 s" in caplog.text, "the job seems to hang"
    first.hold()  # it was only stopped, and resumes
    first.heartbeat()
    assert first.is_lost
    first.close(release=False)


def test_a_dead_process_without_a_launcher_owns_nothing(
    claim: Callable[..., Ownership], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name)
    claim("").claim()
    record = json.loads((tmp_path / OWNER_FILE).read_text())
    *place, pid, start = record["process"].split()
    record["process"] = record["run_id"] = " ".join([*place, pid, str(int(start) - 1)])
    (tmp_path / OWNER_FILE).write_text(json.dumps(record))
    claim("", on_sleep=lambda: pytest.fail("it waits")).claim()


def test_a_job_of_one_node_with_a_dead_launcher_owns_nothing(
    claim: Callable[..., Ownership], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    with subprocess.Popen(["sleep", "60"]) as launcher:
        monkeypatch.setattr("elastic.train.folder._launcher", lambda: launcher.pid)
        claim("one").claim()
        launcher.kill()
    claim("two", on_sleep=lambda: pytest.fail("it waits")).claim()


def test_launches_of_one_node_with_the_same_run_id_share_no_folder(
    claim: Callable[..., Ownership], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    first = claim("none")
    first.claim()
    claim("none", on_sleep=lambda: pytest.fail("it waits")).claim()  # restarted by its launcher
    with subprocess.Popen(["sleep", "60"]) as launcher:
        monkeypatch.setattr("elastic.train.folder._launcher", lambda: launcher.pid)
        with pytest.raises(ConfigError, match="'none'"):
            claim("none", on_sleep=first.heartbeat).claim()
        launcher.kill()


def test_a_restarted_container_is_the_same_job(
    claim: Callable[..., Ownership], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes are not visible from the new container."""
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    claim("one").claim()
    record = json.loads((tmp_path / OWNER_FILE).read_text())
    boot, _, pid, start = record["process"].split()
    record["process"] = f"{boot} pid:[1] {pid} {start}"
    (tmp_path / OWNER_FILE).write_text(json.dumps(record))
    claim("one", on_sleep=lambda: pytest.fail("it waits")).claim()


@pytest.mark.parametrize("process", ["", " ", "x", "a b", "a b c d", "a b 1 c d"])
def test_an_owner_with_an_invalid_process_is_watched(
    claim: Callable[..., Ownership], tmp_path: Path, process: str
) -> None:
    claim("one").claim()
    record = json.loads((tmp_path / OWNER_FILE).read_text())
    (tmp_path / OWNER_FILE).write_text(json.dumps({**record, "process": process}))
    slept: list[None] = []
    claim("two", on_sleep=lambda: slept.append(None)).claim()
    assert slept


def test_a_job_of_several_nodes_outlives_each_launcher(
    claim: Callable[..., Ownership], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")  # the current size
    monkeypatch.setenv("ELASTIC_MAX_NODES", "3")
    claim("one").claim()
    assert json.loads((tmp_path / OWNER_FILE).read_text())["process"] == ""


def test_the_launcher_is_found_behind_wrapper_processes() -> None:
    code = "from elastic.train.folder import _launcher; print(_launcher())"
    done = subprocess.run(
        ["sh", "-c", f'{sys.executable} -c "{code}"; exit'],
        env={**os.environ, "TORCHELASTIC_RUN_ID": "one"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) == os.getpid()


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"\xff", b'{"run_id": 1}', b"x" * 100_000])
def test_an_invalid_record_does_not_prevent_a_claim(
    claim: Callable[..., Ownership], tmp_path: Path, data: bytes
) -> None:
    (tmp_path / OWNER_FILE).write_bytes(data)
    assert claim("one").claim() is None
