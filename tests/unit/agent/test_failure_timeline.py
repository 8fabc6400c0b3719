"""The failure timeline: what failed and when, the actions taken, and what to do next."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from kit.membership_nodes import node

from elastic.agent.accounting import is_wanted, render
from elastic.agent.node import NodeStatus
from elastic.errors import ConfigError, JobFailed
from elastic.membership.records import BreakageRecord, Done, FailureRecord, Keys, Outcome

SNAPSHOT = Path(__file__).parents[2] / "data" / "failure_timeline.txt"
BEGAN_S = 1_790_000_000.0
RESET = FailureRecord(
    node="n1",
    text="RuntimeError: [gloo/transport/tcp/pair.cc:544] Connection closed by peer [10.0.0.2]:41",
    exit_code=1,
)
NAN = FailureRecord(
    node="n2",
    text='Traceback (most recent call last):\n  File "train.py", line 7\nValueError: loss is nan',
    exit_code=1,
    step=120,
)
KILLED = FailureRecord(
    node="n3",
    text="local rank 0 (pid 71) was ended by SIGKILL: the kernel killed it because the memory "
    "limit of its cgroup was reached",
    exit_code=-9,
    step=131,
    is_oom_kill=True,
)


def breakage(number: int, *failures: FailureRecord, **more: object) -> BreakageRecord:
    record = BreakageRecord(
        generation=number,
        lived_s=31.4,
        steps=12,
        failures=failures,
        lost=(),
        time_s=BEGAN_S + 60 * number,
        step=125,
        verdict="restart: no rule matches; it may be transient",
        response=f"formed generation {number + 1} with n1, n2, n3",
    )
    return replace(record, **more)  # type: ignore[arg-type]


def ended(*breakages: BreakageRecord, exit_code: int = 70) -> Done:
    return Done(
        outcome=Outcome.FAILURE,
        reason="4 worlds broke within 600 s, none of them lasted 60 s",
        exit_code=exit_code,
        generation=len(breakages),
        final_step=131,
        time_s=BEGAN_S + 60 * len(breakages),
        breakages=breakages,
    )


EARLY = FailureRecord(node="n2", text=None, exit_code=1, step=None)


def page(done: Done) -> str:
    return render(done, Keys.of("/elastic", "job"))


def test_the_page_of_an_exhausted_budget() -> None:
    """The complete page. After an intended change, update the snapshot from the diff."""
    done = ended(
        breakage(1, RESET, NAN),
        breakage(2, lost=("n3",), verdict="", counts=False, step=None, steps=None),
        breakage(3, lost=("n3",), verdict="", churned=("n3",), response="formed generation 4"),
        breakage(4, KILLED, verdict="restart: the node's memory is exhausted"),
        breakage(5, *(replace(RESET, node=f"n{i}") for i in range(4, 10)), verdict=""),
        breakage(6, response="ended the job with exit code 70", left=("n1",)),
    )
    assert page(done) + "\n" == SNAPSHOT.read_text(encoding="utf-8")


def test_without_a_checkpoint_the_earlier_failure_is_named() -> None:
    lacks = FailureRecord(
        node="n1",
        text="elastic.errors.CheckpointRequired: the job had committed 5 steps\n  Give it a folder",
        exit_code=65,
        step=0,
    )
    output = page(ended(breakage(1, RESET, NAN), breakage(2, lacks), exit_code=65))
    assert "elastic.join(checkpoints=…)" in output
    assert "the first failure of generation 1, at step 120: n2: ValueError: loss is nan" in output
    assert "from the last checkpoint before step" not in output


def test_the_original_failure_precedes_its_consequences() -> None:
    text = page(ended(breakage(1, RESET, NAN)))
    assert text.index("n2: ValueError: loss is nan") < text.index("n1: RuntimeError")


@pytest.mark.parametrize(
    ("breakages", "exit_code", "advice"),
    [
        ((breakage(1, NAN), breakage(2, NAN)), 1, "last checkpoint before step 120"),
        ((breakage(1, EARLY, step=None),) * 3, 1, "reproduce it on one node, and fix it"),
        ((breakage(1, KILLED),), 70, "give n3 more memory"),
        ((breakage(1, lost=("n2",), churned=("n2",)),), 70, "find out why n2 departed"),
        ((breakage(1, RESET), breakage(2, RESET)), 70, "check the network between the nodes"),
        ((*[breakage(1, NAN)] * 3, breakage(4, KILLED)), 70, "3 of 4 failures began on n2"),
        ((breakage(1, NAN),), 70, "read the logs of these nodes"),
        ((), 70, "delete /elastic/job/done in etcd"),
    ],
)
def test_the_advice_matches_the_failures(
    breakages: tuple[BreakageRecord, ...], exit_code: int, advice: str
) -> None:
    last = page(ended(*breakages, exit_code=exit_code)).partition("What to do next")[2]
    assert advice in last


def test_groups_that_could_not_be_built_are_one_incident() -> None:
    record = breakage(14, attempts=12, lived_s=650.0, verdict="n2 cannot reach n1", counts=False)
    output = page(ended(record))
    assert "12 groups could not be built within 650 s" in output
    assert "verdict: n2 cannot reach n1; not counted" in output


def test_sixteen_worlds_of_a_thousand_nodes_fit_on_a_page() -> None:
    long = replace(NAN, text="x" * 300)
    text = page(ended(*[breakage(1, *[long] * 16)] * 16))
    assert len(text.splitlines()) < 150 and max(map(len, text.splitlines())) < 700


@pytest.mark.parametrize(
    ("breakages", "exit_code", "wanted"), [(0, 70, True), (1, 1, False), (2, 1, True)]
)
def test_a_single_failure_needs_no_timeline(breakages: int, exit_code: int, wanted: bool) -> None:
    assert is_wanted(ended(*[breakage(1, NAN)] * breakages, exit_code=exit_code)) is wanted


def test_the_advice_on_an_error_of_the_script_blames_no_machine() -> None:
    breakages = (*[breakage(1, NAN)] * 3, breakage(4, RESET))
    by_script = page(ended(*breakages, exit_code=1))
    assert "the script itself fails" in by_script and "exclude it" not in by_script
    assert "exclude it" in page(ended(*breakages, exit_code=70))


def test_the_hint_of_a_refusal_is_part_of_the_advice() -> None:
    refused = replace(ended(breakage(1, NAN), exit_code=1), reason="refused\n  track it")
    assert "\n- track it\n" in page(refused)


@pytest.mark.parametrize(
    ("run_id", "is_deletable"), [("llama-7", True), ("job-0123456789ab", False)]
)
def test_a_job_with_a_generated_id_is_simply_started_again(run_id: str, is_deletable: bool) -> None:
    """Its etcd may be the embedded one, which has ended."""
    text = render(ended(), Keys.of("/elastic", run_id))
    assert (f"delete /elastic/{run_id}/done in etcd" in text) is is_deletable


@pytest.mark.parametrize(
    ("hint", "separator"), [("track it", "; "), ("if x:\n    main()", "\n")], ids=["text", "code"]
)
def test_the_error_of_a_refused_job_ends_with_the_hint_and_the_way_to_continue(
    hint: str, separator: str
) -> None:
    keys = Keys.of("/elastic", "llama-7", is_etcd_local=True)
    status = NodeStatus(node("n1"), keys, 0.0)
    status.set_done(replace(ended(exit_code=2), reason=f"the script failed\n  {hint}"))
    with pytest.raises(ConfigError) as caught:
        status.raise_if_over()
    assert caught.value.message == "the job under /elastic/llama-7/ has failed: the script failed"
    assert caught.value.hint == f"{hint}{separator}then {keys.how_to_continue}"


def test_a_script_that_fails_is_fixed_before_it_is_started_again() -> None:
    status = NodeStatus(node("n1"), Keys.of("/elastic", "job-0123456789ab"), 0.0)
    status.set_done(replace(ended(exit_code=1), reason="the script failed"))
    with pytest.raises(JobFailed, match="fix the script; then start it again"):
        status.raise_if_over()


def test_a_job_in_an_etcd_of_this_machine_continues_under_another_id() -> None:
    text = render(ended(), Keys.of("/elastic", "llama-7", is_etcd_local=True))
    assert text.endswith("then start it again under another --rdzv-id, from its last checkpoint")
