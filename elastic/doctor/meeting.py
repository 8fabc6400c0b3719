"""Several nodes exchange values through etcd, below the run's prefix.

All keys are on leases: those of a killed doctor expire seconds later. The first node publishes the
roster of participants, so that two examinations with the same id do not mix while the first ends.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from elastic.clock import SYSTEM_CLOCK
from elastic.doctor.findings import failed
from elastic.errors import ElasticError
from elastic.store.keyvalue import Deleted, Entry, KeyValue, Put, Reset, WatchEvent
from elastic.tuning.doctor_intervals import DOCTOR_LEASE_S

CLOCK_ROUNDS = 5


class MeetingFailed(ElasticError):
    """The nodes have not found each other. ``finding`` is the row for the table."""

    def __init__(self, present: list[str], expected: int, within_s: float) -> None:
        names = ", ".join(present)
        message = f"{len(present)} of {expected} nodes arrived within {within_s:g} s: {names}"
        hint = (
            "start `elastic doctor` on each node with the same --nnodes, --rdzv-id and "
            "--rdzv-endpoint"
        )
        super().__init__(message, hint=hint)
        self.finding = failed("nodes", message, hint)


@dataclass(frozen=True, kw_only=True)
class Participant:
    """A node of the examination; its place in the roster is its number."""

    node_id: str  # generated for one examination
    name: str
    host_name: str
    address: str
    nproc: int


class AllGather(Protocol):
    """All nodes exchange one value each: ``number → value``, without missing nodes."""

    def __call__(self, phase: str, value: Any, within_s: float) -> dict[int, Any]: ...


def alone(phase: str, value: Any, within_s: float) -> dict[int, Any]:
    """The all-gather of a single node."""
    return {0: value}


class Meeting:
    """This node's part of the exchange, an AllGather: ``with Meeting(...) as m: m.join(2, 60)``."""

    def __init__(self, store: KeyValue, root: str, me: Participant) -> None:
        self._store = store
        self._root = f"{root}doctor/meeting/"
        self._me = me
        self._changed = threading.Condition()
        self._seen: dict[str, Entry] = {}  # including deleted entries
        self._gone: set[str] = set()
        self._session = ""
        self.members: tuple[Participant, ...] = ()
        self._lease = store.lease(DOCTOR_LEASE_S)
        self._watch = store.watch([self._root], self._on_event, name="doctor-meeting")

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, *unused: object) -> None:
        self._watch.close()
        self._lease.close()

    @property
    def number(self) -> int:
        """This node's number."""
        return [m.node_id for m in self.members].index(self._me.node_id)

    # -- discovery -------------------------------------------------------------------------

    def join(self, nodes: int, within_s: float) -> tuple[Participant, ...]:
        """Wait until ``nodes`` nodes have arrived. Raises MeetingFailed, CoordinationError."""
        ends_s = SYSTEM_CLOCK.monotonic() + within_s
        self._put(f"nodes/{self._me.node_id}", vars(self._me))
        found = self._wait(lambda: self._is_in_roster() or self._founds(nodes), ends_s)
        if found and not self._is_in_roster():
            roster = [vars(m) for m in self._present()[:nodes]]
            self._put(f"roster/{secrets.token_hex(6)}", roster)
            found = self._wait(self._is_in_roster, ends_s)
        if not found:
            raise MeetingFailed([m.name for m in self._present()], nodes, within_s)
        return self.members

    def _founds(self, nodes: int) -> bool:
        present = self._present()
        return len(present) >= nodes and present[0].node_id == self._me.node_id

    def _present(self) -> list[Participant]:
        prefix = f"{self._root}nodes/"
        entries = [e for k, e in self._seen.items() if k.startswith(prefix) and k not in self._gone]
        entries.sort(key=lambda entry: entry.mod_revision)
        return [Participant(**json.loads(entry.value)) for entry in entries]

    def _is_in_roster(self) -> bool:
        prefix = f"{self._root}roster/"
        with self._changed:
            seen = dict(self._seen)
        for key, entry in seen.items():
            if key.startswith(prefix):
                members = tuple(Participant(**one) for one in json.loads(entry.value))
                if self._me in members:
                    self._session, self.members = key.removeprefix(prefix), members
                    return True
        return False

    # -- exchange --------------------------------------------------------------------------

    def __call__(self, phase: str, value: Any, within_s: float) -> dict[int, Any]:
        """Publish ``value`` and wait for those of the other nodes, or until they have left."""
        self._put(f"{self._session}/{phase}/{self.number}", value)
        keys = {n: self._key(phase, n) for n in range(len(self.members))}
        ends_s = SYSTEM_CLOCK.monotonic() + within_s
        self._wait(
            lambda: all(k in self._seen or self._has_left(n) for n, k in keys.items()), ends_s
        )
        with self._changed:
            return {n: json.loads(self._seen[k].value) for n, k in keys.items() if k in self._seen}

    def clocks(self, within_s: float) -> dict[int, tuple[float, float]]:
        """The offset of every node's clock from the first one's, and its error bound, in seconds.

        A node requests the first one's time; both write to etcd. The first node's clock was read
        during the round trip, so half of the round-trip time bounds the error.
        """
        self("clocks", None, within_s)
        ends_s = SYSTEM_CLOCK.monotonic() + within_s
        measured = self._answer(ends_s) if self.number == 0 else self._ask(ends_s)
        found = self("measured clocks", measured, within_s)
        return {n: (value[0], value[1]) for n, value in found.items() if value}

    def _ask(self, ends_s: float) -> tuple[float, float] | None:
        best: tuple[float, float] | None = None
        for turn in range(CLOCK_ROUNDS):
            asked = SYSTEM_CLOCK.wall()
            began = SYSTEM_CLOCK.monotonic()
            self._put(f"{self._session}/ask/{self.number}/{turn}", None)
            key = f"{self._root}{self._session}/answer/{self.number}/{turn}"
            if not self._wait(lambda key=key: key in self._seen, ends_s):  # type: ignore[misc]
                break
            took_s = SYSTEM_CLOCK.monotonic() - began
            answered = float(json.loads(self._seen[key].value))
            if best is None or took_s / 2 < best[1]:
                best = (asked + took_s / 2 - answered, took_s / 2)
        return best

    def _answer(self, ends_s: float) -> tuple[float, float]:
        asks = {
            f"{self._root}{self._session}/ask/{n}/{turn}"
            for n in range(1, len(self.members))
            for turn in range(CLOCK_ROUNDS)
        }
        while asks and self._wait(lambda: bool(asks & self._seen.keys()), ends_s):
            for key in asks & self._seen.keys():
                rest = key.removeprefix(f"{self._root}{self._session}/ask/")
                self._put(f"{self._session}/answer/{rest}", SYSTEM_CLOCK.wall())
                asks.discard(key)
            if all(self._has_left(n) for n in range(1, len(self.members))):
                break
        return (0.0, 0.0)

    # -- parts -----------------------------------------------------------------------------

    def _key(self, phase: str, number: int) -> str:
        return f"{self._root}{self._session}/{phase}/{number}"

    def _has_left(self, number: int) -> bool:
        return f"{self._root}nodes/{self.members[number].node_id}" in self._gone

    def _put(self, name: str, value: Any) -> None:
        self._store.put(f"{self._root}{name}", json.dumps(value).encode(), lease=self._lease)

    def _wait(self, condition: Callable[[], bool], ends_s: float) -> bool:
        with self._changed:
            left_s = max(ends_s - SYSTEM_CLOCK.monotonic(), 0.0)
            return self._changed.wait_for(condition, left_s)

    def _on_event(self, event: WatchEvent) -> None:
        with self._changed:
            if isinstance(event, Reset):
                there = {entry.key: entry for entry in event.snapshot.entries}
                self._gone |= self._seen.keys() - there.keys()
                self._seen.update(there)
            elif isinstance(event, Put):
                self._seen[event.entry.key] = event.entry
            elif isinstance(event, Deleted):
                self._gone.add(event.key)
            self._changed.notify_all()
