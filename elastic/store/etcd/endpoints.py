"""Endpoints and credentials of etcd, validated early."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from elastic.errors import ConfigError
from elastic.tuning.agent_intervals import STORE_CALL_S, STORE_CONNECT_S

DEFAULT_PORT = 2379
_HINT = "write host, host:port, [ipv6]:port or http(s)://host:port, separated by commas"
_PATTERN = re.compile(
    r"(?:(?P<scheme>https?)://)?(?:\[(?P<v6>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^\s:/\[\]@?#]+))"
    r"(?::(?P<port>[0-9]+))?/?"
)


class Endpoint(NamedTuple):
    """One etcd member's client address; ``scheme`` is "http", "https" or "" (not given)."""

    host: str
    port: int = DEFAULT_PORT
    scheme: str = ""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoints(text: str) -> tuple[Endpoint, ...]:
    """Read ``h1:2379,h2,[::1]:2379,https://h3:2379``. Raises ConfigError naming the bad part."""
    parts = [part.strip() for part in text.split(",")]
    endpoints = tuple(dict.fromkeys(_parse_one(part, text) for part in parts if part))
    if not endpoints:
        raise ConfigError(f"no etcd endpoint in --rdzv-endpoint={text!r}", hint=_HINT)
    return endpoints


def _parse_one(part: str, text: str) -> Endpoint:
    match = _PATTERN.fullmatch(part)
    if match is None:
        raise ConfigError(f"etcd endpoint {part!r} (in {text!r}) cannot be read", hint=_HINT)
    port = int(match["port"]) if match["port"] else DEFAULT_PORT
    if not 1 <= port <= 65535:
        raise ConfigError(f"etcd endpoint {part!r}: port {port} is not in 1..65535", hint=_HINT)
    return Endpoint(match["v6"] or match["host"], port, match["scheme"] or "")


@dataclass(frozen=True, kw_only=True)
class EtcdConfig:
    """How to reach etcd. Checked on construction: raises ConfigError naming the values."""

    endpoints: tuple[Endpoint, ...]
    cacert: str | None = None  # PEM file; given, or https:// endpoints: TLS
    cert: str | None = None  # client certificate, PEM file
    key: str | None = None  # its private key, PEM file
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    connect_timeout_s: float = STORE_CONNECT_S  # for the first contact
    request_timeout_s: float = STORE_CALL_S  # for one call, retries included

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise ConfigError("no etcd endpoint given", hint=_HINT)
        if bool(self.cert) != bool(self.key):
            given, lacking = ("cert", "key") if self.cert else ("key", "cert")
            raise ConfigError(
                f"{given} is given without {lacking}",
                hint="a client certificate needs both files: cert and key",
            )
        if bool(self.user) != bool(self.password):
            given, lacking = ("user", "password") if self.user else ("password", "user")
            raise ConfigError(
                f"{given} is given without {lacking}", hint="set both, or neither of them"
            )
        self._check_schemes()
        for name in ("connect_timeout_s", "request_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be positive")

    def _check_schemes(self) -> None:
        schemes = {endpoint.scheme for endpoint in self.endpoints}
        if {"http", "https"} <= schemes:
            raise ConfigError(
                f"http:// and https:// are mixed in {', '.join(map(str, self.endpoints))}",
                hint="all members of an etcd cluster use the same scheme",
            )
        if "http" in schemes and (self.cacert or self.cert):
            raise ConfigError(
                f"http:// endpoints with a certificate ({self.cacert or self.cert})",
                hint="write https://, or omit cacert, cert and key",
            )

    @property
    def tls(self) -> bool:
        """Whether connections are encrypted."""
        return bool(self.cacert or self.cert) or any(e.scheme == "https" for e in self.endpoints)


def read_pem(name: str, path: str | None) -> bytes | None:
    """The bytes of a certificate or key file. Raises ConfigError naming option and path."""
    if path is None:
        return None
    try:
        pem = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{name}={path} cannot be read ({error.strerror})",
            hint="give the path of a PEM file that this process may read",
        ) from None
    if b"-----BEGIN " not in pem:
        raise ConfigError(
            f"{name}={path} holds nothing in PEM format",
            hint="PEM files have lines like -----BEGIN CERTIFICATE-----",
        )
    return pem
