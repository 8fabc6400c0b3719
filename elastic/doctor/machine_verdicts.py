"""Turns facts about one machine into findings: pure functions, one per group of checks.

A finding is FAILED if a job on this machine would not start, or would fail later; a WARNING if
it would train, but more slowly or with less margin.
"""

from __future__ import annotations

import statistics

from elastic.doctor.findings import Finding, failed, ok, skipped, warning
from elastic.doctor.machine import (
    FolderFacts,
    GpuFacts,
    LimitFacts,
    NetworkFacts,
    ShmFacts,
    VersionFacts,
)
from elastic.doctor.probes import Unanswered
from elastic.tuning.doctor_intervals import SLOW_FSYNC_MS
from elastic.tuning.memory import RUNTIME_SHM_BYTES, human
from elastic.tuning.network import Network, faster_interface, how_to_announce

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
    found = [ok(name, f"{facts.address} ({facts.interface})"), _of_host_name(facts)]
    if facts.bind_error:
        found.append(failed("ports", f"{facts.address}: {facts.bind_error}", remedy))
    else:
        found.append(ok("ports", f"can be bound on {facts.address}"))
    return [*found, _of_mtu(facts)]


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
