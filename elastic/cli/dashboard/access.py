"""Access control of the page: pure decisions on the headers of a request.

On loopback every user of the machine has access unless a token is set. A web site whose name is
resolved to 127.0.0.1 (DNS rebinding) is detected by the Host header. On any other address a token
is required: as ``Authorization: Bearer``, or once as ``?token=``, which sets a cookie.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from elastic.errors import ConfigError
from elastic.node.address import is_loopback

MIN_TOKEN = 16  # characters
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
# kubelet and load balancers have no token; the check reveals only whether the server is alive.
OPEN_PATHS = frozenset({"/healthz"})


class AccessVerdict(Enum):
    """The decision on a request."""

    ALLOWED = "allowed"
    WRONG_HOST = "wrong host"
    NO_TOKEN = "no token"
    TOKEN_IN_QUERY = "token in query"  # correct: set the cookie and redirect to the URL without it


@dataclass(frozen=True)
class AccessPolicy:
    """``token``: None requires none. ``hosts``: the accepted Host headers; None accepts all."""

    token: str | None
    hosts: frozenset[str] | None
    cookie: str = "elastic-dashboard"

    def judge(
        self, *, host: str, path: str, authorization: str, cookie: str, query_token: str
    ) -> AccessVerdict:
        """Credentials of one request. ``cookie``: the value of the dashboard's cookie."""
        if self.hosts is not None and host_name(host) not in self.hosts:
            return AccessVerdict.WRONG_HOST
        if self.token is None or path in OPEN_PATHS:
            return AccessVerdict.ALLOWED
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() == "bearer" and _is_same(given.strip(), self.token):
            return AccessVerdict.ALLOWED
        if _is_same(cookie, self.cookie_value):
            return AccessVerdict.ALLOWED
        if path == "/" and _is_same(query_token, self.token):
            return AccessVerdict.TOKEN_IN_QUERY
        return AccessVerdict.NO_TOKEN

    @property
    def cookie_value(self) -> str:
        """A value that proves knowledge of the token without containing it."""
        token = (self.token or "").encode()
        return hmac.new(token, b"elastic dashboard cookie", hashlib.sha256).hexdigest()


def policy_of(
    host: str, port: int, token: str | None, allowed_hosts: tuple[str, ...] = ()
) -> AccessPolicy:
    """The policy of a server at ``host``. Raises ConfigError if it would be open to a network."""
    is_local = is_loopback(host)
    if not is_local and token is None:
        raise ConfigError(
            f"--host={host} would show the job to the network without a token",
            hint="head -c 24 /dev/urandom | base64 > token; elastic dashboard "
            f"--host={host} --token-file=token",
        )
    extra = frozenset(host_name(name) for name in allowed_hosts)
    if is_local:
        hosts: frozenset[str] | None = LOOPBACK_NAMES | {host_name(host)} | extra
    else:
        hosts = extra or None  # a rebound site does not receive a cookie set under another name
    return AccessPolicy(token, hosts, f"elastic-dashboard-{port}")


def host_name(header: str) -> str:
    """The name in a Host header, without the port.

    >>> [host_name(h) for h in ("Localhost.:80", "[::1]:80", "::1", "10.0.0.1")]
    ['localhost', '::1', '::1', '10.0.0.1']
    """
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    if header.count(":") == 1:
        header = header.partition(":")[0]
    return header.rstrip(".")


def read_token(path: str) -> str:
    """The token in the first line of a file. Raises ConfigError."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--token-file={path} cannot be read: {error}",
            hint="name a file that contains the token",
        ) from error
    return checked_token(lines[0].strip() if lines else "", f"--token-file={path}")


def checked_token(token: str, place: str) -> str:
    """The token. Raises ConfigError if it is too short, or no header can hold it."""
    if len(token) < MIN_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{place}: a token has at least {MIN_TOKEN} printable ASCII characters and no spaces",
            hint="head -c 24 /dev/urandom | base64 > token",
        )
    return token


def _is_same(given: str, expected: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(given.encode(errors="surrogatepass"), expected.encode())
