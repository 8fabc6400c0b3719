"""Turns facts exchanged by nodes into findings: versions, names, clocks, ports. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from elastic.doctor.findings import Finding, failed, ok, warning
from elastic.doctor.machine import NameFacts
from elastic.doctor.probes import Unanswered
from elastic.tuning.doctor_intervals import CLOCK_SKEW_WARNING_S


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


def missing_nodes(what: str, missing: Sequence[str], within_s: float) -> Finding:
    """Expected nodes that have not answered."""
    return failed(
        what,
        f"nothing from {', '.join(missing)} within {within_s:g} s",
        "start `elastic doctor` with the same --nnodes, --rdzv-id and --rdzv-endpoint on each node",
    )


def unbound(node: str, error: str) -> Finding:
    """A requested port is already in use on a node."""
    return replace(failed("ports", error, "end the process that uses it: `ss -ltnp`"), node=node)
