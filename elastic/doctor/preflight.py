"""The preflight, which an agent runs before its node may join: no process groups, no disk.

A healthy node takes a few tenths of a second, mostly to start processes. Deadlines are much longer:
a busy node must not be rejected.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from elastic.doctor import etcd, etcd_verdicts, machine, machine_verdicts
from elastic.doctor.between import pairs
from elastic.doctor.findings import Finding, Status, failed, ok, skipped, warning
from elastic.doctor.probes import Probe
from elastic.errors import CoordinationError, NodeUnfit
from elastic.membership.records import Keys, Leader, Node, decode
from elastic.store.etcd.endpoints import Endpoint
from elastic.store.keyvalue import KeyValue
from elastic.tuning.agent_options import AgentOptions
from elastic.tuning.announced_address import configured_address
from elastic.tuning.doctor_intervals import PREFLIGHT_CONNECT_S, PREFLIGHT_PROBES_S


def preflight(
    store: KeyValue,
    keys: Keys,
    options: AgentOptions,
    *,
    endpoint: Endpoint | None,
    local_addr: str,
) -> list[Finding]:
    """Check this node, its permissions in etcd, and its connection to the job's leader."""
    etcd_address = (endpoint.host, endpoint.port) if endpoint else ("", 0)
    arguments = (configured_address(local_addr, options.network, options.pod_ip), *etcd_address)
    # Processes only for checks that may hang: name resolution, and an installed driver.
    network = Probe("network", arguments, deadline_s=PREFLIGHT_PROBES_S)
    gpu = Probe("gpu", (), deadline_s=PREFLIGHT_PROBES_S) if machine.has_gpu_driver() else None
    found = [
        etcd_verdicts.of_permissions(keys.root, tuple(etcd.permissions(store, keys.root))),
        *etcd_verdicts.of_certificates(etcd.own_certificates(options)),
        *_of_leader(store, keys),
    ]
    return [
        *found,
        *machine_verdicts.of_network(network.result()),
        machine_verdicts.of_shm(machine.shm()),
        *machine_verdicts.of_limits(machine.limits()),
        *(machine_verdicts.of_gpu(gpu.result()) if gpu else [skipped("GPU", "no GPU")]),
    ]


def require_fit(findings: Sequence[Finding], node: str) -> None:
    """Raise NodeUnfit if any check has failed, with all failed checks and remedies."""
    bad = [finding for finding in findings if finding.status is Status.FAILED]
    if bad:
        raise NodeUnfit(
            f"preflight: node {node} does not join the job: "
            + "; ".join(f"{finding.name}: {finding.measured}" for finding in bad),
            hint="; ".join(dict.fromkeys(finding.remedy for finding in bad))
            + " (`elastic doctor` on this node has the details)",
        )


def _of_leader(store: KeyValue, keys: Keys) -> Iterator[Finding]:
    """Whether this node reaches the agent that would admit it."""
    with contextlib.suppress(CoordinationError):  # reported by the permissions check
        entry = store.get(keys.leader)
        if entry is None:
            yield skipped("leader", "the job has none yet")
            return
        leader = decode(Leader, entry.key, entry.value)
        ports = [leader.liveness_port]
        if (of_node := store.get(keys.node(leader.node_id))) is not None:
            memory_port = decode(Node, of_node.key, of_node.value).memory_port
            ports += [memory_port] if memory_port else []
        yield _of_ports(leader.address, ports)


def _of_ports(address: str, ports: Sequence[int]) -> Finding:
    name = "leader"
    errors = {port: pairs.connection_error(address, port, PREFLIGHT_CONNECT_S) for port in ports}
    closed = {port: error for port, error in errors.items() if error is not None}
    if not closed:
        return ok(name, f"{address} answers on {', '.join(map(str, ports))}")
    measured = "; ".join(f"{address}:{port}: {error}" for port, error in closed.items())
    if all(isinstance(error, ConnectionRefusedError) for error in closed.values()):
        # The leader may have just ended: the next one is elected while this node joins.
        return warning(name, measured, "check that the leader's agent is running")
    return failed(
        name,
        measured,
        "open all TCP ports between the nodes, in both directions; check --local-addr",
    )
