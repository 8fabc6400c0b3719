"""Relative checkpoint folders are relative to one working folder for all processes of a job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kit.memory_store import MemoryServer, MemoryStore
from kit.run_kit import job, run_of

from checkpoints import LocalStorage, Root, list_checkpoints
from elastic.agent.node import JobFolder
from elastic.errors import RecordError
from elastic.link.link import FolderAnswer, FolderAsk, Heartbeat, Message
from elastic.membership.records import Keys
from elastic.telemetry.log import get_logger
from elastic.testing.waiting import eventually
from elastic.train.folder import Checkpoints, in_job_folder
from elastic.worker.worlds import Worlds

KEYS = Keys.of("/elastic", "job")


def test_the_first_worker_s_folder_is_that_of_all_nodes() -> None:
    store = MemoryStore(MemoryServer())
    first, second = JobFolder(), JobFolder()
    assert first.agree(store, KEYS, "/outputs/1") == "/outputs/1"
    assert second.agree(store, KEYS, "/outputs/2") == "/outputs/1"
    assert first.agree(store, KEYS, "/outputs/3") == "/outputs/1"


def test_two_first_workers_agree() -> None:
    """Both nodes have read the key, and found none."""
    server = MemoryServer()

    class Late(MemoryStore):
        def compare_and_swap(self, key: str, *args: object, **kwargs: object) -> int | None:
            JobFolder().agree(MemoryStore(server), KEYS, "/outputs/1")
            return super().compare_and_swap(key, *args, **kwargs)  # type: ignore[arg-type]

    assert JobFolder().agree(Late(server), KEYS, "/outputs/2") == "/outputs/1"


def test_the_agents_restore_the_folder_after_a_wipe() -> None:
    server = MemoryServer()
    store, known = MemoryStore(server), JobFolder()
    known.agree(store, KEYS, "/outputs/1")
    server.wipe()
    JobFolder().restore(store, KEYS)  # of a node without such a worker
    known.restore(store, KEYS)
    assert JobFolder().agree(store, KEYS, "/outputs/2") == "/outputs/1"


def test_an_unreadable_record_is_named() -> None:
    store = MemoryStore(MemoryServer())
    store.put(KEYS.working_folder, b"outputs")
    with pytest.raises(RecordError, match="/elastic/job/working_folder"):
        JobFolder().agree(store, KEYS, "/outputs/1")


def test_a_relative_folder_is_below_the_job_s_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(get_logger(), "warning", lambda text, *a: warnings.append(text % a))
    first, second = tmp_path / "1", tmp_path / "2"
    first.mkdir()
    second.mkdir()
    monkeypatch.chdir(second)
    asked: list[str] = []

    def job_folder(own: str) -> str:
        asked.append(own)
        return str(first)

    assert in_job_folder("ckpt", job_folder=job_folder) == str(first / "ckpt")
    assert in_job_folder(LocalStorage("ckpt"), job_folder=job_folder) == str(first / "ckpt")
    assert asked == [str(second)] * 2
    assert str(second) in warnings[0] and f"using {first / 'ckpt'}" in warnings[0]

    (tmp_path / "same").symlink_to(second)
    assert in_job_folder("ckpt", job_folder=lambda own: str(tmp_path / "same")) == "ckpt"
    missing = str(tmp_path / "on another machine")
    assert in_job_folder("ckpt", job_folder=lambda own: missing) == "ckpt"
    assert len(warnings) == 2


@pytest.mark.parametrize("root", ["/shared/job-1", "~/job-1", "file:///shared", "memory://jobs"])
def test_other_addresses_are_not_asked_for(root: Root) -> None:
    def job_folder(own: str) -> str:
        raise AssertionError(own)

    assert in_job_folder(root, job_folder=job_folder) == root


def test_a_worker_saves_where_its_agent_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, own = tmp_path / "1", tmp_path / "2"
    first.mkdir()
    own.mkdir()
    monkeypatch.chdir(own)
    worlds = Worlds(
        abort=lambda: None,
        position=lambda: Heartbeat(generation=0, step=0, phase="", step_time_s=0.0),
        current_step=lambda: None,
    )

    class Agent:
        def send(self, message: Message) -> None:
            if isinstance(message, FolderAsk):
                assert message.folder == os.getcwd()
                worlds.receive(FolderAnswer(folder=str(first)))

        def send_heartbeat(self, heartbeat: Heartbeat) -> None:
            pass

        def close(self) -> None:
            pass

    worlds.attach(Agent())
    with run_of(Checkpoints("ckpt", when=1), worlds=worlds) as run:
        job(run).train(stop_after=2)
        eventually(lambda: list_checkpoints(first / "ckpt"), "a checkpoint")
    assert os.listdir(own) == []
