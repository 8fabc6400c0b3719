"""Real etcd servers for tests, and a recorder of what a watch says."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from elastic.errors import StoreFull
from elastic.store.client import EtcdConfig, parse_endpoints
from elastic.store.embedded import EmbeddedEtcd
from elastic.store.etcd import EtcdStore
from elastic.store.keyvalue import Deleted, Disconnected, Put, Reconnected, Reset, WatchEvent
from elastic.testing.waiting import eventually

PATIENCE_S = 90.0  # for things that take milliseconds; noisy machines are slow
T = TypeVar("T")


@pytest.fixture(scope="session")
def shared_etcd() -> Iterator[EmbeddedEtcd]:
    """One etcd for all tests that do it no harm; use :func:`root` to stay apart."""
    with EmbeddedEtcd(name="shared") as etcd:
        yield etcd


@pytest.fixture
def own_etcd() -> Iterator[EmbeddedEtcd]:
    """An etcd for one test, to be killed, frozen and wiped."""
    with EmbeddedEtcd(name="own") as etcd:
        yield etcd


@pytest.fixture
def root() -> str:
    """A key prefix that no other test uses."""
    return f"/test/{uuid.uuid4().hex}/"


@pytest.fixture
def connect() -> Iterator[Callable[..., EtcdStore]]:
    """``connect(endpoint, **config)`` opens a store; all are closed after the test."""
    stores: list[EtcdStore] = []

    def open_store(endpoint: str, **settings: object) -> EtcdStore:
        config = EtcdConfig(endpoints=parse_endpoints(endpoint), **settings)  # type: ignore[arg-type]
        stores.append(EtcdStore(config))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


class SmallEtcd(EmbeddedEtcd):
    """Is full after a few writes."""

    def _command(self) -> list[str]:
        return [*super()._command(), f"--quota-backend-bytes={1 << 20}"]


def fill_etcd(store: EtcdStore) -> None:
    """Write to a :class:`SmallEtcd` until it refuses. Raises StoreFull."""
    for number in range(100):
        store.put(f"/fill/{number}", b"x" * (128 << 10))


def wait_alarm(store: EtcdStore) -> None:
    """Fill a :class:`SmallEtcd` until it has raised its alarm: on a slow disk it may refuse a
    write, and not manage to raise the alarm with it. Small writes are accepted until then."""

    def raises_its_alarm() -> bool:
        with contextlib.suppress(StoreFull):
            fill_etcd(store)
        return "NOSPACE" in store.alarms()

    eventually(raises_its_alarm, "the alarm of a full etcd")


class Recorder:
    """A watch callback that keeps every event."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._events: list[WatchEvent] = []

    def __call__(self, event: WatchEvent) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    @property
    def events(self) -> list[WatchEvent]:
        with self._changed:
            return list(self._events)

    @property
    def changes(self) -> list[tuple[str, bytes | None]]:
        """Puts as (key, value) and deletions as (key, None), in order."""
        return [
            (e.entry.key, e.entry.value) if isinstance(e, Put) else (e.key, None)
            for e in self.events
            if isinstance(e, Put | Deleted)
        ]

    @property
    def resets(self) -> list[Reset]:
        return [e for e in self.events if isinstance(e, Reset)]

    @property
    def disconnections(self) -> int:
        return sum(isinstance(e, Disconnected) for e in self.events)

    @property
    def reconnections(self) -> int:
        return sum(isinstance(e, Reconnected) for e in self.events)

    def wait_for(
        self, condition: Callable[[Recorder], object], within_s: float = PATIENCE_S
    ) -> None:
        """Block until ``condition(self)`` holds."""
        with self._changed:
            if not self._changed.wait_for(lambda: condition(self), within_s):
                raise AssertionError(f"not within {within_s} s; seen: {self._events}")


def elastic_threads() -> set[str]:
    """Names of this package's client threads that run now."""
    return {t.name for t in threading.enumerate() if t.name.startswith("elastic-")} - {
        "elastic-etcd-owner"
    }
