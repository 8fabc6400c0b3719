"""Facts about this machine. Functions that may block run in a child process (``probes``).

Standard library only, except for the address, which is found as in an agent.
"""

from __future__ import annotations

import contextlib
import csv
import ctypes
import fcntl
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import struct
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from elastic.clock import SYSTEM_CLOCK

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
        found = os.statvfs(SHM)
        with tempfile.TemporaryFile(dir=SHM) as file:
            os.posix_fallocate(file.fileno(), 0, 1 << 20)
    except OSError as error:
        return ShmFacts(size_bytes=0, free_bytes=0, error=f"{SHM}: {error.strerror or error}")
    return ShmFacts(
        size_bytes=found.f_blocks * found.f_frsize,
        free_bytes=found.f_bavail * found.f_frsize,
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
    from elastic.errors import ConfigError
    from elastic.node.address import own_address
    from elastic.store.etcd.endpoints import Endpoint

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
        found = os.statvfs(path)
        free, size = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
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
        found = list(pool.map(_addresses_of, wanted))
    return NameFacts(
        unresolved=tuple(n for n, addresses in zip(wanted, found, strict=True) if not addresses)
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
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(sorted({str(entry[4][0]) for entry in found}))


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
