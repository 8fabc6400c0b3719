"""Random hangs injected into a job of three nodes, and the outcome of each."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from training_job import SCRIPTS, TrainingJob, Workload

from elastic.hangs.page import Phase
from elastic.testing.cluster import ClusterTimeout
from elastic.testing.node import LocalNode
from elastic.testing.waiting import PATIENCE_S

SCRIPT = SCRIPTS / "injected_hangs.py"
WORKLOAD = Workload(samples=480, epochs=12, step_s=0.2, save_every=20)
LONG_WORKLOAD = replace(WORKLOAD, epochs=40)
NODES = 3
# Short timeouts that cause no false alarms on a busy machine, so that many hangs can be drawn.
CONF = {"hang_timeout_s": 2.0, "hang_script_timeout_s": 6.0}
# The first three steps of a world have a budget of minutes.
WARM_UP_STEPS = 6

# The name in the report of the place that a worker hangs in. "anywhere": from outside, at any time.
# "state" is the script's `state_dict`, called after every step and for every checkpoint.
PLACES = {
    "data": (Phase.DATA,),
    "loader": (Phase.DATA,),
    "forward": (Phase.COMPUTE,),
    "backward": (Phase.COMPUTE,),
    "optimizer": (Phase.OPTIMIZER,),
    "before-forward": (Phase.SCRIPT,),
    "before-update": (Phase.SCRIPT,),
    "after-update": (Phase.SCRIPT,),
    "evaluation": (Phase.EVALUATION,),
    "state": (Phase.SCRIPT, Phase.CHECKPOINT),
    "restore": (Phase.FORMING,),
}
HANGS = ("stop", "loop", "sleep", "locked", "deadlock", "fifo")
COLLECTIVES = ("skip", "order")


@dataclass(frozen=True)
class Injection:
    """``action`` at ``place`` on the node with this index among the running ones."""

    action: str
    place: str
    index: int

    def __str__(self) -> str:
        return f"{self.action} at {self.place} of node {self.index}"


@dataclass(frozen=True)
class Outcome:
    """The outcome of an injection; ``wrong`` is empty if the right rank was named, and no other
    harmed.
    """

    injection: Injection
    wrong: str
    pause_s: float


def draw(rng: random.Random) -> Iterator[Injection]:
    """Every action at every place before any repeats, in a random order, on random nodes."""
    kinds = [(action, place) for place in PLACES for action in HANGS if place != "restore"]
    kinds += [(action, "collectives") for action in COLLECTIVES for _ in range(3)]
    kinds += [("stop", "anywhere")] * 3
    while True:
        rng.shuffle(kinds)
        for action, place in kinds:
            yield Injection(action, place, rng.randrange(NODES))


def one_of_each(rng: random.Random) -> list[Injection]:
    """Every single-worker action once, each at another place: test_hangs.py covers mismatched
    collectives, and the worker that is stopped from outside.
    """
    places = rng.sample(sorted(set(PLACES) - {"loader", "restore"}), len(HANGS))
    kinds = [*zip(HANGS, places, strict=True), ("sleep", "loader")]
    rng.shuffle(kinds)
    return [Injection(action, place, rng.randrange(NODES)) for action, place in kinds]


def inject(job: TrainingJob, injection: Injection) -> Outcome:
    """Inject it into a training job, and wait until all nodes train again."""
    job.bring_to(NODES)
    job.wait_progress(WARM_UP_STEPS)
    nodes, generation = job.running, job.generation()
    victim = nodes[injection.index]
    pids = {node.name: node.workers()[0].pid for node in nodes}
    rank = _rank_of(job, victim)
    since_s = time.monotonic()
    _order(job, injection, victim, pids[victim.name])
    try:
        verdicts = _recovery(job, generation, since_s)
    except ClusterTimeout as error:
        return Outcome(injection, f"no recovery: {str(error).splitlines()[0]}", PATIENCE_S)
    now = {node.name: node.workers()[0].pid for node in job.running}
    wrong = _judge(injection, verdicts, victim.name, rank, pids, now)
    return Outcome(injection, wrong, _pause_s(job, generation))


def inject_while_a_world_forms(job: TrainingJob, action: str) -> Outcome:
    """A restarted worker hangs when it receives the state of the job."""
    injection = Injection(action, "restore", 1)
    job.bring_to(NODES)
    job.wait_progress(WARM_UP_STEPS)
    nodes, generation = job.running, job.generation()
    victim, since_s = nodes[injection.index], time.monotonic()
    pids = {node.name: node.workers()[0].pid for node in nodes}
    _order(job, injection, victim, 0)
    os.kill(pids[victim.name], signal.SIGKILL)
    pids[victim.name] = job.wait_for(lambda: _injected(job), PATIENCE_S, "a worker that hangs")
    try:
        verdicts = _recovery(job, generation, since_s)
    except ClusterTimeout as error:
        return Outcome(injection, f"no recovery: {str(error).splitlines()[0]}", PATIENCE_S)
    now = {node.name: node.workers()[0].pid for node in job.running}
    # The world in which it hangs never began: its rank is that of the verdict.
    rank = verdicts[0]["ranks"][0] if verdicts and verdicts[0]["node"] == victim.name else -1
    wrong = _judge(injection, verdicts, victim.name, rank, pids, now)
    return Outcome(injection, wrong, _pause_s(job, generation))


def _recovery(job: TrainingJob, generation: int, since_s: float) -> list[dict[str, Any]]:
    """The verdicts, once all nodes train in a later world. They are logged after their effects.
    Raises ClusterTimeout.
    """
    job.wait_training(nodes=NODES, after_generation=generation)
    job.wait_event("hang-found", since_s=since_s)
    return job.journaled("hang-found", since_s=since_s)


def _injected(job: TrainingJob) -> int | None:
    """The process that took the order."""
    if (job.folder / "inject").exists() or not (job.folder / "injected").exists():
        return None
    return int((job.folder / "injected").read_text().split()[0])


def _order(job: TrainingJob, injection: Injection, victim: LocalNode, pid: int) -> None:
    (job.folder / "injected").unlink(missing_ok=True)
    if injection.place == "anywhere":
        os.kill(pid, signal.SIGSTOP)
        return
    staged = job.folder / "inject.new"
    staged.write_text(f"{victim.name} {injection.action} {injection.place}")
    staged.rename(job.folder / "inject")


def _rank_of(job: TrainingJob, node: LocalNode) -> int:
    steps = job.ledger().steps
    newest = max(s.generation for s in steps)
    return next(s.rank for s in steps if s.generation == newest and s.node == node.name)


def _judge(
    injection: Injection,
    verdicts: Sequence[dict[str, Any]],
    node: str,
    rank: int,
    before: dict[str, int],
    after: dict[str, int],
) -> str:
    """The deviation from the expected outcome; empty: none."""
    if len(verdicts) != 1:
        return f"{len(verdicts)} verdicts: {[v['reason'] for v in verdicts]}"
    (verdict,) = verdicts
    if tuple(verdict["ranks"]) != (rank,):
        return f"rank {rank} hangs, and {verdict['ranks']} were named: {verdict['reason']}"
    kind = _expected_kind(injection)
    if verdict["kind"] != kind:
        return f"{verdict['kind']} instead of {kind}: {verdict['reason']}"
    labels = [phase.label for phase in PLACES.get(injection.place, ())]
    if kind == "absent" and not any(f"hangs in {label}" in verdict["reason"] for label in labels):
        return f"not in {' or '.join(labels)}: {verdict['reason']}"
    ended = {name for name, pid in before.items() if after.get(name) != pid}
    if kind == "mismatch":  # gloo itself may fail one of the two ends, as an error of the script
        return "" if len(ended) <= 1 else f"the workers of {ended} were ended"
    return "" if ended == {node} else f"the workers of {ended} were ended, not of {node}"


def _expected_kind(injection: Injection) -> str:
    if injection.place == "collectives":
        return "mismatch"
    is_worker = injection.place != "loader"
    return "stopped" if injection.action == "stop" and is_worker else "absent"


def _pause_s(job: TrainingJob, generation: int) -> float:
    """Between the last step of this generation and the first one after it."""
    steps = job.ledger().steps
    before = max(s.time_s for s in steps if s.generation <= generation)
    return min(s.time_s for s in steps if s.generation > generation) - before


def table(outcomes: Sequence[Outcome]) -> str:
    """Runs, correct and wrong ones and the median pause by action, and a list of the wrong ones."""
    lines = [f"{'action':10} {'runs':>4} {'right':>5} {'wrong':>5} {'pause s (median, most)':>24}"]
    for action in (*HANGS, *COLLECTIVES):
        of_it = [o for o in outcomes if o.injection.action == action]
        if not of_it:
            continue
        wrong = sum(bool(o.wrong) for o in of_it)
        pauses_s = [o.pause_s for o in of_it]
        times = f"{statistics.median(pauses_s):.2f} {max(pauses_s):.2f}"
        lines.append(f"{action:10} {len(of_it):4} {len(of_it) - wrong:5} {wrong:5} {times:>24}")
    lines += [f"{o.injection}: {o.wrong}" for o in outcomes if o.wrong]
    return "\n".join(lines)


def start(endpoint: str, folder: Path, workload: Workload) -> TrainingJob:
    """A job to inject into; the caller enters and leaves it."""
    return TrainingJob(
        [endpoint],
        folder,
        script=SCRIPT,
        workload=workload,
        min_nodes=2,
        max_nodes=NODES,
        conf=CONF,
    )
