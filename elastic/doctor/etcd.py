"""Facts about etcd: each member, this user's permissions, latency, certificates."""

from __future__ import annotations

import base64
import calendar
import re
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from elastic.clock import SYSTEM_CLOCK
from elastic.errors import CoordinationError, ElasticError, StoreRefused
from elastic.store.etcd.endpoints import Endpoint, EtcdConfig
from elastic.store.etcd.store import EtcdStore
from elastic.store.keyvalue import KeyValue, Put, Reset, WatchEvent
from elastic.tuning.agent_options import AgentOptions
from elastic.tuning.doctor_intervals import (
    DOCTOR_ETCD_CALL_S,
    DOCTOR_ETCD_CONNECT_S,
    DOCTOR_LEASE_S,
)

SAMPLES = 15
_UTC_TIME, _OCTETS_OF_LENGTH = 0x17, 0x80
_CERTIFICATE = re.compile("-----BEGIN CERTIFICATE-----(.*?)-----END CERTIFICATE-----", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class MemberFacts:
    """One endpoint. ``error``: why it cannot be used, with ``hint``."""

    endpoint: str
    version: str = ""
    error: str = ""
    hint: str = ""


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """One operation of an agent on etcd, below the run's prefix."""

    name: str
    error: str


@dataclass(frozen=True, kw_only=True)
class CertificateFacts:
    """When a certificate expires. ``error``: why that is unknown."""

    name: str
    expires_in_s: float = 0.0
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class EtcdFacts:
    """All facts about one etcd cluster."""

    members: tuple[MemberFacts, ...]
    alarms: tuple[str, ...] = ()
    alarms_error: str = ""
    root: str = ""
    steps: tuple[StepFacts, ...] = ()
    read_ms: tuple[float, ...] = ()
    write_ms: tuple[float, ...] = ()
    certificates: tuple[CertificateFacts, ...] = ()

    @property
    def reachable(self) -> bool:
        return any(not member.error for member in self.members)


def quick(config: EtcdConfig) -> EtcdConfig:
    """The same etcd, with the deadlines of a check."""
    return replace(
        config,
        connect_timeout_s=min(config.connect_timeout_s, DOCTOR_ETCD_CONNECT_S),
        request_timeout_s=DOCTOR_ETCD_CALL_S,
    )


def inspect(config: EtcdConfig, root: str) -> EtcdFacts:
    """Query each member, then run an agent's operations below ``root``. Ends within seconds."""
    with ThreadPoolExecutor(len(config.endpoints), "elastic-doctor-etcd") as pool:
        members = tuple(pool.map(lambda e: _member(config, e), config.endpoints))
    usable = [e for e, m in zip(config.endpoints, members, strict=True) if not m.error]
    if not usable:
        return EtcdFacts(members=members)
    try:
        store = EtcdStore(quick(replace(config, endpoints=tuple(usable))))
    except CoordinationError as error:  # it became unreachable
        gone = tuple(replace(m, error=error.message, hint=error.hint) for m in members)
        return EtcdFacts(members=gone)
    try:
        alarms, alarms_error = _alarms(store)
        steps = tuple(permissions(store, root))
        read_ms, write_ms = _latencies(store, root)
    finally:
        store.close()
    return EtcdFacts(
        members=members,
        alarms=alarms,
        alarms_error=alarms_error,
        root=root,
        steps=steps,
        read_ms=read_ms,
        write_ms=write_ms,
        certificates=tuple(_server_certificate(config, e) for e in usable) if config.tls else (),
    )


def permissions(store: KeyValue, root: str) -> Iterator[StepFacts]:
    """Lease, write, read, watch and delete a key below ``root``; nothing is left behind."""
    key = f"{root}doctor/{secrets.token_hex(6)}"
    with _Seen(store, key) as seen:
        yield _step("watch", seen.wait_until_it_listens)
        try:
            lease = store.lease(DOCTOR_LEASE_S)
        except CoordinationError as error:
            yield StepFacts(name="lease", error=error.message)
            return
        yield StepFacts(name="lease", error="")
        try:
            yield _step("write", lambda: store.put(key, b"doctor", lease=lease))
            yield _step("read", lambda: store.get(key))
            yield _step("watched write", seen.wait_for_write)
            yield _step("delete", lambda: store.delete(key))
        finally:
            lease.close()


class _Seen:
    """Watches one key and waits for the expected events."""

    def __init__(self, store: KeyValue, key: str) -> None:
        self._listens, self._written = threading.Event(), threading.Event()
        self._watch = store.watch([key], self._on_event, name="doctor")

    def __enter__(self) -> _Seen:
        return self

    def __exit__(self, *unused: object) -> None:
        self._watch.close()

    def wait_until_it_listens(self) -> None:
        self._wait(self._listens, "etcd does not serve the watch")

    def wait_for_write(self) -> None:
        self._wait(self._written, "the watch did not report the write")

    def _wait(self, event: threading.Event, otherwise: str) -> None:
        if not SYSTEM_CLOCK.wait(event, DOCTOR_ETCD_CALL_S):
            raise CoordinationError(f"{otherwise} within {DOCTOR_ETCD_CALL_S:g} s")

    def _on_event(self, event: WatchEvent) -> None:
        if isinstance(event, Reset):
            self._listens.set()
        elif isinstance(event, Put):
            self._written.set()


def _step(name: str, do: Callable[[], object]) -> StepFacts:
    try:
        do()
    except CoordinationError as error:
        return StepFacts(name=name, error=error.message)
    return StepFacts(name=name, error="")


def _member(config: EtcdConfig, endpoint: Endpoint) -> MemberFacts:
    try:
        store = EtcdStore(quick(replace(config, endpoints=(endpoint,))))
    except ElasticError as error:
        return MemberFacts(endpoint=str(endpoint), error=error.message, hint=error.hint)
    try:
        return MemberFacts(endpoint=str(endpoint), version=store.version())
    except CoordinationError as error:
        return MemberFacts(endpoint=str(endpoint), error=error.message, hint=error.hint)
    finally:
        store.close()


def _alarms(store: EtcdStore) -> tuple[tuple[str, ...], str]:
    try:
        return store.alarms(), ""
    except StoreRefused:
        return (), "this user may not list alarms"
    except CoordinationError as error:
        return (), error.message


def _latencies(store: EtcdStore, root: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Durations of linearizable reads and writes, in milliseconds; none if they fail."""
    key = f"{root}doctor/latency-{secrets.token_hex(6)}"
    try:
        lease = store.lease(DOCTOR_LEASE_S)
        try:
            write_ms = tuple(_timed(lambda: store.put(key, b"x", lease=lease)))
            read_ms = tuple(_timed(lambda: store.get(key)))
        finally:
            lease.close()
    except CoordinationError:
        return (), ()
    return read_ms, write_ms


def _timed(call: Callable[[], object]) -> Iterator[float]:
    ends_s = SYSTEM_CLOCK.monotonic() + DOCTOR_ETCD_CALL_S
    for _ in range(SAMPLES):
        began = SYSTEM_CLOCK.monotonic()
        call()
        now = SYSTEM_CLOCK.monotonic()
        yield 1000 * (now - began)
        if now > ends_s:  # etcd is slow: fewer samples suffice
            return


# Certificates --------------------------------------------------------------------------------


def own_certificates(options: AgentOptions) -> tuple[CertificateFacts, ...]:
    """Facts about the certificate files in an agent's options, for etcd and other nodes."""
    names = ("cacert", "cert", "node_cacert", "node_cert")
    given = [(name, getattr(options, name)) for name in names]
    return tuple(_of_file(f"{name}={path}", path) for name, path in given if path)


def _of_file(name: str, path: str) -> CertificateFacts:
    try:
        found = _CERTIFICATE.findall(Path(path).read_text())
        if not found:
            return CertificateFacts(name=name, error="it contains no certificate")
        # The first is the subject's own; of several authorities, one valid suffices.
        ends = [not_after(base64.b64decode(text)) for text in found]
        expires = max(ends) if "cacert" in name.partition("=")[0] else ends[0]
        return CertificateFacts(name=name, expires_in_s=expires - SYSTEM_CLOCK.wall())
    except (OSError, ValueError) as error:
        return CertificateFacts(name=name, error=str(error))


def _server_certificate(config: EtcdConfig, endpoint: Endpoint) -> CertificateFacts:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    name = f"server certificate of {endpoint}"
    try:
        if config.cert and config.key:
            context.load_cert_chain(config.cert, config.key)
        with (
            socket.create_connection(endpoint[:2], timeout=DOCTOR_ETCD_CALL_S) as plain,
            context.wrap_socket(plain, server_hostname=endpoint.host) as secured,
        ):
            der = secured.getpeercert(binary_form=True)
        assert der is not None  # a TLS server always sends one
        expires = not_after(der)
    except (OSError, ValueError) as error:
        return CertificateFacts(name=name, error=str(error))
    return CertificateFacts(name=name, expires_in_s=expires - SYSTEM_CLOCK.wall())


def not_after(der: bytes) -> float:
    """When an X.509 certificate expires, as a Unix time (RFC 5280, section 4.1).

    The standard library reads certificates only once they are verified. Raises ValueError.
    """
    try:
        to_be_signed = next(_elements(next(_elements(der))[1]))[1]
        fields = [f for f in _elements(to_be_signed) if f[0] != 0xA0]  # without the version
        validity = fields[3][1]  # serial number, algorithm, issuer, validity
        _, (tag, text) = _elements(validity)
        form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
        return float(calendar.timegm(time.strptime(text.decode(), form)))
    except (IndexError, StopIteration, UnicodeDecodeError) as error:
        raise ValueError("not an X.509 certificate") from error


def _elements(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Tag and content of the DER elements in ``der``, one after the other."""
    at = 0
    while at < len(der):
        tag, length, at = der[at], der[at + 1], at + 2
        if length & _OCTETS_OF_LENGTH:
            octets = length & ~_OCTETS_OF_LENGTH
            length, at = int.from_bytes(der[at : at + octets], "big"), at + octets
        yield tag, der[at : at + length]
        at += length
