"""Ask an agent whether it is there: one connection, one line each way, a verdict."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass

from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.coordination.view import Liveness

MAX_LINE = 1024
RESET_AGAIN_S = 0.05


@dataclass(frozen=True)
class Verdict:
    """What a probe found."""

    liveness: Liveness
    reason: str
    reset: bool = False  # the connection was accepted and then reset
    refused: bool = False  # nobody of that name listens there: half of a proof (connections.py)


def probe(
    host: str, port: int, node_id: str, *, timeout_s: float, clock: Clock = SYSTEM_CLOCK
) -> Verdict:
    """Ask the agent at ``host:port`` whether it is ``node_id``.

    Refused, or answered by another agent: half of a proof that the process is gone, for a live
    agent never closes its port, but a firewall refuses in its name. What the other half is, says
    :mod:`elastic.agent.connections`. Silence is no proof at all. A connection that is accepted
    and reset has met an agent dying: it is asked again, when its port refuses.
    """
    verdict = _probe(host, port, node_id, timeout_s)
    if verdict.reset:
        clock.sleep(RESET_AGAIN_S)
        verdict = _probe(host, port, node_id, timeout_s)
    return verdict


def _probe(host: str, port: int, node_id: str, timeout_s: float) -> Verdict:
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as connection:
            connection.sendall(to_line({"probe": node_id}))
            answer = _read_line(connection)
    except ConnectionRefusedError:
        return Verdict(Liveness.SUSPECT, f"{host}:{port} refuses connections", refused=True)
    except ConnectionResetError:
        return Verdict(Liveness.SUSPECT, f"{host}:{port} reset the connection", reset=True)
    except OSError as error:
        return Verdict(Liveness.SUSPECT, f"{host}:{port} is silent ({error})")
    if answer.get("node_id") == node_id:
        return Verdict(Liveness.ALIVE, f"{host}:{port} answers")
    if isinstance(answer.get("node_id"), str):
        return Verdict(Liveness.SUSPECT, f"{host}:{port} is now another agent", refused=True)
    return Verdict(Liveness.SUSPECT, f"{host}:{port} does not speak this protocol")


def _read_line(connection: socket.socket) -> dict[str, object]:
    data = b""
    while not data.endswith(b"\n"):
        if len(data) > MAX_LINE:
            return {}
        chunk = connection.recv(MAX_LINE)
        if not chunk:
            raise ConnectionResetError
        data += chunk
    return from_line(data) or {}


def to_line(message: dict[str, str]) -> bytes:
    """A message as it goes over the wire."""
    return json.dumps(message).encode() + b"\n"


def from_line(line: bytes) -> dict[str, object] | None:
    """The message of a line; None if it is not a JSON object."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None
