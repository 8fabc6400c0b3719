"""The leader's probes: those that a decision waits for come first."""

from __future__ import annotations

import threading

import pytest
from kit.journal import MemoryJournal
from kit.manual_clock import ManualClock
from kit.membership_nodes import node
from kit.memory_store import MemoryStore

from elastic.agent import leader
from elastic.agent.leader import RECHECK_S, Probed, Prober
from elastic.agent.liveness import Connections, Verdict
from elastic.agent.node import NodeContext, NodeStatus, RunSecret
from elastic.agent.roster import Roster
from elastic.membership.records import Keys
from elastic.membership.view import Liveness
from elastic.testing.waiting import PATIENCE_S
from elastic.tuning.options import AgentOptions
from elastic.wire.handshake import SecretKey

KEYS = Keys.of("/elastic", "job")
SILENT = Verdict(Liveness.SUSPECT, "silent")


def test_probes_of_silent_nodes_do_not_delay_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a large cluster may be cut off, and a probe of each takes probe_s."""
    is_over = threading.Event()

    def probe(host: str, *args: object, **options: object) -> Verdict:
        if host != "10.0.0.1":
            is_over.wait(PATIENCE_S)
        return SILENT

    monkeypatch.setattr(leader, "probe", probe)
    context = NodeContext(
        store=MemoryStore(),
        keys=KEYS,
        secret=RunSecret(SecretKey.generate(), KEYS.root),
        options=AgentOptions(),
        status=NodeStatus(node("n1"), KEYS, 0.0),
        clock=ManualClock(),
        journal=MemoryJournal(),
    )
    roster = Roster(KEYS, Connections())
    for number in range(1, 101):
        roster.put(node(f"n{number}"), 1, 0.0)
        roster.resolve(f"id-n{number}", SILENT, 0.0)
    prober = Prober(context, roster)
    try:
        for turn in range(5):
            prober.start_probes(None, turn * RECHECK_S)
        roster.suspect("id-n1", 9.0)
        prober.start_probes(None, 9.0)
        (first,) = context.inbox.take(PATIENCE_S)
        assert isinstance(first, Probed) and first.node_id == "id-n1"
    finally:
        is_over.set()
        prober.close()
