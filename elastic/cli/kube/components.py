"""``--with``: optional components of deploy/, and combinations that have no effect. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.cli.command_parser import nearest
from elastic.errors import ConfigError

OWN_CERTIFICATES = "own-certificates"
MONITORING = "monitoring"
KNOWN = (
    *("spot", "rdma", "kueue", "volcano", "node-tls", OWN_CERTIFICATES),
    *(MONITORING, "etcd-monitoring"),
)
# The part of a component that each of several jobs needs: they share alerts and dashboard.
_OF_NAMED = {MONITORING: f"{MONITORING}/scrape"}


def chosen(given: Sequence[str], overlay: str, name: str | None) -> tuple[str, ...]:
    """The distinct components. Raises ConfigError for an unknown, ineffective or harmful one."""
    for component in given:
        if component not in KNOWN:
            raise ConfigError(
                f"unknown component --with={component}{nearest(component, KNOWN)}",
                hint=f"known: {', '.join(KNOWN)}",
            )
    if name is not None:
        _check_named(given, name)
    if overlay == "dev":
        _check_dev(given)
    return tuple(dict.fromkeys(given))


def in_order(wanted: Sequence[str], *, is_named: bool) -> tuple[str, ...]:
    """Order components for a kustomization: certificates are removed after others add them."""
    return (
        *(
            _OF_NAMED.get(component, component) if is_named else component
            for component in wanted
            if component != OWN_CERTIFICATES
        ),
        *(["shared-etcd"] if is_named else []),
        *([OWN_CERTIFICATES] if OWN_CERTIFICATES in wanted else []),
        "derived",
    )


def _check_named(given: Sequence[str], name: str) -> None:
    if "node-tls" in given:
        raise ConfigError(
            f"--with=node-tls with --name={name}: all jobs of a namespace would have one "
            "certificate, and one would overwrite the other's",
            hint="give the job its own namespace, without --name",
        )
    if "etcd-monitoring" in given:
        raise ConfigError(
            f"--with=etcd-monitoring with --name={name}: this job has no etcd of its own",
            hint="add components/etcd-monitoring to deploy/overlays/shared",
        )


def _check_dev(given: Sequence[str]) -> None:
    lacks = {"etcd-monitoring": "whose etcd accepts only its own job"}
    if "node-tls" not in given:
        lacks[OWN_CERTIFICATES] = "which has no certificates"
    for component in given:
        if component in lacks:
            raise ConfigError(
                f"--with={component} with --overlay=dev, {lacks[component]}",
                hint="omit one of the two",
            )
