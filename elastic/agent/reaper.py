"""The orphan reaper: a small process that outlives the agent and ends its workers if it dies.

An agent killed with SIGKILL leaves its workers running (torch 2.13.0, measured). They carry
``ELASTIC_NODE_ID`` of their agent in their environment, and so do their DataLoader workers: after
the agent's death the reaper ends every process with that mark. Scanning the environment rather than
keeping a list of pids leaves no window in which a worker exists unregistered.

A worker that was forked (``start_method="fork"``) has its agent's initial environment, without the
mark. It has inherited the agent's descriptors: one of them, an unused pipe, marks all forked
processes, and their own forks in turn (docs/decisions/0003).

A frozen agent leaves them running, too. It extends their permission to train while its loop runs
(agent/service.py); when that expires, the reaper ends them.

Run as a script with only the standard library, with the arguments ``AGENT_PID NODE_ID FORK_MARK
LINK MEMORY ENDING`` and a pipe from the agent as standard input. A line on it is the end of the
permission, by CLOCK_BOOTTIME; an ``x`` means that the agent ends normally.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MARK = "ELASTIC_NODE_ID"
# (Time comes from the standard library here: the reaper runs without this package.)
GRACE_S = 0.5  # between SIGTERM and SIGKILL
SETTLE_S = 1.0  # the reaper ends once it has found no marked process for this long
TURN_S = 0.05  # between two scans for marked processes
RELEASED_S = 2.0  # for the reaper to end once its agent has announced a normal end
# Removes the named semaphores and shared memory of a process and its children once all of them have
# ended, and then ends itself. It ignores SIGTERM, and nothing else would remove them.
_RESOURCE_TRACKER = b"multiprocessing.resource_tracker"
LONGEST_WAIT_S = 3600.0  # select's clock stops while the machine is suspended


@dataclass(frozen=True)
class ForkMark:
    """A descriptor that forked processes inherit, identified by its number and its open file."""

    descriptor: int
    device: int
    inode: int

    @classmethod
    def of(cls, descriptor: int) -> ForkMark:
        status = os.fstat(descriptor)
        return cls(descriptor, status.st_dev, status.st_ino)

    @classmethod
    def parse(cls, text: str) -> ForkMark | None:
        return cls(*map(int, text.split(":"))) if text else None

    def __str__(self) -> str:
        return f"{self.descriptor}:{self.device}:{self.inode}"

    def is_held_by(self, process: str) -> bool:
        """Whether the process of this folder in ``/proc`` has inherited it."""
        try:
            status = os.stat(f"{process}/fd/{self.descriptor}")
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == (self.device, self.inode)


def marked_processes(node_id: str, forked: ForkMark | None = None) -> list[int]:
    """Pids of live processes that carry the agent's mark, started or forked; not this one, and no
    resource trackers."""
    mark = f"\0{MARK}={node_id}\0".encode()
    pids = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = Path(entry.path, "environ").read_bytes()
        except OSError:
            continue
        if mark in b"\0%b\0" % environment or (forked and forked.is_held_by(entry.path)):
            pids.append(int(entry.name))
    return [pid for pid in pids if not _is_resource_tracker(pid)]


def _is_resource_tracker(pid: int) -> bool:
    try:
        return _RESOURCE_TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def kill_group(pid: int) -> None:
    """SIGKILL the processes that a dead worker left in its process group: data workers keep its
    sockets open, so peers would not detect its death. torchrun makes every worker the leader of a
    process group."""
    if os.getpgrp() == pid:
        return
    trackers = [member for member in _group(pid) if _is_resource_tracker(member)]
    if not trackers:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        return
    killed = set(trackers)
    while new := [member for member in _group(pid) if member not in killed]:  # some may fork
        for member in new:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(member, signal.SIGKILL)
        killed.update(new)


def _group(leader: int) -> list[int]:
    """The processes of a process group."""
    members = []
    for entry in os.scandir("/proc"):
        with contextlib.suppress(ValueError, ProcessLookupError, PermissionError):
            if os.getpgid(int(entry.name)) == leader:
                members.append(int(entry.name))
    return members


def end_marked(
    node_id: str,
    forked: ForkMark | None = None,
    *,
    agent_pid: int | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """SIGTERM, after a grace period SIGKILL, until no marked process has been seen for
    ``SETTLE_S``, or until ``stop``.

    For the reaper: the agent, which has the forked processes' descriptor, has ended, or is
    ``agent_pid``.
    """
    signalled: set[int] = set()
    began = quiet_since = time.monotonic()
    while (now := time.monotonic()) - quiet_since < SETTLE_S and not stop():
        for pid in marked_processes(node_id, forked):
            if pid == agent_pid:
                continue
            late = now - began > GRACE_S
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if late or pid not in signalled:
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
                    signalled.add(pid)
            quiet_since = now
        time.sleep(TURN_S)


def kill_marked(node_id: str, forked: ForkMark | None = None) -> None:
    """SIGKILL every marked process: for an agent whose workers' time has expired."""
    for pid in marked_processes(node_id, forked):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def end_strays(node_id: str, forked: ForkMark | None = None) -> int:
    """SIGKILL processes that dead workers left behind; returns how many.

    For the agent between two worlds. Each worker leads its own process group: a marked
    process whose group's leader is gone belonged to a dead worker (its DataLoader workers keep
    its sockets open: peers would not notice its death for seconds, measured). Workers that run a
    function are in the agent's own group, and so are their data workers: those of dead ones are
    children of no process of the agent's. A process that a worker started in a session of its
    own, such as a logging service, is not killed.
    """
    kept, ended = set(marked_processes(node_id, forked)), 0
    while strays := [pid for pid in kept if _is_stray(pid, kept)]:
        for pid in strays:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                ended += 1
        kept.difference_update(strays)
    return ended


def _is_stray(pid: int, family: set[int]) -> bool:
    try:
        group = os.getpgid(pid)
    except (ProcessLookupError, PermissionError):
        return False
    if group == os.getpgrp():  # whose leader may be a shell that ended long ago
        return _parent(pid) not in (0, os.getpid(), *family)
    return _is_dead(group)


def _parent(pid: int) -> int:
    """0 if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat[stat.rindex(")") + 2 :].split()[1])


def _is_dead(pid: int) -> bool:
    """No such process, or a zombie."""
    return _state_of(pid) in ("", "Z", "X")


def _state_of(pid: int) -> str:
    """The letter of its state; "" if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat[stat.rindex(")") + 2]


class OrphanReaper:
    """The agent's handle on its reaper process, and on the mark of its forked processes."""

    def __init__(self, node_id: str, link: str = "", memory: str = "", ending: str = "") -> None:
        """``link``: the path of the workers' socket, if there is one, in its own folder;
        ``memory``: the agent's folder in memory; ``ending``: a file of the agent's."""
        self._inherited, unused = os.pipe()
        os.close(unused)
        self.forked = ForkMark.of(self._inherited)
        self._arguments = [str(os.getpid()), node_id, str(self.forked), link, memory, ending]
        self._process = self._start()
        self._permitted = b""  # the last permission, for a replacement
        self._writing = threading.Lock()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={k: v for k, v in os.environ.items() if k != MARK},
            start_new_session=True,
        )
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        return process

    @property
    def pid(self) -> int:
        return self._process.pid

    def permit(self, until_s: float) -> None:
        """Let the workers train until then, by CLOCK_BOOTTIME. Thread-safe; does not wait for the
        reaper."""
        self._permitted = f"{until_s!r}\n".encode()
        self._write(self._permitted)

    def supervise(self) -> None:
        """Replace a reaper that was killed or stopped. Called regularly, also while etcd is
        unreachable, when no permission is renewed. Thread-safe."""
        with self._writing:
            is_released = self._process.stdin is None or self._process.stdin.closed
            if is_released or not self._replace_if_lost():
                return
        self._write(self._permitted)

    def _replace_if_lost(self) -> bool:
        pid = self._process.pid
        if self._process.poll() is None and _state_of(pid) not in ("T", "t"):  # stopped, traced
            return False
        lost, self._process = self._process, self._start()
        assert lost.stdin is not None
        lost.stdin.close()
        lost.kill()
        lost.wait()
        from elastic.telemetry.log import get_logger  # the reaper itself runs without this package

        get_logger().warning(
            "the process that ends this node's workers if its agent dies was killed or stopped "
            "(pid %d): it is replaced by pid %d",
            *(pid, self._process.pid),
        )
        return True

    def _write(self, data: bytes) -> None:
        pipe = self._process.stdin
        with self._writing, contextlib.suppress(OSError):  # it has ended, or does not read
            if pipe is not None and not pipe.closed:
                os.write(pipe.fileno(), data)

    def release(self) -> None:
        """The agent ends normally: no processes are left to reap."""
        if self._process.stdin is None or self._process.stdin.closed:
            return
        os.close(self._inherited)
        self._write(b"x")
        with self._writing, contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=RELEASED_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def after_fork(self, *, is_worker: bool) -> None:
        """In a forked child: only the agent can report an orderly end, only workers are
        marked."""
        if self._process.stdin is None or self._process.stdin.closed:
            return
        # Not closed: the objects that own these numbers would close them a second time.
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in (self._process.stdin.fileno(), *(() if is_worker else (self._inherited,))):
            os.dup2(null, fd, inheritable=False)
        os.close(null)


def remove_leftovers(link: str, memory: str, ending: str) -> None:
    """Remove what only the agent served: its folder in memory, the workers' link,
    and the file that may have announced their end to its workers."""
    folders = (
        (Path(memory), "elastic-memory-"),
        (Path(link).parent, "elastic-"),
        (Path(ending).parent, "elastic-ending-"),
    )
    for folder, prefix in folders:
        if folder.name.startswith(prefix):
            shutil.rmtree(folder, ignore_errors=True)


def main(agent_pid: int, node_id: str, forked: ForkMark | None, *leftovers: str) -> None:
    """Wait for the agent's end; kill its workers unless it ended normally."""
    for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    watched = [0]
    try:
        # The pipe may be held open by a forked child of the agent: the pidfd is not.
        watched.append(os.pidfd_open(agent_pid))
    except ProcessLookupError:
        end_marked(node_id, forked)
        remove_leftovers(*leftovers)
        return
    except (AttributeError, OSError):  # before Linux 5.3: only the pipe
        pass
    if not _watch(watched, agent_pid, node_id, forked):
        end_marked(node_id, forked)
        remove_leftovers(*leftovers)


def _watch(watched: list[int], agent_pid: int, node_id: str, forked: ForkMark | None) -> bool:
    """Wait until the agent has ended; returns whether it ended normally. Ends workers whose
    permission has expired."""
    until_s, rest = math.inf, b""
    while True:
        left_s = max(0.0, min(until_s - _boottime(), LONGEST_WAIT_S))
        readable, _, _ = select.select(watched, [], [], left_s)
        if 0 in readable and (data := os.read(0, 4096)):
            if b"x" in data:
                return True
            *lines, rest = (rest + data).split(b"\n")
            until_s = float(lines[-1]) if lines else until_s
        elif readable:
            return False
        elif _boottime() > until_s:
            # Stop once the agent responds again: workers that it starts later are not affected.
            end_marked(
                node_id,
                forked,
                agent_pid=agent_pid,
                stop=lambda: bool(select.select(watched, [], [], 0)[0]),
            )
            until_s = math.inf


def _boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], ForkMark.parse(sys.argv[3]), *sys.argv[4:])
