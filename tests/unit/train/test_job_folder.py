"""All processes of a job use one checkpoint folder, whichever their script chooses."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from kit.memory_store import MemoryServer, MemoryStore
from kit.run_kit import job, run_of

from checkpoints import LocalStorage, Root, list_checkpoints
from checkpoints.testing import FaultyStorage
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
    store.put(KEYS.checkpoint_folder, b"outputs")
    with pytest.raises(RecordError, match="/elastic/job/checkpoint_folder"):
        JobFolder().agree(store, KEYS, "/outputs/1")


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    texts: list[str] = []
    monkeypatch.setattr(get_logger(), "warning", lambda text, *a: texts.append(text % a))
    return texts


@pytest.mark.parametrize("form", [str, LocalStorage, "file://{}".format, os.path.relpath])
def test_a_folder_that_changes_per_start_is_the_one_with_which_the_job_began(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    warnings: list[str],
    form: Callable[[str], Root],
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = str(tmp_path / "12:00"), str(tmp_path / "12:05")
    asked: list[str] = []

    def job_folder(own: str) -> str:
        asked.append(own)
        return first

    root = form(first)
    assert in_job_folder(root, job_folder=job_folder) is root
    assert in_job_folder(form(second), job_folder=job_folder) == first
    assert asked == [first, second]
    assert os.listdir(tmp_path) == ["12:00"]
    (warning,) = warnings
    assert second in warning and f"using {first}." in warning and "checkpoints=" in warning


def test_a_process_keeps_its_folder_if_the_job_s_is_elsewhere_the_same_or_not_needed(
    tmp_path: Path, warnings: list[str]
) -> None:
    first, own = tmp_path / "1", tmp_path / "2"
    missing = str(tmp_path / "on another machine")
    assert in_job_folder(str(own), job_folder=lambda _: missing) == str(own)
    (tmp_path / "same").symlink_to(own)
    assert in_job_folder(str(own), job_folder=lambda _: str(tmp_path / "same")) == str(own)
    assert not warnings

    first.mkdir()
    with run_of(Checkpoints(str(own), when=1)) as run:
        job(run).train(stop_after=2)
    assert in_job_folder(str(own), job_folder=lambda _: str(first)) == str(own)
    assert "which has checkpoints, too" in warnings[-1]


def test_urls_are_compared_as_they_are() -> None:
    first, second = (f"memory://{uuid.uuid4()}/{number}" for number in (1, 2))
    assert in_job_folder(second, job_folder=lambda own: first) == first


def test_a_storage_of_the_user_s_own_is_not_asked_for(tmp_path: Path) -> None:
    def job_folder(own: str) -> str:
        raise AssertionError(own)

    root = FaultyStorage(LocalStorage(tmp_path))
    assert in_job_folder(root, job_folder=job_folder) is root


def test_a_worker_saves_where_its_agent_says(tmp_path: Path) -> None:
    first, own = tmp_path / "1", tmp_path / "2"
    first.mkdir()
    worlds = Worlds(
        abort=lambda: None,
        position=lambda: Heartbeat(generation=0, step=0, phase="", step_time_s=0.0),
        current_step=lambda: None,
    )

    class Agent:
        def send(self, message: Message) -> None:
            if isinstance(message, FolderAsk):
                assert message.folder == str(own)
                worlds.receive(FolderAnswer(folder=str(first)))

        def send_heartbeat(self, heartbeat: Heartbeat) -> None:
            pass

        def close(self) -> None:
            pass

    worlds.attach(Agent())
    with run_of(Checkpoints(str(own), when=1), worlds=worlds) as run:
        job(run).train(stop_after=2)
        eventually(lambda: list_checkpoints(first), "a checkpoint")
    assert not own.exists()
