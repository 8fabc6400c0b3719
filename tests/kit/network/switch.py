"""The process that forwards every packet between the machines of an emulated network.

Each machine's interface is a TUN device that this process creates in the machine's network
namespace. It reads packets from one device and writes them to the device of their target, unless a
rule drops or delays them. Run as ``python -m kit.network.switch`` by
:class:`~kit.network.emulated.EmulatedNetwork`, which sends orders as JSON lines::

    {"open": {"10.0.0.1": ["/run/netns/one", "eth0"], "10.0.0.254": ["", "el0"]}}
    {"rules": [{"source": "10.0.0.1", "target": "10.0.0.2", "loss": 0.3, "delay_s": 0.0}]}
    {"drop_established": [["10.0.0.1", "10.0.0.2"]]}     (answered with the number of flows)
    {"forget_flows": true}
    {"blocked": [["10.0.0.1", 2379]]}
    {"only": [["10.0.0.1", 2379]]}                       (null: everything)

Each order is answered with a line once it is in effect. The end of its input ends the process and
its devices.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import json
import os
import random
import selectors
import socket
import struct
import sys
from dataclasses import dataclass
from typing import Any

from elastic.errors import SYSTEM_CLOCK
from kit.network.packets import Flow, addresses_of, flow_of

# linux/if_tun.h, linux/sched.h
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_LARGEST_PACKET = 1 << 16
_PACKETS_PER_TURN = 64
# A high priority, because delays on a busy machine would be faults that no test requested.
_NICENESS = -10


@dataclass(frozen=True)
class Impairment:
    """A rule for packets from one address to another."""

    loss: float = 0.0  # the fraction of packets that is dropped
    delay_s: float = 0.0


class Switch:
    """Forwards packets between devices. One thread."""

    def __init__(self, *, seed: int = 0) -> None:
        self._devices: dict[bytes, int] = {}  # descriptor by address
        self._rules: dict[tuple[bytes, bytes], Impairment] = {}
        self._flows: set[Flow] = set()  # seen since the beginning
        self._dropped: set[Flow] = set()
        self._blocked: set[tuple[bytes, bytes]] = set()  # target and its port
        self._only: set[tuple[bytes, bytes]] | None = None  # one end of a flow and its port
        self._late: list[tuple[float, int, int, bytes]] = []  # a heap: due, number, device, packet
        self._numbers = itertools.count()
        self._random = random.Random(seed)
        self._selector = selectors.DefaultSelector()
        self._unread = b""

    def run(self) -> None:
        """Forward packets until the input ends."""
        self._selector.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select(self._due_in_s()):
                if key.fd != 0:
                    self._forward_from(key.fd)
                elif not self._obey():
                    return
            self._send_late()

    # Orders ----------------------------------------------------------------------------------

    def _obey(self) -> bool:
        chunk = os.read(0, _LARGEST_PACKET)
        self._unread += chunk
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            answer = self._carry_out(json.loads(line))
            os.write(1, json.dumps(answer).encode() + b"\n")
        return bool(chunk)

    def _carry_out(self, order: dict[str, Any]) -> Any:
        for address, (namespace, name) in order.get("open", {}).items():
            device = open_device(namespace, name)
            self._devices[socket.inet_aton(address)] = device
            self._selector.register(device, selectors.EVENT_READ)
        if "rules" in order:
            self._rules = {
                (socket.inet_aton(r["source"]), socket.inet_aton(r["target"])): Impairment(
                    r["loss"], r["delay_s"]
                )
                for r in order["rules"]
            }
        if order.get("forget_flows"):
            self._dropped = set()
        if "blocked" in order:
            self._blocked = _ends(order["blocked"])
        if "only" in order:
            self._only = None if order["only"] is None else _ends(order["only"])
        pairs = {tuple(map(socket.inet_aton, pair)) for pair in order.get("drop_established", ())}
        found = {flow for flow in self._flows if (flow.source, flow.target) in pairs}
        self._dropped |= found
        return len(found)

    # Packets ---------------------------------------------------------------------------------

    def _forward_from(self, device: int) -> None:
        for _ in range(_PACKETS_PER_TURN):
            try:
                packet = os.read(device, _LARGEST_PACKET)
            except OSError:  # no more packets, or the interface is down
                return
            ends = addresses_of(packet)
            if ends is not None and ends[1] in self._devices:
                self._forward(packet, ends)

    def _forward(self, packet: bytes, ends: tuple[bytes, bytes]) -> None:
        flow = flow_of(packet)
        if flow is not None:
            self._flows.add(flow)
            ends_of_flow = {(flow.source, flow.source_port), (flow.target, flow.target_port)}
            if flow in self._dropped or (flow.target, flow.target_port) in self._blocked:
                return
            if self._only is not None and not ends_of_flow & self._only:
                return
        rule, target = self._rules.get(ends), self._devices[ends[1]]
        if rule is None:
            _write(target, packet)
        elif self._random.random() >= rule.loss:
            due_s = SYSTEM_CLOCK.monotonic() + rule.delay_s
            heapq.heappush(self._late, (due_s, next(self._numbers), target, packet))

    def _due_in_s(self) -> float | None:
        return max(0.0, self._late[0][0] - SYSTEM_CLOCK.monotonic()) if self._late else None

    def _send_late(self) -> None:
        now_s = SYSTEM_CLOCK.monotonic()
        while self._late and self._late[0][0] <= now_s:
            _, _, target, packet = heapq.heappop(self._late)
            _write(target, packet)


def _ends(pairs: list[tuple[str, int]]) -> set[tuple[bytes, bytes]]:
    return {(socket.inet_aton(address), port.to_bytes(2, "big")) for address, port in pairs}


def _write(device: int, packet: bytes) -> None:
    with contextlib.suppress(OSError):  # the interface is down, or not up yet
        os.write(device, packet)


def open_device(namespace: str, name: str) -> int:
    """Create a TUN device in a namespace (path; "": this one); returns its owning descriptor."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        if namespace:
            _enter(os.open(namespace, os.O_RDONLY))
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        request = struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI)
        fcntl.ioctl(device, _TUNSETIFF, request)
        return device
    finally:
        _enter(home)


def _enter(namespace: int) -> None:
    # os.setns() is new in Python 3.12.
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.setns(namespace, _CLONE_NEWNET) != 0
    os.close(namespace)
    if failed:
        raise OSError(ctypes.get_errno(), "setns")


if __name__ == "__main__":
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
    Switch().run()
    sys.exit(0)
