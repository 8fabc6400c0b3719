"""Worlds of replicas of two nodes each: which nodes continue, repair a replica, or wait."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kit.membership_nodes import (
    NOW,
    POLICY,
    dead,
    missing,
    named,
    node,
    proposal,
    seen,
    suspect,
    view,
    wait,
    world,
)

from elastic.membership.decision import decide, propose, refusal, waiting_nodes, world_of
from elastic.membership.records import NodeState, WorldRecord
from elastic.membership.replicas import take_slot
from elastic.membership.view import NodeView, Proposal, View
from elastic.wire.messages import Cause, NodeReplica, ReplicaSlot, WorldState

LIMITS = (2, 6)


def pairs(*names: str, mode: str = "restart", state: WorldState = WorldState.ACTIVE) -> WorldRecord:
    return world(*names, mode=mode, state=state, limits=LIMITS, replica_size=2)


def arrived(name: str, *, since_s: float = NOW - 50) -> NodeView:
    return seen(node(name, limits=LIMITS, replica_size=2), since_s=since_s)


def runs(name: str) -> NodeView:
    return seen(node(name, NodeState.STARTING, limits=LIMITS, replica_size=2))


def steps(name: str, group: WorldRecord | None, state: NodeState = NodeState.READY) -> NodeView:
    """A node whose workers need no restart, in ``group`` or not yet in a group."""
    return seen(node(name, state, in_process=True, running=group, limits=LIMITS, replica_size=2))


def connected(*names: str) -> list[NodeView]:
    """Ready nodes outside the world, whose workers are connected and form a replica."""
    ids = tuple(f"id-{name}" for name in names)
    return [replace(n, node=replace(n.node, replica=ids)) for n in (steps(x, None) for x in names)]


def survivors(names: str, group: WorldRecord) -> list[NodeView]:
    return [steps(name, group) for name in names.split()]


FOUR = pairs("n1", "n2", "n3", "n4")
IN_PROCESS = pairs("n1", "n2", "n3", "n4", mode="in-process")


# ── forming ──────────────────────────────────────────────────────────────────────────────────


def test_a_node_of_an_incomplete_replica_waits_for_the_others_in_a_full_world_too() -> None:
    """Its own agent logs the same reason."""
    names, few = ("n1", "n2", "n3", "n4", "n5", "n6"), "1 of 2 nodes of a replica"
    full, members = pairs(*names), map(runs, names)
    spares = [arrived(name) for name in ("n7", "n8", "n9")]
    v = view(full, *members, *spares)
    assert waiting_nodes(v, NOW, POLICY) == {
        "id-n7": "the world is full",
        "id-n8": "the world is full",
        "id-n9": few,
    }
    v = replace(v, nodes=v.nodes[:7])
    assert waiting_nodes(v, NOW, POLICY) == {"id-n7": few}


def test_a_first_world_has_complete_replicas_and_names_waiting_nodes() -> None:
    p = proposal(view(None, *(arrived(f"n{i}") for i in range(1, 6))))
    assert named(p) == ["n1", "n2", "n3", "n4"]
    assert p.replica_size == 2
    assert p.reason.endswith("n5 waits: 1 of 2 nodes of a replica")


def test_too_few_nodes_for_one_replica_wait() -> None:
    w = wait(view(None, arrived("n1")))
    assert "1 (n1) of at least 2 nodes arrived; n1 waits: 1 of 2 nodes of a replica" in w.reason


def test_a_node_of_an_incomplete_replica_extends_the_last_call() -> None:
    late = arrived("n3", since_s=NOW)
    w = wait(view(None, arrived("n1"), arrived("n2"), late))
    assert w.until_s == NOW + POLICY.last_call_s


def test_a_single_node_does_not_change_a_running_world() -> None:
    v = view(FOUR, *map(runs, ("n1", "n2", "n3", "n4")), arrived("n5"))
    assert wait(v).reason == (
        "generation 7 runs on n1, n2, n3, n4; n5 waits: 1 of 2 nodes of a replica"
    )
    p = proposal(replace(v, nodes=(*v.nodes, arrived("n6"))))
    assert (named(p)[4:], p.cause) == (["n5", "n6"], Cause.JOINED)


def test_a_full_world_is_named_as_the_reason() -> None:
    full = pairs(*(f"n{i}" for i in range(1, 7)))
    v = view(full, *(runs(f"n{i}") for i in range(1, 7)), arrived("n7"), arrived("n8"))
    assert wait(v).reason == "n7, n8 wait: the world is full"


# ── restart mode: a death ────────────────────────────────────────────────────────────────────


def test_the_oldest_waiting_node_repairs_a_broken_replica_in_place() -> None:
    v = view(FOUR, runs("n1"), runs("n3"), runs("n4"), arrived("n6"), arrived("n5"))
    p = proposal(replace(v, missing=(missing("n2", proved_dead=True),)))
    assert named(p) == ["n3", "n4", "n1", "n5"], "intact first; n1 keeps its place in the pair"
    assert p.cause is Cause.LOST
    assert "n5 joins" in p.reason
    assert p.reason.endswith("n6 waits: 1 of 2 nodes of a replica")


def test_a_replacement_takes_the_position_of_the_lost_node() -> None:
    v = view(pairs("n1", "n2"), dead(runs("n1")), runs("n2"), arrived("n3"))
    assert named(proposal(v)) == ["n3", "n2"]


def test_the_rest_of_a_broken_replica_waits_without_a_spare() -> None:
    p = proposal(view(FOUR, runs("n1"), runs("n2"), dead(runs("n3")), runs("n4")))
    assert named(p) == ["n1", "n2"]
    assert p.reason == "n3 is lost (its process is dead); n4 waits: 1 of 2 nodes of a replica"


def test_the_rests_of_two_broken_replicas_form_one() -> None:
    six = pairs(*(f"n{i}" for i in range(1, 7)))
    v = view(
        six, runs("n1"), dead(runs("n2")), dead(runs("n3")), runs("n4"), runs("n5"), runs("n6")
    )
    assert named(proposal(v)) == ["n5", "n6", "n1", "n4"]


def test_a_world_without_a_complete_replica_pauses_with_its_members() -> None:
    p = proposal(view(pairs("n1", "n2"), runs("n1"), dead(runs("n2"))))
    assert (p.state, named(p), p.mode) == (WorldState.PAUSED, ["n1"], "restart")
    paused = pairs("n1", state=WorldState.PAUSED)
    p = proposal(view(paused, arrived("n1"), arrived("n3")))
    assert (p.cause, named(p)) == (Cause.RESUMED, ["n1", "n3"])


def test_without_a_suspect_of_the_last_replica_the_job_pauses() -> None:
    failed = seen(node("n1", arrived_for=7, failure="boom", limits=LIMITS, replica_size=2))
    silent = suspect(runs("n2"), NOW - 1000)
    paused = proposal(view(pairs("n1", "n2"), failed, silent))
    assert (named(paused), paused.state) == (["n1"], WorldState.PAUSED)
    p = proposal(view(FOUR, failed, silent, runs("n3"), runs("n4")))
    assert named(p) == ["n3", "n4"]


def test_the_next_world_includes_a_node_of_a_group_that_may_still_step() -> None:
    """Found by the histories: n3 and n4 alone would train in parallel with n1 and n2, if these are
    isolated before n2 knows of it."""
    two = replace(pairs("n1", "n2"), generation=6)
    silent = replace(missing("n1"), running=two)
    still = seen(node("n2", NodeState.STARTING, running=two, limits=LIMITS, replica_size=2))
    v = replace(view(FOUR, still, arrived("n3"), arrived("n4")), missing=(silent,))
    p = proposal(v)
    assert named(p) == ["n3", "n2"]
    assert p.reason.endswith("n4 waits: 1 of 2 nodes of a replica")
    proved = replace(v, missing=(replace(silent, proved_dead=True),))
    assert named(proposal(proved)) == ["n3", "n4"]


# ── in-process mode ────────────────────────────────────────────────────────────────────────────


def test_the_others_continue_and_the_rest_of_the_replica_restarts() -> None:
    v = view(IN_PROCESS, *survivors("n1 n2 n4", IN_PROCESS), dead(steps("n3", IN_PROCESS)))
    p = proposal(v)
    assert (named(p), p.mode, p.planned) == (["n1", "n2"], "in-process", False)
    assert "n4 restarts: a replica has lost nodes" in p.reason


def test_a_world_names_the_memory_of_living_nodes_outside_of_it() -> None:
    """The rest of a broken replica restarts its workers; its agent has parts of checkpoints."""
    lost, leaving = dead(steps("n3", IN_PROCESS)), steps("n5", None, NodeState.LEAVING)
    silent, new = suspect(steps("n6", None)), steps("n7", None)
    nodes = [*survivors("n1 n2 n4", IN_PROCESS), lost, leaving, silent, new]
    with_memory = [replace(n, node=replace(n.node, memory_port=7000)) for n in nodes[:-1]]
    p = proposal(view(IN_PROCESS, *with_memory, new))
    assert named(p) == ["n1", "n2"]
    (found,) = world_of(p, IN_PROCESS, nonce="cd", time_s=5.0).outside
    assert (found.node_id, found.name, found.host, found.port) == ("id-n4", "n4", "10.0.0.4", 7000)


def test_ready_nodes_replace_a_broken_replica_in_the_same_change() -> None:
    spares = connected("n6", "n5")
    v = view(IN_PROCESS, *survivors("n1 n2 n4", IN_PROCESS), dead(steps("n3", IN_PROCESS)), *spares)
    assert named(proposal(v)) == ["n1", "n2", "n6", "n5"], "in the order in which they have met"


def test_one_ready_node_waits_for_the_rest_of_the_broken_replica() -> None:
    v = view(
        pairs("n1", "n2", mode="in-process"),
        *survivors("n1 n2", pairs("n1", "n2", mode="in-process")),
        steps("n5", None),
    )
    assert "n5 waits: 1 of 2 nodes of a replica" in wait(v).reason
    back = replace(v, nodes=(*v.nodes[:2], *connected("n5", "n4")))
    p = proposal(back)
    assert (named(p), p.planned) == (["n1", "n2", "n5", "n4"], True)


def test_ready_nodes_that_are_not_connected_are_no_replica() -> None:
    """Their groups are built with other nodes: n6, the partner of n5, is not ready yet."""
    first, second = connected("n5", "n6")[:1], connected("n7", "n8")[1:]
    v = view(IN_PROCESS, *survivors("n1 n2 n3 n4", IN_PROCESS), *first, *second)
    assert wait(v).reason == "generation 7 runs on n1, n2, n3, n4; n5, n8 wait"
    p = proposal(replace(v, nodes=(*v.nodes, *connected("n7", "n8")[:1])))
    assert named(p)[4:] == ["n7", "n8"]


def test_all_restart_with_a_node_that_waits_for_a_replica() -> None:
    two = pairs("n1", "n2", mode="in-process")
    waits = seen(node("n3", NodeState.STARTING, limits=LIMITS, replica_size=2))
    v = view(two, steps("n1", two), dead(steps("n2", two)), waits)
    paused = proposal(v)
    assert (paused.state, named(paused)) == (WorldState.PAUSED, ["n1"]), "n3 only starts"
    waits = replace(waits, node=replace(waits.node, replica_start="first"))
    again = view(pairs("n1", state=WorldState.PAUSED), arrived("n1"), waits)
    p = proposal(again)
    assert (named(p), p.mode, p.cause) == (["n1", "n3"], "restart", Cause.RESUMED)


@pytest.mark.parametrize(("met", "mode"), [("n1 n3", "in-process"), ("n3 n1", "restart")])
def test_nodes_connected_in_another_order_restart(met: str, mode: str) -> None:
    """Found by the histories: the workers of the last replica have died, and those of one of its
    nodes have connected to a joining node's, which had waited longer."""
    two = pairs("n1", "n2", mode="in-process")
    ready = sorted(connected(*met.split()), key=lambda n: n.node.name)
    p = propose(view(two, *ready), two, ready, Cause.LOST, "")
    assert (named(p), p.mode) == (["n1", "n3"], mode)


def test_running_rests_of_two_replicas_restart_together() -> None:
    """Their workers hold shards of different positions, and are not connected."""
    rests = survivors("n1 n4", IN_PROCESS)
    p = propose(view(IN_PROCESS, *rests), IN_PROCESS, rests, Cause.LOST, "")
    assert (named(p), p.mode) == (["n1", "n4"], "restart")
    whole = survivors("n3 n4", IN_PROCESS)
    p = propose(view(IN_PROCESS, *whole), IN_PROCESS, whole, Cause.LOST, "")
    assert (named(p), p.mode) == (["n3", "n4"], "in-process")


def test_two_replicas_broken_at_once_are_handled_together() -> None:
    six = pairs(*(f"n{i}" for i in range(1, 7)), mode="in-process")
    v = view(six, *survivors("n1 n4 n5 n6", six), dead(steps("n2", six)), dead(steps("n3", six)))
    p = proposal(v)
    assert (named(p), p.mode) == (["n5", "n6"], "in-process")
    assert "n1, n4 restart: a replica has lost nodes" in p.reason


def test_the_last_replica_is_repaired_by_restarting_all_its_nodes() -> None:
    two = pairs("n1", "n2", mode="in-process")
    v = view(two, steps("n1", two), dead(steps("n2", two)), steps("n3", None))
    p = proposal(v)
    assert (named(p), p.mode, p.planned) == (["n1", "n3"], "restart", False)


def test_a_paused_world_in_process_has_complete_replicas_that_save() -> None:
    four = replace(IN_PROCESS, min_nodes=4)
    nodes = [*survivors("n1 n2 n4", four), dead(steps("n3", four))]
    v = view(four, *(replace(n, node=replace(n.node, min_nodes=4)) for n in nodes))
    p = proposal(v)
    assert (p.state, named(p), p.mode) == (WorldState.PAUSED, ["n1", "n2"], "in-process")


def test_the_replica_of_a_leaving_node_leaves_at_the_step_boundary() -> None:
    leaving = steps("n3", IN_PROCESS, NodeState.LEAVING)
    p = proposal(view(IN_PROCESS, *survivors("n1 n2 n4", IN_PROCESS), leaving))
    assert (named(p), p.cause, p.planned) == (["n1", "n2"], Cause.LEFT, True)


def test_the_last_replica_leaves_like_the_last_nodes_of_a_job() -> None:
    two = pairs("n1", "n2", mode="in-process")
    v = view(two, steps("n1", two), steps("n2", two, NodeState.LEAVING), steps("n3", None))
    p = proposal(v)
    assert (p.state, named(p), p.planned) == (WorldState.PAUSED, [], True)
    # n3 has a partner only once n1 has left.
    empty = replace(pairs(state=WorldState.PAUSED), generation=8)
    still = view(empty, steps("n1", two), steps("n3", None), steps("n4", None))
    assert "n1 still leaving" in wait(still).reason
    over = view(
        empty, seen(node("n1", arrived_for=7, limits=LIMITS, replica_size=2)), steps("n3", None)
    )
    assert named(proposal(over)) == ["n1", "n3"]


def test_a_replica_that_never_connected_holds_no_state() -> None:
    """Found by the histories: the last replica leaves, or is broken, before a planned one has
    reached its step boundary."""
    two = pairs("n1", "n2", mode="in-process")
    plan = replace(IN_PROCESS, generation=8, switch_at_step=40)
    joining = [steps("n3", None), steps("n4", None)]
    v = view(plan, steps("n1", two), steps("n2", two, NodeState.LEAVING), *joining)
    assert (named(proposal(v)), proposal(v).state) == ([], WorldState.PAUSED)
    v = view(plan, steps("n1", two), dead(steps("n2", two)), *joining)
    p = proposal(v)
    assert (named(p), p.mode) == (["n1", "n3"], "restart"), "n1 does not continue with n2"


def test_a_complete_replica_replaces_that_of_a_straggler() -> None:
    full = replace(IN_PROCESS, max_nodes=4)
    spares = connected("n5", "n6")

    def seen_by(*spares: NodeView) -> View:
        nodes = (*survivors("n1 n2 n3 n4", full), *spares)
        nodes = tuple(replace(n, node=replace(n.node, max_nodes=4)) for n in nodes)
        return replace(view(full, *nodes), stragglers={"id-n2": "n2 is slow"})

    assert "the world is full" in wait(seen_by(*spares[:1])).reason
    p = proposal(seen_by(*spares))
    assert (named(p), p.cause, p.planned) == (["n3", "n4", "n5", "n6"], Cause.LEFT, True)
    assert p.reason == "n5, n6 replace n1, n2: n2 is slow"


def test_a_quarantined_member_is_evicted_with_its_replica() -> None:
    v = view(FOUR, *map(runs, ("n1", "n2", "n3")), seen(node("n4", arrived_for=7, failure="boom")))
    p = proposal(replace(v, quarantined={"id-n4": NOW + 9}))
    assert named(p) == ["n1", "n2"]
    assert "n3 waits: 1 of 2 nodes of a replica; n4 quarantined" in p.reason


# ── nodes whose workers start during training ────────────────────────────────────────────────


def slot(node_id: str, start: str = "first") -> ReplicaSlot:
    return ReplicaSlot(node_id=node_id, start=start)


def taken(
    replicas: tuple[NodeReplica, ...], who: str, starts: str, start: str = "first"
) -> tuple[NodeReplica, ...]:
    """The replicas after ``who`` looked; all other nodes of ``starts`` are in their first start."""
    of = dict.fromkeys(starts.split(), "first") | {who: start}
    return take_slot(replicas, slot(who, start), of, per_replica=2, nonce=f"nonce-{who}")


def ids(replicas: tuple[NodeReplica, ...]) -> list[list[str]]:
    return [[s.node_id for s in replica.slots] for replica in replicas]


def test_a_node_takes_the_free_seat_of_the_oldest_replica() -> None:
    replicas = taken((), "a", "a b c")
    assert ids(replicas) == [["a"]]
    assert taken(replicas, "a", "a b c") == replicas, "it has one"
    replicas = taken(replicas, "b", "a b c")
    assert (ids(replicas), replicas[0].nonce) == ([["a", "b"]], "nonce-a")
    assert ids(taken(replicas, "c", "a b c")) == [["a", "b"], ["c"]]


def test_the_seat_of_a_lost_node_is_free_before_the_replica_connected() -> None:
    replicas = taken(taken((), "a", "a"), "b", "b c")
    assert ids(replicas) == [["b"]]


def test_a_complete_replica_ends_if_one_of_its_nodes_is_lost() -> None:
    """The other node's workers were connected to the lost ones, and are restarted."""
    replicas = taken(taken((), "a", "a b"), "b", "a b")
    assert ids(taken(replicas, "c", "a c")) == [["c"]]
    assert ids(taken(replicas, "b", "b", start="second")) == [["b"]]
    assert taken(replicas, "b", "b", start="second")[0].nonce != replicas[0].nonce


# ── compatibility ────────────────────────────────────────────────────────────────────────────


def test_a_joining_node_with_another_replica_size_is_rejected() -> None:
    said = refusal(node("n9", limits=LIMITS), FOUR)
    assert said == "n9 was started with replica_size=1, the job runs with replica_size=2"


def test_replicas_of_another_number_of_nodes_are_rejected() -> None:
    job = world("n1", limits=LIMITS, replica_size=4)  # one worker per node
    joining = replace(node("n9", limits=LIMITS, replica_size=4), nproc=2)
    said = refusal(joining, job)
    assert said is not None and "a replica of 4 ranks would take 2 such nodes" in said


@pytest.mark.parametrize("nproc", [2, 4, 8])
def test_nodes_with_complete_replicas_are_compatible(nproc: int) -> None:
    reference = replace(node("n1", limits=LIMITS, replica_size=2), nproc=2)
    joining = replace(node("n9", limits=LIMITS, replica_size=2), nproc=nproc)
    assert refusal(joining, reference) is None
    decision = decide(view(None, seen(reference), seen(joining)), NOW, POLICY)
    assert isinstance(decision, Proposal) and len(decision.nodes) == 2
