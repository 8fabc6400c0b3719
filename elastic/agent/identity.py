"""What a node says of itself: identity, address, ports, and whether it ran out of memory."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import threading
from pathlib import Path

import tenacity

from elastic.errors import SYSTEM_CLOCK, Clock, ConfigError
from elastic.membership.records import ProcessDigest, ProcessIdentity
from elastic.store.client import Endpoint

# Between two lookups of a pod's name, which is registered a moment after the pod starts.
RESOLVE_AGAIN_S = 0.5

# ----------------------------------------------------------------------------
# The address of this node for the others, resolved once, before it is published.
#
# Names are resolved only on this node. Others would have to resolve them at every connection, on
# threads that must not block, and many machines resolve their own name to 127.0.1.1.


def own_address(
    configured: str, endpoint: Endpoint | None, *, within_s: float, clock: Clock = SYSTEM_CLOCK
) -> str:
    """The address behind ``configured``, an address or a name; if it is empty or a name for the
    loopback interface, this machine's address on the way to etcd (``endpoint``).

    Raises ConfigError if the name cannot be resolved within ``within_s``.
    """
    if not configured:
        return _towards(endpoint) or _of_this_host()
    if _is_address(configured):
        return configured
    resolved = _resolve(configured, within_s, clock)
    reachable = [address for address in resolved if not ipaddress.ip_address(address).is_loopback]
    if reachable or configured == "localhost":
        return (reachable or resolved)[0]
    return _towards(endpoint) or resolved[0]


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to ``host``.

    >>> [is_loopback(h) for h in ("localhost", "127.0.0.2", "::1", "0.0.0.0", "node-a")]
    [True, True, True, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _resolve(name: str, within_s: float, clock: Clock) -> list[str]:
    """The addresses of a name, IPv4 first, as for a listener on that name."""
    attempts = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(OSError),
        stop=tenacity.stop_after_attempt(1 + int(within_s / RESOLVE_AGAIN_S)),
        wait=tenacity.wait_fixed(RESOLVE_AGAIN_S),
        sleep=clock.sleep,
        reraise=True,
    )
    try:
        return attempts(_addresses, name)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--local-addr={name} cannot be resolved on this node: {error}",
            hint="give the IP address at which the other nodes reach this one",
        ) from error


def _addresses(name: str) -> list[str]:
    entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    entries.sort(
        key=lambda entry: entry[0] != socket.AF_INET
    )  # stable: otherwise in the system's order
    return [str(entry[4][0]) for entry in entries]


def _towards(endpoint: Endpoint | None) -> str:
    """This machine's address on the route to etcd: most likely reachable by the other nodes.

    Connecting a datagram socket sends nothing; it makes the kernel choose the route.
    """
    if endpoint is None:
        return ""
    try:
        routes = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, target = routes[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _of_this_host() -> str:
    try:
        return _addresses(socket.gethostname())[0]
    except OSError as error:
        raise ConfigError(
            f"the address of this node is unknown: {socket.gethostname()!r} cannot be resolved "
            f"({error})",
            hint="give the IP address at which the other nodes reach it, with --local-addr",
        ) from error


# ----------------------------------------------------------------------------
# The identity of a process, and whether another one still exists: proof of death on one machine.
#
# A missing pid proves a death only in the process table that the pid was from: that of the same
# kernel, since the same boot, in the same pid namespace. A reused pid is detected by its start
# time in clock ticks (``/proc/<pid>/stat``, field 22). All of these properties must agree, since
# none of them alone distinguishes two machines:
#
# - the boot id is random for each boot of a kernel, and shared by all containers on it. Virtual
#   machines that were cloned while they ran have the same one;
# - the machine id is that of an installation: cloned disks and containers of one image share it,
#   and in containers it is often empty, which proves nothing;
# - the uid of a pod (``ELASTIC_POD_UID``, from the downward API) is unlike any other's, and empty
#   where there are no pods. Two containers of one pod have it in common;
# - the host name is arbitrary: equal ones prove nothing, different ones do;
# - the inode of a pid namespace is unique on one kernel only: the first one has the same number
#   everywhere.
#
# If one of them differs, nothing is proved here, neither death nor life: the node's lease and its
# port decide. A reboot of a machine proves nothing either: only its machine id would identify it,
# but a clone has the same one.

_MACHINE_ID = Path("/etc/machine-id")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def current_process(pod_uid: str = "") -> ProcessIdentity:
    """The identity of this process; ``pod_uid`` is that of its pod, if known."""
    pid = os.getpid()
    stat = _stat(pid)
    return ProcessIdentity(
        host=socket.gethostname(),
        machine_id=_read(_MACHINE_ID),
        boot_id=_read(_BOOT_ID),
        pod_uid=pod_uid,
        pid_namespace=_pid_namespace(),
        pid=pid,
        start_ticks=stat[1] if stat else 0,
    )


def proved_gone(process: ProcessDigest, me: ProcessIdentity) -> bool:
    """True if this machine can prove that ``process`` no longer runs; False proves nothing."""
    if not process.table or process.table != me.digest.table:
        return False
    stat = _stat(process.pid)
    if stat is None:
        return not _exists(process.pid)
    return stat[0] in "ZX" or (process.start_ticks > 0 and stat[1] != process.start_ticks)


def _pid_namespace() -> int:
    """The inode of this pid namespace; 0, which proves nothing, if ``/proc`` belongs to another."""
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return 0
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _exists(pid: int) -> bool:
    """Whether the process exists: ``/proc`` may hide the processes of other users (hidepid)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def _stat(pid: int) -> tuple[str, int] | None:
    """(state letter, start time in ticks), or None if no such process is visible."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The command name is in parentheses, and may itself contain spaces and parentheses.
    rest = text[text.rindex(")") + 2 :].split()
    return rest[0], int(rest[19])


# ----------------------------------------------------------------------------
# Whether the kernel's OOM killer has ended a process of this agent's cgroup.
#
# A SIGKILL does not identify its sender. The kernel counts its own in the memory cgroup:
# ``oom_kill`` in ``memory.events`` (cgroup v2), or in ``memory.oom_control`` (v1, Linux 4.13 and
# later). v1's ``memory.failcnt`` is no evidence: it also increases when the kernel only dropped
# its file cache.

OOM_KILL = "the kernel killed it because the memory limit of its cgroup was reached"

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class OomKillCounter:
    """The kernel's count of OOM kills, read after a worker's death by SIGKILL. Thread-safe.

    The workers are in the cgroup of the agent, which has started them. Several agents may share
    one: a kill among the workers of one counts for both, if both observe a SIGKILL.
    """

    def __init__(self, cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> None:
        self._files = _files(cgroups, membership)
        self._lock = threading.Lock()
        self._seen = self._count()

    def mark(self) -> None:
        """Ignore the kills so far: workers are about to start."""
        with self._lock:
            self._seen = self._count()

    def has_killed(self) -> bool:
        """Whether there was a kill since the last call of this or of :meth:`mark`."""
        with self._lock:
            before, self._seen = self._seen, self._count()
            return before is not None and self._seen is not None and self._seen > before

    def _count(self) -> int | None:
        """None: not available from the kernel."""
        for path in self._files:
            try:
                match = _COUNT.search(path.read_text(encoding="ascii", errors="replace"))
            except OSError:
                continue
            if match is not None:
                return int(match.group(1))
        return None


def _files(cgroups: Path, membership: Path) -> tuple[Path, ...]:
    """Possible files of the count, the most likely one first. In a container the path of the cgroup
    may be the host's, while the container's own is mounted."""
    try:
        lines = membership.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    files: list[Path] = []
    for line in lines:  # "0::/path" (v2), "4:memory:/path" (v1)
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "":
            folder, name = cgroups, "memory.events"
        elif "memory" in controllers.split(","):
            folder, name = cgroups / "memory", "memory.oom_control"
        else:
            continue
        files += [folder / path.strip("/") / name, folder / name]
    return tuple(files)


# ----------------------------------------------------------------------------
# Ports for the process group's store, reserved for the lifetime of the agent.
#
# The leader picks the next world's store port from those that rank 0's node has published, so the
# node must own free ports ahead of time, and the port must still be free seconds later, when the
# worker has imported torch. A bound socket with SO_REUSEADDR that never listens achieves both: the
# kernel assigns the port to no other process, but torch's TCPStore, which sets SO_REUSEADDR, too,
# may still listen on it [measured with torch 2.13: libuv and the older backend].


class PortReserve:
    """A few reserved TCP ports; generation g uses ``ports[g % len(ports)]``."""

    def __init__(self, count: int = 4) -> None:
        self._sockets = [_reserve() for _ in range(count)]
        self._replica = _reserve()

    @property
    def ports(self) -> tuple[int, ...]:
        return tuple(int(s.getsockname()[1]) for s in self._sockets)

    @property
    def replica_port(self) -> int:
        """The port for the store of a replica's ranks, which they keep for their lifetime."""
        return int(self._replica.getsockname()[1])

    def close(self) -> None:
        """Release all of them."""
        for held in (*self._sockets, self._replica):
            held.close()
        self._sockets = []


def _reserve() -> socket.socket:
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held
