"""The address of this node for the others, resolved once, before it is published.

Names are resolved only on this node. Others would have to resolve them at every connection, on
threads that must not block, and many machines resolve their own name to 127.0.1.1.
"""

from __future__ import annotations

import ipaddress
import socket

import tenacity

from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.errors import ConfigError
from elastic.store.etcd.endpoints import Endpoint
from elastic.tuning.agent_intervals import RESOLVE_AGAIN_S


def own_address(
    configured: str, endpoint: Endpoint | None, *, within_s: float, clock: Clock = SYSTEM_CLOCK
) -> str:
    """The address behind ``configured``, an address or a name; if it is empty or a name for the
    loopback interface, this machine's address on the way to etcd (``endpoint``).

    Raises ConfigError if the name cannot be resolved within ``within_s``.
    """
    if not configured:
        return _towards(endpoint) or _of_this_host()
    if _is_address(configured):
        return configured
    found = _resolve(configured, within_s, clock)
    reachable = [address for address in found if not ipaddress.ip_address(address).is_loopback]
    if reachable or configured == "localhost":
        return (reachable or found)[0]
    return _towards(endpoint) or found[0]


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to ``host``.

    >>> [is_loopback(h) for h in ("localhost", "127.0.0.2", "::1", "0.0.0.0", "node-a")]
    [True, True, True, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _resolve(name: str, within_s: float, clock: Clock) -> list[str]:
    """The addresses of a name, IPv4 first, as for a listener on that name."""
    attempts = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(OSError),
        stop=tenacity.stop_after_attempt(1 + int(within_s / RESOLVE_AGAIN_S)),
        wait=tenacity.wait_fixed(RESOLVE_AGAIN_S),
        sleep=clock.sleep,
        reraise=True,
    )
    try:
        return attempts(_addresses, name)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--local-addr={name} cannot be resolved on this node: {error}",
            hint="give the IP address at which the other nodes reach this one",
        ) from error


def _addresses(name: str) -> list[str]:
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    found.sort(
        key=lambda entry: entry[0] != socket.AF_INET
    )  # stable: otherwise in the system's order
    return [str(entry[4][0]) for entry in found]


def _towards(endpoint: Endpoint | None) -> str:
    """This machine's address on the route to etcd: most likely reachable by the other nodes.

    Connecting a datagram socket sends nothing; it makes the kernel choose the route.
    """
    if endpoint is None:
        return ""
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, target = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _of_this_host() -> str:
    try:
        return _addresses(socket.gethostname())[0]
    except OSError as error:
        raise ConfigError(
            f"the address of this node is unknown: {socket.gethostname()!r} cannot be resolved "
            f"({error})",
            hint="give the IP address at which the other nodes reach it, with --local-addr",
        ) from error
