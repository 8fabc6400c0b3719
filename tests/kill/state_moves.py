"""The state transfers between ranks, in a job of replicas."""

from __future__ import annotations

from training_job import TrainingJob

from elastic.testing.waiting import PATIENCE_S


def wait_moved(job: TrainingJob, moves: list[tuple[int, list[int]]], since_s: float) -> None:
    """Wait until exactly these state transfers, from rank to rank, have taken place."""

    def moved() -> bool:
        received = sorted(e["sources"] for e in job.journaled("state-received", since_s=since_s))
        sent = sorted(e["receivers"] for e in job.journaled("state-sent", since_s=since_s))
        return list(zip(received, sent, strict=False)) == [([s], r) for s, r in moves]

    job.wait_for(moved, PATIENCE_S, f"state sent by and to {moves}")
