"""Emulated machines for the nodes of a test, on a network with injected faults::

    with EmulatedNetwork(3) as network:
        one, two, three = network.machines
        subprocess.run([*one.launcher, "ping", "-c1", two.address])
        network.cut(one.address, two.address)
        network.heal()

Losses are silent: neither end of a connection is notified. ``network.host`` is the address of
this process's own namespace on it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.network.switch import Impairment

INTERFACE = "eth0"
_NAMESPACES = Path("/run/netns")
_TUN = Path("/dev/net/tun")
_MTU = "1500"
# The kernel drops packets that do not fit into the queue; a burst must fit.
_QUEUE_PACKETS = "10000"
_numbers = itertools.count()  # of the networks of this process


def why_unavailable() -> str:
    """Why this process cannot create an emulated network; "" if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need `ip` of iproute2"
    if not _TUN.exists():
        return f"the emulated network needs {_TUN}"
    name = f"elp{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode != 0:
        return f"cannot create a network namespace: {made.stderr.strip()}"
    _ip("netns", "delete", name)
    return ""


@dataclass(frozen=True)
class EmulatedMachine:
    """A network namespace with one interface besides ``lo``."""

    namespace: str
    address: str

    @property
    def launcher(self) -> tuple[str, ...]:
        """A prefix that runs a command in this machine's namespace."""
        return ("ip", "netns", "exec", self.namespace)


class EmulatedNetwork:
    """A network of ``machines`` machines and this process's namespace, as a context manager.

    The faults of different pairs of addresses add up until :meth:`heal`; a later one for the same
    pair and direction replaces an earlier one.
    """

    def __init__(self, machines: int) -> None:
        pid, number = os.getpid(), next(_numbers)
        tag = f"{pid}-{number}"
        # Each concurrent network has its own addresses, distinct from those of other processes.
        prefix = f"10.{(pid >> 8) + 64 * number & 255}.{pid & 255}"
        self.host = f"{prefix}.254"
        self.machines = tuple(
            EmulatedMachine(f"els{tag}-{n}", f"{prefix}.{n + 1}") for n in range(machines)
        )
        self._device = f"els{tag}"
        self._switch: subprocess.Popen[str] | None = None
        self._impaired: dict[tuple[str, str], Impairment] = {}

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of all machines and the host."""
        return (*(machine.address for machine in self.machines), self.host)

    # Faults ----------------------------------------------------------------------------------

    def drop(self, source: str, target: str) -> None:
        """Drop packets from one address to the other, in this direction only."""
        self._impair([(source, target)], Impairment(loss=1.0))

    def cut(self, one: str, *others: str) -> None:
        """Drop all packets between an address and the others, in both directions."""
        self._impair(_both_ways(one, others), Impairment(loss=1.0))

    def degrade(self, one: str, *others: str, loss: float = 0.0, delay_s: float = 0.0) -> None:
        """Drop a fraction of the packets, or delay them, in each direction."""
        self._impair(_both_ways(one, others), Impairment(loss, delay_s))

    def drop_established(self, one: str, *others: str) -> int:
        """Drop the packets of all existing TCP connections, like a firewall or NAT that has lost
        its state; new connections work. Returns the number of flows, two per connection."""
        return int(self._order({"drop_established": list(_both_ways(one, others))}))

    def block(self, address: str, *ports: int) -> None:
        """Drop TCP packets to these ports of an address, and no others, as a firewall does."""
        self._order({"blocked": [(address, port) for port in ports]})

    def block_all_but(self, *ends: tuple[str, int]) -> None:
        """Drop the TCP packets of all connections of which neither end is one of these ports."""
        self._order({"only": ends})

    def others(self, machine: EmulatedMachine) -> tuple[str, ...]:
        """The addresses of the other machines, without the host's."""
        return tuple(m.address for m in self.machines if m is not machine)

    def heal(self) -> None:
        """Deliver all packets again, also of dropped connections."""
        self._impaired = {}
        self._order({"rules": [], "forget_flows": True, "blocked": [], "only": None})

    def _impair(self, pairs: Iterable[tuple[str, str]], impairment: Impairment) -> None:
        self._impaired |= dict.fromkeys(pairs, impairment)
        rules = [
            {"source": source, "target": target, "loss": how.loss, "delay_s": how.delay_s}
            for (source, target), how in self._impaired.items()
        ]
        self._order({"rules": rules})

    # Lifecycle -------------------------------------------------------------------------------

    def __enter__(self) -> EmulatedNetwork:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *unused: object) -> None:
        self._stop()

    def _start(self) -> None:
        for machine in self.machines:
            _ip("netns", "add", machine.namespace)
        self._switch = subprocess.Popen(
            [sys.executable, "-m", "kit.network.switch"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        ports = {m.address: [str(_NAMESPACES / m.namespace), INTERFACE] for m in self.machines}
        self._order({"open": {**ports, self.host: ["", self._device]}})
        for machine in self.machines:
            _ip("-n", machine.namespace, "link", "set", "lo", "up")
            _bring_up(machine.address, INTERFACE, "-n", machine.namespace)
        _bring_up(self.host, self._device)

    def _stop(self) -> None:
        if self._switch is not None:
            assert self._switch.stdin is not None and self._switch.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                self._switch.stdin.close()
            self._switch.wait()
            self._switch.stdout.close()
        for machine in self.machines:
            if (_NAMESPACES / machine.namespace).exists():
                _ip("netns", "delete", machine.namespace)

    def _order(self, order: dict[str, Any]) -> Any:
        """Send an order to the switch; returns its answer once the order is in effect."""
        switch = self._switch
        assert switch is not None and switch.stdin is not None and switch.stdout is not None
        switch.stdin.write(json.dumps(order) + "\n")
        switch.stdin.flush()
        answer = switch.stdout.readline()
        if not answer:
            raise RuntimeError("the switch of the emulated network has died: its error is above")
        return json.loads(answer)


def _both_ways(one: str, others: Iterable[str]) -> Iterable[tuple[str, str]]:
    return [pair for other in others for pair in ((one, other), (other, one))]


def _bring_up(address: str, device: str, *where: str) -> None:
    _ip(*where, "address", "add", f"{address}/24", "dev", device)
    _ip(*where, "link", "set", device, "mtu", _MTU, "txqueuelen", _QUEUE_PACKETS, "up")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
