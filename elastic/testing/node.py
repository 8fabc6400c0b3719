"""One node of a local test cluster: a torchrun agent with all its descendants."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic.errors import SYSTEM_CLOCK, Clock
from elastic.testing.forks.server import ForkedPopen, ForkServer, can_fork
from elastic.testing.processes import (
    TOKEN,
    Process,
    freeze,
    is_alive,
    kill_at_once,
    marked_with,
    send,
)
from elastic.testing.reaper import OWNERS, owners


@dataclass(frozen=True, kw_only=True)
class TorchrunOptions:
    """How torchrun starts a node of a job.

    Args:
        nproc: workers per node.
        conf: ``--rdzv-conf``.
        env: variables added to this process's environment.
        flags: additional flags of torchrun.
    """

    min_nodes: int = 1
    max_nodes: int = 3
    nproc: int = 1
    backend: str = "etcd-v3"
    max_restarts: int = 100
    conf: Mapping[str, object] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    flags: Sequence[str] = ()

    def command(self, endpoints: Sequence[str], run_id: str, address: str) -> list[str]:
        """The command line of torchrun, without the script. ``address``: the node's."""
        conf = ",".join(f"{key}={value}" for key, value in self.conf.items())
        return [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nnodes={self.min_nodes}:{self.max_nodes}",
            f"--nproc-per-node={self.nproc}",
            f"--max-restarts={self.max_restarts}",
            f"--rdzv-backend={self.backend}",
            f"--rdzv-endpoint={','.join(endpoints)}",
            f"--rdzv-id={run_id}",
            f"--local-addr={address}",
            *([f"--rdzv-conf={conf}"] if conf else []),
            *self.flags,
        ]


class LocalNode:
    """A node for fault injection. Its processes never outlive this one, even after SIGKILL.

    Args:
        name: the node's name, also ``ELASTIC_NODE_NAME``.
        command: the agent's command line.
        environment: the agent's complete environment.
        token: marks the node's processes; see :mod:`elastic.testing.processes`.
        log: file that takes stdout and stderr of the agent and its workers.
        folder: the working directory; this process's own by default.
        fork_server: forks the agent, which forks its workers, if the command runs this interpreter.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        token: str,
        log: Path,
        *,
        folder: Path | None = None,
        fork_server: ForkServer | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.name = name
        self.token = token
        self.log = log
        self.command = tuple(command)
        self._clock = clock
        with log.open("ab") as output:
            options: dict[str, Any] = {
                "env": {**environment, TOKEN: token, OWNERS: owners()},
                "cwd": folder,
                "stdin": subprocess.DEVNULL,
                "stdout": output,
                "stderr": subprocess.STDOUT,
                "start_new_session": True,
            }
            self._process: subprocess.Popen[bytes]
            if fork_server is not None and can_fork(command, environment):
                self._process = ForkedPopen(fork_server.client, command, **options)
            else:
                self._process = subprocess.Popen(command, **options)

    def __repr__(self) -> str:
        state = "running" if self.exit_code is None else f"ended with {self.exit_code}"
        return f"<node {self.name}, agent pid {self.pid}, {state}>"

    @property
    def pid(self) -> int:
        """The agent's pid."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The agent's exit code (negative: the signal that killed it), None while it runs."""
        return self._process.poll()

    @property
    def running(self) -> bool:
        """Whether the agent runs (a stopped one does)."""
        return self.exit_code is None

    def processes(self) -> list[Process]:
        """All living processes of this node: agent, workers, their children, the orphan reaper."""
        return marked_with(self.token)

    def workers(self) -> dict[int, Process]:
        """The living workers of the agent by local rank, without their children."""
        return {
            int(p.environment["LOCAL_RANK"]): p
            for p in self.processes()
            if p.parent == self.pid and "LOCAL_RANK" in p.environment
        }

    def kill_worker(self, local_rank: int = 0) -> int:
        """SIGKILL one worker only; returns its pid. Raises LookupError if the node has no such
        worker."""
        workers = self.workers()
        if local_rank not in workers:
            raise LookupError(f"{self} has no worker {local_rank}, only {sorted(workers)}")
        pid = workers[local_rank].pid
        send(pid, signal.SIGKILL)
        return pid

    def kill_agent(self) -> None:
        """SIGKILL only the agent; its workers must detect this themselves."""
        send(self.pid, signal.SIGKILL)
        self._process.wait()

    def kill(self) -> None:
        """SIGKILL all processes of the node at once, as a power failure would."""
        kill_at_once(self.token)
        self._process.wait()

    def pause(self) -> None:
        """SIGSTOP every process of the node: it hangs with all its connections open."""
        freeze(process.pid for process in self.processes())

    def resume(self) -> None:
        """SIGCONT every process of the node."""
        for process in self.processes():
            send(process.pid, signal.SIGCONT)

    def terminate(self) -> None:
        """SIGTERM the agent, as a scheduler does to make a node leave."""
        send(self.pid, signal.SIGTERM)

    def wait(self, timeout_s: float) -> int:
        """The agent's exit code. Raises TimeoutError with the end of the log."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(
                f"{self} did not end within {timeout_s} s\n{self.log_tail()}"
            ) from None

    def wait_gone(self, pids: Sequence[int], timeout_s: float) -> float:
        """Wait until none of ``pids`` is alive; returns the seconds it took. Raises TimeoutError
        after ``timeout_s``."""
        begin = self._clock.monotonic()
        while left := [pid for pid in pids if is_alive(pid)]:
            waited = self._clock.monotonic() - begin
            if waited > timeout_s:
                raise TimeoutError(f"{left} of {self} are alive after {timeout_s} s")
            self._clock.sleep(0.02)
        return self._clock.monotonic() - begin

    def log_text(self) -> str:
        """All output of the agent and its workers."""
        return self.log.read_text(errors="replace")

    def log_tail(self, lines: int = 25) -> str:
        """The end of the log under a headline, for failure messages."""
        tail = self.log_text().splitlines()[-lines:]
        return os.linesep.join([f"--- {self} ({self.log})", *tail])


def worker_pids(nodes: Iterable[LocalNode]) -> dict[str, int]:
    """The process of local rank 0 of each node, by name; nodes without one are omitted."""
    workers = {node.name: node.workers() for node in nodes}
    return {name: of_node[0].pid for name, of_node in workers.items() if 0 in of_node}
