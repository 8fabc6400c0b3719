"""The network of this machine, and the address that it announces."""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from elastic.errors import ConfigError

# ----------------------------------------------------------------------------
# The network of this machine: interfaces, RDMA devices, drivers, and the route to a peer.
#
# Facts only, read from the kernel once; :mod:`elastic.tuning.environment` decides what follows from
# them. The standard library alone: ``elastic env`` prints this without torch.

# <linux/sockios.h>. Each entry is a name of 16 bytes and an address of 16, padded to 40.
_SIOCGIFCONF, _SIOCGIFNETMASK = 0x8912, 0x891B
_ENTRY_BYTES, _NAME_BYTES = 40, 16
_MAX_ADDRESSES = 1024
# Any port: a connected datagram socket sends nothing, it makes the kernel choose the route.
_ANY_PORT = 9

_MUCH_FASTER = 2  # times as many bits in a second

LOOPBACK = "lo"
INFINIBAND, ETHERNET = "InfiniBand", "Ethernet"  # as the kernel writes them (link_layer)
_ACTIVE = "ACTIVE"

# Network drivers that only clouds have: AWS, Google and Azure.
_CLOUD_DRIVERS = {"ena": "AWS", "efa": "AWS", "gve": "Google Cloud", "mana": "Azure"}
# How firmware identifies virtual machines of clouds: a file in /sys/class/dmi/id and its beginning,
# as read by cloud-init's tools/ds-identify.
_CLOUD_FIRMWARE = (
    ("sys_vendor", "Amazon EC2", "AWS"),
    ("product_name", "Google Compute Engine", "Google Cloud"),
    ("product_name", "Alibaba Cloud", "Alibaba Cloud"),
    ("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77", "Azure"),
    ("chassis_asset_tag", "OracleCloud.com", "Oracle Cloud"),
)


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface that has an address."""

    name: str
    addresses: tuple[str, ...]
    networks: tuple[str, ...] = ()  # that its addresses are in: "10.1.0.0/24"
    speed_mbps: int | None = None  # None: not reported by the driver
    driver: str = ""  # "": virtual


@dataclass(frozen=True, kw_only=True)
class RdmaDevice:
    """A device under ``/sys/class/infiniband`` with an active port."""

    name: str
    link_layer: str  # INFINIBAND, ETHERNET (RoCE), or another
    driver: str = ""


@dataclass(frozen=True, kw_only=True)
class Network:
    """The facts of one machine, or of one container."""

    interfaces: tuple[Interface, ...]
    rdma: tuple[RdmaDevice, ...] = ()
    # Devices that the kernel shows, and this process may not open: a container without them.
    rdma_out_of_reach: tuple[str, ...] = ()
    cloud: str | None = None
    has_nvidia: bool = False

    def interface(self, name: str) -> Interface | None:
        """The interface of that name."""
        return next((i for i in self.interfaces if i.name == name), None)

    def with_address(self, address: str) -> Interface | None:
        """The interface that has this address."""
        wanted = _normal(address)
        return next((i for i in self.interfaces if wanted in map(_normal, i.addresses)), None)

    def addresses(self) -> dict[str, tuple[str, ...]]:
        """The addresses of each interface."""
        return {i.name: i.addresses for i in self.interfaces}

    def link_layers(self) -> frozenset[str]:
        """The link layers of the RDMA devices."""
        return frozenset(device.link_layer for device in self.rdma)


def read_network(
    root: Path = Path("/"), addresses: Mapping[str, tuple[str, ...]] | None = None
) -> Network:
    """This machine, from ``/sys``, ``/dev`` and the kernel's list of addresses.

    Args:
        root: where ``sys`` and ``dev`` are (for tests).
        addresses: of each interface, instead of the kernel's.
    """
    known = local_addresses() if addresses is None else addresses
    networks = _networks() if addresses is None else {}
    interfaces = tuple(
        _interface(root, name, known[name], networks.get(name, ())) for name in sorted(known)
    )
    devices = tuple(_rdma_devices(root / "sys/class/infiniband"))
    may_open = any((root / "dev/infiniband").glob("uverbs*"))
    return Network(
        interfaces=interfaces,
        rdma=devices if may_open else (),
        rdma_out_of_reach=() if may_open else tuple(device.name for device in devices),
        cloud=_cloud(root, interfaces, devices),
        has_nvidia=(root / "dev/nvidiactl").exists(),
    )


def local_addresses() -> dict[str, tuple[str, ...]]:
    """The addresses of each interface of this network namespace, IPv4 first."""
    by_interface: dict[str, list[str]] = {}
    for name, address in [*_ipv4_addresses(), *_ipv6_addresses()]:
        by_interface.setdefault(name, []).append(address)
    return {name: tuple(addresses) for name, addresses in by_interface.items()}


def source_address(towards: str) -> str | None:
    """The address of this machine that the kernel would use to reach another; None: no route."""
    try:
        candidates = socket.getaddrinfo(towards, _ANY_PORT, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, target = candidates[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def faster_interface(network: Network, name: str) -> Interface | None:
    """A device of this machine that is at least twice as fast as that interface, according to their
    drivers. Virtual interfaces are excluded: they report a speed that no cable has."""
    slow = network.interface(name)
    if slow is None or slow.speed_mbps is None or name == LOOPBACK:
        return None
    devices = [one for one in network.interfaces if one.driver and one.speed_mbps is not None]
    fastest = max(devices, key=lambda one: one.speed_mbps or 0, default=None)
    if fastest is None or (fastest.speed_mbps or 0) < _MUCH_FASTER * slow.speed_mbps:
        return None
    return fastest


def how_to_announce(interface: Interface) -> str:
    """The option with which the other nodes reach a node over this interface."""
    if interface.networks:
        return f"--rdzv-conf network={interface.networks[0]}"
    return f"--local-addr={interface.addresses[0]}, each with its own"


def interface_towards(
    network: Network, towards: str, source: Callable[[str], str | None] = source_address
) -> Interface | None:
    """The interface on the route to an address; None: there is no route."""
    own = source(towards)
    return network.with_address(own) if own is not None else None


def _ipv4_addresses() -> list[tuple[str, str]]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        buffer = array.array("B", bytes(_ENTRY_BYTES * _MAX_ADDRESSES))
        where, size = buffer.buffer_info()
        filled = fcntl.ioctl(any_socket, _SIOCGIFCONF, struct.pack("iL", size, where))
    length = struct.unpack("iL", filled)[0]
    entries = bytes(buffer)[:length]
    addresses = []
    for start in range(0, length, _ENTRY_BYTES):
        label = entries[start : start + _NAME_BYTES].partition(b"\0")[0].decode()
        address = socket.inet_ntoa(entries[start + _NAME_BYTES + 4 : start + _NAME_BYTES + 8])
        addresses.append((label.partition(":")[0], address))  # a second address may have a label
    return addresses


def _networks() -> dict[str, tuple[str, ...]]:
    """The networks of each interface, without networks of one address."""
    prefixes = [
        (name, f"{a}/{length}") for name, a in _ipv4_addresses() for length in _length(name, a)
    ]
    prefixes += [(name, f"{a}/{length}") for name, a, length in _ipv6_entries()]
    by_interface: dict[str, dict[str, None]] = {}
    for name, prefix in prefixes:
        network = ipaddress.ip_network(prefix, strict=False)
        if network.num_addresses > 1:
            by_interface.setdefault(name, {})[str(network)] = None
    return {name: tuple(networks) for name, networks in by_interface.items()}


def _length(name: str, address: str) -> tuple[int, ...]:
    """The prefix length of an IPv4 address; empty if the address no longer exists."""
    request = struct.pack(
        "=16sH2s4s8x", name.encode(), socket.AF_INET, b"", socket.inet_aton(address)
    )
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            mask = fcntl.ioctl(any_socket, _SIOCGIFNETMASK, request)[20:24]
    except OSError:
        return ()
    return (int.from_bytes(mask, "big").bit_count(),)


def _ipv6_addresses(table: Path = Path("/proc/self/net/if_inet6")) -> list[tuple[str, str]]:
    return [(name, address) for name, address, _ in _ipv6_entries(table)]


def _ipv6_entries(table: Path = Path("/proc/self/net/if_inet6")) -> list[tuple[str, str, int]]:
    """Interface, address and the length of its prefix, without link-local ones, which do not
    identify a network."""
    rows = []
    for line in _text(table).splitlines():
        digits, _, length, *_, name = line.split()
        address = ipaddress.IPv6Address(int(digits, 16))
        if not address.is_link_local:
            rows.append((name, str(address), int(length, 16)))
    return rows


def _interface(
    root: Path, name: str, addresses: tuple[str, ...], networks: tuple[str, ...]
) -> Interface:
    folder = root / "sys/class/net" / name
    speed = _text(folder / "speed")
    return Interface(
        name=name,
        addresses=addresses,
        networks=networks,
        speed_mbps=int(speed) if speed.isdecimal() and int(speed) > 0 else None,
        driver=_driver(folder),
    )


def _rdma_devices(folder: Path) -> list[RdmaDevice]:
    """Those that have an active port."""
    if not folder.is_dir():
        return []
    devices = []
    for device in sorted(folder.iterdir()):
        active = [p for p in sorted(device.glob("ports/*")) if _ACTIVE in _text(p / "state")]
        if active:
            layer = _text(active[0] / "link_layer")
            devices.append(RdmaDevice(name=device.name, link_layer=layer, driver=_driver(device)))
    return devices


def _cloud(
    root: Path, interfaces: tuple[Interface, ...], devices: tuple[RdmaDevice, ...]
) -> str | None:
    drivers = [i.driver for i in interfaces] + [d.driver for d in devices]
    for driver in drivers:
        if driver in _CLOUD_DRIVERS:
            return _CLOUD_DRIVERS[driver]
    for file, beginning, cloud in _CLOUD_FIRMWARE:
        if _text(root / "sys/class/dmi/id" / file).startswith(beginning):
            return cloud
    return None


def _driver(folder: Path) -> str:
    with contextlib.suppress(OSError):
        return (folder / "device" / "driver").resolve(strict=True).name
    return ""


def _text(file: Path) -> str:
    """The content of a file; empty if it cannot be read (the speed of an interface that is
    down)."""
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _normal(address: str) -> str:
    """The address in normal form, without the zone of an IPv6 address."""
    try:
        return str(ipaddress.ip_address(address.partition("%")[0]))
    except ValueError:
        return address


# ----------------------------------------------------------------------------
# The configured address of this node for the others: ``--local-addr``, ``network``.
#
# A network is one setting for all nodes, an address differs on each. The announced address is used
# by the group's store, the transfer of state, NCCL and gloo alike (docs/decisions/0031).


def configured_address(
    local_addr: str | None,
    network: str | None,
    addresses: Mapping[str, tuple[str, ...]] | None = None,
) -> str:
    """The configured address of this node: ``local_addr``, else its address in ``network``;
    "" if none is set.

    Args:
        local_addr: an address or a name.
        network: "172.30.0.0/24".
        addresses: of each interface, instead of the kernel's.

    Raises:
        ConfigError: this machine has no address in the network, or ``local_addr`` is outside it.
    """
    if network is None:
        return local_addr or ""
    within = ipaddress.ip_network(network, strict=False)
    if local_addr:
        _require_within(local_addr, within, network)
        return local_addr
    known = local_addresses() if addresses is None else addresses
    every = [(name, address) for name, those in known.items() for address in those]
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
