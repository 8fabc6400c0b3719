"""Checks of machines, of etcd, and between nodes: facts, and findings that follow from them."""

from __future__ import annotations

import base64
import calendar
import contextlib
import csv
import ctypes
import fcntl
import importlib.metadata
import json
import os
import platform
import re
import resource
import secrets
import shutil
import signal
import socket
import ssl
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from elastic.child_interpreters import code_command
from elastic.errors import SYSTEM_CLOCK, CoordinationError, ElasticError, StoreRefused
from elastic.store.client import Endpoint, EtcdConfig
from elastic.store.etcd import EtcdStore
from elastic.store.keyvalue import KeyValue, Put, Reset, WatchEvent
from elastic.tuning.environment import RUNTIME_SHM_BYTES, human
from elastic.tuning.intervals import DOCTOR_LEASE_S
from elastic.tuning.network import Network, faster_interface, how_to_announce
from elastic.tuning.options import AgentOptions

# How long a probe's process is waited for after its SIGKILL: one in a hung system call never ends.
DOCTOR_KILLED_S = 0.2
# A result that has arrived is used even at its deadline: the shortest wait for one.
DOCTOR_MIN_WAIT_S = 0.01
# First contact with etcd. One call of an agent has the same limit (STORE_CALL_S).
DOCTOR_ETCD_CONNECT_S = 5.0
# One call to etcd, and the first event of a watch.
DOCTOR_ETCD_CALL_S = 5.0
# Above this median, etcd's disk or network is slow: etcd recommends 10 ms for an fsync.
SLOW_ETCD_MS = 100.0
# Above this median, renewals of a lease of 4 s, due every third of it, are late.
TOO_SLOW_ETCD_MS = 1000.0
# A certificate that expires sooner is reported: two weeks are enough to issue another one.
CERTIFICATE_WARNING_S = 14 * 86400.0
# A slower fsync of a small file in the checkpoint folder delays every commit.
SLOW_FSYNC_MS = 500.0
# Larger clock differences make logs of several nodes hard to read, and certificates invalid.
CLOCK_SKEW_WARNING_S = 1.0

# ----------------------------------------------------------------------------
# The result type of every check.

HEALTHY, UNHEALTHY = 0, 1


class Status(str, Enum):
    """The verdict of one check."""

    OK = "ok"
    WARNING = "warning"  # training works, but not optimally
    FAILED = "failed"
    SKIPPED = "skipped"  # does not apply here; ``measured`` has the reason


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check's verdict, the measured value, and the remedy if it is not good."""

    name: str
    status: Status
    measured: str
    remedy: str = ""
    node: str = ""  # "": all nodes, or the only one

    def __post_init__(self) -> None:
        assert self.remedy or self.status in (Status.OK, Status.SKIPPED), self


def ok(name: str, measured: str) -> Finding:
    return Finding(name=name, status=Status.OK, measured=measured)


def skipped(name: str, why: str) -> Finding:
    return Finding(name=name, status=Status.SKIPPED, measured=why)


def warning(name: str, measured: str, remedy: str) -> Finding:
    return Finding(name=name, status=Status.WARNING, measured=measured, remedy=remedy)


def failed(name: str, measured: str, remedy: str) -> Finding:
    return Finding(name=name, status=Status.FAILED, measured=measured, remedy=remedy)


def exit_code(findings: Iterable[Finding]) -> int:
    """The verdict as an exit code: warnings and skipped checks do not fail a machine.

    >>> exit_code([ok("etcd", "reachable"), warning("MTU", "900", "raise it")])
    0
    >>> exit_code([failed("etcd", "refused", "start it")])
    1
    """
    found_failure = any(finding.status is Status.FAILED for finding in findings)
    return UNHEALTHY if found_failure else HEALTHY


def summary(findings: Iterable[Finding]) -> str:
    """The counts as a sentence.

    >>> summary([ok("etcd", "reachable"), ok("MTU", "1500"), skipped("GPU", "none")])
    '2 ok, 1 skipped: healthy'
    """
    counted = list(findings)
    counts = [(status, sum(f.status is status for f in counted)) for status in Status]
    parts = ", ".join(f"{count} {status.value}" for status, count in counts if count)
    verdict = "healthy" if exit_code(counted) == HEALTHY else "NOT healthy"
    return f"{parts or 'no checks'}: {verdict}"


# ----------------------------------------------------------------------------
# Facts about this machine. Functions that may block run in a child process (``probes``).
#
# Standard library only, except for the address, which is found as in an agent.

SHM = "/dev/shm"
FSYNCS = 20
_FSYNC_BYTES = 4096
_PORTS = 8
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_NVIDIA = Path("/dev/nvidiactl")
_SMI = ("index", "name", "driver_version", "memory.total", "memory.used",
        "ecc.errors.uncorrected.volatile.total")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ShmFacts:
    """The shared memory of data workers and of NCCL. ``error``: why it cannot be used."""

    size_bytes: int
    free_bytes: int
    error: str


@dataclass(frozen=True, kw_only=True)
class LimitFacts:
    """Resource limits of this process, which workers inherit. None: unlimited."""

    descriptors: int | None
    descriptors_hard: int | None
    locked_bytes: int | None
    rdma_devices: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class NetworkFacts:
    """The address that this node would publish, and what it resolves to."""

    address: str
    address_error: str
    host_name: str
    host_addresses: tuple[str, ...]  # what the host name resolves to; (): nothing
    interface: str  # the one with this address; "": none
    mtu: int | None
    bind_error: str  # why no ports can be bound to the address


@dataclass(frozen=True, kw_only=True)
class FolderFacts:
    """The checkpoint folder. ``fsync_ms``: of small files, one after the other."""

    path: str
    free_bytes: int
    size_bytes: int
    fsync_ms: tuple[float, ...]
    error: str


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """The output of nvidia-smi. ``devices``: rows of the query, as text."""

    is_installed: bool
    has_device_files: bool
    error: str
    names: tuple[str, ...]
    driver: str
    used_bytes: tuple[int, ...]
    total_bytes: tuple[int, ...]
    uncorrected_errors: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class NameFacts:
    """Host names of other nodes that this one cannot resolve."""

    unresolved: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class VersionFacts:
    """Versions that must be equal on all nodes."""

    python: str
    library: str
    torch: str
    kernel: str


def shm() -> ShmFacts:
    try:
        usage = os.statvfs(SHM)
        with tempfile.TemporaryFile(dir=SHM) as file:
            os.posix_fallocate(file.fileno(), 0, 1 << 20)
    except OSError as error:
        return ShmFacts(size_bytes=0, free_bytes=0, error=f"{SHM}: {error.strerror or error}")
    return ShmFacts(
        size_bytes=usage.f_blocks * usage.f_frsize,
        free_bytes=usage.f_bavail * usage.f_frsize,
        error="",
    )


def limits() -> LimitFacts:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    rdma = Path("/sys/class/infiniband")
    return LimitFacts(
        descriptors=_finite(soft),
        descriptors_hard=_finite(hard),
        locked_bytes=_finite(locked),
        rdma_devices=tuple(sorted(p.name for p in rdma.iterdir())) if rdma.is_dir() else (),
    )


def network(configured: str, etcd_host: str, etcd_port: int) -> NetworkFacts:
    """This node's address. ``configured``: --local-addr; ``etcd_host``: "" for none."""
    from elastic.agent.identity import own_address
    from elastic.errors import ConfigError
    from elastic.store.client import Endpoint

    endpoint = Endpoint(etcd_host, etcd_port) if etcd_host else None
    address, address_error = "", ""
    try:
        address = own_address(configured, endpoint, within_s=0)
    except ConfigError as error:
        address_error = error.message
    host_name = socket.gethostname()
    interface = _interface_of(address) if address else ""
    return NetworkFacts(
        address=address,
        address_error=address_error,
        host_name=host_name,
        host_addresses=_addresses_of(host_name),
        interface=interface,
        mtu=_mtu_of(interface),
        bind_error=_bind_error(address) if address else "",
    )


def folder(path: str) -> FolderFacts:
    """Write a small temporary file several times, and remove it."""
    free = size = 0
    took: list[float] = []
    problem = ""
    try:
        usage = os.statvfs(path)
        free, size = usage.f_bavail * usage.f_frsize, usage.f_blocks * usage.f_frsize
        with tempfile.NamedTemporaryFile(dir=path, prefix=".elastic-doctor-") as file:
            for _ in range(FSYNCS):
                began = SYSTEM_CLOCK.monotonic()
                os.write(file.fileno(), bytes(_FSYNC_BYTES))
                os.fsync(file.fileno())
                took.append(1000 * (SYSTEM_CLOCK.monotonic() - began))
    except OSError as error:
        problem = error.strerror or str(error)
    return FolderFacts(
        path=path, free_bytes=free, size_bytes=size, fsync_ms=tuple(took), error=problem
    )


def has_gpu_driver() -> bool:
    """Whether :func:`gpu` has anything to query. Does not block."""
    return shutil.which("nvidia-smi") is not None or _NVIDIA.exists()


def gpu() -> GpuFacts:
    """Query nvidia-smi, which may hang."""
    program = shutil.which("nvidia-smi")
    has_files = _NVIDIA.exists()
    rows: list[list[str]] = []
    problem = ""
    if program is not None:
        query = [program, f"--query-gpu={','.join(_SMI)}", "--format=csv,noheader,nounits"]
        done = subprocess.run(query, capture_output=True, text=True)
        if done.returncode == 0:
            rows = [[cell.strip() for cell in row] for row in csv.reader(done.stdout.splitlines())]
        else:
            problem = (done.stdout.strip() or done.stderr.strip() or f"exit {done.returncode}")[
                :300
            ]
    return GpuFacts(
        is_installed=program is not None,
        has_device_files=has_files,
        error=problem,
        names=tuple(row[1] for row in rows),
        driver=rows[0][2] if rows else "",
        total_bytes=tuple(_number(row[3]) << 20 for row in rows),
        used_bytes=tuple(_number(row[4]) << 20 for row in rows),
        uncorrected_errors=tuple(_number(row[5]) for row in rows),
    )


def names(*wanted: str) -> NameFacts:
    """Look up the other nodes' host names, all of them at once."""
    with ThreadPoolExecutor(max(len(wanted), 1)) as pool:
        looked_up = list(pool.map(_addresses_of, wanted))
    return NameFacts(
        unresolved=tuple(n for n, addresses in zip(wanted, looked_up, strict=True) if not addresses)
    )


def versions() -> VersionFacts:
    """Read versions from package metadata, without imports."""
    return VersionFacts(
        python=platform.python_version(),
        library=_version("torch-elastic-harness"),
        torch=_version("torch"),
        kernel=platform.release(),
    )


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process when the thread that started it ends (prctl(2))."""
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
    if os.getppid() != parent:  # the parent ended before prctl
        os._exit(1)


def _finite(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def _number(cell: str) -> int:
    """A number of nvidia-smi; "[N/A]", for an unsupported counter, is 0."""
    return int(cell) if cell.isdigit() else 0


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _addresses_of(name: str) -> tuple[str, ...]:
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(sorted({str(entry[4][0]) for entry in entries}))


def _bind_error(address: str) -> str:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with contextlib.ExitStack() as held:
            for _ in range(_PORTS):
                one = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
                one.bind((address, 0))
                one.listen()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _interface_of(address: str) -> str:
    if ":" in address:
        return _interface_of_v6(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
            except OSError:
                continue  # it has no IPv4 address
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return ""


def _interface_of_v6(address: str) -> str:
    packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            if line.split()[0] == packed:
                return line.split()[-1]
    return ""


def _mtu_of(interface: str) -> int | None:
    try:
        return int(Path(f"/sys/class/net/{interface}/mtu").read_text())
    except (OSError, ValueError):
        return None


# ----------------------------------------------------------------------------
# Runs the functions that return facts of this machine in child processes with deadlines.
#
# A hung disk, an unreachable name server, a hung driver: none of them can be interrupted from
# within a process. So each probe is a process, which is killed without waiting: one that is
# blocked in the kernel ends later.

_FACTS: Mapping[str, type[Any]] = {
    "shm": ShmFacts,
    "limits": LimitFacts,
    "network": NetworkFacts,
    "folder": FolderFacts,
    "names": NameFacts,
    "gpu": GpuFacts,
    "versions": VersionFacts,
}
_CODE = "from elastic.doctor.checks import child; child()"


@dataclass(frozen=True)
class Unanswered:
    """A probe that was killed at its deadline, or that failed."""

    reason: str


class Probe:
    """One function in a child process; :meth:`result` waits for it."""

    def __init__(self, name: str, arguments: Sequence[object], *, deadline_s: float) -> None:
        self._name = name
        self._deadline_s = deadline_s
        self._ends_s = SYSTEM_CLOCK.monotonic() + deadline_s
        self._process = subprocess.Popen(
            code_command(_CODE, [str(os.getpid()), name, json.dumps(arguments)]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # its own children are killed with it
        )

    def result(self) -> Any:
        """The facts, or :class:`Unanswered`."""
        left_s = max(self._ends_s - SYSTEM_CLOCK.monotonic(), DOCTOR_MIN_WAIT_S)
        try:
            out, err = self._process.communicate(timeout=left_s)
        except subprocess.TimeoutExpired:
            self._kill()
            return Unanswered(f"no answer within {self._deadline_s:g} s")
        if self._process.returncode != 0:
            lines = err.decode(errors="replace").strip().splitlines()
            why = lines[-1][:300] if lines else f"exit code {self._process.returncode}"
            return Unanswered(f"the check ended without a result: {why}")
        return _facts(_FACTS[self._name], json.loads(out))

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(DOCTOR_KILLED_S)
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()


def child() -> None:
    """The main function of the child: ``PARENT NAME ARGUMENTS``; facts as JSON on stdout."""
    parent, name, arguments = sys.argv[1:]
    die_with_parent(int(parent))
    facts = globals()[name](*json.loads(arguments))
    sys.stdout.write(json.dumps(asdict(facts)))


def _facts(kind: type[Any], values: dict[str, Any]) -> Any:
    """Convert JSON's lists to the tuples of the dataclasses."""
    hints = typing.get_type_hints(kind)
    return kind(
        **{k: tuple(v) if typing.get_origin(hints[k]) is tuple else v for k, v in values.items()}
    )


# ----------------------------------------------------------------------------
# Turns facts exchanged by nodes into findings: versions, names, clocks, ports. Pure.


def equal_over_nodes(name: str, values: Mapping[str, str], remedy: str, *, fatal: bool) -> Finding:
    """Whether ``values`` (node → value) are the same everywhere.

    >>> equal_over_nodes("MTU", {"a": "1500", "b": "9000"}, "set one", fatal=False).measured
    '1500 on a; 9000 on b'
    """
    by_value: dict[str, list[str]] = {}
    for node, value in sorted(values.items()):
        by_value.setdefault(value, []).append(node)
    if len(by_value) <= 1:
        return ok(name, f"{next(iter(by_value), '')} on {len(values)} nodes")
    measured = "; ".join(f"{value} on {', '.join(nodes)}" for value, nodes in by_value.items())
    return (failed if fatal else warning)(name, measured, remedy)


def of_names(wanted: Sequence[str], facts: NameFacts | Unanswered) -> Finding:
    """Whether a node resolves the host names of the others: MASTER_ADDR may be one."""
    name, remedy = "names of other nodes", "add them to DNS or /etc/hosts, or use addresses only"
    if isinstance(facts, Unanswered):
        return warning(name, facts.reason, "fix /etc/resolv.conf, or use addresses only")
    if facts.unresolved:
        return warning(name, f"cannot be resolved: {', '.join(facts.unresolved)}", remedy)
    return ok(name, ", ".join(wanted))


def of_clock(node: str, offset_s: float, bound_s: float) -> Finding:
    """``offset_s`` ± ``bound_s``: a node's clock against the first node's."""
    name = f"clock of {node}"
    measured = f"{offset_s * 1000:+.1f} ms ± {bound_s * 1000:.1f} ms"
    if abs(offset_s) - bound_s > CLOCK_SKEW_WARNING_S:
        return warning(
            name,
            f"{measured}: times in logs and certificates are off",
            "run chrony or systemd-timesyncd on all nodes",
        )
    return ok(name, measured)


def unbound(node: str, error: str) -> Finding:
    """A requested port is already in use on a node."""
    return replace(failed("ports", error, "end the process that uses it: `ss -ltnp`"), node=node)


def broken(name: str, reason: str) -> Finding:
    """A check that has ended its world, by the reason that the job gives for that.

    >>> broken("gloo reduce", "b failed: hang: rank 1 on b is stopped; report: /tmp/x").measured
    'b failed: hang: rank 1 on b is stopped'
    """
    measured = reason.partition("; report: ")[0].strip().splitlines()
    if "SIGSTOP" in reason:
        remedy = "continue the named process (kill -CONT), or end it and find what stopped it"
    elif "SIGKILL" in reason:
        remedy = "check `dmesg` and the memory limit of the named node"
    else:
        remedy = (
            "open all ports between the nodes, and set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME "
            "to the interface that has the node's address"
        )
    return failed(name, " ".join(measured), remedy)


# ----------------------------------------------------------------------------
# Facts about etcd: each member, this user's permissions, latency, certificates.

SAMPLES = 15
_UTC_TIME, _OCTETS_OF_LENGTH = 0x17, 0x80
_CERTIFICATE = re.compile("-----BEGIN CERTIFICATE-----(.*?)-----END CERTIFICATE-----", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class MemberFacts:
    """One endpoint. ``error``: why it cannot be used, with ``hint``."""

    endpoint: str
    version: str = ""
    error: str = ""
    hint: str = ""


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """One operation of an agent on etcd, below the run's prefix."""

    name: str
    error: str


@dataclass(frozen=True, kw_only=True)
class CertificateFacts:
    """When a certificate expires. ``error``: why that is unknown."""

    name: str
    expires_in_s: float = 0.0
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class EtcdFacts:
    """All facts about one etcd cluster."""

    members: tuple[MemberFacts, ...]
    alarms: tuple[str, ...] = ()
    alarms_error: str = ""
    root: str = ""
    steps: tuple[StepFacts, ...] = ()
    read_ms: tuple[float, ...] = ()
    write_ms: tuple[float, ...] = ()
    certificates: tuple[CertificateFacts, ...] = ()

    @property
    def reachable(self) -> bool:
        return any(not member.error for member in self.members)


def quick(config: EtcdConfig) -> EtcdConfig:
    """The same etcd, with the deadlines of a check."""
    return replace(
        config,
        connect_timeout_s=min(config.connect_timeout_s, DOCTOR_ETCD_CONNECT_S),
        request_timeout_s=DOCTOR_ETCD_CALL_S,
    )


def inspect(config: EtcdConfig, root: str) -> EtcdFacts:
    """Query each member, then run an agent's operations below ``root``. Ends within seconds."""
    with ThreadPoolExecutor(len(config.endpoints), "elastic-doctor-etcd") as pool:
        members = tuple(pool.map(lambda e: _member(config, e), config.endpoints))
    usable = [e for e, m in zip(config.endpoints, members, strict=True) if not m.error]
    if not usable:
        return EtcdFacts(members=members)
    try:
        store = EtcdStore(quick(replace(config, endpoints=tuple(usable))))
    except CoordinationError as error:  # it became unreachable
        gone = tuple(replace(m, error=error.message, hint=error.hint) for m in members)
        return EtcdFacts(members=gone)
    try:
        alarms, alarms_error = _alarms(store)
        steps = tuple(permissions(store, root))
        read_ms, write_ms = _latencies(store, root)
    finally:
        store.close()
    return EtcdFacts(
        members=members,
        alarms=alarms,
        alarms_error=alarms_error,
        root=root,
        steps=steps,
        read_ms=read_ms,
        write_ms=write_ms,
        certificates=tuple(_server_certificate(config, e) for e in usable) if config.tls else (),
    )


def permissions(store: KeyValue, root: str) -> Iterator[StepFacts]:
    """Lease, write, read, watch and delete a key below ``root``; nothing is left behind."""
    key = f"{root}doctor/{secrets.token_hex(6)}"
    with _Seen(store, key) as seen:
        yield _step("watch", seen.wait_until_it_listens)
        try:
            lease = store.lease(DOCTOR_LEASE_S)
        except CoordinationError as error:
            yield StepFacts(name="lease", error=error.message)
            return
        yield StepFacts(name="lease", error="")
        try:
            yield _step("write", lambda: store.put(key, b"doctor", lease=lease))
            yield _step("read", lambda: store.get(key))
            yield _step("watched write", seen.wait_for_write)
            yield _step("delete", lambda: store.delete(key))
        finally:
            lease.close()


class _Seen:
    """Watches one key and waits for the expected events."""

    def __init__(self, store: KeyValue, key: str) -> None:
        self._listens, self._written = threading.Event(), threading.Event()
        self._watch = store.watch([key], self._on_event, name="doctor")

    def __enter__(self) -> _Seen:
        return self

    def __exit__(self, *unused: object) -> None:
        self._watch.close()

    def wait_until_it_listens(self) -> None:
        self._wait(self._listens, "etcd does not serve the watch")

    def wait_for_write(self) -> None:
        self._wait(self._written, "the watch did not report the write")

    def _wait(self, event: threading.Event, otherwise: str) -> None:
        if not SYSTEM_CLOCK.wait(event, DOCTOR_ETCD_CALL_S):
            raise CoordinationError(f"{otherwise} within {DOCTOR_ETCD_CALL_S:g} s")

    def _on_event(self, event: WatchEvent) -> None:
        if isinstance(event, Reset):
            self._listens.set()
        elif isinstance(event, Put):
            self._written.set()


def _step(name: str, do: Callable[[], object]) -> StepFacts:
    try:
        do()
    except CoordinationError as error:
        return StepFacts(name=name, error=error.message)
    return StepFacts(name=name, error="")


def _member(config: EtcdConfig, endpoint: Endpoint) -> MemberFacts:
    try:
        store = EtcdStore(quick(replace(config, endpoints=(endpoint,))))
    except ElasticError as error:
        return MemberFacts(endpoint=str(endpoint), error=error.message, hint=error.hint)
    try:
        return MemberFacts(endpoint=str(endpoint), version=store.version())
    except CoordinationError as error:
        return MemberFacts(endpoint=str(endpoint), error=error.message, hint=error.hint)
    finally:
        store.close()


def _alarms(store: EtcdStore) -> tuple[tuple[str, ...], str]:
    try:
        return store.alarms(), ""
    except StoreRefused:
        return (), "this user may not list alarms"
    except CoordinationError as error:
        return (), error.message


def _latencies(store: EtcdStore, root: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Durations of linearizable reads and writes, in milliseconds; none if they fail."""
    key = f"{root}doctor/latency-{secrets.token_hex(6)}"
    try:
        lease = store.lease(DOCTOR_LEASE_S)
        try:
            write_ms = tuple(_timed(lambda: store.put(key, b"x", lease=lease)))
            read_ms = tuple(_timed(lambda: store.get(key)))
        finally:
            lease.close()
    except CoordinationError:
        return (), ()
    return read_ms, write_ms


def _timed(call: Callable[[], object]) -> Iterator[float]:
    ends_s = SYSTEM_CLOCK.monotonic() + DOCTOR_ETCD_CALL_S
    for _ in range(SAMPLES):
        began = SYSTEM_CLOCK.monotonic()
        call()
        now = SYSTEM_CLOCK.monotonic()
        yield 1000 * (now - began)
        if now > ends_s:  # etcd is slow: fewer samples suffice
            return


# Certificates --------------------------------------------------------------------------------


def own_certificates(options: AgentOptions) -> tuple[CertificateFacts, ...]:
    """Facts about the certificate files in an agent's options, for etcd and other nodes."""
    names = ("cacert", "cert", "node_cacert", "node_cert")
    given = [(name, getattr(options, name)) for name in names]
    return tuple(_of_file(f"{name}={path}", path) for name, path in given if path)


def _of_file(name: str, path: str) -> CertificateFacts:
    try:
        certificates = _CERTIFICATE.findall(Path(path).read_text())
        if not certificates:
            return CertificateFacts(name=name, error="it contains no certificate")
        # The first is the subject's own; of several authorities, one valid suffices.
        ends = [not_after(base64.b64decode(text)) for text in certificates]
        expires = max(ends) if "cacert" in name.partition("=")[0] else ends[0]
        return CertificateFacts(name=name, expires_in_s=expires - SYSTEM_CLOCK.wall())
    except (OSError, ValueError) as error:
        return CertificateFacts(name=name, error=str(error))


def _server_certificate(config: EtcdConfig, endpoint: Endpoint) -> CertificateFacts:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    name = f"server certificate of {endpoint}"
    try:
        if config.cert and config.key:
            context.load_cert_chain(config.cert, config.key)
        with (
            socket.create_connection(endpoint[:2], timeout=DOCTOR_ETCD_CALL_S) as plain,
            context.wrap_socket(plain, server_hostname=endpoint.host) as secured,
        ):
            der = secured.getpeercert(binary_form=True)
        assert der is not None  # a TLS server always sends one
        expires = not_after(der)
    except (OSError, ValueError) as error:
        return CertificateFacts(name=name, error=str(error))
    return CertificateFacts(name=name, expires_in_s=expires - SYSTEM_CLOCK.wall())


def not_after(der: bytes) -> float:
    """When an X.509 certificate expires, as a Unix time (RFC 5280, section 4.1).

    The standard library reads certificates only once they are verified. Raises ValueError.
    """
    try:
        to_be_signed = next(_elements(next(_elements(der))[1]))[1]
        fields = [f for f in _elements(to_be_signed) if f[0] != 0xA0]  # without the version
        validity = fields[3][1]  # serial number, algorithm, issuer, validity
        _, (tag, text) = _elements(validity)
        form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
        return float(calendar.timegm(time.strptime(text.decode(), form)))
    except (IndexError, StopIteration, UnicodeDecodeError) as error:
        raise ValueError("not an X.509 certificate") from error


def _elements(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Tag and content of the DER elements in ``der``, one after the other."""
    at = 0
    while at < len(der):
        tag, length, at = der[at], der[at + 1], at + 2
        if length & _OCTETS_OF_LENGTH:
            octets = length & ~_OCTETS_OF_LENGTH
            length, at = int.from_bytes(der[at : at + octets], "big"), at + octets
        yield tag, der[at : at + length]
        at += length


# ----------------------------------------------------------------------------
# Turns facts about etcd and certificates into findings. Pure.

_NEWEST_ETCD = (3, 6)
_DAMAGING_ETCD = ((3, 5, 0), (3, 5, 1), (3, 5, 2))  # etcd-io/etcd#13766


def of_etcd(facts: EtcdFacts) -> list[Finding]:
    """Findings on reachability, version, alarms, permissions, latency, server certificates."""
    findings = [_of_member(member, is_last=not facts.reachable) for member in facts.members]
    findings += [v for m in facts.members if m.version and (v := _of_version(m))]
    if not facts.reachable:
        return findings
    return [
        *findings,
        _of_alarms(facts),
        of_permissions(facts.root, facts.steps),
        *_of_latency(facts),
        *of_certificates(facts.certificates),
    ]


def _of_member(member: MemberFacts, *, is_last: bool) -> Finding:
    name = f"etcd {member.endpoint}"
    if not member.error:
        return ok(name, f"answers, version {member.version}")
    verdict = failed if is_last else warning
    return verdict(
        name, member.error, member.hint or "check --rdzv-endpoint and that etcd is running"
    )


def _of_version(member: MemberFacts) -> Finding | None:
    name = "etcd version"
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", member.version)
    if match is None:
        return warning(name, f"{member.version!r} of {member.endpoint}", "use etcd 3.4 to 3.6")
    number = (int(match[1]), int(match[2]), int(match[3]))
    if number in _DAMAGING_ETCD:
        return warning(
            name,
            f"{member.version} may lose writes when a member is killed under load (3.5.0 to 3.5.2)",
            "upgrade to 3.5.3 or later",
        )
    if number[:2] > _NEWEST_ETCD:
        return warning(name, f"{member.version} is newer than tested", "use etcd 3.4 to 3.6")
    return ok(name, member.version)


def _of_alarms(facts: EtcdFacts) -> Finding:
    name = "etcd alarms"
    if facts.alarms_error:
        return skipped(name, facts.alarms_error)
    if not facts.alarms:
        return ok(name, "none")
    return failed(
        name,
        ", ".join(facts.alarms),
        "compact and defragment etcd, then `etcdctl alarm disarm`; NOSPACE: raise its "
        "--quota-backend-bytes",
    )


def of_permissions(root: str, steps: Sequence[StepFacts]) -> Finding:
    """The permissions for an agent's operations below the run's prefix."""
    name = "etcd permissions"
    refused = [step for step in steps if step.error]
    if not refused:
        return ok(name, f"{', '.join(step.name for step in steps)} below {root}")
    return failed(
        name,
        "; ".join(f"{step.name}: {step.error}" for step in refused),
        f"grant the user's role readwrite on the prefix {root} (etcdctl role "
        "grant-permission --prefix=true ROLE readwrite PREFIX)",
    )


def _of_latency(facts: EtcdFacts) -> list[Finding]:
    name = "etcd latency"
    if not facts.read_ms or not facts.write_ms:
        return []  # the finding on permissions has the reason
    read, write = statistics.median(facts.read_ms), statistics.median(facts.write_ms)
    measured = f"read {read:.1f} ms, write {write:.1f} ms (median of {len(facts.write_ms)})"
    remedy = "give etcd a dedicated disk (fsync should take 10 ms) and a network without loss"
    if max(read, write) > TOO_SLOW_ETCD_MS:
        return [failed(name, measured, remedy)]
    if max(read, write) > SLOW_ETCD_MS:
        return [warning(name, measured, remedy)]
    return [ok(name, measured)]


def of_certificates(facts: Iterable[CertificateFacts]) -> list[Finding]:
    """One finding per certificate."""
    return [_of_certificate(one) for one in facts]


def _of_certificate(one: CertificateFacts) -> Finding:
    name = "certificate"
    if one.error:
        return failed(name, f"{one.name}: {one.error}", "give a PEM file with a certificate")
    if one.expires_in_s <= 0:
        return failed(
            name,
            f"{one.name} expired {_span(-one.expires_in_s)} ago",
            "renew it; agents reload changed files without a restart",
        )
    measured = f"{one.name} expires in {_span(one.expires_in_s)}"
    if one.expires_in_s < CERTIFICATE_WARNING_S:
        return warning(name, measured, "renew it before that")
    return ok(name, measured)


def _span(seconds: float) -> str:
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:.0f} days"
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"


# ----------------------------------------------------------------------------
# Turns facts about one machine into findings: pure functions, one per group of checks.
#
# A finding is FAILED if a job on this machine would not start, or would fail later; a WARNING if
# it would train, but more slowly or with less margin.

# torch's DataLoader keeps descriptors for every shared tensor; NCCL some for every peer.
FEW_DESCRIPTORS, TOO_FEW_DESCRIPTORS = 4096, 256
RDMA_LOCKED_BYTES = 1 << 30
MIN_SHM_BYTES = 64 << 20
MIN_MTU = 1280  # RFC 8200: IPv6's minimum for every link
LITTLE_SPACE_BYTES, TOO_LITTLE_SPACE_BYTES = 10 << 30, 64 << 20


def of_shm(facts: ShmFacts | Unanswered) -> Finding:
    """The shared memory that data workers and NCCL use."""
    name, remedy = (
        "/dev/shm",
        "mount a larger tmpfs there (docker --shm-size, an emptyDir of Memory)",
    )
    if isinstance(facts, Unanswered):
        return failed(name, facts.reason, remedy)
    if facts.error:
        return failed(name, facts.error, remedy)
    measured = f"{human(facts.free_bytes)} free of {human(facts.size_bytes)}"
    if facts.free_bytes < MIN_SHM_BYTES and facts.size_bytes > RUNTIME_SHM_BYTES:
        return failed(name, measured, "remove the files of ended jobs from /dev/shm, or enlarge it")
    if facts.size_bytes <= RUNTIME_SHM_BYTES:
        return warning(
            name,
            f"{measured}: too little for data workers and NCCL, which end with a bus error",
            remedy,
        )
    return ok(name, measured)


def of_limits(facts: LimitFacts | Unanswered) -> list[Finding]:
    """Descriptors; locked memory where there is RDMA."""
    if isinstance(facts, Unanswered):
        return [failed("resource limits", facts.reason, "check the load of this machine")]
    return [_of_descriptors(facts), _of_locked_memory(facts)]


def _of_descriptors(facts: LimitFacts) -> Finding:
    name = "open files limit"
    if facts.descriptors is None:
        return ok(name, "unlimited")
    hard = "unlimited" if facts.descriptors_hard is None else str(facts.descriptors_hard)
    measured = f"{facts.descriptors} (hard limit {hard})"
    remedy = "`ulimit -n 65536` before the launch, LimitNOFILE= in systemd, --ulimit in docker"
    if facts.descriptors < TOO_FEW_DESCRIPTORS:
        return failed(name, measured, remedy)
    if facts.descriptors < FEW_DESCRIPTORS:
        return warning(name, measured, remedy)
    return ok(name, measured)


def _of_locked_memory(facts: LimitFacts) -> Finding:
    name = "locked memory limit"
    if not facts.rdma_devices:
        return skipped(name, "no RDMA device")
    if facts.locked_bytes is None:
        return ok(name, "unlimited")
    measured = f"{human(facts.locked_bytes)}, with RDMA devices {', '.join(facts.rdma_devices)}"
    if facts.locked_bytes < RDMA_LOCKED_BYTES:
        return failed(
            name,
            measured,
            "`ulimit -l unlimited` before the launch, LimitMEMLOCK=infinity, --ulimit memlock=-1",
        )
    return ok(name, measured)


def of_network(facts: NetworkFacts | Unanswered) -> list[Finding]:
    """The address this node publishes, what its name resolves to, ports, MTU."""
    name, remedy = "own address", "set the address that other nodes can reach with --local-addr"
    if isinstance(facts, Unanswered):
        return [
            failed(name, f"name resolution: {facts.reason}", f"{remedy}, or fix /etc/resolv.conf")
        ]
    if facts.address_error:
        return [failed(name, facts.address_error, remedy)]
    if not facts.interface:
        return [failed(name, f"{facts.address} is on no interface of this machine", remedy)]
    findings = [ok(name, f"{facts.address} ({facts.interface})"), _of_host_name(facts)]
    if facts.bind_error:
        findings.append(failed("ports", f"{facts.address}: {facts.bind_error}", remedy))
    else:
        findings.append(ok("ports", f"can be bound on {facts.address}"))
    return [*findings, _of_mtu(facts)]


def of_link_speeds(facts: NetworkFacts | Unanswered, network: Network) -> list[Finding]:
    """Link speeds according to the drivers, compared with the interface of this node's address."""
    if isinstance(facts, Unanswered) or not facts.interface:
        return []
    name = "link speed"
    known = [one for one in network.interfaces if one.speed_mbps is not None]
    if not known:
        return [skipped(name, "no driver reports any")]
    measured = ", ".join(f"{one.name} {one.speed_mbps} Mbit/s" for one in known)
    faster = faster_interface(network, facts.interface)
    if faster is None:
        return [ok(name, measured)]
    return [
        warning(
            name,
            f"{measured}; the address of this node is on {facts.interface}",
            f"if the other nodes can reach {faster.name}, start this one with "
            f"{how_to_announce(faster)}; --nnodes=N measures the bandwidth",
        )
    ]


def _of_host_name(facts: NetworkFacts) -> Finding:
    name = "host name"
    remedy = "add it to DNS or /etc/hosts, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    if not facts.host_addresses:
        return warning(
            name,
            f"{facts.host_name} cannot be resolved: gloo finds its interface by this name",
            remedy,
        )
    measured = f"{facts.host_name} is {', '.join(facts.host_addresses)}"
    if facts.address in facts.host_addresses or facts.interface == "lo":
        return ok(name, measured)
    return warning(
        name, f"{measured}, and not {facts.address}: gloo may use another interface", remedy
    )


def _of_mtu(facts: NetworkFacts) -> Finding:
    if facts.mtu is None:
        return skipped("MTU", f"{facts.interface} has none")
    measured = f"{facts.mtu} bytes ({facts.interface})"
    if facts.mtu < MIN_MTU:
        return warning(
            "MTU", measured, f"`ip link set {facts.interface} mtu 1500`, on the switch too"
        )
    return ok("MTU", measured)


def of_gpu(facts: GpuFacts | Unanswered) -> list[Finding]:
    """The driver's report on the devices."""
    name = "GPU"
    reset = "drain the node, `nvidia-smi --gpu-reset` or reboot; `dmesg | grep Xid` shows the cause"
    if isinstance(facts, Unanswered):
        return [failed(name, f"nvidia-smi: {facts.reason}: the driver hangs", reset)]
    if not facts.is_installed:
        if facts.has_device_files:
            return [
                warning(name, "/dev/nvidiactl exists, nvidia-smi does not", "install nvidia-smi")
            ]
        return [skipped(name, "no GPU")]
    if facts.error:
        return [failed(name, f"nvidia-smi: {facts.error}", reset)]
    if not facts.names:
        return [skipped(name, "nvidia-smi lists none")]
    return [_of_device(facts, index) for index in range(len(facts.names))]


def _of_device(facts: GpuFacts, index: int) -> Finding:
    name = f"GPU {index}"
    used, total = facts.used_bytes[index], facts.total_bytes[index]
    measured = f"{facts.names[index]}, driver {facts.driver}, {human(used)} of {human(total)} used"
    errors = facts.uncorrected_errors[index]
    if errors:
        return failed(name, f"{measured}, {errors} uncorrected ECC errors", "reset or replace it")
    if used > total / 2:
        return warning(name, measured, "end the processes that use it: `nvidia-smi` lists them")
    return ok(name, measured)


def of_versions(facts: VersionFacts | Unanswered) -> Finding:
    """This node's versions; :func:`equal_over_nodes` compares them."""
    if isinstance(facts, Unanswered):
        return failed("versions", facts.reason, "check the load of this machine")
    return ok(
        "versions",
        f"python {facts.python}, torch {facts.torch or 'none'}, torch-elastic-harness "
        f"{facts.library or 'none'}, kernel {facts.kernel}",
    )


def of_folder(path: str, facts: FolderFacts | Unanswered) -> list[Finding]:
    """The checkpoint folder: writable, free space, speed of fsync."""
    name = f"checkpoint folder {path}"
    if isinstance(facts, Unanswered):
        return [
            failed(name, facts.reason, "the file system hangs: `dmesg`, `mount`, the NFS server")
        ]
    if facts.error:
        remedy = (
            "free space on that file system"
            if facts.error.startswith("No space")
            else "use an existing folder that this user can write to"
        )
        return [failed(name, facts.error, remedy)]
    return [_of_space(name, facts), _of_fsync(facts)]


def _of_space(name: str, facts: FolderFacts) -> Finding:
    measured = f"{human(facts.free_bytes)} free of {human(facts.size_bytes)}"
    remedy = (
        "free space, or keep fewer checkpoints (keep= of the saver, `elastic checkpoints prune`)"
    )
    if facts.free_bytes < TOO_LITTLE_SPACE_BYTES:
        return failed(name, measured, remedy)
    if facts.free_bytes < LITTLE_SPACE_BYTES:
        return warning(name, measured, remedy)
    return ok(name, measured)


def _of_fsync(facts: FolderFacts) -> Finding:
    times = sorted(facts.fsync_ms)
    p50, p99 = statistics.median(times), times[-1]  # of 20, the slowest one
    measured = f"fsync p50 {p50:.1f} ms, p99 {p99:.1f} ms ({len(times)} small files)"
    if p99 > SLOW_FSYNC_MS:
        return warning(
            "checkpoint fsync", measured, "save to the memory tier more often than to this disk"
        )
    return ok("checkpoint fsync", measured)
