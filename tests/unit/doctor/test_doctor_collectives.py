"""Which operation hangs and which rank causes it, from the reports of all ranks."""

from __future__ import annotations

from elastic.doctor.checks import Finding, Status
from elastic.doctor.collectives import (
    ENDED,
    RUNNING,
    STOPPED,
    RankOutcome,
    Result,
    Speed,
    blame,
    findings,
    gpu_findings,
    noted,
    of_speed,
)


def rank(number: int, **changes: object) -> RankOutcome:
    settings: dict[str, object] = {"node": f"n{number}", "pid": 100 + number, "state": RUNNING}
    return RankOutcome(rank=number, **{**settings, **changes})  # type: ignore[arg-type]


def done(number: int, *operations: str, **changes: str) -> RankOutcome:
    results = tuple(Result(operation=o, took_ms=1.0, **changes) for o in operations)
    return rank(number, is_done=True, entered=len(operations), results=results)


def only(found: list[Finding]) -> Finding:
    assert len(found) == 1
    return found[0]


def test_an_operation_is_ok_wrong_or_unsupported() -> None:
    def found(*ranks: RankOutcome) -> Finding:
        return only(findings("gloo", ranks, ["reduce"], 9))

    well = found(done(0, "reduce"), done(1, "reduce"))
    assert (well.name, well.status) == ("gloo reduce", Status.OK)
    lacking = [done(n, "reduce", unsupported="gloo does not support it") for n in (0, 1)]
    assert found(*lacking).status is Status.SKIPPED
    wrong = found(done(0, "reduce"), done(1, "reduce", wrong="3 of 1000 elements are wrong"))
    assert wrong.status is Status.FAILED
    assert "rank 1 (node n1, pid 101)" in wrong.measured and "3 of 1000" in wrong.measured


def test_a_stopped_rank_is_blamed_while_all_ranks_wait() -> None:
    ranks = [
        rank(0, entered=5, operation="all_reduce"),
        rank(1, entered=5, operation="all_reduce", state=STOPPED),
        rank(2, entered=5, operation="all_reduce"),
    ]
    reason = blame(ranks, 20)
    assert reason == (
        "no result within 20 s: rank 1 (node n1, pid 101) is stopped; rank 0 waits in all_reduce; "
        "rank 2 waits in all_reduce"
    )


def test_a_dead_rank_is_blamed_rather_than_ranks_that_lost_a_connection() -> None:
    ranks = [
        rank(0, entered=5, operation="gather", error="RuntimeError: Connection closed by peer"),
        rank(1, entered=5, operation="gather", state=ENDED, how_ended="was ended by SIGKILL"),
    ]
    assert blame(ranks, 20) == "rank 1 (node n1, pid 101) was ended by SIGKILL"


def test_a_rank_that_is_behind_is_blamed_and_named_by_waiting_ranks() -> None:
    ranks = [
        rank(0, entered=7, operation="send/recv", peer=2),
        rank(1, entered=7, operation="send/recv", peer=0),
        rank(2, entered=6, operation="init tcp://"),
    ]
    reason = blame(ranks, 3)
    assert "rank 2 (node n2, pid 102) is behind the others, in init tcp://" in reason
    assert "rank 0 waits in send/recv for rank 2" in reason


def test_the_hanging_operation_fails_and_later_ones_are_skipped() -> None:
    ranks = [
        rank(n, entered=2, operation="b", results=(Result(operation="a", took_ms=1.0),))
        for n in (0, 1)
    ]
    found = findings("gloo", ranks, ["a", "b", "c"], 9)
    assert [f.status for f in found] == [Status.OK, Status.FAILED, Status.SKIPPED]
    assert "not reached" in found[2].measured


def test_messages_of_a_rank_update_its_progress() -> None:
    progress = rank(0)
    for message in (
        {"event": "entered", "operation": "send/recv", "peer": None},
        {"event": "entered", "operation": "send/recv", "peer": 1},
        {"event": "done", "operation": "send/recv", "wrong": "", "took_ms": 2.0},
        {"event": "speed", "peer": 1, "size": 4, "torch_ms": 1.0, "raw_ms": 0.5},
        {"event": "end", "group": "operations", "peak_bytes": 5},
    ):
        progress = noted(progress, message)
    assert (progress.entered, progress.peer, progress.is_done) == (2, 1, True)
    assert progress.results == (Result(operation="send/recv", took_ms=2.0),)
    assert progress.speeds == (Speed(peer=1, size=4, torch_ms=1.0, raw_ms=0.5),)


def test_a_slow_backend_is_a_warning_between_machines_only() -> None:
    speeds = (
        Speed(peer=1, size=4, torch_ms=0.1, raw_ms=0.05),
        Speed(peer=1, size=64 << 20, torch_ms=100.0, raw_ms=10.0),
    )
    ranks = [rank(0, speeds=speeds)]
    assert only(of_speed("gloo", ranks, is_one_machine=False)).status is Status.WARNING
    assert only(of_speed("gloo", ranks, is_one_machine=True)).status is Status.OK


def test_gpus_that_are_faulty_or_invisible_to_torch_are_reported() -> None:
    build = {"gpus": 2, "gpu_errors": [], "has_driver": True, "cuda": "12.8", "torch": "2.13.0"}
    assert [f.status for f in gpu_findings(build)] == [Status.OK]
    unseen = only(gpu_findings({**build, "gpus": 0}))
    assert unseen.status is Status.WARNING and "CUDA_VISIBLE_DEVICES" in unseen.remedy
    assert gpu_findings({**build, "gpus": 0, "has_driver": False}) == []
    broken = only(gpu_findings({**build, "gpu_errors": ["GPU 1: CUDA error: unspecified launch"]}))
    assert broken.status is Status.FAILED and "GPU 1" in broken.measured
