"""Check whether an agent is alive: one connection, one round trip, a verdict."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass

from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.membership.view import Liveness
from elastic.secure_channel.channel import Channel
from elastic.secure_channel.errors import ProtocolError
from elastic.secure_channel.keys import SecretKey
from elastic.secure_channel.tls import Tls
from elastic.tuning.agent_intervals import PROBE_AGAIN_S


@dataclass(frozen=True)
class Verdict:
    """What a probe found."""

    liveness: Liveness
    reason: str
    reset: bool = False  # the connection was accepted and then reset
    refused: bool = False  # no agent with that id listens there: half of a proof (connections.py)


def probe(
    host: str,
    port: int,
    node_id: str,
    *,
    key: SecretKey,
    timeout_s: float,
    tls: Tls | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> Verdict:
    """Have the agent at ``host:port`` prove that it is ``node_id``.

    Refused, or answered by another agent: half of a proof that the process is gone, for a live
    agent never closes its port, but a firewall may refuse for it. For the other half see
    :mod:`elastic.liveness.connections`. A timeout is no proof, nor is another server's answer:
    only agents of this run know ``key``. A connection that is accepted and reset has met an agent
    dying: it is probed again once its port refuses.
    """
    verdict = _probe(host, port, node_id, key, timeout_s, tls)
    if verdict.reset:
        clock.sleep(PROBE_AGAIN_S)
        verdict = _probe(host, port, node_id, key, timeout_s, tls)
    return verdict


def _probe(
    host: str, port: int, node_id: str, key: SecretKey, timeout_s: float, tls: Tls | None
) -> Verdict:
    try:
        with (
            socket.create_connection((host, port), timeout=timeout_s) as connection,
            contextlib.closing(Channel(connection, timeout_s=timeout_s, tls=tls)) as channel,
        ):
            # Without our proof it counts as no follower.
            found = channel.authenticate(key, expected=None, proves=False)
    except ConnectionRefusedError:
        return Verdict(Liveness.SUSPECT, f"{host}:{port} refuses connections", refused=True)
    except ConnectionResetError:
        return Verdict(Liveness.SUSPECT, f"{host}:{port} reset the connection", reset=True)
    except ProtocolError as error:
        return Verdict(Liveness.SUSPECT, f"{host}:{port} is not an agent of this run: {error}")
    except OSError as error:
        return Verdict(Liveness.SUSPECT, f"{host}:{port} is silent ({error})")
    if found == node_id:
        return Verdict(Liveness.ALIVE, f"{host}:{port} answers")
    return Verdict(Liveness.SUSPECT, f"{host}:{port} is now another agent", refused=True)
