"""The configured address of this node for the others: ``--local-addr``, ``network``, ``pod_ip``.

A network is one setting for all nodes, an address differs on each. The announced address is used by
the group's store, the transfer of state, NCCL and gloo alike (docs/decisions/0031).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from elastic.errors import ConfigError
from elastic.tuning.network import LOOPBACK, local_addresses


def configured_address(
    local_addr: str | None,
    network: str | None,
    pod_ip: str | None,
    addresses: Mapping[str, tuple[str, ...]] | None = None,
) -> str:
    """The configured address of this node: ``local_addr``, else its address in ``network``, else
    ``pod_ip``; "" if none is set.

    Args:
        local_addr: an address or a name.
        network: "172.30.0.0/24".
        pod_ip: an address.
        addresses: of each interface, instead of the kernel's.

    Raises:
        ConfigError: this machine has no address in the network, or ``local_addr`` is another.
    """
    if network is None:
        return local_addr or pod_ip or ""
    within = ipaddress.ip_network(network, strict=False)
    if local_addr:
        _require_within(local_addr, within, network)
        return local_addr
    found = local_addresses() if addresses is None else addresses
    every = [(name, address) for name, those in found.items() for address in those]
    for _, address in every:
        if ipaddress.ip_address(address) in within:
            return address
    has = ", ".join(f"{name} ({address})" for name, address in every if name != LOOPBACK)
    raise ConfigError(
        f"network={network}: this machine has no address in that network",
        hint=f"it has {has or 'none'}; connect it, or omit network on all nodes",
    )


def _require_within(
    local_addr: str, within: ipaddress.IPv4Network | ipaddress.IPv6Network, network: str
) -> None:
    try:
        is_within = ipaddress.ip_address(local_addr) in within
    except ValueError:
        return  # a name is not resolved here: it is used as configured
    if not is_within:
        raise ConfigError(
            f"--local-addr={local_addr} and network={network} are incompatible: the address is "
            "not in that network",
            hint="give one of the two",
        )
