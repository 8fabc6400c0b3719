"""The processes of a test, found by a token in their environment.

All descendants inherit the environment, including forked DataLoader workers and processes in other
sessions. So the token finds processes that a walk of the process tree misses once a parent has
died. Linux only: reads ``/proc``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from elastic.errors import SYSTEM_CLOCK

TOKEN = "ELASTIC_TEST_TOKEN"
"""Environment variable that marks every process of a test cluster: ``<cluster>/<node>``."""

_STOPS_WITHIN_S = 1.0


def react_to_signals() -> None:
    """Give this process the default action for signals that its parent may ignore: background
    processes of a shell ignore SIGINT and SIGQUIT, and nohup SIGHUP. Agents keep them ignored."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@dataclass(frozen=True)
class Process:
    """A living process, not a zombie, whose environment no longer exists."""

    pid: int
    parent: int
    command: str
    environment: Mapping[str, str] = field(repr=False)

    def __str__(self) -> str:
        return f"pid {self.pid} (parent {self.parent}): {self.command}"


def marked_with(token: str) -> list[Process]:
    """Every living process whose token is ``token`` or starts with ``token/``."""

    def is_marked(value: str) -> bool:
        return value == token or value.startswith(f"{token}/")

    return _with_variable(TOKEN, token, is_marked)


def _with_variable(variable: str, part: str, accepts: Callable[[str], bool]) -> list[Process]:
    """Living processes whose variable contains ``part`` and is accepted, sorted by pid."""
    name, needle = f"{variable}=".encode(), part.encode()
    processes = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        raw = _read(f"/proc/{entry.name}/environ")
        if name not in raw or needle not in raw:
            continue
        environment = _parse_environment(raw)
        if accepts(environment.get(variable, "")):
            pid = int(entry.name)
            processes.append(Process(pid, _parent_of(pid), _command_of(pid), environment))
    return sorted(processes, key=lambda process: process.pid)


def kill_at_once(token: str) -> list[int]:
    """SIGKILL all marked processes, as a power failure would; returns the pids.

    All are stopped first, so that none can react to the death of another: a power failure leaves no
    time for that. The search is repeated until it finds no new process, because some may be
    forking.
    """
    return _kill_all(lambda: marked_with(token))


def owned_by(variable: str, mark: str) -> list[Process]:
    """Every living process with ``mark`` among the values of ``variable``, separated by colons."""
    return _with_variable(variable, mark, lambda value: mark in value.split(":"))


def kill_owned_by(variable: str, mark: str) -> list[int]:
    """Like :func:`kill_at_once`, for the processes of :func:`owned_by`."""
    return _kill_all(lambda: owned_by(variable, mark))


def _kill_all(find: Callable[[], list[Process]]) -> list[int]:
    stopped: set[int] = set()
    while fresh := {p.pid for p in find()} - stopped:
        freeze(fresh)
        stopped |= fresh
    for pid in stopped:
        send(pid, signal.SIGKILL)
    return sorted(stopped)


def freeze(pids: Iterable[int]) -> None:
    """SIGSTOP all processes, and wait until none of their threads runs.

    On a busy machine, threads may continue for a while after the signal. A thread that is blocked
    in the kernel, for example by a slow disk, delays the return by at most a second.
    """
    stopping = [pid for pid in pids if send(pid, signal.SIGSTOP)]
    deadline_s = SYSTEM_CLOCK.monotonic() + _STOPS_WITHIN_S
    while stopping := [pid for pid in stopping if _runs(pid)]:
        if SYSTEM_CLOCK.monotonic() > deadline_s:
            return
        SYSTEM_CLOCK.sleep(0.001)


def send(pid: int, number: signal.Signals) -> bool:
    """Signal one process; False if it no longer exists."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def is_alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    stat = _read(f"/proc/{pid}/stat")
    return _state_of(stat) not in b"ZX"


def _runs(pid: int) -> bool:
    """Whether any thread of the process may still run; False if the process has ended."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return any(
        _state_of(_read(f"/proc/{pid}/task/{thread}/stat")) not in b"TtZX" for thread in threads
    )


def _state_of(stat: bytes) -> bytes:
    """The state as one letter; empty for a process that has ended."""
    # The command, in brackets, may contain brackets and blanks: the state follows the last one.
    return stat[stat.rfind(b")") + 2 :][:1]


def _parent_of(pid: int) -> int:
    stat = _read(f"/proc/{pid}/stat")
    fields = stat[stat.rfind(b")") + 2 :].split()
    return int(fields[1]) if len(fields) > 1 else 0


def _command_of(pid: int) -> str:
    return _read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def _parse_environment(raw: bytes) -> dict[str, str]:
    # Forks of the fork server have room for a larger environment, filled with zeros.
    pairs = (item.partition(b"=") for item in raw.rstrip(b"\0").split(b"\0") if b"=" in item)
    return {k.decode(errors="replace"): v.decode(errors="replace") for k, _, v in pairs}


def _read(path: str) -> bytes:
    """The content of a file; empty once its process has ended."""
    try:
        return Path(path).read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""
