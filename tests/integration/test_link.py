"""Agent and workers on a real socket, as real processes that are killed and stopped."""

from __future__ import annotations

import os
import queue
import signal
import stat
import tempfile
import threading
from pathlib import Path

import pytest
from link_kit import DEADLINE_S, Agent, Processes, connect

from elastic.errors import LinkError
from elastic.link.link import (
    ClientHandshakeRequest,
    CollectiveFailure,
    Entered,
    Exiting,
    Heartbeat,
    LinkServer,
    Message,
    Ready,
    SigtermAnswer,
    WorkerDeath,
)
from elastic.testing.waiting import eventually


def test_the_socket_is_accessible_to_this_user_only(agent: Agent) -> None:
    folder = Path(agent.server.path).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    agent.server.close()
    assert not folder.exists()


def test_messages_are_ordered_in_both_directions(agent: Agent) -> None:
    heard: queue.Queue[Message] = queue.Queue()
    client = connect(agent.server.path, on_message=heard.put)
    for step in range(100):
        client.send(Entered(generation=1, step=step))
    steps = [agent.wait_for(Entered)[1].step for _ in range(100)]
    assert steps == list(range(100))
    for leaving in (True, False):
        agent.server.send(SigtermAnswer(leaving=leaving))
    assert [heard.get(timeout=DEADLINE_S) for _ in range(2)] == [
        SigtermAnswer(leaving=True),
        SigtermAnswer(leaving=False),
    ]
    client.close()


def test_the_client_sends_heartbeats(agent: Agent) -> None:
    client = connect(agent.server.path, heartbeat_every_s=0.01)
    senders = [agent.wait_for(Heartbeat)[0] for _ in range(3)]
    assert {worker.pid for worker in senders} == {os.getpid()}
    client.close()


def test_a_death_is_reported_at_once_despite_inherited_descriptors(
    agent: Agent, processes: Processes
) -> None:
    process = processes.worker(agent.server.path, "fork")
    assert process.stdout is not None
    process.stdout.readline()
    agent.wait_for(Ready)
    process.kill()
    death = agent.deaths.get(timeout=DEADLINE_S)  # the children live for longer
    assert (death.pid, death.signal, death.exit_code) == (process.pid, signal.SIGKILL, None)


def test_a_death_carries_the_exit_notice_and_the_exit_code(
    agent: Agent, processes: Processes
) -> None:
    process = processes.worker(agent.server.path, "bye")
    death = agent.deaths.get(timeout=DEADLINE_S)
    assert death == WorkerDeath(process.pid, 3, None, Exiting(clean=True, error=""))
    assert process.wait() == 3  # left to its parent to reap


def test_the_exit_notice_arrives_after_a_backlog_of_messages(
    agent: Agent, processes: Processes
) -> None:
    may_read = threading.Event()
    agent.on_message = lambda message: may_read.wait(DEADLINE_S)
    process = processes.worker(agent.server.path, "talk")
    process.wait(timeout=DEADLINE_S)
    may_read.set()
    exit_notice = agent.deaths.get(timeout=DEADLINE_S).exit_notice
    assert exit_notice == Exiting(clean=False, error="the last word")
    generations = [m.generation for _, m in agent.said.queue if isinstance(m, CollectiveFailure)]
    assert generations == list(range(40))


def test_a_disconnected_worker_is_still_watched(agent: Agent, processes: Processes) -> None:
    process = processes.worker(agent.server.path, "close")
    agent.wait_for(Ready)
    process.kill()
    assert agent.deaths.get(timeout=DEADLINE_S).pid == process.pid


def test_a_worker_ends_with_its_agent(processes: Processes) -> None:
    agent, path = processes.agent()
    worker = processes.worker(path, "fork")
    assert worker.stdout is not None
    worker.stdout.readline()
    agent.kill()
    assert worker.wait(timeout=DEADLINE_S) == 9
    assert not Path(path).parent.exists()  # no one else would clean up


def test_a_stopped_worker_does_not_block_other_workers(agent: Agent, processes: Processes) -> None:
    process = processes.worker(agent.server.path)
    stopped, _ = agent.wait_for(Ready)
    os.kill(process.pid, signal.SIGSTOP)
    for _ in range(50_000):
        agent.server.send(SigtermAnswer(leaving=True), stopped)
    client = connect(agent.server.path, local_rank=1)
    client.send(Entered(generation=1, step=1))
    assert agent.wait_for(Entered)[0].local_rank == 1
    client.close()
    os.kill(process.pid, signal.SIGCONT)
    # It was disconnected because it did not read, and repeats the handshake.
    assert agent.wait_for(ClientHandshakeRequest)[0].pid == process.pid


def test_connecting_to_a_closed_server_raises_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic.link.link.LINK_CONNECT_S", 0.1)
    agent = Agent()
    agent.server.close()
    with pytest.raises(LinkError, match="does not answer"):
        connect(agent.server.path)


def test_closing_client_and_server_joins_their_threads(agent: Agent) -> None:
    client = connect(agent.server.path)
    client.close()
    client.close()
    agent.server.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("elastic-link")]


def test_a_long_temporary_folder_path_is_supported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    agent = Agent()
    assert len(agent.server.path) < 100
    connect(agent.server.path).close()
    agent.close()


def test_sending_does_not_block_on_the_server_thread() -> None:
    server = LinkServer(
        on_message=lambda worker, message: None,
        on_death=lambda worker, death: None,
        on_error=lambda error: None,
    )
    for _ in range(2000):  # more bytes than a socket pair holds
        server.send(SigtermAnswer(leaving=True))
    server.close()
    server.close()
    assert not Path(server.path).parent.exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_callback_that_fails_is_reported_to_the_owner() -> None:
    agent = Agent()

    def fail(message: Message) -> None:
        raise ValueError("a mistake of the owner's")

    agent.on_message = fail
    client = connect(agent.server.path)
    eventually(lambda: agent.errors)
    assert isinstance(agent.errors.pop(), ValueError)
    client.close()
    agent.close()
