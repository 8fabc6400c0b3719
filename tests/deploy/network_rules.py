"""The connections that NetworkPolicies allow: their published semantics, for one namespace."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from manifests import Object

Labels = Mapping[str, str]


@dataclass(frozen=True)
class End:
    """One end of a connection: a pod by its labels and its namespace's, or an address outside."""

    labels: Labels = field(default_factory=dict)
    namespace: Labels | None = None  # None: the policies' own
    outside: bool = False
    address: str | None = None  # of an end outside, for rules that name addresses


def allowed(
    policies: Iterable[Object], source: End, target: End, port: int, protocol: str = "TCP"
) -> bool:
    """Whether the policies of both ends allow a connection."""
    every = list(policies)
    leaves = source.outside or source.namespace is not None
    arrives = target.outside or target.namespace is not None
    return (leaves or _passes(every, source, target, "Egress", port, protocol)) and (
        arrives or _passes(every, target, source, "Ingress", port, protocol)
    )


def _passes(
    policies: list[Object], here: End, there: End, direction: str, port: int, protocol: str
) -> bool:
    concerned = [
        p["spec"]
        for p in policies
        if matches(p["spec"]["podSelector"], here.labels) and direction in p["spec"]["policyTypes"]
    ]
    if not concerned:
        return True
    key, side = ("egress", "to") if direction == "Egress" else ("ingress", "from")
    return any(
        _port_matches(rule, port, protocol) and _peer_matches(rule.get(side), there)
        for spec in concerned
        for rule in spec.get(key, [])
    )


def _port_matches(rule: Object, port: int, protocol: str) -> bool:
    ports = rule.get("ports")
    return ports is None or any(
        (p["port"], p.get("protocol", "TCP")) == (port, protocol) for p in ports
    )


def _peer_matches(peers: list[Object] | None, there: End) -> bool:
    if peers is None:
        return True
    for peer in peers:
        if "ipBlock" in peer:
            block = ipaddress.ip_network(peer["ipBlock"]["cidr"])
            if there.address and ipaddress.ip_address(there.address) in block:
                return True
            continue
        if there.outside:
            continue
        spaces = peer.get("namespaceSelector")
        if spaces is None:
            in_space = there.namespace is None
        else:
            in_space = there.namespace is not None and matches(spaces, there.namespace)
        if in_space and matches(peer.get("podSelector", {}), there.labels):
            return True
    return False


def matches(selector: Object, labels: Labels) -> bool:
    """A label selector with matchLabels and the In of matchExpressions."""
    wanted = selector.get("matchLabels", {})
    return wanted.items() <= dict(labels).items() and all(
        e["operator"] == "In" and labels.get(e["key"]) in e["values"]
        for e in selector.get("matchExpressions", [])
    )
