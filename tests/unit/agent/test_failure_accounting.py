"""The leader's failure accounting: which nodes are quarantined, and when the job stops."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kit.membership_nodes import NOW, missing, node, proposal, seen, view, wait, world

from elastic.agent.accounting import (
    BUILD_BACKOFF_CAP_S,
    Broken,
    FailureAccounting,
)
from elastic.agent.roster import Failed
from elastic.membership.budget import StopJob
from elastic.membership.records import FailureReport, NodeState, WorldRecord
from elastic.membership.view import NodeView, StepRate, View, classify_members
from elastic.tuning.options import AgentOptions
from elastic.wire.messages import Cause

ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
OPTIONS = AgentOptions(quarantine_s=30.0, failure_budget=5)
SEVEN = world("n1", "n2", mode="in-process")
EIGHT = world("n1", "n2", "n3", generation=8, mode="in-process")
NINE = replace(EIGHT, generation=9)


def runs(name: str, group: WorldRecord) -> NodeView:
    return seen(node(name, NodeState.READY, in_process=True, running=group, arrived_for=1))


def out(name: str, group: WorldRecord, code: int = 1) -> NodeView:
    return seen(node(name, arrived_for=group.generation, failure="boom", exit_code=code))


def broken(v: View, *, since_s: float = NOW - 5) -> Broken:
    assert v.world is not None
    failures = tuple(
        Failed(n.node.node_id, n.node.name, n.node.failure, n.node.failure_exit_code)
        for n in v.nodes
        if n.node.failure
    )
    return Broken(
        members=classify_members(v, v.world),
        proposal=proposal(v),
        since_s=since_s,
        failures=failures,
    )


def joined_s_ago(seconds: float) -> FailureAccounting:
    """n3 joined the running job that many seconds ago."""
    accounting = FailureAccounting(OPTIONS)
    accounting.formed(SEVEN, EIGHT, NOW - seconds)
    return accounting


def with_n3_out(code: int = 1, *, since_s: float = NOW - 5) -> Broken:
    v = view(EIGHT, runs("n1", EIGHT), runs("n2", EIGHT), out("n3", EIGHT, code))
    return broken(v, since_s=since_s)


def test_a_joining_node_that_fails_by_itself_is_quarantined() -> None:
    accounting = joined_s_ago(10.0)
    accounting.count(with_n3_out(), None, NOW)
    assert accounting.flaps.quarantined(NOW) == {"id-n3": NOW + 30.0}
    assert accounting.flaps.quarantined(NOW + 30.0) == {}


def test_a_joining_node_is_told_why_it_is_quarantined_in_its_second_world() -> None:
    """Under load, the others may report that they lost it before its own failure is known."""
    accounting = joined_s_ago(10.0)
    accounting.count(
        broken(view(NINE, runs("n1", NINE), runs("n2", NINE), out("n3", NINE, 2))), None, NOW
    )
    assert list(accounting.quarantine_reasons) == ["id-n3"]


@pytest.mark.parametrize(("code", "seconds"), [(-9, 10.0), (-15, 10.0), (1, 70.0)])
def test_a_node_killed_or_failed_later_is_not_quarantined(code: int, seconds: float) -> None:
    accounting = joined_s_ago(seconds)
    accounting.count(with_n3_out(code, since_s=NOW - seconds), None, NOW)
    assert accounting.flaps.quarantined(NOW) == {}


def test_members_of_the_first_world_are_not_joining_nodes() -> None:
    accounting = FailureAccounting(OPTIONS)
    accounting.formed(None, EIGHT, NOW - 1)
    accounting.count(with_n3_out(), None, NOW)
    assert accounting.flaps.quarantined(NOW) == {}


def test_a_joining_node_lost_before_the_switch_is_quarantined_by_name() -> None:
    """It returns with another ID."""
    pending = world("n1", "n2", "n3", generation=8, mode="in-process", switch_at_step=50)
    accounting = FailureAccounting(OPTIONS)
    accounting.formed(SEVEN, pending, NOW - 1)
    gone = [missing("n3", proved_dead=True)]
    accounting.count(
        broken(view(pending, runs("n1", SEVEN), runs("n2", SEVEN), gone=gone)), None, NOW
    )
    assert accounting.flaps.quarantined(NOW) == {"n3": NOW + 30.0}


def count_repeatedly(accounting: FailureAccounting, times: int, *, steps: int) -> StopJob | None:
    """Worlds 1, 2, … each broken by n2's workers, ``steps`` after the previous one."""
    stop = None
    for generation in range(1, times + 1):
        group = world("n1", "n2", "n3", generation=generation, mode="in-process")
        v = view(group, runs("n1", group), runs("n3", group), out("n2", group))
        step_rate = StepRate(generation, generation * steps, 0.1, NOW)
        stop = stop or accounting.count(broken(v), step_rate, NOW + generation)
    return stop


def test_failures_stop_the_job_unless_it_makes_progress() -> None:
    stop = count_repeatedly(FailureAccounting(OPTIONS), 3, steps=0)
    assert stop is not None and "boom" in stop.reason
    assert count_repeatedly(FailureAccounting(OPTIONS), 20, steps=100) is None


TYPO = "AttributeError: module 'torch.nn' has no attribute 'Linaer'"


@pytest.mark.parametrize(
    ("text", "step", "of_each_world", "ends"),
    [
        (TYPO, 0, [("n1", "n2")], True),
        (TYPO, None, [("n1", "n2")], False),  # it lived long, and may have trained
        (TYPO, 7, [("n1", "n2")], False),  # from a checkpoint
        (TYPO, 0, [("n1",)], False),
        (TYPO, 0, [("n1",), ("n2",)], True),  # one node after the other
        (TYPO, 0, [("n1",), ("n1",)], False),
        ("OSError: [Errno 116] Stale handle", 0, [("n1", "n2")], False),  # may be transient
        ("FileNotFoundError: /data/train.bin", 0, [("n1", "n2")], False),
        ("RuntimeError: the data service is not up yet", 0, [("n1", "n2")], False),
        ("json.decoder.JSONDecodeError: Expecting value", 0, [("n1", "n2")], False),
    ],
)
def test_an_error_of_the_code_on_every_node_before_the_first_step_ends_the_job(
    text: str, step: int | None, of_each_world: list[tuple[str, ...]], ends: bool
) -> None:
    accounting = FailureAccounting(OPTIONS)
    stop = None
    for generation, names in enumerate(of_each_world, start=1):
        group = world("n1", "n2", generation=generation)
        views = {n: out(n, group) if n in names else runs(n, group) for n in ("n1", "n2")}
        made = broken(view(group, *views.values()), since_s=NOW - 300)
        failures = tuple(replace(f, text=text, step=step) for f in made.failures)
        assert stop is None
        stop = accounting.count(replace(made, failures=failures), None, NOW + generation)
    assert (stop is not None) == ends
    if stop is not None:
        assert "every node raised this error before the first step" in stop.reason
        assert TYPO in stop.reason and stop.exit_code == 1


def test_an_error_of_the_code_on_a_lone_node_is_tried_once_more() -> None:
    accounting = FailureAccounting(OPTIONS)
    stops = []
    for generation in (1, 2):
        group = world("n1", generation=generation)
        made = broken(view(group, out("n1", group)), since_s=NOW - 300)
        failures = tuple(replace(f, text=TYPO, step=0) for f in made.failures)
        failed = replace(made.proposal, cause=Cause.FAILURE)
        made = replace(made, failures=failures, proposal=failed)
        stops.append(accounting.count(made, None, NOW + generation))
    assert [stop is not None for stop in stops] == [False, True]


def test_a_restart_from_a_checkpoint_is_not_progress() -> None:
    accounting = FailureAccounting(OPTIONS)
    accounting.observe(StepRate(1, 100, 0.1, NOW))
    stop = None
    for generation, step in ((1, 110), (2, 20), (3, 90), (4, 109)):
        group = world("n1", "n2", "n3", generation=generation, mode="in-process")
        v = view(group, runs("n1", group), runs("n3", group), out("n2", group))
        stop = accounting.count(broken(v), StepRate(generation, step, 0.1, NOW), NOW)
    assert stop is not None


def test_a_world_is_counted_once_despite_repeated_proposals() -> None:
    accounting = FailureAccounting(OPTIONS)
    assert [accounting.count(with_n3_out(), None, NOW) for _ in range(10)] == [None] * 10


def test_joining_and_leaving_are_not_counted() -> None:
    accounting = FailureAccounting(OPTIONS)
    leaves = seen(node("n3", NodeState.LEAVING, in_process=True, running=EIGHT))
    left = broken(view(EIGHT, runs("n1", EIGHT), runs("n2", EIGHT), leaves))
    assert accounting.count(left, StepRate(8, 500, 0.1, NOW), NOW) is None
    assert accounting.count(left, StepRate(8, 500, 0.1, NOW), NOW) is None
    (record,) = accounting.records(NOW, 0.0)
    assert (record.left, record.counts, record.step) == (("n3",), False, 500)
    assert record.response == "formed generation 9 with n1, n2"


def lose_n3_repeatedly(
    accounting: FailureAccounting, times: int, *, steps: int, mode: str = "in-process"
) -> StopJob | None:
    """Worlds 1, 2, …, each of which loses n3 ``steps`` after the previous one. Its agent is a new
    one each time, under the same name."""
    stop = None
    for generation in range(1, times + 1):
        group = world("n1", "n2", "n3", generation=generation, mode=mode)
        gone = [missing("n3", proved_dead=True)]
        v = view(group, runs("n1", group), runs("n2", group), gone=gone)
        step_rate = StepRate(generation, generation * steps, 0.1, NOW)
        accounting.observe(StepRate(1, 0, 0.1, NOW))
        stop = stop or accounting.count(broken(v), step_rate, NOW + generation)
    return stop


def test_repeated_losses_without_progress_spend_the_budget() -> None:
    stop = lose_n3_repeatedly(FailureAccounting(OPTIONS), 7, steps=0)
    assert stop is not None and stop.exit_code == 70
    # The first loss does not count.
    assert lose_n3_repeatedly(FailureAccounting(OPTIONS), 6, steps=0) is None
    assert lose_n3_repeatedly(FailureAccounting(OPTIONS), 30, steps=5) is None


def test_a_name_shared_by_several_agents_is_not_churn() -> None:
    accounting = FailureAccounting(OPTIONS)
    for generation in range(1, 10):
        group = world("n1", "n2", "n3", generation=generation, mode="in-process")
        members = tuple(replace(m, name="machine") for m in group.members)
        group = replace(group, members=members)
        gone = [missing("n3", proved_dead=True)]
        gone = [replace(g, member=members[2]) for g in gone]
        v = view(group, runs("n1", group), runs("n2", group), gone=gone)
        step_rate = StepRate(generation, 7, 0.1, NOW)
        assert accounting.count(broken(v), step_rate, NOW + generation) is None


def test_single_losses_of_different_nodes_spend_no_budget() -> None:
    accounting = FailureAccounting(OPTIONS)
    names = [f"n{i}" for i in range(1, 21)]
    for generation in range(1, 19):
        group = world(*names[generation:], generation=generation, mode="in-process")
        gone = [missing(names[generation], proved_dead=True)]
        v = view(group, *(runs(n, group) for n in names[generation + 1 :]), gone=gone)
        step_rate = StepRate(generation, 7, 0.1, NOW)
        assert accounting.count(broken(v), step_rate, NOW + generation) is None


def test_losses_do_not_displace_the_records_of_failures() -> None:
    accounting = FailureAccounting(OPTIONS)
    assert count_repeatedly(accounting, 2, steps=0) is None
    for generation in range(3, 40):
        group = world("n1", "n2", f"n{generation}", generation=generation, mode="in-process")
        gone = [missing(f"n{generation}", proved_dead=True)]
        v = view(group, runs("n1", group), runs("n2", group), gone=gone)
        assert accounting.count(broken(v), StepRate(1, 0, 0.1, NOW), NOW + 3) is None
    records = accounting.records(NOW + 3, 0.0)
    assert len(records) == 16
    assert [r.generation for r in records if r.counts] == [1, 2]


def in_world(
    generation: int, *nodes: NodeView, reports: bool = False, lost: bool = False
) -> Broken:
    """n1 and n2 run that world; n3 is one of ``nodes``, or lost. n1 may report an error."""
    group = world("n1", "n2", "n3", generation=generation, mode="in-process")
    others = tuple(replace(n, node=replace(n.node, running=group)) for n in nodes)
    report = FailureReport(node_id="id-n1", generation=generation, error="connection reset")
    gone = [missing("n3", proved_dead=True)] if lost else []
    v = view(group, runs("n1", group), runs("n2", group), *others, gone=gone)
    return broken(replace(v, failure_reports=(report,) if reports else ()))


def dies(generation: int) -> Broken:
    group = world("n1", "n2", "n3", generation=generation, mode="in-process")
    return broken(view(group, runs("n1", group), runs("n2", group), out("n3", group, -9)))


@pytest.mark.parametrize("how", ["dies", "lost"])
def test_a_broken_connection_and_its_late_cause_count_once(how: str) -> None:
    """Its peers noticed n3's death in generation 8, its agent in generation 9."""
    accounting = FailureAccounting(replace(OPTIONS, failure_budget=1))
    for generation, step in ((8, 3), (11, 4)):
        reported = in_world(generation, runs("n3", SEVEN), reports=True)
        assert accounting.count(reported, StepRate(generation, step, 0.1, NOW), NOW) is None
        late = generation + 1
        cause = dies(late) if how == "dies" else in_world(late, lost=True)
        stop = accounting.count(cause, StepRate(late, step, 0.1, NOW), NOW + 1)
        assert (stop is not None) == (how == "dies" and generation == 11)
        records = accounting.records(NOW + 1, 0.0)[-2:]
        assert [r.counts for r in records] == [False, how == "dies" or generation == 11]  # or churn


def test_a_failure_after_steps_does_not_explain_the_one_before() -> None:
    accounting = FailureAccounting(replace(OPTIONS, failure_budget=1))
    reported = in_world(8, runs("n3", SEVEN), reports=True)
    assert accounting.count(reported, StepRate(8, 3, 0.1, NOW), NOW) is None
    stop = accounting.count(dies(9), StepRate(9, 5, 0.1, NOW), NOW + 1)
    assert stop is not None and stop.exit_code == 70


def test_unexplained_failures_spend_the_budget() -> None:
    accounting = FailureAccounting(OPTIONS)
    stops = [
        accounting.count(
            in_world(generation, runs("n3", SEVEN), reports=True),
            StepRate(generation, 3, 0.1, NOW),
            NOW,
        )
        for generation in range(8, 15)
    ]
    assert [stop is not None for stop in stops] == [False] * 6 + [True]


def test_the_record_contains_verdict_and_response() -> None:
    accounting = FailureAccounting(OPTIONS)
    assert accounting.count(failed_with("CUDA error: uncorrectable ECC error"), None, NOW) is None
    assert accounting.count(failed_with("NameError: name 'x' is not defined", NINE), None, NOW)
    first, last = accounting.records(NOW, 0.0)
    assert first.verdict == "exclude-node: a GPU of this node is faulty"
    assert first.response == "quarantined n3, formed generation 9 with n1, n2"
    assert last.verdict == "stop: the script cannot run"
    assert last.response == "ended the job with exit code 1"


def test_the_next_leader_inherits_steps_and_oom_kills() -> None:
    accounting = FailureAccounting(OPTIONS)
    failed = Failed("id-n3", "n3", "boom", -9, step=41, is_oom_kill=True)
    accounting.count(replace(with_n3_out(-9), failures=(failed,)), StepRate(8, 40, 0.1, NOW), NOW)
    (record,) = records = accounting.records(NOW, 0.0)
    assert (record.step, record.failures[0].step, record.failures[0].is_oom_kill) == (40, 41, True)
    other = FailureAccounting(OPTIONS)
    other.remember(replace(EIGHT, breakages=records), NOW, 0.0)
    assert other.records(NOW, 0.0) == records


def test_an_oom_kill_has_its_own_verdict_and_quarantines_a_joining_node() -> None:
    accounting = joined_s_ago(10.0)
    failed = Failed("id-n3", "n3", "local rank 0 was ended by SIGKILL", -9, is_oom_kill=True)
    accounting.count(replace(with_n3_out(-9), failures=(failed,)), None, NOW)
    assert accounting.verdict is not None
    assert accounting.verdict[1].rule == "host-out-of-memory"
    assert "id-n3" in accounting.flaps.quarantined(NOW)


def test_a_fault_in_the_kernel_log_quarantines_its_node_and_not_the_peer() -> None:
    """n1 reports the end of its peer first; n3, whose GPU is gone, has the same error text."""
    text = "RuntimeError: Connection closed by peer [10.0.0.4]:4711"
    xid = "NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus"
    peer = Failed("id-n1", "n1", text, 1)
    faulty = Failed("id-n3", "n3", text, 1, kernel_log=(xid,))
    accounting = FailureAccounting(OPTIONS)
    accounting.count(replace(with_n3_out(), failures=(peer, faulty)), None, NOW)
    assert accounting.verdict is not None
    failed, verdict = accounting.verdict
    assert (failed.node, verdict.evidence) == ("n3", f"kernel log: {xid}")
    assert "id-n3" in accounting.flaps.quarantined(NOW)
    assert "id-n1" not in accounting.flaps.quarantined(NOW)


def test_the_next_leader_continues_the_count() -> None:
    one = FailureAccounting(OPTIONS)
    assert count_repeatedly(one, 2, steps=0) is None
    last = world("n1", "n2", "n3", generation=3, mode="in-process")
    records = one.records(NOW + 2, wall_s=5000.0)
    assert [r.time_s for r in records] == [4999.0, 5000.0]
    two = FailureAccounting(OPTIONS)
    two.remember(replace(last, breakages=records), NOW + 3, wall_s=5001.0)
    v = view(last, runs("n1", last), runs("n3", last), out("n2", last))
    stop = two.count(broken(v), None, NOW + 3)
    assert stop is not None and "3 times in a row" in stop.reason


@pytest.mark.parametrize("steps", [0, 50])
def test_the_next_leader_knows_the_progress_of_the_job(steps: int) -> None:
    """Each failure ends the leader, and its successor judges the failure first."""
    last, stop = world("n1", "n2", "n3", generation=1, mode="in-process"), None
    for generation in range(1, 21):
        leader = FailureAccounting(OPTIONS)
        leader.remember(last, NOW + generation, wall_s=5000.0 + generation)
        step_rate = StepRate(generation, generation * steps, 0.1, NOW)
        leader.observe(step_rate)
        group = replace(last, generation=generation)
        v = view(group, runs("n1", group), runs("n3", group), out("n2", group))
        stop = stop or leader.count(broken(v), step_rate, NOW + generation)
        records = leader.records(NOW + generation, wall_s=5000.0 + generation)
        last = replace(last, breakages=records)
    assert (stop is None) is (steps > 0)


def test_a_node_that_all_others_waited_for_is_quarantined_by_id() -> None:
    accounting = FailureAccounting(OPTIONS)
    for generation in (1, 2, 3):
        group = world("n1", "n2", "n3", generation=generation, mode="in-process")
        reports = tuple(
            FailureReport(
                node_id=f"id-{n}", generation=generation, error="late", unreachable=("id-n2",)
            )
            for n in ("n1", "n3")
        )
        members = [runs(n, group) for n in ("n1", "n2", "n3")]
        accounting.count(broken(view(group, *members, failure_reports=reports)), None, NOW)
    assert set(accounting.flaps.quarantined(NOW)) == {"id-n2"}


# ── verdicts on failures ─────────────────────────────────────────────────────────────────────


def failed_with(text: str, group: WorldRecord = EIGHT) -> Broken:
    loser = seen(node("n3", arrived_for=group.generation, failure=text, exit_code=1))
    return broken(view(group, runs("n1", group), runs("n2", group), loser))


def test_a_deterministic_error_stops_the_job_at_once() -> None:
    accounting = FailureAccounting(OPTIONS)
    stop = accounting.count(failed_with("NameError: name 'lr' is not defined"), None, NOW)
    assert stop is not None and stop.exit_code == 1
    assert "n3" in stop.reason and "name 'lr' is not defined" in stop.reason


def test_a_faulty_gpu_quarantines_its_node_at_once() -> None:
    accounting = FailureAccounting(OPTIONS)
    text = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    assert accounting.count(failed_with(text), None, NOW) is None
    assert accounting.flaps.quarantined(NOW) == {"id-n3": NOW + 30.0}
    assert accounting.verdict is not None and accounting.verdict[1].rule == "gpu-hardware"


def test_a_module_that_is_missing_on_one_node_quarantines_it_once_the_job_has_trained() -> None:
    text = "ModuleNotFoundError: No module named 'flash_attn'"
    at_the_start = FailureAccounting(OPTIONS)
    assert at_the_start.count(failed_with(text), None, NOW) is not None
    later = FailureAccounting(OPTIONS)
    later.observe(StepRate(8, 40, 0.1, NOW))
    assert later.count(failed_with(text), StepRate(8, 41, 0.1, NOW), NOW) is None
    assert "id-n3" in later.flaps.quarantined(NOW)


def test_one_statement_that_fails_on_all_nodes_counts_once() -> None:
    """On some nodes before the world without the first one was formed, on others after it."""
    nine = world("n1", "n2", generation=9, mode="in-process")
    ten = world("n1", generation=10, mode="in-process", limits=(1, 4))

    def fails(name: str) -> NodeView:
        return seen(node(name, arrived_for=8, failure="OSError: stale", exit_code=1))

    accounting = FailureAccounting(OPTIONS)
    for v in (
        view(EIGHT, runs("n1", EIGHT), runs("n2", EIGHT), fails("n3")),
        view(nine, runs("n1", EIGHT), fails("n2")),
        view(ten, fails("n1")),
    ):
        assert accounting.count(broken(v), None, NOW) is None
    assert [b.counts for b in accounting.records(NOW, 0.0)] == [True, False, False]


def test_a_failure_counts_in_each_world_that_had_been_entered_before() -> None:
    """Also if all members of the world fail, so that none of them runs it any more."""
    nine = world("n1", "n2", generation=9, mode="in-process")
    ten = world("n1", generation=10, mode="in-process", limits=(1, 4))

    def fails(name: str, ran: int) -> NodeView:
        record = node(name, arrived_for=ran, failure="OSError: stale", exit_code=1)
        return seen(replace(record, ran_generation=ran))

    accounting = FailureAccounting(OPTIONS)
    for v in (
        view(EIGHT, runs("n1", EIGHT), runs("n2", EIGHT), fails("n3", 8)),
        view(nine, runs("n1", nine), fails("n2", 9)),
        view(ten, fails("n1", 10)),
    ):
        accounting.count(broken(v), None, NOW)
    assert [b.counts for b in accounting.records(NOW, 0.0)] == [True, True, True]


def test_a_refusal_by_all_nodes_ends_a_job_that_has_trained() -> None:
    text = "TrainingError: Adam is not tracked\n  call run.track(optimizer=optimizer)"

    def refuses(name: str) -> NodeView:
        return seen(node(name, arrived_for=8, failure=text, exit_code=1))

    def count(*nodes: NodeView) -> StopJob | None:
        accounting = FailureAccounting(OPTIONS)
        accounting.observe(StepRate(8, 40, 0.1, NOW))
        return accounting.count(broken(view(EIGHT, *nodes)), StepRate(8, 41, 0.1, NOW), NOW)

    assert count(runs("n1", EIGHT), runs("n2", EIGHT), refuses("n3")) is None
    stop = count(refuses("n1"), refuses("n2"), refuses("n3"))
    assert stop is not None
    assert stop.reason.splitlines()[-1] == "  call run.track(optimizer=optimizer)"


def test_a_module_that_is_missing_on_a_node_that_joins_does_not_end_the_job() -> None:
    """Workers of restart mode, and those of unmodified scripts, report no steps."""
    text = "ModuleNotFoundError: No module named 'flash_attn'"
    seven = world("n1", "n2")
    eight = replace(world("n1", "n2", "n3", generation=8), cause=Cause.JOINED)
    accounting = FailureAccounting(OPTIONS)
    accounting.formed(seven, eight, NOW - 4)
    assert accounting.count(failed_with(text, eight), None, NOW) is None
    assert "id-n3" in accounting.flaps.quarantined(NOW)
    restarted = FailureAccounting(OPTIONS)
    eight = replace(eight, cause=Cause.FAILURE)
    restarted.formed(seven, eight, NOW - 4)
    assert restarted.count(failed_with(text, eight), None, NOW) is not None


@pytest.mark.parametrize("mode", ["restart", "in-process"])
@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("requests.exceptions.HTTPError: 401 Client Error: Unauthorized", 1),
        ("botocore ClientError: An error occurred (AccessDenied) when calling GetObject", 1),
        ("NameError: name 'foo' is not defined", 1),
        ("RuntimeError: Error(s) in loading state_dict for Net: size mismatch for a", 1),
        ("train.py: error: unrecognized arguments: --x", 2),
        ("TrainingError: Adam is not tracked\n  call run.track(optimizer=optimizer)", 1),
        ("ConfigError: checkpoints cannot be written to /data: Permission denied", 2),
        ("boom", 1),
        (None, 65),
    ],
)
def test_no_failure_of_a_joining_node_ends_the_job_of_others(
    text: str | None, code: int, mode: str
) -> None:
    seven = world("n1", "n2", mode=mode)
    eight = replace(world("n1", "n2", "n3", generation=8, mode=mode), cause=Cause.JOINED)
    accounting = FailureAccounting(OPTIONS)
    now = NOW
    for _ in range(OPTIONS.failure_budget + 2):  # it returns after each quarantine
        accounting.formed(seven, eight, now)
        failed = seen(node("n3", arrived_for=eight.generation, failure=text, exit_code=code))
        others = [
            runs(n, eight)
            if mode == "in-process"
            else seen(node(n, NodeState.STARTING, running=eight))
            for n in ("n1", "n2")
        ]
        facts = Failed("id-n3", "n3", text, code, generation=eight.generation)
        v = view(eight, *others, failed)
        failure = replace(broken(v, since_s=now - 5), failures=(facts,))
        assert accounting.count(failure, None, now) is None
        assert "id-n3" in accounting.flaps.quarantined(now)
        # (Why it waits, for its log and `elastic status`.)
        why = accounting.quarantine_reasons["id-n3"]
        assert (text or f"exit code {code}").partition("\n")[0] in why
        now += OPTIONS.quarantine_s
        seven = replace(seven, generation=eight.generation + 1)
        eight = replace(eight, generation=eight.generation + 2)


@pytest.mark.parametrize("mode", ["restart", "in-process"])
@pytest.mark.parametrize("together", [True, False], ids=["together", "one after the other"])
@pytest.mark.parametrize(
    ("text", "code"), [("NameError: name 'foo' is not defined", 1), ("boom", 1), (None, 2)]
)
def test_no_failure_that_several_joining_nodes_have_ends_the_job_of_others(
    text: str | None, code: int, together: bool, mode: str
) -> None:
    """They were started with the same mistake, and the others train."""
    limits, old, new = (2, 8), ("n1", "n2"), ("n3", "n4", "n5", "n6")
    accounting = FailureAccounting(OPTIONS)
    for rate in (StepRate(7, 10, 1.0, NOW), StepRate(7, 50_000, 1.0, NOW)):
        accounting.observe(rate)
    generation = 7
    for names in [new] if together else [(name,) for name in new]:
        before = world(*old, generation=generation, mode=mode, limits=limits)
        generation += 1
        group = world(*old, *names, generation=generation, mode=mode, limits=limits)
        switch_at_step = 49_999 if mode == "in-process" else None
        group = replace(group, cause=Cause.JOINED, switch_at_step=switch_at_step)
        accounting.formed(before, group, NOW - 5)
        others = [
            runs(n, group)
            if mode == "in-process"
            else seen(node(n, NodeState.STARTING, running=group, limits=limits))
            for n in old
        ]
        failed = [
            seen(node(n, arrived_for=generation, failure=text, exit_code=code)) for n in names
        ]
        facts = tuple(Failed(f"id-{n}", n, text, code, 50_000, generation=8) for n in names)
        failure = replace(broken(view(group, *others, *failed)), failures=facts)
        rate = StepRate(generation, 50_000, 1.0, NOW)
        assert accounting.count(failure, rate if mode == "in-process" else None, NOW) is None
        quarantined = accounting.flaps.quarantined(NOW)
        for name in names:
            assert f"id-{name}" in quarantined
            assert (text or f"exit code {code}") in accounting.quarantine_reasons[f"id-{name}"]


def test_an_error_that_other_nodes_have_had_too_ends_the_job() -> None:
    text = "NameError: name 'foo' is not defined"
    eight = replace(EIGHT, members=(*EIGHT.members, node("n4").as_member()))
    accounting = FailureAccounting(OPTIONS)
    accounting.observe(StepRate(8, 10, 1.0, NOW))
    accounting.observe(StepRate(8, 100, 1.0, NOW))
    for generation, name in ((8, "n4"), (9, "n3")):
        group = replace(eight, generation=generation)
        others = [runs(n, group) for n in ("n1", "n2", "n3", "n4") if n != name]
        failed = seen(node(name, arrived_for=generation, failure=text, exit_code=1))
        stop = accounting.count(broken(view(group, *others, failed)), None, NOW)
        assert (stop is not None) == (name == "n3")


def test_a_failure_is_counted_once_while_the_others_cannot_connect() -> None:
    """The record of n3 keeps its failure until its next workers start; the groups of the others
    are not built meanwhile. A new leader has the same records."""
    accounting = FailureAccounting(OPTIONS)
    failure = Failed("id-n3", "n3", "ValueError: bad sample", 1, 500, generation=8)
    first = broken(view(EIGHT, runs("n1", EIGHT), runs("n2", EIGHT), out("n3", EIGHT)))
    assert accounting.count(replace(first, failures=(failure,)), None, NOW) is None
    for generation in (9, 10, 11):
        group = replace(SEVEN, generation=generation)
        reports = tuple(
            FailureReport(node_id=f"id-{n}", generation=generation, error="GroupBuildFailed")
            for n in ("n1", "n2")
        )
        v = view(group, runs("n1", EIGHT), runs("n2", EIGHT), failure_reports=reports)
        if generation == 10:
            records = accounting.records(NOW, NOW)
            accounting = FailureAccounting(OPTIONS)
            accounting.remember(replace(group, breakages=records), NOW, NOW)
        assert accounting.count(replace(broken(v), failures=(failure,)), None, NOW) is None
    assert sum(bool(b.failures) for b in accounting.records(NOW, NOW)) == 1


def test_the_same_failure_of_all_nodes_counts_once_per_world() -> None:
    """They are observed one after the other, each when the next world has been written."""
    accounting = FailureAccounting(OPTIONS)
    for generation, name in ((8, "n1"), (9, "n2"), (10, "n3")):
        group = replace(EIGHT, generation=generation)
        failure = Failed(f"id-{name}", name, "RuntimeError: x", 2, 0, generation=8)
        others = [runs(n, EIGHT) for n in ("n1", "n2", "n3") if n != name]
        v = view(group, *others, out(name, EIGHT, 2))
        counted = replace(broken(v), failures=(failure,))
        assert accounting.count(counted, None, NOW) is None
    assert [b.counts for b in accounting.records(NOW, NOW)] == [True, False, False]


def test_attempts_to_build_a_group_wait_longer_each_time() -> None:
    """The network between the nodes may return: attempts alone do not end the job."""
    accounting = FailureAccounting(OPTIONS)
    pauses: list[float] = []
    for generation in range(9, 9 + 3 * OPTIONS.failure_budget):
        group = replace(EIGHT, generation=generation)
        nodes = [runs(n, EIGHT) for n in ("n1", "n2", "n3")]
        reports = tuple(
            FailureReport(node_id=n.node.node_id, generation=generation, error="timed out")
            for n in nodes
        )
        v = view(group, *nodes, failure_reports=reports)
        assert accounting.count(broken(v), None, NOW) is None
        pauses.append((accounting.retry_at_s or NOW) - NOW)
        waiting = replace(v, failing_since_s=NOW - 9, retry_at_s=accounting.retry_at_s)
        assert proposal(waiting, now=NOW + pauses[-1])
        if pauses[-1]:
            assert wait(waiting, now=NOW).until_s == accounting.retry_at_s
            newcomer = seen(node("n4", NodeState.READY, in_process=True))
            assert proposal(replace(waiting, nodes=(*waiting.nodes, newcomer)))
    assert pauses[:5] == [0.0, 0.0, 1.0, 2.0, 4.0]
    assert max(pauses) == pauses[-1] == BUILD_BACKOFF_CAP_S


@pytest.mark.parametrize(
    ("unreachable", "excluded"),
    [
        ({"id-n3": "id-n1"}, {"id-n3"}),
        ({"id-n1": "id-n3"}, {"id-n3"}),
        ({"id-n1": "id-n2"}, set()),
        ({"id-n1": "id-n2", "id-n3": "id-n2"}, set()),  # n2 hangs
        ({"id-n2": "id-n1", "id-n3": "id-n1"}, set()),  # n1's ports are blocked
        ({"id-n1": "id-n2", "id-n3": "id-n1"}, set()),  # n1 again, as its peers see it
    ],
)
def test_a_joining_node_that_cannot_be_reached_stops_the_others_for_one_build(
    unreachable: dict[str, str], excluded: set[str]
) -> None:
    accounting = joined_s_ago(1.0)
    reports = tuple(
        FailureReport(node_id=one, generation=8, error="GroupBuildFailed", unreachable=(other,))
        for one, other in unreachable.items()
    )
    before = [
        runs("n1", SEVEN),
        runs("n2", SEVEN),
        seen(node("n3", NodeState.READY, in_process=True)),
    ]
    v = replace(view(EIGHT, *before, failure_reports=reports), failing_since_s=NOW - 9)
    assert accounting.count(broken(v), None, NOW) is None
    assert set(accounting.flaps.quarantined(NOW)) == excluded
    successor = FailureAccounting(OPTIONS)
    last = replace(EIGHT, generation=9, breakages=accounting.records(NOW, NOW), time_s=NOW)
    successor.remember(last, NOW, NOW)
    assert set(successor.flaps.quarantined(NOW)) == {node_id[3:] for node_id in excluded}
    reasons = {"id-n1": "n1 cannot reach it", "id-n3": "it cannot reach n1"}
    for reporter in unreachable if excluded else ():
        assert accounting.quarantine_reasons["id-n3"] == reasons[reporter]


def timed_out(generation: int, since_s: float) -> Broken:
    """Its collectives timed out; all members are alive."""
    group = replace(SEVEN, generation=generation)
    report = FailureReport(
        node_id="id-n2",
        generation=generation,
        error="RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 60000ms "
        "for send operation to complete",
    )
    v = view(group, runs("n1", group), runs("n2", group), failure_reports=(report,))
    return broken(replace(v, failing_since_s=NOW - 9), since_s=since_s)


def count_timeouts(options: AgentOptions, *, steps: int) -> StopJob | None:
    """Worlds whose collectives time out, until the job ends. Each lasts longer than a failure may
    take with this budget and window."""
    accounting, now = FailureAccounting(options), NOW
    accounting.observe(StepRate(7, 0, 1.0, NOW))
    for number in range(1, 3 * options.failure_budget):
        formed_s, now = now, now + 130.0
        rate = StepRate(7, number * steps, 1.0, now)
        if stop := accounting.count(timed_out(8 + number, formed_s), rate, now):
            return stop
    return None


def test_collectives_that_always_time_out_end_the_job_and_name_the_option() -> None:
    """A rank reads its batch for longer than a collective waits, in each world again."""
    options = replace(OPTIONS, hang_script_timeout_s=50.0, collective_timeout_s=60.0)
    stop = count_timeouts(options, steps=0)
    assert stop is not None and stop.exit_code == 70
    assert "6 worlds in a row ended without a step within 780 s" in stop.reason
    assert "n2: RuntimeError: Timed out waiting" in stop.reason
    _, _, remedy = stop.reason.partition("\n")
    assert "collective_timeout_s=60" in remedy and "lasted up to 130 s" in remedy


def test_collectives_that_time_out_between_steps_do_not_end_the_job() -> None:
    assert count_timeouts(OPTIONS, steps=5) is None


def test_old_breakages_stay_old_for_a_leader_whose_clock_is_behind() -> None:
    day_s = 86400.0
    accounting = FailureAccounting(OPTIONS)
    for i in range(OPTIONS.failure_budget + 1):
        group = replace(EIGHT, generation=8 + i)
        v = view(group, runs("n1", group), runs("n2", group), out("n3", group))
        accounting.count(replace(broken(v), failures=()), None, NOW + i * day_s)
    end_s = NOW + OPTIONS.failure_budget * day_s
    last = replace(EIGHT, generation=20, time_s=end_s, breakages=accounting.records(end_s, end_s))
    successor = FailureAccounting(OPTIONS)
    successor.remember(last, NOW, end_s - 30 * day_s)
    v = view(last, runs("n1", last), runs("n2", last), out("n3", last))
    assert successor.count(replace(broken(v), failures=()), None, NOW) is None


def test_an_error_of_a_survivor_has_no_verdict_if_a_node_was_lost() -> None:
    accounting = FailureAccounting(OPTIONS)
    loser = seen(node("n3", arrived_for=8, failure="NameError: name 'x' is not defined"))
    gone = [missing("n2", proved_dead=True)]
    lost = broken(view(EIGHT, runs("n1", EIGHT), loser, gone=gone))
    assert accounting.count(lost, None, NOW) is None
    assert accounting.verdict is None


def test_a_verdict_is_reported_once() -> None:
    accounting = FailureAccounting(OPTIONS)
    accounting.count(failed_with("OSError: [Errno 30] Read-only file system: '/x'"), None, NOW)
    assert accounting.verdict is not None
    accounting.count(failed_with("OSError: [Errno 30] Read-only file system: '/x'"), None, NOW)
    assert accounting.verdict is None


def test_the_origin_of_a_failure_is_the_first_independent_error() -> None:
    group = world("n1", "n2", "n3")
    v = view(group, out("n1", group), out("n2", group), out("n3", group))
    errors = ("RuntimeError: Connection closed by peer", "ValueError: boom", "KeyError: 'x'")
    failures = tuple(Failed(f"id-n{i}", f"n{i}", text, 1) for i, text in enumerate(errors, 1))
    several = replace(broken(v), failures=failures)
    assert several.origin == failures[1]
    assert replace(several, failures=failures[:1]).origin == failures[0]
    assert replace(several, failures=()).origin is None
    killed = (failures[0], Failed("id-n2", "n2", None, -9))
    assert replace(several, failures=killed).origin == killed[1]


def test_repeated_failures_of_a_machine_are_not_script_errors() -> None:
    accounting = FailureAccounting(OPTIONS)
    for generation in range(1, 5):  # a quarantine each, and the same error after it
        group = world("n1", "n2", generation=generation)
        gone = seen(node("n2", arrived_for=generation, failure=ECC, exit_code=1))
        failed = broken(view(group, out("n1", group), gone))
        failed = replace(failed, failures=(Failed("id-n2", "n2", ECC, 1),))
        assert accounting.count(failed, None, NOW + generation) is None
        assert accounting.records(NOW, 0.0)[-1].excluded == "n2"
        assert "id-n2" in accounting.flaps.quarantined(NOW + generation)
