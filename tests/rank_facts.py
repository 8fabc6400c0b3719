"""What is known of a rank of a healthy job with steps of 20 ms, for tests of hang verdicts."""

from __future__ import annotations

from dataclasses import replace

from elastic.hangs.page import Flag, KernelFacts, Phase, RankFacts

HEALTHY = RankFacts(
    rank=0,
    node="n1",
    local_rank=0,
    pid=100,
    generation=7,
    step=57,
    phase=Phase.COMPUTE,
    outer=Phase.COMPUTE,
    flags=Flag.NONE,
    progress=4000,
    quiet_s=0.0,
    idle_s=0.0,
    collective=114,
    operation="all_reduce",
    steps_in_world=50,
    longest_s=0.02,
    longest_step_s=0.02,
    typical_s=0.01,
    typical_step_s=0.01,
    collective_s=0.002,
    checkpoint_step=50,
    kernel=KernelFacts(),
)


def rank_facts(rank: int, **changes: object) -> RankFacts:
    """Of this rank, but for ``changes``."""
    return replace(HEALTHY, rank=rank, **changes)  # type: ignore[arg-type]
