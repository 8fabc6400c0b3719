"""The processes of a test, found by a token in their environment.

Descendants inherit the environment, forked DataLoader workers and processes in sessions of their
own included, so the token finds what a walk from parent to child loses as soon as a parent dies.
Linux only: reads ``/proc``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from elastic.clock import SYSTEM_CLOCK

TOKEN = "ELASTIC_TEST_TOKEN"
"""Environment variable that marks every process of a test cluster: ``<cluster>/<node>``."""

_STOPS_WITHIN_S = 1.0


@dataclass(frozen=True)
class Process:
    """A living process (a zombie is none: its environment is gone)."""

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
    """Every living process whose environment variable holds ``part`` and is accepted, by pid."""
    name, needle = f"{variable}=".encode(), part.encode()
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        raw = _read(f"/proc/{entry.name}/environ")
        if name not in raw or needle not in raw:
            continue
        environment = _parse_environment(raw)
        if accepts(environment.get(variable, "")):
            pid = int(entry.name)
            found.append(Process(pid, _parent_of(pid), _command_of(pid), environment))
    return sorted(found, key=lambda process: process.pid)


def kill_at_once(token: str) -> list[int]:
    """SIGKILL all marked processes, as a power failure would; returns the pids.

    All are stopped first, so that none can see another one die and react: a real machine gives
    no time for that. Listed again until nothing new turns up, because a process may have been
    forking.
    """
    return _kill_all(lambda: marked_with(token))


def owned_by(variable: str, mark: str) -> list[Process]:
    """Every living process with ``mark`` among the values of ``variable``, separated by colons."""
    return _with_variable(variable, mark, lambda value: mark in value.split(":"))


def kill_owned_by(variable: str, mark: str) -> list[int]:
    """As :func:`kill_at_once`, for the processes of :func:`owned_by`."""
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
    """SIGSTOP all; returns when no thread of them runs any more.

    On a busy machine threads may run on for a while after the signal was sent. One that is deep
    in the kernel, in a write to a slow disk for instance, is waited for a second at most.
    """
    stopping = [pid for pid in pids if send(pid, signal.SIGSTOP)]
    deadline_s = SYSTEM_CLOCK.monotonic() + _STOPS_WITHIN_S
    while stopping := [pid for pid in stopping if _runs(pid)]:
        if SYSTEM_CLOCK.monotonic() > deadline_s:
            return
        SYSTEM_CLOCK.sleep(0.001)


def send(pid: int, number: signal.Signals) -> bool:
    """Signal one process; False if it is gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def is_alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    stat = _read(f"/proc/{pid}/stat")
    return _state_of(stat) not in b"ZX"


def _runs(pid: int) -> bool:
    """Whether any thread of the process may still do something: none is, if it is gone."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return any(
        _state_of(_read(f"/proc/{pid}/task/{thread}/stat")) not in b"TtZX" for thread in threads
    )


def _state_of(stat: bytes) -> bytes:
    """One letter; nothing of a process that is gone."""
    # The command, in brackets, may hold brackets and blanks itself: the state follows the last.
    return stat[stat.rfind(b")") + 2 :][:1]


def _parent_of(pid: int) -> int:
    stat = _read(f"/proc/{pid}/stat")
    fields = stat[stat.rfind(b")") + 2 :].split()
    return int(fields[1]) if len(fields) > 1 else 0


def _command_of(pid: int) -> str:
    return _read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def _parse_environment(raw: bytes) -> dict[str, str]:
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if b"=" in item)
    return {k.decode(errors="replace"): v.decode(errors="replace") for k, _, v in pairs}


def _read(path: str) -> bytes:
    """The file, or nothing once its process is gone."""
    try:
        return Path(path).read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""
