"""The leader's verdicts on the published facts, and the request to the culprit's node."""

from __future__ import annotations

from dataclasses import replace

from kit.journal import MemoryJournal
from kit.manual_clock import ManualClock
from kit.membership_nodes import node, world
from kit.memory_store import MemoryStore
from rank_facts import rank_facts

from elastic.agent.judges import HangJudge
from elastic.agent.node import NodeContext, NodeStatus, RunSecret, WorldEntry
from elastic.hangs.page import KernelFacts, Phase, RankFacts
from elastic.hangs.verdict import HangAction
from elastic.membership.records import (
    HangFacts,
    HangVerdict,
    Keys,
    NodeState,
    WorldRecord,
    decode,
    encode,
)
from elastic.tuning.options import AgentOptions
from elastic.wire.handshake import SecretKey

KEYS = Keys.of("/elastic", "job")
WORLD = replace(world("n1", "n2", "n3"), generation=7)


class Leader:
    def __init__(self, running: WorldRecord = WORLD) -> None:
        self.store = MemoryStore()
        self.world_revision = 0  # as this leader knows it
        record = node("n1", NodeState.READY, in_process=True, running=running)
        self.judge = HangJudge(
            NodeContext(
                store=self.store,
                keys=KEYS,
                secret=RunSecret(SecretKey.generate(), KEYS.root),
                options=AgentOptions(),
                status=NodeStatus(record, KEYS, 0.0),
                clock=ManualClock(),
                journal=MemoryJournal(),
            ),
            lambda: (KEYS.leader, 0),
        )

    def receives_facts(self, *ranks: RankFacts, generation: int = 7) -> None:
        """Facts of nodes with one rank each."""
        for facts in ranks:
            node_id = f"id-{facts.node}"
            record = HangFacts(node_id=node_id, generation=generation, ranks=(facts,))
            self.judge.put(KEYS.hang(node_id), record)

    def verdict(self, of: WorldRecord = WORLD) -> HangVerdict | None:
        self.judge.judge(WorldEntry(of, self.world_revision, 0.0))
        entry = self.store.get(KEYS.hang_verdict)
        return decode(HangVerdict, entry.key, entry.value) if entry is not None else None

    @property
    def revision(self) -> int:
        entry = self.store.get(KEYS.hang_verdict)
        return entry.mod_revision if entry is not None else 0


def rank(number: int, phase: Phase = Phase.COLLECTIVE, quiet_s: float = 4.0) -> RankFacts:
    return rank_facts(
        number,
        node=f"n{number + 1}",
        pid=100 + number,
        phase=phase,
        progress=4000 + number,
        quiet_s=quiet_s,
        kernel=KernelFacts(state="R", cpu_share=1.0),
    )


def test_the_verdict_is_sent_once_to_the_culprits_node() -> None:
    leader = Leader()
    leader.receives_facts(rank(0), rank(2, Phase.COMPUTE))
    verdict = leader.verdict()
    assert verdict is not None
    assert (verdict.action, verdict.culprits, verdict.node_id) == (HangAction.KILL, (2,), "id-n3")
    assert verdict.culprit == rank(2, Phase.COMPUTE)
    revision = leader.revision
    leader.receives_facts(replace(rank(0), quiet_s=14.0))
    leader.verdict()
    assert leader.revision == revision


def test_no_verdict_before_every_node_has_published_facts() -> None:
    """A node publishes only ranks without progress, so that its ranks may still be running."""
    leader = Leader()
    leader.receives_facts(rank(0, quiet_s=60.0), rank(1, quiet_s=60.0))
    assert leader.verdict() is None
    leader.receives_facts(rank(2, quiet_s=60.0))
    verdict = leader.verdict()
    assert verdict is not None
    assert (verdict.action, verdict.node_id) == (HangAction.ABORT_AND_REFORM, "id-n1")


def test_a_former_leader_writes_no_verdict() -> None:
    leader = Leader()
    leader.receives_facts(*(rank(n, quiet_s=60.0) for n in range(3)))
    leader.world_revision = leader.store.put(KEYS.world, b"7")
    successors = leader.store.put(KEYS.world, b"8")
    assert leader.verdict() is None
    leader.world_revision = successors
    assert leader.verdict() is not None


def test_facts_of_an_earlier_world_are_ignored() -> None:
    leader = Leader()
    leader.receives_facts(rank(0, quiet_s=60.0), rank(1, quiet_s=60.0), generation=6)
    assert leader.verdict(replace(world("n1", "n2"), generation=7)) is None


def test_the_facts_of_a_node_that_resumed_are_discarded() -> None:
    leader = Leader()
    leader.receives_facts(rank(0), rank(2, Phase.COMPUTE))
    leader.judge.delete(KEYS.hang("id-n3"))
    assert leader.verdict() is None


def test_facts_of_nodes_outside_the_world_are_ignored() -> None:
    leader = Leader()
    leader.receives_facts(rank(0), rank(2, Phase.COMPUTE))
    assert leader.verdict(replace(world("n1", "n2"), generation=7)) is None


def test_a_planned_world_is_judged_without_its_joining_nodes() -> None:
    """The facts of joining ranks are not required, and the ranks that train are judged."""
    leader = Leader()
    planned = replace(world("n1", "n2", "n3", "n4"), generation=8, switch_at_step=60)
    leader.receives_facts(*(rank(n, quiet_s=60.0) for n in range(3)), generation=8)
    verdict = leader.verdict(planned)
    assert verdict is not None
    assert (verdict.action, verdict.size) == (HangAction.ABORT_AND_REFORM, 3)


def test_joining_ranks_that_wait_for_a_planned_world_are_not_hung() -> None:
    """The others reach the switch step later: they evaluate, or their steps are long."""
    leader = Leader()
    planned = replace(world("n1", "n2", "n3", "n4"), generation=8, switch_at_step=60)
    waiting = replace(rank(3, Phase.FORMING, quiet_s=2000.0), generation=8)
    leader.receives_facts(waiting, generation=8)
    assert leader.verdict(planned) is None
    leader.receives_facts(*(rank(n, quiet_s=60.0) for n in range(3)), generation=8)
    verdict = leader.verdict(planned)
    assert verdict is not None, "and a hang of those that train is found meanwhile"
    assert (verdict.action, verdict.size) == (HangAction.ABORT_AND_REFORM, 3)


def test_the_verdict_on_a_large_hang_is_a_small_record() -> None:
    """etcd accepts 1.5 MiB: the facts of all ranks of 360 such nodes are more."""
    names = [f"n{number}" for number in range(1, 1001)]
    large = world(*names, limits=(2, 2000))
    members = tuple(replace(member, nproc=8) for member in large.members)
    large = replace(large, members=members, generation=7)
    leader = Leader(large)
    for index, name in enumerate(names):
        ranks = tuple(
            replace(rank(8 * index + local), node=name, local_rank=local) for local in range(8)
        )
        if name == "n4":
            ranks = (*ranks[:3], replace(ranks[3], phase=Phase.COMPUTE), *ranks[4:])
        facts = HangFacts(node_id=f"id-{name}", generation=7, ranks=ranks)
        leader.judge.put(KEYS.hang(f"id-{name}"), facts)
    verdict = leader.verdict(large)
    assert verdict is not None
    assert (verdict.action, verdict.culprits, verdict.node_id) == (HangAction.KILL, (27,), "id-n4")
    assert 27 in {facts.rank for facts in verdict.ranks}
    assert len({facts.phase for facts in verdict.ranks}) == 2
    assert len(encode(verdict)) < 64 << 10


def test_a_reset_replaces_the_facts_with_those_of_the_store() -> None:
    leader = Leader()
    leader.receives_facts(rank(0), rank(2, Phase.COMPUTE))
    leader.judge.reset()
    assert leader.verdict() is None
