"""When a job stops, and which nodes it quarantines."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from elastic.membership.budget import (
    Breakage,
    FailedStarts,
    Failure,
    FailureBudget,
    FlapPolicy,
    FlapTracker,
    StopJob,
    departed_again,
    is_churn,
    verdict,
)

POLICY = FailureBudget()
NOW = 1000.0


def failed(text: str | None = None, code: int | None = 1, node: str = "n1") -> Failure:
    return Failure(node, text, code)


def broke(
    *failures: Failure,
    lived_s: float = 5.0,
    lost: tuple[str, ...] = (),
    at_s: float = NOW,
    steps: int | None = None,
) -> Breakage:
    return Breakage(
        generation=7, lived_s=lived_s, failures=failures, lost=lost, at_s=at_s, steps=steps
    )


def judge(*history: Breakage) -> StopJob | None:
    return verdict(history, NOW, POLICY)


BOOM = failed("ValueError: boom")
RESET = failed("RuntimeError: Connection reset by peer", node="n2")


def test_a_job_without_failures_continues() -> None:
    assert judge() is None


@pytest.mark.parametrize("lost", [(), ("n2",)])
def test_a_world_in_which_no_node_has_the_state_stops_the_job(lost: tuple[str, ...]) -> None:
    """Two alternately failing nodes went through a hundred generations in this way."""
    text = "CheckpointRequired: none is complete\n  use another folder"
    without = broke(failed(text, 65), lost=lost)
    stop = judge(replace(without, counts=False))
    assert stop is not None and stop.exit_code == 65
    assert "no node has the state of the job: CheckpointRequired: none is" in stop.reason
    assert stop.reason.endswith("\n  use another folder"), "the remedy"
    assert judge(without, replace(broke(lost=("n2",)), counts=False)) is None, "the job continued"


def test_the_same_error_three_times_in_a_row_stops_with_that_error() -> None:
    assert judge(broke(BOOM), broke(BOOM)) is None
    stop = judge(broke(BOOM), broke(BOOM), broke(BOOM))
    assert stop is not None
    assert stop.exit_code == 1
    assert "ValueError: boom (on n1)" in stop.reason and "3 times in a row" in stop.reason


def at_line(line: int, exception: str) -> str:
    frame = f'  File "/job/train.py", line {line}, in train'
    return f"Traceback (most recent call last):\n{frame}\n{exception}"


@pytest.mark.parametrize(
    "texts",
    [
        ("[rank0]: at 0x7f01\nboom", "[rank2]: at 0xBEEF\nboom", "at 0x1 boom"),
        tuple(
            f"RuntimeError: DataLoader worker (pid {pid}) exited unexpectedly" for pid in (7, 81, 9)
        ),
        tuple(f"OSError: [Errno 98] 10.0.0.{n}:2951{n} is in use" for n in range(3)),
        tuple(f"FileNotFoundError: '/tmp/tmp{name}/x.pt'" for name in ("qwer", "asdf", "yxcv")),
        tuple(f"RuntimeError: no file /dev/shm/torch_{n}_{n}8 left" for n in range(3)),
        tuple(f"RuntimeError: no shard data/{name}.tar" for name in ("left", "right", "both")),
        tuple(f"RuntimeError: shape '[{n}, 3]' is invalid for input of size {n}" for n in range(3)),
        tuple(f"ValueError: Expected {shape}" for shape in ("(2, 3)", "(20, 31, 4)", "(7,)")),
        tuple(at_line(7, f"KeyError: '{name}'") for name in ("cat", "dog", "cow")),
        tuple(f"ValueError: loss {value} is too large" for value in ("inf", "nan", "2.5e+10")),
        tuple(f"CalledProcessError: {['ffmpeg'] * n} failed" for n in (1, 2, 3)),
    ],
)
def test_one_error_is_recognised_despite_parts_that_differ_each_time(
    texts: tuple[str, ...],
) -> None:
    assert judge(*(broke(failed(t, node=f"n{i}")) for i, t in enumerate(texts))) is not None


@pytest.mark.parametrize(
    "texts",
    [
        (at_line(7, "ValueError: boom"), at_line(8, "ValueError: boom")),
        (at_line(7, "ValueError: boom"), at_line(7, "TypeError: boom")),
        # Two faults that surface in the same call of backward().
        (
            at_line(7, "RuntimeError: CUDA error: uncorrectable ECC error encountered"),
            at_line(7, "RuntimeError: CUDA error: unspecified launch failure"),
        ),
        (
            at_line(7, "OSError: [Errno 5] Input/output error"),
            at_line(7, "OSError: [Errno 28] No space"),
        ),
    ],
)
def test_different_errors_stay_different(texts: tuple[str, ...]) -> None:
    alternating = [texts[i % 2] for i in range(6)]
    assert judge(*(broke(failed(t, node=f"n{i}")) for i, t in enumerate(alternating))) is None


def test_an_exit_code_of_the_script_is_no_refusal_of_this_library() -> None:
    assert judge(broke(failed("the script called sys.exit(65)", code=65))) is None
    assert judge(broke(failed(None, code=65))) is None


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: [gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:1",
        "RuntimeError: Connection reset by peer",
        "torch.distributed.DistBackendError: NCCL error: unhandled system error",
        "torch.distributed.DistStoreError: Timed out after 31 seconds",
        "torch.distributed.DistNetworkError: The client socket has failed to connect",
        "ConnectionRefusedError: [Errno 111]",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "Watchdog caught collective operation timeout",
    ],
)
def test_consequences_of_a_dead_peer_are_not_script_errors(text: str) -> None:
    assert judge(*[broke(failed(text))] * 3) is None
    assert judge(*[broke(failed(text), BOOM)] * 3) is not None


@pytest.mark.parametrize(("code", "ends_with"), [(1, 1), (2, 2), (65, 65), (3, 1)])
def test_a_known_exit_code_of_the_script_becomes_that_of_the_job(code: int, ends_with: int) -> None:
    stop = judge(*[broke(failed("CheckpointRequired: none", code=code))] * 3)
    assert stop is not None
    assert stop.exit_code == ends_with


def test_the_error_common_to_all_failures_counts() -> None:
    other = failed("OSError: quota", node="n3")
    stop = judge(broke(BOOM), broke(other, BOOM), broke(RESET, BOOM))
    assert stop is not None and "boom" in stop.reason
    assert judge(broke(BOOM), broke(other), broke(BOOM)) is None


@pytest.mark.parametrize(
    "odd",
    [
        broke(BOOM, lost=("n3",)),
        broke(BOOM, failed(None, -9)),
        broke(BOOM, failed(None, -15)),
        broke(failed("ValueError: other")),
        broke(),
    ],
    ids=["lost", "SIGKILL", "SIGTERM", "other error", "no failure"],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_different_failure_ends_the_series(odd: Breakage, place: int) -> None:
    history = [broke(BOOM)] * 3
    history[place] = odd
    assert judge(*history) is None


@pytest.mark.parametrize("place", [1, 2])
@pytest.mark.parametrize("healthy", [broke(BOOM, lived_s=60.0), broke(BOOM, steps=20)])
def test_progress_between_failures_ends_the_series(healthy: Breakage, place: int) -> None:
    history = [broke(BOOM)] * 3
    history[place] = healthy
    assert judge(*history) is None


def test_progress_before_the_first_failure_does_not_matter() -> None:
    """A job that trained for hours before it reached the bad sample."""
    assert judge(broke(BOOM, steps=5000), *[broke(BOOM, steps=0)] * 2) is not None


def test_time_without_completed_steps_is_not_progress() -> None:
    """If steps take minutes, each repetition of the bad one takes longer than healthy_s."""
    assert judge(*[broke(BOOM, lived_s=300.0, steps=0)] * 3) is not None
    assert judge(*[broke(BOOM, lived_s=300.0, steps=5)] * 3) is None


def test_kills_spend_no_budget_while_the_job_makes_progress() -> None:
    killed = failed(None, -9)
    assert judge(*[broke(killed, lived_s=1.0, steps=50)] * 30) is None
    stop = judge(*[broke(killed, lived_s=1.0, steps=3)] * 11)
    assert stop is not None and stop.exit_code == 70


def test_only_the_last_three_failures_count() -> None:
    assert judge(broke(BOOM, lived_s=900.0), *[broke(BOOM)] * 3) is not None
    assert judge(*[broke(BOOM)] * 3, broke(RESET)) is None


def test_failures_without_an_error_text_are_compared_by_exit_code() -> None:
    three = failed(None, 3)
    stop = judge(broke(three), broke(three, failed(None, 1, "n2")), broke(three, RESET))
    assert stop is not None and stop.exit_code == 1 and "exit code 3 (on n1)" in stop.reason
    assert judge(broke(three), broke(three), broke(failed(None, 4))) is None


@pytest.mark.parametrize("code", [-11, 0, None])
def test_exit_codes_count_only_if_all_failed_workers_exited_by_themselves(
    code: int | None,
) -> None:
    silent = failed(None, 3)
    assert judge(*[broke(silent, failed(None, code, "n2"))] * 3) is None


def test_one_failure_too_many_exhausts_the_budget() -> None:
    history = [broke(lost=("n2",), at_s=NOW - i) for i in range(11, 0, -1)]
    assert judge(*history[1:]) is None
    stop = judge(*history)
    assert stop is not None and stop.exit_code == 70
    assert "11 worlds broke within 600 s" in stop.reason and "n2 lost" in stop.reason


def test_failures_before_the_window_do_not_count() -> None:
    old = [broke(lost=("n2",), at_s=NOW - 601)] * 5
    assert judge(*old, *[broke(lost=("n2",))] * 10) is None


def test_a_healthy_world_restores_the_budget() -> None:
    lost = broke(lost=("n2",))
    healthy = broke(lost=("n2",), lived_s=60.0)
    assert judge(*[lost] * 10, healthy, *[lost] * 9) is None
    assert judge(*[lost] * 10, healthy, *[lost] * 10) is not None


@pytest.mark.parametrize(
    "error",
    [
        "DistNetworkError: The client socket has timed out after 1800000ms while trying to connect",
        "DistStoreError: Timed out after 1801 seconds waiting for clients. 1/2 clients joined.",
        "RuntimeError: Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:144] no error",
    ],
)
def test_a_group_that_an_unmodified_script_cannot_build_ends_the_job(error: str) -> None:
    """Each attempt takes half an hour, in which the agents see no step and no failure: not eleven
    of them, which take 5.5 h, but three."""
    attempts = [
        broke(failed(error), lived_s=1800.0, at_s=NOW - 1800.0 * number) for number in (2, 1, 0)
    ]
    assert judge(*attempts[1:]) is None
    stop = judge(*attempts)
    assert stop is not None and stop.exit_code == 70
    assert "3 worlds in a row ended without a step within 5400 s" in stop.reason
    assert "all ports must be open" in stop.reason
    trained = broke(RESET, lived_s=1800.0, at_s=attempts[1].at_s)
    assert judge(attempts[0], trained, attempts[2]) is None


def exits(*lived_s: float, code: int = 1, text: str | None = None) -> list[Breakage]:
    """An unmodified script, each of whose worlds has lasted that long."""
    ended_at_s, failure = itertools.accumulate(lived_s), failed(text, code)
    lives = zip(lived_s, ended_at_s, strict=True)
    return [broke(failure, lived_s=lasted_s, at_s=at_s) for lasted_s, at_s in lives]


def test_exits_without_an_exception_after_the_same_time_end_the_job() -> None:
    """The script handles the error of a collective that timed out, and calls sys.exit(1)."""
    assert judge(*exits(1812.0, 1805.0)) is None
    stop = judge(*exits(1812.0, 1805.0, 1809.0))
    assert stop is not None and stop.exit_code == 1
    assert "3 times in a row with exit code 1 (on n1) and without an exception" in stop.reason


@pytest.mark.parametrize(
    "history",
    [
        exits(1812.0, 4000.0, 1809.0),
        [*exits(1812.0, 1805.0), *exits(1809.0, code=3)],
        exits(1812.0, 1805.0, 1809.0, code=-9),
        exits(1812.0, 1805.0, 1809.0, text="ValueError: boom"),
        [replace(b, steps=500) for b in exits(1812.0, 1805.0, 1809.0)],
    ],
)
def test_other_failures_after_half_an_hour_each_end_no_job(history: list[Breakage]) -> None:
    assert judge(*history) is None


def test_attempts_of_minutes_end_the_job_by_their_number() -> None:
    """The network has time to return: as much as the window, and as many attempts as the budget."""
    error = failed("DistNetworkError: The client socket has timed out after 300000ms")
    attempts = [
        broke(error, lived_s=300.0, at_s=NOW - 300.0 * number) for number in range(10, -1, -1)
    ]
    assert judge(*attempts[1:]) is None
    assert judge(*attempts) is not None


def test_a_repeated_script_error_takes_precedence_over_the_budget() -> None:
    stop = judge(*[broke(BOOM)] * 11)
    assert stop is not None and stop.exit_code == 1


def test_the_last_failure_is_named_when_the_budget_is_spent() -> None:
    stop = judge(*[broke(RESET, failed(None, -9, "n3"), lost=("n4",))] * 11)
    assert stop is not None
    assert "n4 lost; n2: RuntimeError: Connection reset by peer; n3: exit code -9" in stop.reason


# ── the same error at the same step ────────────────────────────────────────────────────────


def at_step(step: int | None, text: str = "ValueError: boom", **more: Any) -> Breakage:
    """A failure of the script at a step that its worker reported."""
    failure = Failure("n1", text, 1, step)
    return replace(broke(failure, **more), step=step)


def test_the_same_error_at_the_same_step_stops_the_job_despite_progress() -> None:
    """A restart from a checkpoint repeats steps each time, and takes long."""
    again = at_step(500, steps=300, lived_s=900.0)
    assert judge(again, again) is None
    stop = judge(again, again, again)
    assert stop is not None and stop.exit_code == 1
    assert "3 times at step 500" in stop.reason and "ValueError: boom (on n1)" in stop.reason


@pytest.mark.parametrize(
    "between",
    [
        broke(RESET, lived_s=900.0),
        replace(broke(lost=("n3",)), counts=False),
        replace(at_step(120, "OSError: quota"), steps=300),
    ],
    ids=["consequence", "loss", "other error before it"],
)
def test_other_failures_do_not_hide_an_error_that_repeats_at_a_step(between: Breakage) -> None:
    again = at_step(500, steps=300, lived_s=900.0)
    assert judge(again, between, again, between, again) is not None


def test_progress_past_the_failing_step_resets_the_count() -> None:
    again = at_step(500, steps=300, lived_s=900.0)
    past = at_step(800, "OSError: quota", steps=300, lived_s=900.0)
    assert judge(again, again, past, again) is None
    assert judge(again, again, past, again, again) is None
    assert judge(again, past, again, again, again) is not None
    # Another rank may be a step ahead of the one that fails.
    ahead = replace(past, step=501)
    assert judge(again, ahead, again, again) is not None


@pytest.mark.parametrize(
    "steps", [(500, 501, 502), (480, 490, 500)], ids=["one by one", "ten by ten"]
)
def test_an_error_at_ever_later_steps_does_not_stop_the_job(steps: tuple[int, ...]) -> None:
    assert judge(*(at_step(step, steps=1) for step in steps)) is None


@pytest.mark.parametrize("steps", [(500, 480, 490), (500, 501, 501), (500, 500, None)])
def test_an_error_that_reaches_no_later_step_stops_the_job(steps: tuple[int | None, ...]) -> None:
    assert judge(*(at_step(step, steps=1) for step in steps)) is not None


def test_an_error_at_ever_later_steps_spends_the_budget() -> None:
    stop = judge(*(at_step(step, steps=1) for step in range(11)))
    assert stop is not None and stop.exit_code == 70


def test_the_step_of_the_job_is_used_if_the_worker_reported_none() -> None:
    again = replace(broke(BOOM, steps=300, lived_s=900.0), step=500)
    stop = judge(again, again, again)
    assert stop is not None and "at step 500" in stop.reason


def test_repeated_oom_kills_at_the_same_step_stop_the_job() -> None:
    def killed(pid: int, *, is_oom_kill: bool = True) -> Breakage:
        text = f"local rank 0 (pid {pid}) was ended by SIGKILL"
        failure = Failure("n1", text, -9, None, is_oom_kill)
        return replace(broke(failure, steps=300, lived_s=900.0), step=500)

    assert judge(*(killed(pid) for pid in (1, 2, 3))) is not None
    assert judge(*(killed(pid, is_oom_kill=False) for pid in (1, 2, 3))) is None


# ── churn ──────────────────────────────────────────────────────────────────────────────────


def gone(*churned: str, counts: bool = True, **more: Any) -> Breakage:
    return replace(broke(lost=("n2",), **more), churned=churned, counts=counts)


def test_churn_spends_the_budget_and_is_named() -> None:
    stop = judge(*[gone("n2", steps=0)] * 11)
    assert stop is not None and stop.exit_code == 70
    assert "11 of them because nodes departed repeatedly" in stop.reason
    assert judge(*[gone("n2", steps=0)] * 10) is None


def test_uncounted_losses_neither_spend_the_budget_nor_end_a_series() -> None:
    idle = gone(counts=False, steps=0)
    assert judge(*[idle] * 30) is None
    assert judge(broke(BOOM), idle, broke(BOOM), idle, broke(BOOM)) is not None


def test_progress_resets_churn() -> None:
    churn = gone("n2", steps=0)
    assert judge(*[churn] * 10, gone("n2", counts=False, steps=20), *[churn] * 10) is None


@pytest.mark.parametrize(
    ("breakage", "is_churn_of_the_job"),
    [
        (gone("n2", steps=2), True),
        (gone("n2", steps=3), False),
        (gone(steps=0), False),
        (gone("n2", lived_s=59.0), True),
        (gone("n2", lived_s=60.0), False),
    ],
)
def test_repeated_departures_are_churn_if_the_job_makes_no_progress(
    breakage: Breakage, is_churn_of_the_job: bool
) -> None:
    assert is_churn(breakage, POLICY) is is_churn_of_the_job


def test_departed_again_lists_nodes_that_departed_before() -> None:
    before = [
        replace(broke(lost=("n1",)), generation=5, at_s=100.0),
        replace(broke(lost=("n2",)), generation=6, at_s=500.0),
        replace(broke(), left=("n3",), generation=7, at_s=600.0),
    ]
    assert departed_again(("n1", "n2", "n3", "n4"), before, 8, since_s=200.0) == ("n2", "n3")
    # Its world is recorded twice: when the node left, and when another one failed.
    assert departed_again(("n3",), before, 7, since_s=200.0) == ()


# ── quarantine ─────────────────────────────────────────────────────────────────────────────


def test_a_node_lost_three_times_in_the_window_is_quarantined() -> None:
    flaps = FlapTracker()
    flaps.lost("n1", 0)
    flaps.lost("n1", 60)
    flaps.lost("n2", 61)
    assert flaps.quarantined(60) == {}
    flaps.lost("n1", 120)
    assert flaps.quarantined(120) == {"n1": 180.0}
    assert flaps.quarantined(179.9) == {"n1": 180.0}
    assert flaps.quarantined(180) == {}


def test_losses_far_apart_do_not_add_up() -> None:
    flaps = FlapTracker()
    for now in (0, 60, 121, 200, 300):
        flaps.lost("n1", now)
        assert flaps.quarantined(now) == {}


def test_a_node_that_flaps_after_its_quarantine_is_quarantined_again() -> None:
    flaps = FlapTracker(FlapPolicy(quarantine_s=10))
    for now in (0, 1, 2):
        flaps.lost("n1", now)
    flaps.lost("n1", 20)
    assert flaps.quarantined(20) == {"n1": 40.0}, "for twice as long"


def test_a_node_that_fails_after_each_quarantine_disturbs_the_job_ever_less_often() -> None:
    flaps, now, lasted = FlapTracker(FlapPolicy(quarantine_s=10)), 0.0, []
    for _ in range(8):
        flaps.quarantine("n1", now)
        flaps.quarantine("n1", now)  # for another reason, at the same incident
        lasted.append(flaps.quarantined(now)["n1"] - now)
        now += lasted[-1] + 60.0  # it returns, and fails within a minute
    assert lasted == [10, 20, 40, 80, 160, 320, 320, 320]
    flaps.quarantine("n1", now + 400.0)
    assert flaps.quarantined(now + 400.0) == {"n1": now + 410.0}, "it had been a member for long"


def test_the_first_to_fail_three_times_in_a_row_is_quarantined() -> None:
    flaps = FlapTracker()
    for now, node in enumerate(("n1", "n1", "n2", "n1", "n1")):
        flaps.failed_first(node, now)
    assert flaps.quarantined(5) == {}
    flaps.failed_first("n1", 5)
    assert flaps.quarantined(5) == {"n1": 65.0}


def test_first_failures_separated_by_healthy_time_do_not_accumulate() -> None:
    flaps = FlapTracker()
    for now in (0, 121, 242, 363):
        flaps.failed_first("n1", now)
    assert flaps.quarantined(363) == {}


def test_a_quarantine_resets_the_count() -> None:
    flaps = FlapTracker(FlapPolicy(quarantine_s=1))
    for now in range(3):
        flaps.failed_first("n1", now)
    flaps.failed_first("n1", 10)
    assert flaps.quarantined(10) == {}


def test_old_losses_are_discarded() -> None:
    """A job of weeks sees thousands of nodes."""
    flaps = FlapTracker()
    for i in range(1000):
        flaps.lost(f"n{i}", 10.0 * i)
    assert len(flaps._losses) <= 13


def test_a_node_that_fails_alike_before_it_joins_is_not_started_for_ever() -> None:
    usage, other = Failure("n3", None, 2), Failure("n3", "OSError: [Errno 5] /data", 1)
    killed = Failure("n3", None, -9)
    starts = FailedStarts()
    assert [starts.failed(usage, now) for now in (0, 1, 59, 60)] == [False, False, False, True]
    starts.clear()  # its workers were in a world
    rows: list[list[Failure]] = [[usage, usage, other], [other, usage, usage], [killed] * 4]
    for row in rows:
        assert not any(starts.failed(failure, 100 * i) for i, failure in enumerate(row)), row
    pids = [Failure("n3", f"RuntimeError: worker (pid {n}) failed", 1) for n in (71, 8, 903)]
    assert [starts.failed(f, 1000 + 40 * i) for i, f in enumerate(pids)] == [False, False, True]
