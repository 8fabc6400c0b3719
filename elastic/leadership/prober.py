"""Probes of the nodes whose liveness is in question, on separate threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from elastic.leadership.roster import Roster
from elastic.liveness.probe import Verdict, probe
from elastic.membership.decision import Liveness
from elastic.membership.records import ProcessDigest, WorldRecord
from elastic.node.context import NodeContext
from elastic.node.identity import proved_gone
from elastic.node.run_secret import LIVENESS
from elastic.tuning.agent_intervals import RECHECK_S

_MAX_PROBES = 16  # at the same time


@dataclass(frozen=True)
class Probed:
    """A probe's verdict, posted to the service's inbox."""

    node_id: str
    verdict: Verdict


class Prober:
    """Probes nodes during one term as leader, one probe per node at a time; posts each verdict as
    :class:`Probed`."""

    def __init__(self, context: NodeContext, roster: Roster) -> None:
        self._at = context
        self._roster = roster
        self._in_flight: set[str] = set()
        self._next_recheck_s = 0.0
        self._threads = ThreadPoolExecutor(_MAX_PROBES, thread_name_prefix="elastic-probe")

    def close(self) -> None:
        """Wait for the probes in flight; no verdict is posted afterwards."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def on_probed(self, probed: Probed) -> None:
        """A probe has ended: the node can be probed again."""
        self._in_flight.discard(probed.node_id)

    def start_probes(self, world: WorldRecord | None, now: float) -> None:
        """Probe the suspected nodes, and periodically also those without a connection."""
        due = set(self._roster.unsettled() | self._roster.unreached())
        if now >= self._next_recheck_s:
            due.update(self._roster.silent())
            self._next_recheck_s = now + RECHECK_S
        members = {m.node_id: m for m in world.members} if world is not None else {}
        for node_id in due - self._in_flight:
            known = self._roster.find(node_id)
            member = members.get(node_id) or (known.node.as_member() if known else None)
            if member is None:
                self._roster.settle(node_id, Verdict(Liveness.SUSPECT, "no address"), now)
                continue
            self._in_flight.add(node_id)
            self._threads.submit(
                self._probe, node_id, member.liveness_host, member.liveness_port, member.process
            )

    def _probe(self, node_id: str, host: str, port: int, process: ProcessDigest) -> None:
        if proved_gone(process, self._at.status.node.process):
            verdict = Verdict(Liveness.DEAD, f"its process {process.pid} no longer exists")
        else:
            timeout_s, clock = self._at.options.probe_s, self._at.clock
            key = self._at.secret.key(LIVENESS)
            verdict = probe(
                host, port, node_id, key=key, timeout_s=timeout_s, tls=self._at.tls, clock=clock
            )
        self._at.post(Probed(node_id, verdict))
