"""From facts to findings: pure functions, one for each group of checks.

A finding is FAILED if a job on this machine would not start, or would fail at a time that nobody
expects; a WARNING if it would train, but slower, or with less margin.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from elastic.doctor.etcd import CertificateFacts, EtcdFacts, MemberFacts, StepFacts
from elastic.doctor.findings import Finding, failed, ok, skipped, warning
from elastic.doctor.machine import (
    FolderFacts,
    GpuFacts,
    LimitFacts,
    NameFacts,
    NetworkFacts,
    ShmFacts,
    VersionFacts,
)
from elastic.doctor.probes import Unanswered
from elastic.errors import ElasticError
from elastic.tuning.memory import RUNTIME_SHM_BYTES, human

# etcd's own advice for its disk is 10 ms; an agent's lease lives for 4 s, and is renewed in thirds.
SLOW_ETCD_MS, TOO_SLOW_ETCD_MS = 100.0, 1000.0
CERTIFICATE_WARNING_S = 14 * 86400.0
# torch's DataLoader keeps descriptors for every tensor that is shared; NCCL some for every peer.
FEW_DESCRIPTORS, TOO_FEW_DESCRIPTORS = 4096, 256
RDMA_LOCKED_BYTES = 1 << 30
LEAST_SHM_BYTES = 64 << 20
LEAST_MTU = 1280  # RFC 8200: what IPv6 asks of every link
LITTLE_SPACE_BYTES, TOO_LITTLE_SPACE_BYTES = 10 << 30, 64 << 20
SLOW_FSYNC_MS = 500.0
_NEWEST_ETCD = (3, 6)
_DAMAGING_ETCD = ((3, 5, 0), (3, 5, 1), (3, 5, 2))  # etcd-io/etcd#13766


# etcd ----------------------------------------------------------------------------------------


def of_etcd(facts: EtcdFacts) -> list[Finding]:
    """Reachable, version, alarms, permissions, latency, the servers' certificates."""
    found = [_of_member(member, is_last=not facts.reachable) for member in facts.members]
    found += [v for m in facts.members if m.version and (v := _of_version(m))]
    if not facts.reachable:
        return found
    return [
        *found,
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
    return verdict(name, member.error, member.hint or "check --rdzv-endpoint, and that etcd runs")


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
    """What an agent does with etcd, below the run's prefix."""
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
        return []  # the permissions say why
    read, write = statistics.median(facts.read_ms), statistics.median(facts.write_ms)
    measured = f"read {read:.1f} ms, write {write:.1f} ms (median of {len(facts.write_ms)})"
    remedy = "give etcd a disk of its own (its fsync should take 10 ms) and a network without loss"
    if max(read, write) > TOO_SLOW_ETCD_MS:
        return [failed(name, measured, remedy)]
    if max(read, write) > SLOW_ETCD_MS:
        return [warning(name, measured, remedy)]
    return [ok(name, measured)]


def of_certificates(facts: Iterable[CertificateFacts]) -> list[Finding]:
    """One for each certificate."""
    return [_of_certificate(one) for one in facts]


def _of_certificate(one: CertificateFacts) -> Finding:
    name = "certificate"
    if one.error:
        return failed(name, f"{one.name}: {one.error}", "name a PEM file of a certificate")
    if one.expires_in_s <= 0:
        return failed(
            name,
            f"{one.name} expired {_span(-one.expires_in_s)} ago",
            "issue it again; agents take changed files without a restart",
        )
    measured = f"{one.name} expires in {_span(one.expires_in_s)}"
    if one.expires_in_s < CERTIFICATE_WARNING_S:
        return warning(name, measured, "issue it again before that")
    return ok(name, measured)


# This machine --------------------------------------------------------------------------------


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
    if facts.free_bytes < LEAST_SHM_BYTES and facts.size_bytes > RUNTIME_SHM_BYTES:
        return failed(name, measured, "remove the files of ended jobs from /dev/shm, or enlarge it")
    if facts.size_bytes <= RUNTIME_SHM_BYTES:
        return warning(
            name, f"{measured}: data workers and NCCL need more, and end with a bus error", remedy
        )
    return ok(name, measured)


def of_limits(facts: LimitFacts | Unanswered) -> list[Finding]:
    """Descriptors; locked memory where there is RDMA."""
    if isinstance(facts, Unanswered):
        return [failed("resource limits", facts.reason, "look at the load of this machine")]
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
    name, remedy = "own address", "give the address that other nodes reach with --local-addr"
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


def _of_host_name(facts: NetworkFacts) -> Finding:
    name = "host name"
    remedy = "add it to DNS or /etc/hosts, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    if not facts.host_addresses:
        return warning(
            name,
            f"{facts.host_name} cannot be resolved: gloo looks for its interface by it",
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
    if facts.mtu < LEAST_MTU:
        return warning(
            "MTU", measured, f"`ip link set {facts.interface} mtu 1500`, on the switch too"
        )
    return ok("MTU", measured)


def of_gpu(facts: GpuFacts | Unanswered) -> list[Finding]:
    """What the driver says of the devices."""
    name = "GPU"
    reset = (
        "drain the node, `nvidia-smi --gpu-reset` or reboot; `dmesg | grep Xid` says what it was"
    )
    if isinstance(facts, Unanswered):
        return [failed(name, f"nvidia-smi: {facts.reason}: the driver hangs", reset)]
    if not facts.is_installed:
        if facts.has_device_files:
            return [warning(name, "/dev/nvidiactl is there, nvidia-smi is not", "install it")]
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
        return warning(name, measured, "`nvidia-smi` lists the processes that use it; end them")
    return ok(name, measured)


def of_versions(facts: VersionFacts | Unanswered) -> Finding:
    """This node's; whether they are equal is :func:`equal_over_nodes`."""
    if isinstance(facts, Unanswered):
        return failed("versions", facts.reason, "look at the load of this machine")
    return ok(
        "versions",
        f"python {facts.python}, torch {facts.torch or 'none'}, torch-elastic-harness "
        f"{facts.library or 'none'}, kernel {facts.kernel}",
    )


def of_folder(path: str, facts: FolderFacts | Unanswered) -> list[Finding]:
    """The folder of checkpoints: may be written, has space, how fast fsync is."""
    name = f"checkpoint folder {path}"
    if isinstance(facts, Unanswered):
        return [
            failed(name, facts.reason, "the file system hangs: `dmesg`, `mount`, the NFS server")
        ]
    if facts.error:
        remedy = (
            "free space there"
            if facts.error.startswith("No space")
            else "name a folder that exists and that this user may write"
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
            "checkpoint fsync", measured, "save into the memory tier more often than to this disk"
        )
    return ok("checkpoint fsync", measured)


# Between nodes -------------------------------------------------------------------------------


def equal_over_nodes(name: str, values: Mapping[str, str], remedy: str, *, fatal: bool) -> Finding:
    """``values``: node → what has to be the same everywhere.

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


SKEW_WARNING_S = 1.0


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
    if abs(offset_s) - bound_s > SKEW_WARNING_S:
        return warning(
            name,
            f"{measured}: times in logs and certificates are off",
            "run chrony or systemd-timesyncd on all nodes",
        )
    return ok(name, measured)


def _span(seconds: float) -> str:
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:.0f} days"
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"


def missing_nodes(what: str, missing: Sequence[str], within_s: float) -> Finding:
    """Nodes that were expected and have not answered."""
    return failed(
        what,
        f"nothing from {', '.join(missing)} within {within_s:g} s",
        "start `elastic doctor` with the same --nnodes, --rdzv-id and --rdzv-endpoint on each node",
    )


def lost_etcd(error: ElasticError) -> Finding:
    """The meeting of the nodes was cut short."""
    return failed("other nodes", error.message, error.hint or "look at etcd")


def unbound(node: str, error: str) -> Finding:
    """A port that was asked for is taken on a node."""
    return replace(failed("ports", error, "end what uses it: `ss -ltnp`"), node=node)
