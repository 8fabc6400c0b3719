"""Machines of one's own: network namespaces on a bridge, whose cables can be pulled."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

INTERFACE = "eth0"
DECOY = "aa0"
FAST, FAST_NETWORK = "fast0", "172.30.0.0/30"
_networks = itertools.count()


def available() -> bool:
    """Whether this process may make network namespaces."""
    if os.geteuid() != 0:
        return False
    name = f"elp{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode != 0:
        return False
    _ip("netns", "delete", name)
    return True


@dataclass(frozen=True)
class Machine:
    """A network namespace with one interface."""

    namespace: str
    address: str
    cable: str  # the bridge's end

    @property
    def launcher(self) -> tuple[str, ...]:
        """Runs a command in it."""
        return ("ip", "netns", "exec", self.namespace)

    def cut(self) -> None:
        """Pull the cable: no packet arrives, not even one that closes a connection."""
        _ip("link", "set", self.cable, "down")

    def restore(self) -> None:
        _ip("link", "set", self.cable, "up")


class Network:
    """``with Network(3) as network``: its machines, and ``network.host``, this one's address.

    ``has_decoy``: each machine has another interface, first in every list, that leads nowhere.
    """

    def __init__(self, machines: int, *, has_decoy: bool = False) -> None:
        self._has_decoy = has_decoy
        pid = os.getpid()
        # Names are used once: the kernel removes a deleted namespace's devices later.
        tag = f"{pid}-{next(_networks)}"
        self._bridge = f"elb{tag}"
        prefix = f"10.{pid >> 8 & 255}.{pid & 255}"
        self.host = f"{prefix}.254"
        self.machines: Sequence[Machine] = tuple(
            Machine(f"el{tag}-{n}", f"{prefix}.{n + 1}", f"el{tag}-{n}") for n in range(machines)
        )

    def __enter__(self) -> Network:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("address", "add", f"{self.host}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for machine in self.machines:
            self._add(machine)
        return self

    def __exit__(self, *unused: object) -> None:
        for machine in self.machines:
            _ip("netns", "delete", machine.namespace)
        _ip("link", "delete", self._bridge)

    def _add(self, machine: Machine) -> None:
        space = machine.namespace
        _ip("netns", "add", space)
        if self._has_decoy:
            # Before eth0, so that it is the first in the kernel's list.
            _ip("-n", space, "link", "add", DECOY, "type", "veth", "peer", "name", "aa1")
            _ip("-n", space, "address", "add", "172.31.0.1/24", "dev", DECOY)
            for end in (DECOY, "aa1"):
                _ip("-n", space, "link", "set", end, "up")
        _ip(
            *("link", "add", machine.cable, "type", "veth"),
            *("peer", "name", INTERFACE, "netns", space),
        )
        _ip("link", "set", machine.cable, "master", self._bridge, "up")
        for command in (
            ("address", "add", f"{machine.address}/24", "dev", INTERFACE),
            ("link", "set", INTERFACE, "up"),
            ("link", "set", "lo", "up"),
        ):
            _ip("-n", space, *command)


def add_fast_link(one: Machine, other: Machine, *, slow_mbit: int) -> tuple[str, str]:
    """Connect two machines by another cable, and slow the network that both are on. Returns their
    addresses on the cable."""
    addresses = ("172.30.0.1", "172.30.0.2")
    _ip(
        *("-n", one.namespace, "link", "add", FAST, "type", "veth"),
        *("peer", "name", FAST, "netns", other.namespace),
    )
    for machine, address in zip((one, other), addresses, strict=True):
        space = machine.namespace
        _ip("-n", space, "address", "add", f"{address}/30", "dev", FAST)
        _ip("-n", space, "link", "set", FAST, "up")
        _tc(
            *("-n", space, "qdisc", "add", "dev", INTERFACE, "root"),
            *("tbf", "rate", f"{slow_mbit}mbit", "burst", "64kb", "latency", "100ms"),
        )
    return addresses


def _tc(*arguments: str) -> None:
    done = subprocess.run(["tc", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"tc {' '.join(arguments)}: {done.stderr.strip()}")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
