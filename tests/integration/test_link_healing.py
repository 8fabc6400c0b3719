"""A link survives lost connections, agents that do not read, forks and namespaces."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import subprocess
import threading

import pytest
from link_kit import DEADLINE_S, Agent, Processes, connect, hang_up

from elastic.link.link import (
    ClientHandshakeRequest,
    Entered,
    Heartbeat,
    LinkClient,
    Message,
    Ready,
    SigtermAnswer,
)
from elastic.testing.waiting import eventually

NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_the_client_reconnects_and_delivers_queued_messages(agent: Agent) -> None:
    heard: queue.Queue[Message] = queue.Queue()
    client = connect(agent.server.path, on_message=heard.put)
    first, _ = agent.wait_for(ClientHandshakeRequest)
    hang_up(client, agent.server.path)
    for step in range(100):
        client.send(Entered(generation=1, step=step))
    second, _ = agent.wait_for(ClientHandshakeRequest)
    assert second.token != first.token
    assert [agent.wait_for(Entered)[1].step for _ in range(100)] == list(range(100))
    agent.server.send(SigtermAnswer(leaving=True), first)  # the path known to its owner
    assert heard.get(timeout=DEADLINE_S) == SigtermAnswer(leaving=True)
    client.close()


def test_reconnections_leak_no_descriptors(agent: Agent) -> None:
    client = connect(agent.server.path)
    agent.wait_for(ClientHandshakeRequest)
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        eventually(lambda: len(client.sockets()) == 3)  # it has received the handshake reply
        hang_up(client, agent.server.path)
        agent.wait_for(ClientHandshakeRequest)
    eventually(lambda: len(os.listdir("/proc/self/fd")) == descriptors)
    client.close()


def test_a_stopped_agent_does_not_block_its_worker(processes: Processes) -> None:
    process, path = processes.agent()
    client = connect(path)
    assert line(process) == "ClientHandshakeRequest"
    os.kill(process.pid, signal.SIGSTOP)
    done = threading.Event()

    def send() -> None:
        for step in range(800):  # more than the socket buffers
            client.send(Entered(generation=1, step=step))
        done.set()

    threading.Thread(target=send, name="sender", daemon=True).start()
    assert done.wait(DEADLINE_S)
    os.kill(process.pid, signal.SIGCONT)
    said = (line(process) for _ in iter(int, 1))
    steps = (int(words.split()[1]) for words in said if words.startswith("Entered"))
    assert [next(steps) for _ in range(800)] == list(range(800))
    client.close()


def test_heartbeats_do_not_displace_messages_while_the_agent_is_stopped(
    processes: Processes,
) -> None:
    process, path = processes.agent()
    client = connect(path)
    assert line(process) == "ClientHandshakeRequest"
    os.kill(process.pid, signal.SIGSTOP)
    for step in range(5000):  # more than the queue holds
        client.send_heartbeat(Heartbeat(generation=1, step=step, phase="step", step_time_s=0.5))
    client.send(Entered(generation=1, step=7))
    os.kill(process.pid, signal.SIGCONT)
    said = (line(process) for _ in iter(int, 1))
    assert next(words for words in said if words.startswith("Entered")).split()[1] == "7"
    client.close()


def test_a_client_can_be_closed_while_its_agent_is_stopped(processes: Processes) -> None:
    process, path = processes.agent()
    client = connect(path)
    os.kill(process.pid, signal.SIGSTOP)
    for step in range(800):
        client.send(Entered(generation=1, step=step))
    closed = threading.Thread(target=client.close, name="closer", daemon=True)
    closed.start()
    closed.join(DEADLINE_S)
    assert not closed.is_alive()


def test_an_agent_without_a_link_counts_as_alive_until_its_process_ends(
    processes: Processes,
) -> None:
    process, path = processes.agent()
    died = threading.Event()
    beats = threading.Semaphore(0)

    def heartbeat() -> Heartbeat:
        beats.release()
        return Heartbeat(generation=0, step=0, phase="other", step_time_s=0.0)

    client = connect(path, on_agent_death=died.set, heartbeat=heartbeat, heartbeat_every_s=0.01)
    assert line(process) == "ClientHandshakeRequest"
    assert process.stdin is not None
    print(file=process.stdin, flush=True)  # it closes its server, and lives
    while line(process) != "closed":
        pass
    eventually(lambda: len(client.sockets()) == 2)  # it has noticed
    assert not died.is_set()
    client.send(Ready())
    process.kill()
    assert died.wait(DEADLINE_S)
    client.close()


def test_closing_does_not_wait_for_a_connection_attempt(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic.link.link.LINK_CONNECT_S", 2 * DEADLINE_S)
    process, path = processes.agent()
    client = connect(path)
    assert process.stdin is not None
    print(file=process.stdin, flush=True)
    eventually(lambda: len(client.sockets()) == 2)
    closed = threading.Thread(target=client.close, name="closer", daemon=True)
    closed.start()
    closed.join(DEADLINE_S)
    assert not closed.is_alive()


def test_a_callback_can_close_its_client(agent: Agent) -> None:
    clients: queue.Queue[LinkClient] = queue.Queue()
    closed = threading.Event()

    def close(message: Message) -> None:
        clients.get(timeout=DEADLINE_S).close()
        closed.set()

    client = connect(agent.server.path, on_message=close)
    clients.put(client)
    agent.wait_for(ClientHandshakeRequest)
    agent.server.send(SigtermAnswer(leaving=True))
    assert closed.wait(DEADLINE_S)
    client.close()
    assert client.sockets() == ()


def test_a_forked_child_neither_sends_nor_holds_the_link(
    agent: Agent, processes: Processes
) -> None:
    process = processes.worker(agent.server.path, "forked client")
    links = line(process).split()
    assert links
    assert set(links) == {"/dev/null"}
    assert agent.wait_for(Entered)[1].step == 1  # and not the child's 999


@pytest.fixture
def needs_namespaces() -> None:
    if shutil.which("unshare") is None:
        pytest.skip("no unshare here")
    if subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip("no right to make a pid namespace")


@pytest.mark.usefixtures("needs_namespaces")
def test_a_worker_in_its_own_pid_namespace_is_watched(agent: Agent, processes: Processes) -> None:
    process = processes.worker(agent.server.path, under=NAMESPACE)
    worker, _ = agent.wait_for(Ready)
    assert worker.pid not in (1, process.pid)  # neither as it sees itself, nor unshare's
    os.kill(worker.pid, signal.SIGKILL)
    assert agent.deaths.get(timeout=DEADLINE_S).pid == worker.pid


@pytest.mark.usefixtures("needs_namespaces")
def test_a_worker_in_its_own_pid_namespace_ends_with_its_agent(processes: Processes) -> None:
    process, path = processes.agent()
    worker = processes.worker(path, under=NAMESPACE)
    while line(process) != "Ready":
        pass
    process.kill()
    assert worker.wait(timeout=DEADLINE_S) == 9
