"""Runs all checks in order, on one machine or several at once, each with a deadline."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from elastic.doctor import checks
from elastic.doctor.checks import Finding, Probe, Status, Unanswered, skipped
from elastic.doctor.collectives import Session, TransferMeasurement, torch_findings
from elastic.doctor.network import (
    AllGather,
    Meeting,
    MeetingFailed,
    Participant,
    alone,
    as_values,
    between_nodes,
    connect_to_all,
    listening_ports,
    pair_findings,
)
from elastic.errors import CoordinationError
from elastic.membership.records import Keys
from elastic.store.client import etcd_config
from elastic.store.etcd import EtcdStore
from elastic.tuning.network import configured_address, read_network
from elastic.tuning.options import AgentOptions

# One collective, or one probe of the machine, may be silent this long (--deadline). The slowest
# one, the first NCCL collective of a process, takes several seconds.
DOCTOR_DEADLINE_S = 20.0
# How long the nodes wait for each other (--join-timeout): a script or a person starts them.
DOCTOR_JOIN_S = 60.0

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ExaminationPlan:
    """The options of an examination."""

    options: AgentOptions
    endpoint: str | None = None
    run_id: str | None = None  # None: a generated one
    nnodes: int = 1
    nproc: int = 2
    local_addr: str = ""
    folder: str | None = None
    ports: tuple[int, ...] = ()  # to test between all nodes, in addition to ephemeral ones
    only_local: bool = False  # no process groups
    # Longest silence of one operation, and of one probe. Starts of processes get more.
    deadline_s: float = DOCTOR_DEADLINE_S
    join_timeout_s: float = DOCTOR_JOIN_S
    name: str = field(
        default_factory=lambda: os.environ.get("ELASTIC_NODE_NAME") or socket.gethostname()
    )


@dataclass(frozen=True, kw_only=True)
class Report:
    """Findings of all nodes, and the measured speeds."""

    findings: tuple[Finding, ...]
    speeds: tuple[TransferMeasurement, ...] = ()
    nodes: tuple[str, ...] = ()


def examine(plan: ExaminationPlan, say: Say) -> Report:
    """Run every check. Never raises for a finding, and never waits longer than the sum of the
    deadlines. Raises ConfigError for invalid options."""
    keys = Keys.of(plan.options.prefix, plan.run_id or f"doctor-{secrets.token_hex(4)}")
    config = etcd_config(plan.endpoint, plan.options) if plan.endpoint else None
    first = config.endpoints[0] if config else None
    probes = _start_probes(plan, (first.host, first.port) if first else ("", 0))
    say("checking this machine")
    own = checks.of_certificates(checks.own_certificates(plan.options))
    if config is None:
        own.append(skipped("etcd", "no --rdzv-endpoint"))
    else:
        say(f"checking etcd at {plan.endpoint}")
        facts = checks.inspect(config, keys.root)
        own = checks.of_etcd(facts) + own
        if not facts.reachable:
            config = None  # etcd cannot be used further
    results = {name: probe.result() for name, probe in probes.items()}
    own += _of_machine(plan, results)
    address = getattr(results["network"], "address", "") or "127.0.0.1"
    if plan.nnodes == 1:
        return _examine_alone(plan, own, address, say)
    if config is None:
        return Report(findings=(*own, skipped("other nodes", "nodes find each other through etcd")))
    try:
        store = EtcdStore(checks.quick(config))
    except CoordinationError as error:  # it became unreachable
        return Report(findings=(*own, checks.lost_etcd(error)))
    return _examine_together(plan, store, keys, own, results, address, say)


def _start_probes(plan: ExaminationPlan, endpoint: tuple[str, int]) -> dict[str, Probe]:
    options = plan.options
    wanted: dict[str, Sequence[object]] = {
        "network": (
            configured_address(plan.local_addr, options.network, options.pod_ip),
            *endpoint,
        ),
        "shm": (),
        "limits": (),
        "gpu": (),
        "versions": (),
    }
    if plan.folder:
        wanted["folder"] = (plan.folder,)
    return {name: Probe(name, a, deadline_s=plan.deadline_s) for name, a in wanted.items()}


def _of_machine(plan: ExaminationPlan, results: Mapping[str, Any]) -> list[Finding]:
    found = [
        *checks.of_network(results["network"]),
        *checks.of_link_speeds(results["network"], read_network()),
        checks.of_shm(results["shm"]),
        *checks.of_limits(results["limits"]),
        *checks.of_gpu(results["gpu"]),
        checks.of_versions(results["versions"]),
    ]
    if plan.folder:
        return [*found, *checks.of_folder(plan.folder, results["folder"])]
    return [*found, skipped("checkpoint folder", "no --checkpoints")]


# One machine ---------------------------------------------------------------------------------


def _examine_alone(plan: ExaminationPlan, own: list[Finding], address: str, say: Say) -> Report:
    if plan.only_local:
        return Report(findings=tuple(own), nodes=(plan.name,))
    me = _participant(plan, address)
    with tempfile.TemporaryDirectory(prefix="elastic-doctor-") as shared:
        session = Session((me,), 0, alone, plan.deadline_s, shared, say)
        found, speeds = torch_findings(session)
    return Report(findings=(*own, *found), speeds=tuple(speeds), nodes=(plan.name,))


def _participant(plan: ExaminationPlan, address: str) -> Participant:
    return Participant(
        node_id=secrets.token_hex(6),
        name=plan.name,
        host_name=socket.gethostname(),
        address=address,
        nproc=plan.nproc,
    )


# Several -------------------------------------------------------------------------------------


def _examine_together(
    plan: ExaminationPlan,
    store: EtcdStore,
    keys: Keys,
    own: list[Finding],
    results: Mapping[str, Any],
    address: str,
    say: Say,
) -> Report:
    with contextlib.closing(store):
        try:
            meeting = Meeting(store, keys.root, _participant(plan, address))
        except CoordinationError as error:
            return Report(findings=(*own, checks.lost_etcd(error)))
        with meeting:
            say(f"waiting for {plan.nnodes} nodes below {keys.root}")
            try:
                members = meeting.join(plan.nnodes, plan.join_timeout_s)
                names = _distinct([member.name for member in members])
                own = [replace(finding, node=names[meeting.number]) for finding in own]
                shared, speeds = _between(plan, meeting, names, results, say)
                say("collecting the findings of all nodes")
                everything = _collect(meeting, own, names, plan.deadline_s)
            except MeetingFailed as failure:
                return Report(findings=(*own, failure.finding), nodes=(plan.name,))
            except CoordinationError as error:
                return Report(findings=(*own, checks.lost_etcd(error)), nodes=(plan.name,))
    return Report(findings=(*everything, *shared), speeds=tuple(speeds), nodes=tuple(names))


def _between(
    plan: ExaminationPlan, meeting: Meeting, names: list[str], results: Mapping[str, Any], say: Say
) -> tuple[list[Finding], list[TransferMeasurement]]:
    """Findings between the nodes, the same on all of them."""
    members = meeting.members
    found = list(_of_equality(meeting, names, results, plan.deadline_s))
    say("comparing clocks")
    offsets = meeting.clocks(plan.deadline_s)
    found += [checks.of_clock(names[n], *offsets[n]) for n in sorted(offsets) if n > 0]
    say("connecting to the other nodes")
    found += _of_pairs(plan, meeting, names)
    say("measuring the paths to the other nodes")
    network = read_network()
    found += between_nodes(meeting, members, meeting.number, network, plan.deadline_s)
    if plan.only_local:
        return found, []
    # A folder that did not answer a child process would block this one.
    folder = None if isinstance(results.get("folder"), Unanswered) else plan.folder
    shared = shared_folder(folder, members[0].node_id, meeting.number, meeting, plan.deadline_s)
    session = Session(members, meeting.number, meeting, plan.deadline_s, shared, say)
    try:
        torch_found, speeds = torch_findings(session)
    finally:
        if shared is not None and meeting.number == 0:
            shutil.rmtree(shared, ignore_errors=True)
    return found + torch_found, speeds


def _of_equality(
    meeting: AllGather, names: list[str], results: Mapping[str, Any], within_s: float
) -> Iterator[Finding]:
    facts = {
        "python": getattr(results["versions"], "python", "unknown"),
        "torch": getattr(results["versions"], "torch", "unknown"),
        "torch-elastic-harness": getattr(results["versions"], "library", "unknown"),
        "GPU driver": getattr(results["gpu"], "driver", "unknown") or "none",
        "MTU": str(getattr(results["network"], "mtu", "unknown")),
    }
    everyone = meeting("versions", facts, within_s)
    for what in facts:
        values = {names[n]: value[what] for n, value in everyone.items()}
        yield checks.equal_over_nodes(
            f"equal {what}",
            values,
            "use one image and one configuration on all nodes",
            fatal=what in ("torch", "torch-elastic-harness"),
        )


def _of_pairs(plan: ExaminationPlan, meeting: Meeting, names: list[str]) -> list[Finding]:
    members, me = meeting.members, meeting.number
    host_names = sorted({m.host_name for n, m in enumerate(members) if n != me})
    with listening_ports(members[me].address, plan.ports) as listeners:
        served = meeting("ports", asdict(listeners), plan.deadline_s)
        lookup = Probe("names", host_names, deadline_s=plan.deadline_s)
        attempts = connect_to_all(
            [
                (n, members[n].address, port)
                for n, bound in sorted(served.items())
                for port in bound["ports"]
                if n != me
            ]
        )
        of_names = checks.of_names(host_names, lookup.result())
        value = {"connections": as_values(attempts), "names": asdict(of_names)}
        everyone = meeting("connections", value, plan.deadline_s)  # all nodes listen until then
    found = [
        checks.unbound(names[n], error) for n, bound in served.items() for error in bound["errors"]
    ]
    missing = [name for n, name in enumerate(names) if n not in everyone]
    if missing:
        found.append(checks.missing_nodes("nodes", missing, plan.deadline_s))
    found += [_finding(value["names"], names[n]) for n, value in sorted(everyone.items())]
    return found + pair_findings(names, {n: v["connections"] for n, v in everyone.items()})


def shared_folder(
    folder: str | None, session: str, number: int, exchange: AllGather, within_s: float
) -> str | None:
    """A new folder below this checkpoint folder, if all nodes see the one that the first created.

    ``folder``: None if there is none, or it does not answer; other nodes are notified.
    """
    token = Path(folder) / f".elastic-doctor-{session}" if folder is not None else None
    if token is not None and number == 0:
        with contextlib.suppress(OSError):
            token.mkdir()
    exchange("shared folder is there", None, within_s)
    is_seen = token is not None and token.is_dir()
    seen = exchange("shared folder is seen", is_seen, within_s)
    if token is not None and all(seen.values()):
        return str(token)
    if is_seen and number == 0:
        shutil.rmtree(str(token), ignore_errors=True)
    return None


def _collect(
    meeting: AllGather, own: list[Finding], names: list[str], within_s: float
) -> list[Finding]:
    everyone = meeting("findings", [asdict(finding) for finding in own], within_s)
    found = [_finding(one) for n in sorted(everyone) for one in everyone[n]]
    missing = [name for n, name in enumerate(names) if n not in everyone]
    return [*found, checks.missing_nodes("report", missing, within_s)] if missing else found


def _finding(value: Mapping[str, Any], node: str | None = None) -> Finding:
    finding = Finding(**{**value, "status": Status(value["status"])})
    return finding if node is None else replace(finding, node=node)


def _distinct(names: list[str]) -> list[str]:
    """Distinguish the names of two nodes on one machine."""
    return [f"{n}#{i}" if names.count(n) > 1 else n for i, n in enumerate(names)]
