"""The evidence that proves a node's death or reopens the verdict, as the leader records it."""

from __future__ import annotations

from dataclasses import replace

from kit.membership_nodes import node, world

from elastic.agent.liveness import Connections, Verdict
from elastic.agent.roster import Roster
from elastic.membership.budget import FlapTracker
from elastic.membership.decision import decide
from elastic.membership.records import Keys, NodeState, group_of
from elastic.membership.view import Liveness, Policy, Proposal
from elastic.wire.messages import WorldReference

KEYS = Keys.of("/elastic", "job")
NODE = node("n1", NodeState.READY)
ID = NODE.node_id
WORLD = world("n1", "n2")
REFUSED = Verdict(Liveness.SUSPECT, "refuses connections", refused=True)
SILENT = Verdict(Liveness.SUSPECT, "is silent")
ALIVE = Verdict(Liveness.ALIVE, "answers")
GONE = Verdict(Liveness.DEAD, "its process no longer exists")


class Leader:
    """A roster that knows one node, which is registered and connected, and has been probed."""

    def __init__(self) -> None:
        self.connections = Connections()
        self.connections.opened(ID, False)
        self.roster = Roster(KEYS, self.connections)
        self.registers()
        self.roster.resolve(ID, ALIVE, 1.0)

    def registers(self) -> None:
        self.roster.put(NODE, 7, now=1.0)

    def hangs_up(self) -> None:
        self.connections.closed(ID, False)
        self.roster.suspect(ID, 2.0)

    def loses_its_lease(self) -> None:
        self.roster.delete(ID, 2.0)

    def answers(self, verdict: Verdict) -> Liveness:
        self.roster.resolve(ID, verdict, 3.0)
        return self.liveness

    @property
    def liveness(self) -> Liveness:
        view = self.roster.view(WORLD, 0.0, done=None, quarantined={})
        if not view.nodes:
            return Liveness.DEAD if view.missing[0].proved_dead else Liveness.SUSPECT
        return view.nodes[0].liveness


def test_a_refusal_with_a_lease_and_a_connection_proves_no_death() -> None:
    leader = Leader()
    leader.roster.suspect(ID, 2.0)
    assert leader.answers(REFUSED) is Liveness.SUSPECT
    assert leader.roster.silent() == (ID,), "it is asked again"


def test_a_refusal_and_a_closed_connection_prove_a_death() -> None:
    leader = Leader()
    leader.hangs_up()
    assert leader.answers(REFUSED) is Liveness.DEAD


def test_a_refusal_and_a_lost_lease_prove_a_death() -> None:
    leader = Leader()
    leader.roster.suspect(ID, 2.0)
    assert leader.answers(REFUSED) is Liveness.SUSPECT
    leader.loses_its_lease()
    assert ID in leader.roster.unresolved()
    assert leader.answers(REFUSED) is Liveness.DEAD


def test_a_new_node_is_not_admitted_before_it_has_answered() -> None:
    """It may have a certificate that this leader does not accept."""
    roster = Roster(KEYS, Connections())
    for i, name in enumerate(("n1", "n2"), 1):
        roster.put(node(name, limits=(1, 2)), i, now=1.0)
    assert roster.unreached() == {"id-n1", "id-n2"}
    assert not roster.unresolved(), "decisions do not wait for it"
    assert roster.resolve("id-n2", SILENT, 2.0) is Liveness.SUSPECT
    roster.resolve("id-n1", ALIVE, 2.0)
    assert not roster.unreached()
    view = roster.view(None, 0.0, done=None, quarantined={})
    decision = decide(view, 100.0, Policy(min_nodes=1, max_nodes=2))
    assert isinstance(decision, Proposal)
    assert [n.name for n in decision.nodes] == ["n1"]
    assert roster.silent() == ("id-n2",)


def test_a_leader_does_not_suspect_itself() -> None:
    """It may be too busy to answer its own probe, and would exclude itself."""
    roster = Roster(KEYS, Connections(), own_id=ID)
    roster.suspect_members_without_key(WORLD, 1.0)
    assert ID not in roster.unresolved()
    assert roster.unregistered(WORLD) == (ID,), "its key is about to be seen"
    roster.put(node("n1"), 7, now=1.0)
    roster.suspect_members(WORLD, 2.0)
    roster.delete(ID, 3.0)
    roster.suspect(ID, 3.0)
    assert ID not in roster.unresolved() | roster.unreached()
    assert ID not in roster.silent()
    view = roster.view(WORLD, 0.0, done=None, quarantined={})
    assert [n.liveness for n in view.nodes if n.node.node_id == ID] == [Liveness.ALIVE]


def test_the_record_of_a_finished_node_is_not_polled() -> None:
    roster = Roster(KEYS, Connections())
    ended = node("n1", NodeState.FINISHED, running=WORLD)
    roster.put(ended, 0, now=1.0)
    roster.resolve(ID, REFUSED, 2.0)
    assert roster.silent() == ()
    assert roster.unneeded(None) == (ID,)


def test_the_record_of_a_node_that_has_left_is_not_polled_and_proves_its_departure() -> None:
    roster = Roster(KEYS, Connections())
    leaving = node("n1", NodeState.LEAVING, running=WORLD)
    roster.put(leaving, 7, now=1.0)
    roster.resolve(ID, SILENT, 2.0)
    assert (roster.silent(), roster.unneeded(None)) == ((ID,), ())
    roster.put(replace(leaving, running=None), 0, now=3.0)
    roster.resolve(ID, SILENT, 4.0)
    assert (roster.silent(), roster.unneeded(None)) == ((), (ID,))


def test_a_new_leader_probes_the_nodes_that_may_still_leave() -> None:
    empty = replace(WORLD, members=(), leaving=WORLD.members[:1])
    roster = Roster(KEYS, Connections())
    roster.suspect_members_without_key(empty, 1.0)
    roster.forget_non_members(empty)
    assert roster.unresolved() == {ID}
    roster.resolve(ID, SILENT, 2.0)
    view = roster.view(empty, 0.0, done=None, quarantined={})
    assert [m.may_step for m in view.missing] == [True]
    roster.resolve(ID, GONE, 3.0)
    view = roster.view(empty, 0.0, done=None, quarantined={})
    assert [m.may_step for m in view.missing] == [False]


def test_answers_without_a_key_are_no_sign_of_permitted_workers() -> None:
    """A member that this leader has never seen is cut off from the store: its workers stop."""
    roster = Roster(KEYS, Connections())
    roster.suspect_members_without_key(WORLD, 1.0)
    for now in (2.0, 3.0):
        roster.resolve(ID, ALIVE, now)
    (missing, _) = roster.view(WORLD, 0.0, done=None, quarantined={}).missing
    assert (missing.last_sign_s, missing.is_known) == (1.0, False)


def test_silence_proves_no_death() -> None:
    leader = Leader()
    leader.hangs_up()
    leader.loses_its_lease()
    assert leader.answers(SILENT) is Liveness.SUSPECT


def test_an_answer_to_a_probe_that_began_before_its_connection_closed_proves_no_life() -> None:
    """The node has answered, and died before the verdict arrived."""
    leader = Leader()
    leader.hangs_up()
    assert leader.roster.resolve(ID, ALIVE, 3.0, probed_s=1.5) is None
    assert ID in leader.roster.unresolved(), "it is probed again"
    assert leader.answers(REFUSED) is Liveness.DEAD, "and its lost connection still counts"


def test_a_refusal_from_before_a_new_connection_proves_no_death() -> None:
    leader = Leader()
    leader.loses_its_lease()
    leader.connections.opened(ID, False)
    leader.roster.connection_opened(ID, 2.5)
    assert leader.roster.resolve(ID, REFUSED, 3.0, probed_s=2.2) is None
    assert ID in leader.roster.unresolved(), "it is probed again"
    assert leader.answers(ALIVE) is Liveness.ALIVE


def test_silence_resolves_a_node_whose_connections_come_and_go() -> None:
    """Each probe may take longer than a connection lasts: decisions would never be made."""
    leader = Leader()
    leader.hangs_up()
    assert leader.roster.resolve(ID, SILENT, 3.0, probed_s=1.5) is Liveness.SUSPECT
    assert not leader.roster.unresolved()


def test_silence_does_not_revoke_a_proof() -> None:
    leader = Leader()
    leader.hangs_up()
    leader.answers(REFUSED)
    assert leader.answers(SILENT) is Liveness.DEAD


def test_an_answer_reopens_a_verdict() -> None:
    leader = Leader()
    leader.hangs_up()
    leader.answers(REFUSED)
    assert leader.roster.silent() == (ID,), "a dead node whose lease lives on is asked again"
    assert leader.answers(ALIVE) is Liveness.ALIVE
    # A connection closed before the answer proves nothing after it.
    assert leader.answers(REFUSED) is Liveness.SUSPECT


def test_a_new_connection_reopens_a_verdict() -> None:
    leader = Leader()
    leader.hangs_up()
    leader.answers(REFUSED)
    leader.connections.opened(ID, False)
    leader.roster.connection_opened(ID, 2.5)
    assert ID in leader.roster.unresolved()
    assert leader.answers(REFUSED) is Liveness.SUSPECT


def test_a_new_registration_reopens_a_verdict() -> None:
    leader = Leader()
    leader.loses_its_lease()
    assert leader.answers(REFUSED) is Liveness.DEAD
    leader.registers()
    assert ID in leader.roster.unresolved()
    assert leader.answers(REFUSED) is Liveness.SUSPECT


def test_a_late_record_of_a_dead_node_does_not_revive_it() -> None:
    leader = Leader()
    leader.hangs_up()
    leader.answers(REFUSED)
    leader.registers()
    assert leader.liveness is Liveness.DEAD
    assert leader.answers(REFUSED) is Liveness.DEAD


def test_a_missing_process_alone_proves_a_death() -> None:
    assert Leader().answers(GONE) is Liveness.DEAD


def test_a_connection_that_never_opened_is_not_lost() -> None:
    connections = Connections()
    connections.closed("leader", True)
    assert not connections.is_lost("leader")
    connections.opened("leader", True)
    connections.closed("leader", True)
    assert connections.is_lost("leader")


def test_a_node_with_one_open_connection_is_not_lost() -> None:
    connections = Connections()
    connections.opened(ID, False)
    connections.opened(ID, False)
    connections.closed(ID, False)
    assert not connections.is_lost(ID)
    connections.closed(ID, False)
    assert connections.is_lost(ID)


def test_a_dropped_connection_is_not_lost() -> None:
    connections = Connections()
    connections.opened("leader", True)
    connections.dropped("leader")
    connections.closed("leader", True)
    assert not connections.is_lost("leader")


def test_a_node_found_alive_does_not_count_as_a_failure() -> None:
    flaps = FlapTracker()
    for now in (0.0, 1.0):
        flaps.lost("n1", now)
        flaps.found("n1")
    flaps.lost("n1", 2.0)
    flaps.lost("n1", 3.0)
    assert not flaps.quarantined(3.0)
    flaps.lost("n1", 4.0)
    assert "n1" in flaps.quarantined(4.0)


def test_a_silent_connection_is_not_lost() -> None:
    """Neither end closed it: the process may live behind a firewall that sends refusals."""
    leader = Leader()
    leader.connections.closed(ID, False, is_lost=False)
    assert not leader.connections.is_lost(ID)
    assert leader.answers(REFUSED) is Liveness.SUSPECT


def test_members_with_a_lease_that_do_not_answer_are_unresponsive() -> None:
    leader = Leader()
    assert leader.roster.unresponsive(WORLD, since_s=9.0) == ()
    leader.answers(SILENT)  # at 3.0
    assert leader.roster.unresponsive(WORLD, since_s=2.9) == ()
    assert leader.roster.unresponsive(WORLD, since_s=3.0) == (ID,)
    leader.loses_its_lease()
    assert leader.roster.unresponsive(WORLD, since_s=9.0) == ()


def test_a_verdict_on_a_former_member_is_ignored() -> None:
    """The answer was in flight when the world was formed; the death is reported once."""
    leader = Leader()
    leader.hangs_up()
    leader.loses_its_lease()
    assert leader.roster.resolve(ID, GONE, 3.0) is Liveness.DEAD
    leader.roster.forget_non_members(world("n2"))
    assert leader.roster.resolve(ID, GONE, 4.0) is None


def test_a_node_names_a_world_that_the_leader_learns_before_or_after() -> None:
    roster = Roster(KEYS, Connections())
    named = WorldReference(generation=WORLD.generation, nonce=WORLD.nonce)
    roster.put(replace(NODE, running=named), 7, now=1.0)
    (unknown,) = roster.view(WORLD, 0.0, done=None, quarantined={}).nodes
    assert group_of(unknown.node.running) is None
    roster.learn_worlds([WORLD])
    roster.put(replace(NODE, node_id="id-n2", running=named), 8, now=2.0)
    for known in roster.view(WORLD, 0.0, done=None, quarantined={}).nodes:
        assert known.node.running is WORLD, "one record for all nodes that run it"


def test_another_world_of_the_same_generation_is_not_the_one_that_a_node_runs() -> None:
    """Two leaders may propose the same generation."""
    roster = Roster(KEYS, Connections())
    roster.learn_worlds([replace(WORLD, nonce="ef")])
    named = WorldReference(generation=WORLD.generation, nonce=WORLD.nonce)
    roster.put(replace(NODE, running=named), 7, now=1.0)
    assert roster.highest_running() == named
    assert roster.nodes_that_run(WORLD) == (ID,)


def test_worlds_that_no_node_runs_are_dropped() -> None:
    roster = Roster(KEYS, Connections())
    old = replace(WORLD, generation=1)
    roster.learn_worlds([old])
    roster.put(replace(NODE, running=WorldReference(generation=1, nonce=WORLD.nonce)), 7, now=1.0)
    for generation in range(2, 1000):
        roster.learn_worlds([replace(WORLD, generation=generation)])
    assert len(roster.worlds) == 2, "the newest one, and the one that a node runs"
    assert roster.highest_running() is old


def test_nodes_that_come_and_go_leave_nothing_behind() -> None:
    """A node that leaves deletes its key first; its connection closes after the leader's turn."""
    connections = Connections()
    roster = Roster(KEYS, connections)
    for name in ("n1", "n2"):
        roster.put(replace(NODE, node_id=f"id-{name}"), 7, now=1.0)
        roster.resolve(f"id-{name}", ALIVE, 1.0)
    for number in range(200):
        pod = f"pod-{number}"
        connections.opened(pod, False)
        roster.put(replace(NODE, node_id=pod), 8, now=2.0)
        roster.delete(pod, 2.0)
        roster.forget_non_members(WORLD)
        connections.closed(pod, False)
        roster.suspect(pod, 3.0)
        roster.forget_non_members(WORLD)
        roster.resolve(pod, REFUSED, 4.0)  # of a probe in flight
    assert roster.silent() == ()
    assert roster.unresolved() == frozenset()
    assert roster.with_keys() == ("id-n1", "id-n2")
    assert not connections.is_lost("pod-0")
    tables = [table for table in vars(roster).values() if isinstance(table, dict)]
    assert max(map(len, tables)) == 2
