"""Rules 1 to 7 of docs/explanation/protocol.md, section 2, and the rule of section 3, one by one,
in restart mode."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kit.membership_nodes import (
    NOW,
    POLICY,
    arrived,
    dead,
    in_state,
    missing,
    named,
    node,
    out,
    proposal,
    ran,
    runs,
    seen,
    suspect,
    view,
    wait,
    world,
)

from elastic.membership.decision import decide, refusal, waiting_nodes, world_of
from elastic.membership.records import (
    BreakageRecord,
    Done,
    FailureRecord,
    NodeState,
    Outcome,
    WorldRecord,
)
from elastic.membership.view import End, MissingMember, NodeView, Proposal, View, Wait
from elastic.wire.messages import Cause, WorldState

PAUSED = WorldState.PAUSED


# ── rule 1: the first world ──────────────────────────────────────────────────────────────────


def test_a_full_first_world_starts_at_once() -> None:
    p = proposal(view(None, *(arrived(f"n{i}", since_s=NOW) for i in (3, 1, 4, 2))))
    assert named(p) == ["n1", "n2", "n3", "n4"]
    assert (p.cause, p.state, p.generation) == (Cause.FIRST, WorldState.ACTIVE, 1)
    assert p.reason == "n1, n2, n3, n4 start"


def test_the_first_world_takes_the_most_senior_nodes() -> None:
    p = proposal(view(None, *(arrived(f"n{i}", since_s=NOW) for i in (5, 4, 3, 2, 1))))
    assert named(p) == ["n1", "n2", "n3", "n4"]


def test_equal_arrival_times_are_ordered_by_id() -> None:
    nodes = [seen(node(name, joined_at_s=5.0), since_s=NOW - 9) for name in ("n3", "n2")]
    assert named(proposal(view(None, *nodes))) == ["n2", "n3"]


def test_a_first_world_of_min_nodes_waits_for_the_last_call() -> None:
    v = view(None, arrived("n1", since_s=NOW - 60), arrived("n2", since_s=NOW - 1))
    w = wait(v)
    assert w.until_s == NOW + 2
    assert "n1, n2" in w.reason and "last call" in w.reason
    assert named(proposal(v, now=NOW + 2)) == ["n1", "n2"]


def test_too_few_nodes_for_a_first_world_wait_without_a_deadline() -> None:
    w = wait(view(None, arrived("n1")))
    assert w.until_s is None
    assert "1 (n1) of at least 2 nodes" in w.reason
    assert "no node" in wait(view(None)).reason


def test_dead_suspect_and_leaving_nodes_do_not_count_for_a_first_world() -> None:
    others = (dead(arrived("n1")), suspect(arrived("n2")), in_state("n3", NodeState.LEAVING))
    w = wait(view(None, *others, arrived("n4")))
    assert "1 (n4)" in w.reason and "the leader cannot reach n2" in w.reason


def test_generations_continue_after_a_wipe_without_a_running_world() -> None:
    p = proposal(view(None, out("n1", generation=7), out("n2", generation=6)))
    assert p.generation == 8


# ── compatibility ────────────────────────────────────────────────────────────────────────────


def test_the_first_node_sets_the_limits_and_the_version() -> None:
    odd = seen(node("n2", limits=(1, 4)))
    other = seen(node("n3", library="0.2.0"))
    w = wait(view(None, arrived("n1"), odd, other))
    assert "n2 was started with 1 to 4 nodes, the job runs with 2 to 4" in w.reason
    assert "n3 has torch-elastic-harness 0.2.0, the job runs with 0.1.0" in w.reason
    p = proposal(view(None, arrived("n1"), odd, arrived("n4")))
    assert named(p) == ["n1", "n4"]
    assert (p.min_nodes, p.max_nodes, p.library) == (2, 4, "0.1.0")


@pytest.mark.parametrize("library", ["0.1.0", "0.1.7", "0.1.1.dev3", "0.1.0+cu130"])
def test_versions_within_one_minor_are_compatible(library: str) -> None:
    assert refusal(node("n9", library=library), world("n1")) is None


@pytest.mark.parametrize("library", ["0.2.0", "1.1.0", "0.10.0", "unknown"])
def test_other_versions_are_rejected(library: str) -> None:
    said = refusal(node("n9", library=library), world("n1"))
    assert said == f"n9 has torch-elastic-harness {library}, the job runs with 0.1.0"


def test_other_torch_versions_and_worlds_without_version_are_compatible() -> None:
    assert refusal(replace(node("n9"), torch="2.11.0"), world("n1")) is None
    assert refusal(node("n9", library="9.9"), replace(world("n1"), library="")) is None


def test_nodes_with_and_without_tls_are_incompatible() -> None:
    with_tls, settings = replace(node("n9"), tls=True), "node_cacert, node_cert, node_key"
    said = refusal(with_tls, world("n1"))
    assert said == f"n9 has TLS between nodes ({settings}), the job runs without"
    said = refusal(node("n9"), replace(world("n1"), tls=True))
    assert said == f"n9 has no TLS between nodes ({settings} are not set), the job runs with it"
    first, plain, third = (seen(replace(node(f"n{i}"), tls=i != 2)) for i in (1, 2, 3))
    p = proposal(view(None, first, plain, third))
    assert named(p) == ["n1", "n3"] and p.tls
    assert world_of(p, None, nonce="ab", time_s=0.0).tls


def test_an_incompatible_joining_node_does_not_affect_the_job() -> None:
    v = view(world("n1", "n2"), runs("n1"), runs("n2"), seen(node("n3", limits=(3, 3))))
    w = wait(v)
    assert w.until_s is None
    assert "n3 was started with 3 to 3 nodes" in w.reason


# ── rule 2: a member is gone ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("v", "cause", "said"),
    [
        (
            view(world("n1", "n2", "n3"), runs("n1"), runs("n3"), gone=[missing("n2")]),
            Cause.LOST,
            "n2 is lost (silent, and its lease has expired)",
        ),
        (
            view(
                world("n1", "n2", "n3"),
                runs("n1"),
                runs("n3"),
                gone=[missing("n2", proved_dead=True)],
            ),
            Cause.LOST,
            "n2 is lost (its process is dead)",
        ),
        (
            view(world("n1", "n2", "n3"), runs("n1"), dead(runs("n2")), runs("n3")),
            Cause.LOST,
            "n2 is lost (its process is dead)",
        ),
        (
            view(
                world("n1", "n2", "n3"), runs("n1"), in_state("n2", NodeState.LEAVING), runs("n3")
            ),
            Cause.LEFT,
            "n2 leaves",
        ),
        (
            view(
                world("n1", "n2", "n3"),
                runs("n1"),
                seen(node("n2", NodeState.FAILED, failure="OSError: disk full")),
                runs("n3"),
            ),
            Cause.LOST,
            "n2 failed: OSError: disk full",
        ),
        (
            # Never seen, not missing.
            view(ran(world("n1", "n2", "n3"), 6, 6, 6), runs("n1"), runs("n3")),
            Cause.LOST,
            "n2 is lost",
        ),
    ],
)
def test_the_others_continue_at_once_without_a_lost_member(
    v: View, cause: Cause, said: str
) -> None:
    p = proposal(v)
    assert named(p) == ["n1", "n3"]
    assert (p.cause, p.state, p.generation) == (cause, WorldState.ACTIVE, 8)
    assert said in p.reason


def test_rank_zero_goes_to_the_most_senior_survivor() -> None:
    """Rule 7: by position in the world, not by arrival time."""
    v = view(world("n4", "n3", "n2"), runs("n2"), runs("n3"), gone=[missing("n4")])
    assert named(proposal(v)) == ["n3", "n2"]


def test_loss_failure_and_joining_nodes_together_lead_to_one_world() -> None:
    v = view(
        world("n3", "n2", "n1"),
        runs("n3"),
        out("n1", failure="RuntimeError: Connection closed by peer"),
        arrived("n5", since_s=NOW),
        arrived("n4", since_s=NOW),
        gone=[missing("n2", proved_dead=True)],
    )
    p = proposal(v)
    assert named(p) == ["n3", "n1", "n4", "n5"]
    assert p.cause is Cause.LOST
    assert p.reason == (
        "n2 is lost (its process is dead); n1 failed: RuntimeError: Connection closed by peer; "
        "n4, n5 join"
    )


def test_joining_nodes_are_limited_to_max_nodes() -> None:
    v = view(
        world("n1", "n2", "n3", "n4"),
        *(runs(f"n{i}") for i in (1, 2, 3)),
        arrived("n5"),
        arrived("n6"),
        gone=[missing("n4")],
    )
    assert named(proposal(v)) == ["n1", "n2", "n3", "n5"]


# ── section 3: what a new leader knows of silent members ─────────────────────────────────────


def unseen(name: str, *, of: WorldRecord) -> MissingMember:
    """A member whose key ended before this leader was elected."""
    member = next(m for m in of.members if m.name == name)
    return replace(missing(name), member=member, is_known=False)


@pytest.mark.parametrize("mode", ["restart", "in-process"])
def test_a_member_that_nobody_has_joined_may_still_train_unseen(mode: str) -> None:
    """n1 alone runs generation 7, and falls silent before it enters 8 together with n3."""
    last = ran(world("n1", "n3", mode=mode, limits=(1, 4), generation=8), 7, 0)
    state, in_process = (
        (NodeState.READY, True) if mode == "in-process" else (NodeState.STARTING, False)
    )
    n3 = seen(node("n3", state, in_process=in_process, limits=(1, 4)))
    v = view(last, n3, gone=[unseen("n1", of=last)])
    assert wait(v).until_s == NOW - 5 + POLICY.takeover_s
    without_knowledge = ran(last, None, None)
    assert isinstance(decide(replace(v, world=without_knowledge), NOW, POLICY), Wait)
    proved = replace(v, missing=(replace(v.missing[0], proved_dead=True),))
    assert named(proposal(proved)) == ["n3"]


def test_a_member_that_others_ran_with_cannot_train_without_them() -> None:
    last = ran(world("n1", "n2", "n3", generation=8), 7, 7, 0)
    v = view(last, runs("n2"), runs("n3"), gone=[unseen("n1", of=last)])
    assert named(proposal(v)) == ["n2", "n3"]
    joined_with_it = ran(last, 0, 7, 7)
    assert named(proposal(replace(v, world=joined_with_it))) == ["n2", "n3"]


def test_a_world_that_a_member_has_entered_was_entered_by_all() -> None:
    last = ran(world("n1", "n3", mode="in-process", limits=(1, 4), generation=8), 7, 0)
    n3 = seen(node("n3", NodeState.READY, in_process=True, running=last, limits=(1, 4)))
    v = view(last, n3, gone=[unseen("n1", of=last)])
    assert named(proposal(v)) == ["n3"]


def test_a_world_records_what_its_members_ran() -> None:
    last = world("n1", "n2", "n3")
    still = seen(node("n1", NodeState.STARTING, running=last))
    ended = seen(node("n2", arrived_for=7, failure="boom"))
    joining = seen(node("n4", arrived_for=5))
    p = proposal(view(last, still, ended, joining, gone=[missing("n3", proved_dead=True)]))
    record = world_of(p, last, nonce="x", time_s=0.0)
    assert [m.ran_generation for m in record.members] == [7, 7, 0]


# ── suspects ─────────────────────────────────────────────────────────────────────────────────


def test_a_suspect_alone_does_not_change_the_world() -> None:
    w = wait(view(world("n1", "n2"), runs("n1"), suspect(runs("n2"))))
    assert "n2 may be dead" in w.reason


@pytest.mark.parametrize(
    ("others", "limit_s"),
    [
        ((out("n2"),), POLICY.suspect_s),
        ((dead(runs("n2")),), POLICY.suspect_s),
        ((runs("n2"), arrived("n4")), POLICY.takeover_s),
    ],
    ids=["failed", "lost", "joining node"],
)
def test_a_change_waits_for_the_lease_of_a_suspect(
    others: tuple[NodeView, ...], limit_s: float
) -> None:
    v = view(world("n1", "n2", "n3"), runs("n1"), *others, suspect(runs("n3")))
    w = wait(v)
    assert "n3 may be dead: the lease decides" in w.reason
    assert w.until_s == NOW + limit_s
    assert isinstance(decide(v, NOW + limit_s, POLICY), Proposal)


def test_a_suspect_with_an_endless_lease_is_evicted_from_a_broken_world() -> None:
    v = view(world("n1", "n2", "n3"), out("n1"), runs("n2"), suspect(runs("n3"), NOW - 5))
    assert wait(v).until_s == NOW + 10
    p = proposal(v, now=NOW + 10)
    assert named(p) == ["n1", "n2"]
    assert "n3 is lost (silent, although its lease is renewed)" in p.reason


def test_waiting_nodes_replace_a_suspect_with_an_endless_lease() -> None:
    limits = (2, 2)
    silent = seen(node("n2", NodeState.STARTING, limits=limits))
    nodes = (seen(node("n1", arrived_for=7, limits=limits)), suspect(silent, NOW - 500))
    last = world("n1", "n2", limits=limits)
    p = proposal(view(last, *nodes, seen(node("n3", limits=limits))))
    assert (named(p), p.state) == (["n1", "n3"], WorldState.ACTIVE)
    few = proposal(view(last, *nodes))
    assert (named(few), few.state) == (["n1"], WorldState.PAUSED)


def test_a_suspect_of_an_intact_world_delays_a_joining_node_and_stays_a_member() -> None:
    v = view(world("n1", "n2"), runs("n1"), suspect(runs("n2"), NOW - 200), arrived("n3"))
    assert wait(v).until_s == NOW + 100
    assert named(proposal(v, now=NOW + 100)) == ["n1", "n2", "n3"]


def test_silent_members_that_renew_their_leases_are_ended_before_others_start() -> None:
    """Nobody reached them: only a world that they read in the store ends their workers."""
    last = world("n1", "n2")
    group = world("n1", "n2", generation=7)
    silent = [
        suspect(seen(node(name, NodeState.STARTING, running=group)), NOW - 15)
        for name in ("n1", "n2")
    ]
    failed = dead(runs("n9"))
    v = view(replace(last, members=(*last.members, failed.node.as_member())), *silent, failed)
    v = replace(v, nodes=(*v.nodes, arrived("n3"), arrived("n4")))
    p = proposal(v)
    assert (named(p), p.state) == ([], WorldState.PAUSED)
    empty = world_of(p, v.world, nonce="x", time_s=0.0)
    waiting = replace(v, world=empty, world_since_s=NOW, nodes=(*silent, *v.nodes[3:]))
    assert wait(waiting).until_s == NOW + POLICY.leave_s
    assert named(proposal(waiting, now=NOW + POLICY.leave_s)) == ["n3", "n4"]


def test_a_leaving_node_is_not_waited_for_indefinitely() -> None:
    """Its agent may be frozen while a thread of it renews its lease."""
    group = world("n1", limits=(1, 4))
    leaves = seen(node("n1", NodeState.LEAVING, running=group, limits=(1, 4)), since_s=NOW)
    waiting = [seen(node(name, limits=(1, 4))) for name in ("n2", "n3")]
    v = view(world(generation=8, limits=(1, 4), state=PAUSED), leaves, *waiting, world_since_s=NOW)
    assert wait(v).until_s == NOW + POLICY.leave_s
    assert named(proposal(v, now=NOW + POLICY.leave_s)) == ["n2", "n3"]


def test_a_finished_job_does_not_wait_indefinitely_for_a_silent_member() -> None:
    group = world("n1", "n2")
    ended = seen(node("n1", NodeState.FINISHED, running=group))
    silent = suspect(seen(node("n2", NodeState.STARTING, running=group)), NOW)
    v = view(group, ended, silent)
    assert isinstance(decide(v, NOW + POLICY.takeover_s - 1, POLICY), Wait)
    later = NOW + POLICY.takeover_s
    assert named(proposal(v, now=later)) == []  # ends its workers
    lost = replace(N1_LOST, lost=("n2",))
    empty = replace(world(generation=8, state=PAUSED), breakages=(lost,))
    leaves = replace(silent, node=replace(silent.node, state=NodeState.LEAVING))
    assert isinstance(decide(view(empty, ended, leaves, world_since_s=later), later, POLICY), Wait)
    assert named(proposal(view(empty, ended, world_since_s=later), now=later)) == ["n1"]


def test_the_end_of_a_broken_world_waits_for_a_silent_member_for_takeover_s() -> None:
    """Its workers may be in their last steps; without a survivor nobody else waits for it."""
    group = world("n1", "n2", "n3")
    finished = seen(node("n3", NodeState.FINISHED, running=group))
    silent = suspect(seen(node("n2", NodeState.STARTING, running=group)))
    v = view(group, silent, finished, gone=[missing("n1", proved_dead=True)])
    assert wait(v, now=NOW + POLICY.takeover_s - 1).until_s == NOW + POLICY.takeover_s
    assert named(proposal(v, now=NOW + POLICY.takeover_s)) == []


def test_a_leaving_or_finished_suspect_does_not_delay_a_change() -> None:
    leaves = suspect(in_state("n3", NodeState.LEAVING))
    assert named(proposal(view(world("n1", "n2", "n3"), runs("n1"), runs("n2"), leaves))) == [
        "n1",
        "n2",
    ]
    ended = suspect(in_state("n3", NodeState.FINISHED))
    assert named(proposal(view(world("n1", "n2", "n3"), out("n1"), runs("n2"), ended))) == [
        "n1",
        "n2",
    ]


# ── rule 3: joining nodes ────────────────────────────────────────────────────────────────────────


def test_joining_nodes_are_collected_for_the_join_window() -> None:
    v = view(world("n1", "n2"), runs("n1"), runs("n2"), arrived("n3", since_s=NOW - 0.25))
    assert wait(v).until_s == NOW + 0.75
    p = proposal(v, now=NOW + 0.75)
    assert named(p) == ["n1", "n2", "n3"]
    assert (p.cause, p.reason, p.planned) == (Cause.JOINED, "n3 joins", False)


def test_joining_nodes_that_fill_the_world_join_at_once() -> None:
    late = (arrived("n3", since_s=NOW), arrived("n4", since_s=NOW))
    p = proposal(view(world("n1", "n2"), runs("n1"), runs("n2"), *late))
    assert named(p) == ["n1", "n2", "n3", "n4"]


def test_joining_nodes_wait_while_the_world_is_full() -> None:
    names = ("n1", "n2", "n3", "n4")
    w = wait(view(world(*names), *(runs(n) for n in names), arrived("n5")))
    assert w.reason == "n5 waits: the world is full"


def test_only_one_plan_is_pending_at_a_time() -> None:
    """All members have to adopt the last world before joining nodes change it again."""
    about_to_start = seen(node("n2", NodeState.ARRIVED, arrived_for=6))
    v = view(world("n1", "n2"), runs("n1"), about_to_start, arrived("n3"))
    assert wait(v).reason == "n3 waits until n2 runs generation 7"
    assert named(proposal(view(world("n1", "n2"), runs("n1"), runs("n2"), arrived("n3")))) == [
        "n1",
        "n2",
        "n3",
    ]


@pytest.mark.parametrize("state", [NodeState.STARTING, NodeState.LEAVING, NodeState.FAILED])
def test_a_joining_node_in_another_state_does_not_delay_the_job(state: NodeState) -> None:
    v = view(world("n1", "n2"), runs("n1"), runs("n2"), in_state("n3", state))
    w = wait(v)
    assert "generation 7 runs on n1, n2" in w.reason and w.until_s is None


@pytest.mark.parametrize("key", ["id-n3", "n3"], ids=["id", "name"])
def test_a_quarantined_joining_node_waits_for_the_end_of_its_quarantine(key: str) -> None:
    members = (runs("n1"), runs("n2"), arrived("n3"))
    w = wait(view(world("n1", "n2"), *members, quarantined={key: NOW + 30}))
    assert w.until_s == NOW + 30
    assert "n3 is quarantined" in w.reason
    why = replace(view(world("n1", "n2"), *members), quarantined={key: NOW + 30})
    why = replace(why, quarantine_reasons={"id-n3": "a module is missing"})
    assert waiting_nodes(why, NOW, POLICY) == {"id-n3": "n3 is quarantined: a module is missing"}
    after = view(world("n1", "n2"), *members, quarantined={key: NOW})
    assert named(proposal(after)) == ["n1", "n2", "n3"]


# ── rule 5: failures ─────────────────────────────────────────────────────────────────────────


def test_a_failure_with_all_nodes_alive_leads_to_the_same_members() -> None:
    v = view(world("n1", "n2"), runs("n1"), out("n2", failure="ValueError: boom"))
    p = proposal(v)
    assert named(p) == ["n1", "n2"]
    assert (p.cause, p.reason) == (Cause.FAILURE, "n2 failed: ValueError: boom")


def test_the_reason_is_one_line_for_any_failure_text() -> None:
    trace = "Traceback (most recent call last):\n  File x\nValueError: " + "boom" * 400
    p = proposal(view(world("n1", "n2"), runs("n1"), out("n2", failure=trace)))
    assert p.reason.startswith("n2 failed: ValueError: boomboom")
    assert "\n" not in p.reason and len(p.reason) < 400
    bare = seen(node("n2", arrived_for=7, exit_code=3))
    assert proposal(view(world("n1", "n2"), runs("n1"), bare)).reason == (
        "n2 failed with exit code 3"
    )
    stopped = proposal(view(world("n1", "n2"), runs("n1"), out("n2", failure="\n")))
    assert stopped.reason == "n2 left generation 7"
    gone = seen(replace(node("n2"), state=NodeState.FAILED))
    assert proposal(view(world("n1", "n2"), runs("n1"), gone)).reason.startswith(
        "n2 failed, and leaves;"
    )


def test_a_member_that_has_not_adopted_the_world_yet_is_no_failure() -> None:
    v = view(world("n1", "n2"), runs("n1"), out("n2", generation=6))
    assert "runs on n1, n2" in wait(v).reason


def test_a_repeatedly_unreachable_member_is_evicted_if_the_rest_suffices() -> None:
    members = (runs("n1"), runs("n2"), out("n3", failure="boom"))
    p = proposal(view(world("n1", "n2", "n3"), *members, quarantined={"n3": NOW + 60}))
    assert named(p) == ["n1", "n2"]
    assert "n3 quarantined" in p.reason
    needed = view(world("n1", "n3"), runs("n1"), out("n3"), quarantined={"n3": NOW + 60})
    assert named(proposal(needed)) == ["n1", "n3"]
    with_joining_node = view(
        world("n1", "n3"), runs("n1"), out("n3"), arrived("n4"), quarantined={"n3": NOW + 60}
    )
    assert named(proposal(with_joining_node)) == ["n1", "n4"]


def test_quarantine_alone_does_not_change_a_running_world() -> None:
    w = wait(view(world("n1", "n2", "n3"), *map(runs, ("n1", "n2", "n3")), quarantined={"n3": 1e9}))
    assert "runs on n1, n2, n3" in w.reason


# ── rule 4: fewer than min_nodes ─────────────────────────────────────────────────────────────


def test_a_world_with_too_few_survivors_pauses() -> None:
    p = proposal(view(world("n1", "n2"), out("n1"), gone=[missing("n2")]))
    assert (named(p), p.state, p.cause) == (["n1"], PAUSED, Cause.PAUSED)
    assert "n2 is lost" in p.reason and "1 (n1) of at least 2 nodes remain" in p.reason


def test_joining_nodes_that_replace_the_lost_prevent_a_pause() -> None:
    p = proposal(view(world("n1", "n2"), out("n1"), arrived("n3"), gone=[missing("n2")]))
    assert (named(p), p.state, p.cause) == (["n1", "n3"], WorldState.ACTIVE, Cause.LOST)


def test_too_few_joining_nodes_are_not_members_of_the_pause() -> None:
    w = world("n1", "n2", "n3", limits=(3, 4))
    fresh = seen(node("n4", limits=(3, 4)))
    p = proposal(view(w, runs("n1"), fresh, gone=[missing("n2"), missing("n3")]))
    assert (named(p), p.state) == (["n1"], PAUSED)


@pytest.mark.parametrize("member", [out("n1"), out("n1", generation=6), runs("n1")])
def test_members_of_a_paused_world_are_no_failure(member) -> None:  # type: ignore[no-untyped-def]
    w = wait(view(world("n1", state=PAUSED), member))
    assert w.until_s == NOW - 100 + POLICY.join_timeout_s
    assert w.reason == "paused with 1 (n1) of at least 2 nodes"


def test_a_paused_world_with_enough_nodes_resumes_at_once() -> None:
    p = proposal(view(world("n1", state=PAUSED), out("n1"), arrived("n2", since_s=NOW)))
    assert (named(p), p.state, p.cause) == (["n1", "n2"], WorldState.ACTIVE, Cause.RESUMED)
    assert p.reason == "n2 joins"


def test_a_paused_world_may_shrink_to_no_members() -> None:
    two = world("n1", "n2", state=PAUSED, limits=(3, 4))
    p = proposal(view(two, out("n1"), in_state("n2", NodeState.LEAVING)))
    assert (named(p), p.state) == (["n1"], PAUSED)
    last = view(world("n1", state=PAUSED), in_state("n1", NodeState.LEAVING))
    p = proposal(last)
    assert (named(p), p.state, p.cause) == ([], PAUSED, Cause.PAUSED)
    assert p.reason == "n1 leaves; no member remains"


def test_a_pause_ends_the_job_after_the_join_timeout() -> None:
    v = view(world("n1", state=PAUSED), out("n1"), seen(node("n2", limits=(1, 2))))
    until = NOW - 100 + POLICY.join_timeout_s
    d = decide(v, until, POLICY)
    assert isinstance(d, End)
    assert (d.outcome, d.exit_code) == (Outcome.FAILURE, 1)
    assert "1 (n1) of at least 2" in d.reason and "n2 was started with" in d.reason


def test_a_pause_is_not_resumed_with_a_suspect() -> None:
    v = view(world("n1", state=PAUSED), suspect(out("n1")), arrived("n2"))
    assert "n1 may be dead" in wait(v).reason


# ── section 2: no member of the last world is left ────────────────────────────────────────────


def test_a_silent_world_is_taken_over_only_after_takeover_s() -> None:
    v = view(
        world("n1", "n2"),
        arrived("n3"),
        arrived("n4"),
        gone=[missing("n1", last_sign_s=NOW - 10), missing("n2", last_sign_s=NOW - 20)],
    )
    w = wait(v)
    assert w.until_s == NOW - 10 + POLICY.takeover_s
    assert "n1 is lost (silent" in w.reason and "n2 is lost (silent" in w.reason
    p = proposal(v, now=w.until_s)
    assert (named(p), p.cause, p.generation) == (["n3", "n4"], Cause.TAKEOVER, 8)


def test_dead_members_do_not_prolong_the_wait_for_a_silent_one() -> None:
    gone = [missing("n1", proved_dead=True, last_sign_s=NOW), missing("n2", last_sign_s=NOW - 20)]
    w = wait(view(world("n1", "n2"), arrived("n3"), arrived("n4"), gone=gone))
    assert w.until_s == NOW - 20 + POLICY.takeover_s
    assert "n1" not in w.reason


def test_a_world_proved_dead_is_replaced_like_a_first_world() -> None:
    gone = [missing("n1", proved_dead=True)]
    last = world("n1", "n2")
    one = view(last, dead(runs("n2")), arrived("n3"), gone=gone)
    assert "1 (n3) of at least 2" in wait(one).reason
    two = view(last, dead(runs("n2")), arrived("n3"), arrived("n4", since_s=NOW), gone=gone)
    assert wait(two).until_s == NOW + POLICY.last_call_s
    p = proposal(two, now=NOW + POLICY.last_call_s)
    assert (named(p), p.cause) == (["n3", "n4"], Cause.TAKEOVER)
    assert "n1 is lost (its process is dead)" in p.reason


def test_a_world_without_members_needs_no_proof() -> None:
    v = view(world(state=PAUSED), arrived("n3"), arrived("n4"))
    assert proposal(v).cause is Cause.TAKEOVER
    assert "no members" in wait(view(world(state=PAUSED), arrived("n3"))).reason


def test_a_suspect_with_a_valid_key_is_a_survivor() -> None:
    v = view(world("n1"), suspect(runs("n1")), arrived("n3"), arrived("n4"))
    assert "n1 may be dead" in wait(v, now=NOW + POLICY.suspect_s).reason


def test_leaving_members_prove_nothing_about_silent_ones() -> None:
    v = view(world("n1", "n2"), in_state("n1", NodeState.LEAVING), gone=[missing("n2")])
    assert "n2 is lost (silent" in wait(v).reason


# ── the end ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "v",
    [
        view(world("n1", "n2"), *(in_state(n, NodeState.FINISHED) for n in ("n1", "n2"))),
        view(world("n2"), in_state("n1", NodeState.FINISHED), gone=[missing("n2")]),
        view(world("n1"), gone=[replace(missing("n1"), finished=True)]),
    ],
    ids=["all", "finished earlier world", "finished and exited"],
)
def test_the_job_ends_when_all_nodes_have_finished(v: View) -> None:
    d = decide(v, NOW, POLICY)
    assert isinstance(d, End)
    assert (d.outcome, d.exit_code) == (Outcome.SUCCESS, 0)
    assert d.reason.startswith("n1") and "finished" in d.reason


def test_a_finished_member_is_not_lost() -> None:
    v = view(world("n1", "n2"), in_state("n1", NodeState.FINISHED), runs("n2"))
    assert "runs on n2" in wait(v).reason


def test_no_node_joins_and_finished_members_count_while_the_job_ends() -> None:
    finished = in_state("n1", NodeState.FINISHED)
    p = proposal(view(world("n1", "n2"), finished, out("n2"), arrived("n3")))
    assert (named(p), p.state) == (["n2"], WorldState.ACTIVE)
    again = proposal(view(world("n2", generation=8), finished, out("n2", generation=8)))
    assert (named(again), again.state) == (["n2"], WorldState.ACTIVE)
    calm = view(world("n1", "n2"), finished, runs("n2"), arrived("n3"))
    assert "runs on n2" in wait(calm).reason


def test_a_node_that_ended_early_neither_blocks_nor_counts() -> None:
    """The job went on without it: n1 and n2 have run a later world."""
    ended = seen(node("n3", NodeState.FINISHED, running=world("n1", "n2", "n3", generation=6)))
    v = view(world("n1", "n2"), runs("n1"), runs("n2"), ended, arrived("n4"))
    assert named(proposal(v)) == ["n1", "n2", "n4"]
    paused = view(world("n1", state=PAUSED), out("n1"), ended, world_since_s=NOW)
    assert named(proposal(paused)) == ["n1"]  # perhaps the job is about to end
    later = NOW + POLICY.join_timeout_s - 50
    assert "paused with 1 (n1)" in wait(paused, now=later).reason
    enough = replace(paused, nodes=(*paused.nodes, arrived("n4")))
    assert named(proposal(enough, now=later)) == ["n1", "n4"]


def test_a_member_that_finished_keeps_other_nodes_out_for_a_limited_time_only() -> None:
    """The job may be about to end: nobody joins it then. If it goes on, the member ended early."""
    group = world("n1", "n2", "n3")
    finished = seen(node("n3", NodeState.FINISHED), since_s=NOW)
    until_s = NOW + POLICY.join_timeout_s
    trains = (runs("n1"), runs("n2"))
    assert wait(view(group, *trains, finished)).until_s is None
    left = replace(missing("n3", last_sign_s=NOW), finished=True)
    for v in (
        view(group, *trains, finished, arrived("n4")),
        view(group, *trains, arrived("n4"), gone=[left]),
    ):
        assert wait(v).until_s == until_s
        assert waiting_nodes(v, NOW, POLICY) == {"id-n4": "the job is ending"}
        assert named(proposal(v, now=until_s)) == ["n1", "n2", "n4"]


def test_a_member_that_finished_early_does_not_count_among_the_minimum() -> None:
    group = world("n1", "n2", "n3")
    finished = seen(node("n3", NodeState.FINISHED), since_s=NOW)
    v = view(group, runs("n1"), finished, gone=[missing("n2", proved_dead=True)])
    ending, later = proposal(v), proposal(v, now=NOW + POLICY.join_timeout_s)
    assert (named(ending), ending.state) == (["n1"], WorldState.ACTIVE)
    assert (named(later), later.state) == (["n1"], WorldState.PAUSED)


def test_nodes_that_trained_on_are_not_done_because_one_had_finished_early() -> None:
    """Its peers are lost, and the node that joined after its end restarts its workers."""
    early = seen(node("n1", NodeState.FINISHED, running=world("n1", "n2", generation=6)))
    group = world("n3", "n4", mode="in-process")
    for restarts in (node("n3", failure="boom", exit_code=1), node("n3")):
        out = seen(replace(restarts, ran_generation=7))
        v = view(group, early, out, gone=[missing("n4", proved_dead=True)])
        assert not isinstance(decide(v, NOW, POLICY), End)


@pytest.mark.parametrize("mode", ["restart", "in-process"])
def test_the_loss_or_preemption_of_nodes_that_trained_on_is_no_success(mode: str) -> None:
    """n1 had finished early, and is there to see it: the job is interrupted, and can continue."""
    early = seen(node("n1", NodeState.FINISHED, running=world("n1", "n2", generation=6)))
    group = world("n2", mode=mode, limits=(1, 4))
    leaves = seen(node("n2", NodeState.LEAVING, running=group, in_process=True))
    died = dead(seen(node("n2", NodeState.READY, running=group, in_process=True)))
    silent = replace(missing("n2"), running=group)
    unseen = replace(missing("n2"), is_known=False)
    for v in (
        view(group, early, leaves),
        view(group, early, died),
        view(group, early, gone=[silent]),
        view(group, early, gone=[unseen]),
        view(ran(replace(group, generation=8), 7), early, gone=[replace(unseen, is_known=True)]),
    ):
        assert not isinstance(decide(v, NOW, POLICY), End)
    finished = seen(node("n2", NodeState.FINISHED, running=group))
    assert isinstance(decide(view(group, early, finished), NOW, POLICY), End)
    plan = world("n1", "n3", mode="in-process", switch_at_step=50)
    cancelled = view(plan, early, gone=[replace(missing("n3"), is_known=False)])
    assert isinstance(decide(cancelled, NOW, POLICY), End), "n1 had finished before the switch"


def test_a_finished_node_that_is_gone_does_not_end_the_job_of_others() -> None:
    """Its record remains in the store: they were interrupted, and return."""
    group = world("n1", "n2")
    departed = suspect(seen(node("n1", NodeState.FINISHED, running=group)))
    lost = missing("n2", proved_dead=True)
    v = view(group, departed, arrived("n3"), arrived("n4"), gone=[lost])
    assert named(proposal(v)) == ["n3", "n4"]
    empty = view(world(generation=8, state=PAUSED), departed, arrived("n3"), arrived("n4"))
    assert named(proposal(empty)) == ["n3", "n4"]
    both = view(group, departed, suspect(seen(node("n2", NodeState.FINISHED, running=group))))
    assert isinstance(decide(both, NOW, POLICY), End)
    goes_on = view(group, departed, seen(node("n2", NodeState.STARTING, running=group)))
    assert "runs on n2" in wait(goes_on, now=NOW + 1e6).reason


def test_no_member_waits_for_one_that_finished_before_it_entered_the_world() -> None:
    """n2 returns, or its workers fail, while the last steps of n1 are done."""
    n1 = node("n1", NodeState.FINISHED, running=world("n1"))
    returned = node("n2", arrived_for=6)
    ended = decide(view(world("n1", "n2", generation=8), seen(n1), seen(returned)), NOW, POLICY)
    assert isinstance(ended, End) and ended.outcome is Outcome.SUCCESS

    waits_inside = replace(returned, running=world("n1", "n2", generation=8))
    p = proposal(view(world("n1", "n2", generation=8), seen(n1), seen(waits_inside)))
    assert (named(p), p.generation) == ([], 9)
    assert p.reason == "n1 had finished before; the job ends"
    w = wait(view(world(generation=9, state=PAUSED), seen(n1), seen(waits_inside)))
    assert w.reason == "n2 still ending workers"
    v = view(world(generation=9, state=PAUSED), seen(n1), seen(node("n2", arrived_for=8)))
    assert isinstance(decide(v, NOW, POLICY), End)

    n1 = replace(n1, running=world("n1", "n2"))
    failed = node("n2", arrived_for=7)
    v = view(world("n1", "n2", generation=8), seen(n1), seen(failed))
    p = proposal(v)
    assert (named(p), p.state, p.cause) == (["n2"], WorldState.ACTIVE, Cause.LEFT)
    assert p.reason == "n1 had finished before"
    exited = replace(missing("n1"), finished=True, running=world("n1", "n2"))
    assert named(proposal(view(v.world, seen(failed), gone=[exited]))) == ["n2"]
    calm = view(world("n2", generation=9), seen(n1), seen(failed))
    assert "runs on n2" in wait(calm).reason


N1_FAILED = BreakageRecord(
    generation=7,
    lived_s=9.0,
    steps=9,
    failures=(FailureRecord(node="n1", text="OSError: no space", exit_code=1),),
    lost=(),
    time_s=0.0,
)


@pytest.mark.parametrize("in_process", [False, True])
def test_what_failed_after_the_last_step_runs_again(in_process: bool) -> None:
    """n1 saves the model, its script raises, and the others, whose workers are about to exit, go on
    without it in process: they finish in the world that they had with it."""
    group = world("n1", "n2", "n3", limits=(3, 3))
    done = [seen(node(n, NodeState.FINISHED, running=group, limits=(3, 3))) for n in ("n2", "n3")]
    failed = node("n1", arrived_for=7, failure="OSError: no space", exit_code=1, limits=(3, 3))
    warms_up = replace(failed, state=NodeState.STARTING)
    ready = replace(failed, state=NodeState.READY, in_process=True)
    after = replace(
        world("n2", "n3", generation=8, state=PAUSED, mode="in-process", limits=(3, 3)),
        breakages=(N1_FAILED,),
    )
    p = proposal(view(after, *done, seen(ready if in_process else failed)))
    assert (named(p), p.state, p.mode) == (
        ["n1"],
        WorldState.ACTIVE,
        "in-process" if in_process else "restart",
    )
    why = "n1 failed (OSError: no space) before the end of the script"
    assert p.reason == f"n2, n3 finished; {why}"
    limit_s = NOW - 50 + POLICY.join_timeout_s
    assert wait(view(after, *done, seen(warms_up))).until_s == limit_s
    again = world("n1", generation=9, limits=(3, 3))
    runs_again = seen(replace(failed, state=NodeState.STARTING, running=again))
    assert "runs on n1" in wait(view(again, *done, runs_again)).reason
    assert named(proposal(view(again, *done, seen(replace(failed, arrived_for=9))))) == ["n1"]
    finished = seen(node("n1", NodeState.FINISHED, running=again))
    end = decide(view(again, *done, finished), NOW, POLICY)
    assert isinstance(end, End) and end.outcome is Outcome.SUCCESS


N1_LOST = replace(N1_FAILED, failures=(), lost=("n1",))
END = replace(world("n2", generation=8, limits=(3, 3)), cause=Cause.UNFINISHED)


@pytest.mark.parametrize("how", ["killed", "silent", "asked to leave", "excluded, and finished"])
def test_the_end_of_a_script_that_a_node_was_lost_in_runs_again_on_one_that_has_finished(
    how: str,
) -> None:
    """n1 saves the model for minutes, and n2 and n3 have nothing more to do."""
    group = world("n1", "n2", "n3", limits=(3, 3))
    done = [seen(node(n, NodeState.FINISHED, running=group, limits=(3, 3))) for n in ("n2", "n3")]
    n1 = node("n1", NodeState.LEAVING, running=group, limits=(3, 3))
    v = {
        "killed": view(group, *done, gone=[missing("n1", proved_dead=True)]),
        "silent": view(group, *done, gone=[missing("n1")]),
        "asked to leave": view(group, *done, seen(n1)),
        "excluded, and finished": view(
            replace(world("n2", "n3", generation=8, limits=(3, 3)), breakages=(N1_LOST,)), *done
        ),
    }[how]
    decision = decide(v, NOW, POLICY)
    if how in ("silent", "asked to leave"):  # its workers may still run
        assert isinstance(decision, Wait) and decision.until_s is not None
        decision = decide(v, decision.until_s, POLICY)
    assert isinstance(decision, Proposal)
    assert (named(decision), decision.mode) == (["n2"], "restart")
    assert (decision.state, decision.cause) == (WorldState.ACTIVE, Cause.UNFINISHED)
    assert "n1 was lost before the end of the script; n2 runs it again" in decision.reason
    saved = view(group, *done, seen(replace(n1, state=NodeState.FINISHED)))
    assert isinstance(decide(saved, NOW, POLICY), End)
    spare = replace(v, nodes=(*v.nodes, seen(node("n4", limits=(3, 3)))))
    assert named(proposal(spare, now=NOW + POLICY.leave_s)) == ["n4"]


def test_a_node_that_runs_the_end_of_the_script_again_is_followed_to_that_end() -> None:
    group = world("n1", "n2", "n3", limits=(3, 3))
    done = [seen(node(n, NodeState.FINISHED, running=group, limits=(3, 3))) for n in ("n2", "n3")]
    n2 = done[0].node
    limit_s = NOW + POLICY.join_timeout_s
    waits = view(END, *done, world_since_s=NOW)
    assert wait(waits).until_s == limit_s
    assert named(proposal(waits, now=limit_s)) == ["n3"]
    left = view(END, dead(done[0]), done[1], world_since_s=NOW)
    assert named(proposal(left)) == ["n3"]
    arrives = replace(n2, state=NodeState.ARRIVED, running=None, arrived_for=7)
    starts = replace(n2, state=NodeState.STARTING, running=END)
    for runs_it in (arrives, starts):
        assert "runs on n2" in wait(view(END, done[1], seen(runs_it))).reason
    again = proposal(view(END, done[1], seen(replace(arrives, arrived_for=8))))
    assert (named(again), again.state, again.cause) == (["n2"], WorldState.ACTIVE, Cause.UNFINISHED)
    lost = view(END, done[1], gone=[missing("n2", proved_dead=True)])
    assert named(proposal(lost)) == ["n3"]
    failed = replace(
        arrives, state=NodeState.FAILED, arrived_for=8, failure="OSError", ran_generation=8
    )
    end = decide(view(END, done[1], seen(failed)), NOW, POLICY)
    assert isinstance(end, End) and (end.outcome, end.exit_code) == (Outcome.FAILURE, 1)
    finished = seen(replace(n2, running=END))
    end = decide(view(END, done[1], finished), NOW, POLICY)
    assert isinstance(end, End) and end.outcome is Outcome.SUCCESS
    # All have left since: a later start begins it, and is no success by itself.
    later = view(END, *map(dead, done), arrived("n4"), world_since_s=NOW)
    assert not isinstance(decide(later, NOW, POLICY), End)


def test_a_spare_that_is_to_run_the_end_of_the_script_is_waited_for() -> None:
    """In process, it enters that world only later."""
    group = world("n1", "n2", mode="in-process")
    done = seen(node("n2", NodeState.FINISHED, running=group))
    spare = seen(node("n3", NodeState.READY, in_process=True))
    p = proposal(view(group, done, spare, gone=[missing("n1", proved_dead=True)]))
    assert (named(p), p.mode) == (["n3"], "in-process")
    end = replace(world("n3", generation=8, mode="in-process"), cause=Cause.UNFINISHED)
    assert "runs on n3" in wait(view(end, done, spare)).reason


@pytest.mark.parametrize("excluded", [False, True])
def test_a_script_that_fails_after_the_last_step_fails_the_job_if_it_is_not_restarted(
    excluded: bool,
) -> None:
    """--max-restarts=0: n1 leaves, and its record remains if it is a member."""
    group = world("n1", "n2")
    finished = seen(node("n2", NodeState.FINISHED, running=group))
    failed = seen(
        node("n1", NodeState.FAILED, arrived_for=7, failure="OSError: no space", exit_code=1)
    )
    after = replace(world("n2", generation=8, state=PAUSED), breakages=(N1_FAILED,))
    v = view(after, finished) if excluded else view(group, finished, failed)
    end = decide(v, NOW, POLICY)
    assert isinstance(end, End) and (end.outcome, end.exit_code) == (Outcome.FAILURE, 1)
    why = "n1 failed (OSError: no space) before" if excluded else "n1 failed: OSError: no space; n1"
    assert end.is_final and why in end.reason
    spare = replace(v, nodes=(*v.nodes, arrived("n3")))
    assert named(proposal(spare)) == ["n3"]


def test_no_decision_after_the_end_of_the_job() -> None:
    done = Done(
        outcome=Outcome.SUCCESS,
        reason="all finished",
        exit_code=0,
        generation=7,
        final_step=None,
        time_s=0.0,
    )
    v = replace(view(world("n1", "n2"), runs("n1"), gone=[missing("n2")]), done=done)
    assert wait(v).reason == "the job is over: all finished"


# ── a wiped store ────────────────────────────────────────────────────────────────────────────


def test_no_world_is_formed_while_another_still_runs() -> None:
    running = seen(node("n1", NodeState.STARTING, running=world("n1", "n2")))
    v = view(None, running, arrived("n3"), arrived("n4"))
    assert "generation 7 runs" in wait(v).reason
    assert "generation 7 runs" in wait(replace(v, world=world("n3", generation=3))).reason
    last = ran(world("n1", "n2"), 6, 6)
    assert isinstance(decide(replace(v, world=last), NOW, POLICY), Proposal)


# ── the record ───────────────────────────────────────────────────────────────────────────────


def test_the_world_record_continues_the_last_world() -> None:
    last = replace(world("n1", "n2"), lineage=tuple(range(1, 33)), committed_step=40)
    p = proposal(view(last, runs("n2"), arrived("n3"), gone=[missing("n1")]))
    record = world_of(p, last, nonce="cd", time_s=5.0)
    assert record.generation == 8
    assert record.lineage == (*range(2, 33), 7)
    assert record.committed_step == 40
    assert (record.store_host, record.store_port) == ("10.0.0.2", 5003)  # ports[8 % 3]
    assert (record.min_nodes, record.max_nodes, record.library) == (2, 4, "0.1.0")
    assert (record.cause, record.reason, record.nonce) == (p.cause, p.reason, "cd")
    assert record.node_ids == ("id-n2", "id-n3")


def test_a_world_without_members_has_a_record() -> None:
    last = world("n1", state=PAUSED)
    p = proposal(view(last, in_state("n1", NodeState.LEAVING)))
    record = world_of(p, last, nonce="cd", time_s=5.0)
    assert (record.members, record.store_host, record.store_port) == ((), "", 0)


@pytest.mark.parametrize(
    ("failure", "step", "waits"),
    [("TypeError: boom", None, True), ("TypeError: boom", 7, False), ("OSError: boom", 0, False)],
)
def test_an_error_of_the_code_before_the_first_step_waits_for_the_other_nodes(
    failure: str, step: int | None, waits: bool
) -> None:
    """Workers do not start at the same moment, and an error on all nodes ends the job."""
    failed = replace(node("n1", arrived_for=7, failure=failure, exit_code=1), failure_step=step)
    v = view(world("n1", "n2"), seen(failed, since_s=NOW), runs("n2"), world_since_s=NOW - 15)
    if waits:
        assert wait(v).until_s == NOW + 3
        assert wait(replace(v, world_since_s=NOW - 1)).until_s == NOW + POLICY.origin_settle_s
        both = replace(v, nodes=(v.nodes[0], out("n2", failure=failure)))
        assert proposal(both).cause is Cause.FAILURE
        v = view(replace(world("n1", "n2"), committed_step=7), *v.nodes)
    assert proposal(v).cause is Cause.FAILURE


def test_a_failure_caused_by_a_peer_waits_for_the_peers_own_error() -> None:
    closed = "RuntimeError: Connection closed by peer [10.0.0.3]:4711"
    seven = world("n1", "n2", "n3")
    at_first = replace(out("n1", failure=closed), state_since_s=NOW)
    v = view(seven, at_first, out("n2", failure=closed), runs("n3"))
    until_s = NOW - 50 + POLICY.origin_settle_s  # since the first of them
    assert proposal(v).cause is Cause.FAILURE
    assert wait(v, now=until_s - 0.01).until_s == until_s
    own = replace(v, nodes=(*v.nodes[:2], out("n3", failure="ValueError: boom")))
    assert proposal(own, now=until_s - 0.01).cause is Cause.FAILURE
    lost = replace(v, nodes=v.nodes[:2], missing=(missing("n3", proved_dead=True),))
    assert proposal(lost, now=until_s - 0.01).cause is Cause.LOST


def test_a_job_that_all_nodes_have_left_in_order_may_start_over() -> None:
    """They have saved, or have reported what is lost: otherwise every start would end with 65."""
    last = replace(world("n1"), committed_step=40)
    left = proposal(view(last, in_state("n1", NodeState.LEAVING)))
    empty = world_of(left, last, nonce="0", time_s=0.0)
    assert (empty.left_in_order, empty.committed_step) == (True, 40)
    again = proposal(view(empty, arrived("n1"), arrived("n2")), now=NOW + 60)
    assert "all nodes had left, after step 40" in again.reason
    record = world_of(again, empty, nonce="1", time_s=0.0)
    assert (record.left_in_order, record.committed_step) == (False, None)


def test_a_job_whose_nodes_have_failed_does_not_start_over() -> None:
    last = replace(world("n1", "n2"), committed_step=40)
    failed = in_state("n1", NodeState.FAILED), in_state("n2", NodeState.LEAVING)
    assert not proposal(view(last, *failed)).left_in_order


def left_by(*names: str, committed_step: int | None = None) -> WorldRecord:
    """A world without members, written while the workers of these nodes stepped."""
    last = replace(world(*names), committed_step=committed_step)
    leaving = [seen(node(n, NodeState.LEAVING, running=last)) for n in names]
    p = proposal(view(last, *leaving))
    assert p.nodes == ()
    return world_of(p, last, nonce="0", time_s=0.0)


def test_waiting_nodes_do_not_start_while_leaving_ones_may_step() -> None:
    """Their leases end while they cannot reach etcd: their keys do not tell whether they left."""
    empty = left_by("n1", "n2")
    assert [m.name for m in empty.leaving] == ["n1", "n2"]
    waiting = arrived("n3"), arrived("n4")
    silent = [replace(missing(n), is_known=False) for n in ("n1", "n2")]
    w = wait(view(empty, *waiting, gone=silent))
    assert "n1, n2 were leaving when the leases expired" in w.reason
    assert w.until_s == NOW - 5 + POLICY.takeover_s
    assert named(proposal(view(empty, *waiting, gone=silent), now=w.until_s)) == ["n3", "n4"]


def test_waiting_nodes_start_at_once_when_the_leaving_ones_have_left_or_died() -> None:
    empty = left_by("n1", "n2")
    waiting = arrived("n3"), arrived("n4")
    left = suspect(in_state("n1", NodeState.LEAVING))  # its host does not answer any more
    dead_one = missing("n2", proved_dead=True)
    assert named(proposal(view(empty, left, *waiting, gone=[dead_one]))) == ["n3", "n4"]


def test_a_job_may_start_over_only_if_the_nodes_that_were_to_leave_have_left() -> None:
    """One that dies before has perhaps not saved."""
    empty = left_by("n1", "n2", committed_step=40)
    waiting = arrived("n3"), arrived("n4")
    left = [in_state(n, NodeState.LEAVING) for n in ("n1", "n2")]
    in_order = proposal(view(empty, *left, *waiting))
    assert "all nodes had left, after step 40" in in_order.reason
    assert world_of(in_order, empty, nonce="1", time_s=0.0).committed_step is None
    died = missing("n2", proved_dead=True)
    restarted = proposal(view(empty, left[0], *waiting, gone=[died]))
    assert world_of(restarted, empty, nonce="1", time_s=0.0).committed_step == 40


# ── `elastic stop` ───────────────────────────────────────────────────────────────────────────

STOPPED = "the job was stopped by a@b"


@pytest.mark.parametrize("before", [None, world(), world("n1", "n2")], ids=["new", "left", "runs"])
def test_a_stopped_job_admits_no_node_and_says_why(before: WorldRecord | None) -> None:
    members = [runs(m.name) for m in before.members] if before is not None else []
    v = replace(view(before, *members, arrived("n3"), arrived("n4")), stopped=STOPPED)
    assert STOPPED in wait(v).reason
    if before is not None:
        why = {"id-n3": f"n3 waits: {STOPPED}", "id-n4": f"n4 waits: {STOPPED}"}
        assert waiting_nodes(v, NOW, POLICY) == why
    assert {"n3", "n4"} <= set(named(proposal(replace(v, stopped=""))))


def test_nodes_leave_a_stopped_job_as_any_other() -> None:
    v = view(world("n1", "n2", "n3"), runs("n1"), runs("n2"), in_state("n3", NodeState.LEAVING))
    stopped = replace(v, stopped=STOPPED)
    assert proposal(stopped) == proposal(v)


def test_lost_connections_are_explained_by_a_member_that_has_ended() -> None:
    """Of a script without elastic.join(), whose worker has called os._exit(0) in training."""
    lost = [out(n, failure="RuntimeError: Connection reset by peer") for n in ("n1", "n2")]
    ended = in_state("n3", NodeState.FINISHED)
    reason = proposal(view(world("n1", "n2", "n3"), *lost, ended)).reason
    assert reason.startswith("n3 ended with exit code 0 before the others; n1 failed: ")
    own = out("n2", failure="ValueError: boom")
    reason = proposal(view(world("n1", "n2", "n3"), lost[0], own, ended)).reason
    assert "exit code 0" not in reason, "another failure explains them"
