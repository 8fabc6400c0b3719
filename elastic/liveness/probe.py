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
    """The result of a probe, and the reason for it."""

    liveness: Liveness
    reason: str
    reset: bool = False  # the connection was accepted and then reset
    refused: bool = False  # no agent with that id listens there: half of the proof (connections.py)


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

    A refusal, or a response from another agent, is half of the proof that the process has ended: a
    live agent never closes its port, but a firewall may refuse connections to it. For the other
    half see :mod:`elastic.liveness.connections`. A timeout proves nothing, nor does a response from
    another server: only agents of this run have ``key``. If a connection is accepted and then
    reset, the agent is dying, and is probed again after PROBE_AGAIN_S.
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
            # Without this agent's proof the connection does not count as a follower's.
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
