"""Both ends of a link for tests: a recording agent, and workers and agents as processes."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

from elastic.link.link import (
    LIMITS,
    Heartbeat,
    LinkClient,
    LinkServer,
    Message,
    Worker,
    WorkerDeath,
)
from elastic.wire.base import Limits

DEADLINE_S = 60.0

WORKER = """
import os, sys, time
from elastic.link.link import LinkClient
from elastic.link.link import Heartbeat, Exiting, Entered, Ready, CollectiveFailure
client = LinkClient.connect(
    sys.argv[1], local_rank=int(sys.argv[2]), on_message=lambda m: None,
    on_agent_death=lambda: os._exit(9), heartbeat=lambda: Heartbeat(
        generation=1, step=2, phase="step", step_time_s=0.5),
)
client.send(Ready())
what = sys.argv[3]
if what == "fork":
    for _ in range(2):
        if os.fork() == 0:
            time.sleep(600)
    print("forked", flush=True)
elif what == "forked client":
    if os.fork() == 0:
        client.send(Entered(generation=1, step=999))
        client.close()
        print(*(os.readlink(f"/proc/self/fd/{fd}") for fd in client.sockets()), flush=True)
        os._exit(0)
    os.wait()
    client.send(Entered(generation=1, step=1))
elif what == "bye":
    client.send(Exiting(clean=True, error=""))
    client.close()
    sys.exit(3)
elif what == "talk":
    for step in range(40):
        client.send(CollectiveFailure(generation=step, error="x" * 3000))
    client.send(Exiting(clean=False, error="the last word"))
    client.close()
    sys.exit(3)
elif what == "close":
    client.close()
time.sleep(600)
"""

AGENT = """
import sys, threading
from elastic.link.link import Entered
from elastic.link.link import LinkServer

def heard(worker, message):
    print(*([type(message).__name__] + ([message.step] if isinstance(message, Entered) else [])),
          flush=True)

server = LinkServer(on_message=heard, on_death=lambda w, d: None, on_error=lambda e: None)
server.start()
print(server.path, flush=True)
sys.stdin.readline()
server.close()
print("closed", flush=True)
threading.Event().wait()
"""


class Agent:
    """A server that records the messages it receives."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.said: queue.Queue[tuple[Worker, Message]] = queue.Queue()
        self.deaths: queue.Queue[WorkerDeath] = queue.Queue()
        self.errors: list[BaseException] = []
        self.on_message: Callable[[Message], object] = lambda message: None
        self.server = LinkServer(
            on_message=self._on_message,
            on_death=lambda worker, death: self.deaths.put(death),
            on_error=self.errors.append,
            limits=limits,
        )
        self.server.start()

    def _on_message(self, worker: Worker, message: Message) -> None:
        self.said.put((worker, message))
        self.on_message(message)

    def wait_for(self, kind: type[Any]) -> tuple[Worker, Any]:
        while True:
            worker, message = self.said.get(timeout=DEADLINE_S)
            if isinstance(message, kind):
                return worker, message

    def close(self) -> None:
        self.server.close()
        assert self.errors == []


class Processes:
    """Workers and agents started by a test, terminated with all their children."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []

    def worker(
        self, path: str, what: str = "", local_rank: int = 0, under: tuple[str, ...] = ()
    ) -> subprocess.Popen[str]:
        return self._start([*under, sys.executable, "-c", WORKER, path, str(local_rank), what])

    def agent(self) -> tuple[subprocess.Popen[str], str]:
        """The process, and the path of its link."""
        process = self._start([sys.executable, "-c", textwrap.dedent(AGENT)])
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    def _start(self, command: list[str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def close(self) -> None:
        for process in self._started:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()


def connect(path: str, **more: Any) -> LinkClient:
    """A client in this process."""
    settings: dict[str, Any] = {
        "local_rank": 0,
        "on_message": lambda message: None,
        "on_agent_death": lambda: None,
        "heartbeat": lambda: Heartbeat(generation=0, step=0, phase="other", step_time_s=0.0),
        **more,
    }
    return LinkClient.connect(path, **settings)


def hang_up(client: LinkClient, path: str) -> None:
    """Close a client's connection at the socket level."""
    for fd in client.sockets():
        with socket.socket(fileno=os.dup(fd)) as sock:
            if sock.getpeername() == path:
                sock.shutdown(socket.SHUT_RDWR)
