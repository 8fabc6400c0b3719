"""Turns facts about etcd and certificates into findings. Pure."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence

from elastic.doctor.etcd import CertificateFacts, EtcdFacts, MemberFacts, StepFacts
from elastic.doctor.findings import Finding, failed, ok, skipped, warning
from elastic.errors import ElasticError
from elastic.tuning.doctor_intervals import CERTIFICATE_WARNING_S, SLOW_ETCD_MS, TOO_SLOW_ETCD_MS

_NEWEST_ETCD = (3, 6)
_DAMAGING_ETCD = ((3, 5, 0), (3, 5, 1), (3, 5, 2))  # etcd-io/etcd#13766


def of_etcd(facts: EtcdFacts) -> list[Finding]:
    """Findings on reachability, version, alarms, permissions, latency, server certificates."""
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


def lost_etcd(error: ElasticError) -> Finding:
    """The finding when etcd became unreachable while the nodes exchanged values."""
    return failed("other nodes", error.message, error.hint or "check etcd")
