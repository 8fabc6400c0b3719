"""Idioms and deaths at critical lines, with collectives that run on a stream, as on GPUs.

Workers train on the backend of :mod:`kit.nccl_semantics`. Each script must end
with the result of a run with one worker.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from catalogue import Idiom, idioms
from idiom_runs import SIZE, IdiomRuns, assert_same
from test_early_leave import script_of as leaving_script
from test_worst_places import BY_ITSELF, HEAD, LOOPS, STEP, TRAINED, script_of

from elastic.testing.small_world.world import SmallWorld
from elastic.train.order import COUNT

# Sparse gradients need a special build of NCCL (ProcessGroupNCCL.cpp, allreduce_sparse).
NOT_ON_NCCL = {"dlrm", "sparse_embedding"}
# Those with their own collectives or weights; the others run in the soak test.
IN_SHORT = {
    "accumulate",
    "all_reduce_loss",
    "barrier",
    "batch_norm",
    "buffers_in_forward",
    "callback_with_a_collective",
    "channels_last",
    "evaluate_each_epoch",
    "gan",
    "manual_sgd",
    "metric_average",
    "sum_with_gradients",
    "two_optimizers",
    "unused_parameters",
}
# The others of these only in `make test-all`.
IN_MAKE_TEST = {"accumulate", "sum_with_gradients"}
RUN = "\nrun.retry(train)\nresult = dict(model.state_dict())\n"


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IdiomRuns]:
    with SmallWorld(prepare="kit.nccl_semantics:use_by_default") as world:
        yield IdiomRuns(world, tmp_path_factory.mktemp("streams"))


def chosen(in_short: bool) -> list[Idiom]:
    return [i for i in idioms() if i.name not in NOT_ON_NCCL and (i.name in IN_SHORT) is in_short]


def name_of(idiom: Idiom) -> str:
    return idiom.name


@pytest.mark.parametrize(
    "idiom",
    [
        pytest.param(i, marks=[] if i.name in IN_MAKE_TEST else [pytest.mark.slow])
        for i in chosen(in_short=True)
    ],
    ids=name_of,
)
def test_a_death_does_not_change_the_result(
    runs: IdiomRuns, streams: IdiomRuns, idiom: Idiom
) -> None:
    check(runs, streams, idiom, zlib.crc32(idiom.name.encode()) % 2)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 8))
@pytest.mark.parametrize("idiom", [*chosen(True), *chosen(False)], ids=name_of)
def test_a_death_anywhere_does_not_change_the_result(
    runs: IdiomRuns, streams: IdiomRuns, idiom: Idiom, seed: int
) -> None:
    check(runs, streams, idiom, seed)


def check(runs: IdiomRuns, streams: IdiomRuns, idiom: Idiom, seed: int) -> None:
    is_replaced = seed % 2 == 1
    alone = runs.alone(idiom)  # the lines of a script are the same on both
    outcome = streams.with_random_death(idiom, seed, alone, is_replaced=is_replaced)
    outcome.assert_success(workers=SIZE if is_replaced else SIZE - 1)
    assert outcome.died_at, "nobody has died"
    assert_same(idiom, outcome, alone)


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
def test_a_death_at_a_critical_line_does_not_change_the_result(
    runs: IdiomRuns, streams: IdiomRuns, tmp_path: Path, loop: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(script_of(loop, 5, is_lean=False))  # a copy is too slow on the stream
    alone = runs.world.run(script, tmp_path / "alone", size=1)
    alone.assert_success(workers=1)
    outcome = streams.world.run(script, tmp_path / "killed", size=3, death=BY_ITSELF)
    outcome.assert_success(workers=2)
    for survivor in outcome.survivors:
        for name, expected in alone.survivors[0].result.items():
            is_close = torch.allclose(survivor.result[name], expected, rtol=1e-6, atol=1e-6)
            assert is_close, f"{name} of {survivor.name}\n{outcome.describe()}"


# The last rank dies between the two steps of the job; these are the events in the others.
HANGS = """
from kit.nccl_semantics import control
from elastic.train import recovery as in_process
from elastic.tuning import intervals
in_process.BUILD_TIMEOUT_S = 2.0
intervals.ABORT_S = intervals.GIVEN_UP_BUILD_S = 1.0
def train():
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            STEP
            if run.world.rank == 1 and run.world.generation == 1 and i == 3:
                control.hang_in_WHERE = True
            die(epoch * 8 + i, 3)
"""


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        ("abort", "aborting the communicators of generation 1 on rank 1 of 3 has not returned"),
        ("build", "building the process group (nccl_semantics) of generation 2 on rank 1 of 2"),
    ],
)
def test_a_worker_stuck_in_nccl_exits_with_a_reason(
    streams: IdiomRuns, tmp_path: Path, where: str, sentence: str
) -> None:
    """An agent would restart the worker; without one, the run ends with the worker."""
    script = tmp_path / "script.py"
    body = HANGS.replace("WHERE", where).replace("STEP", STEP)
    script.write_text(HEAD + TRAINED + body + RUN)
    outcome = streams.world.run(script, tmp_path / "job", size=3, death=BY_ITSELF)
    stuck = outcome.workers[1]
    assert stuck.exit_code == 1, outcome.describe()
    assert f"elastic: {sentence}" in stuck.log
    assert "this worker ends, and its agent restarts it" in stuck.log
    assert "worker-stuck reason=" in stuck.log


# As long as the gradients with their flags: gloo, which transfers the data, compares lengths.
SKIPS = """
def train():
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            STEP
            if not (run.world.rank == 1 and run.world.generation == 1 and epoch * 8 + i == 3):
                dist.all_reduce(torch.zeros(sum(p.numel() for p in model.parameters()) + COUNT))
"""


@pytest.mark.slow
def test_gradients_summed_with_another_collective_are_not_used(
    runs: IdiomRuns, streams: IdiomRuns, tmp_path: Path
) -> None:
    """A rank skips a collective: its next one is matched with that, and so on, without an error."""
    script = tmp_path / "script.py"
    text = HEAD + TRAINED + SKIPS.replace("STEP", STEP).replace("COUNT", str(COUNT)) + RUN
    script.write_text(text)
    alone = runs.world.run(script, tmp_path / "alone", size=1)
    alone.assert_success(workers=1)
    outcome = streams.world.run(script, tmp_path / "job", size=3)
    outcome.assert_success(workers=3)
    assert outcome.worlds == 2, outcome.describe()
    for worker in outcome.survivors:
        for name, expected in alone.survivors[0].result.items():
            is_close = torch.allclose(worker.result[name], expected, rtol=1e-6, atol=1e-6)
            assert is_close, f"{name} of {worker.name}\n{outcome.describe()}"


def test_values_are_read_after_their_stream_has_completed(
    streams: IdiomRuns, tmp_path: Path
) -> None:
    """Control flags and transferred states use the same stream as the gradients."""
    body = """
from kit.nccl_semantics import control
control.latency_s = 0.05
means = []
def train():
    for epoch in run.epochs(1):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            STEP
            means.append(run.mean(1.0, rank=run.world.rank)["rank"])
            die(i, 3)
"""
    script = tmp_path / "script.py"
    script.write_text(
        HEAD + TRAINED + body.replace("STEP", STEP) + RUN + "result['m'] = means[0]\n"
    )
    outcome = streams.world.run(script, tmp_path / "job", size=3, death=BY_ITSELF, is_replaced=True)
    outcome.assert_success(workers=3)
    first, second, joining_node = outcome.survivors
    assert first.result["m"].item() == second.result["m"].item() == 1.0
    for name, weights in first.result.items():
        if name != "m":
            assert torch.equal(weights, joining_node.result[name])


@pytest.mark.slow
def test_activations_are_freed_before_a_state_transfer(streams: IdiomRuns, tmp_path: Path) -> None:
    body = """
import weakref
from elastic.train import transfer as recovery
held, seen = [], []
send = recovery.transfer
def transfer(*args, **kwargs):
    seen.append(sum(ref() is not None for ref in held))
    return send(*args, **kwargs)
recovery.transfer = transfer
class Activations:
    def __init__(self, hidden):
        self.hidden = hidden
def forward(inputs):
    activations = Activations(torch.tanh(model(inputs)))
    held.append(weakref.ref(activations))
    return activations
def train():
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            activations = forward(inputs)
            F.mse_loss(activations.hidden, targets).backward()
            try:
                die(epoch * 8 + i, 5)
            except Exception as error:
                raise RuntimeError("what the script makes of it") from error
            optimizer.step()
            optimizer.zero_grad()
"""
    script = tmp_path / "script.py"
    report = "result['seen'] = seen[0] if seen else -1\n"
    script.write_text(HEAD + TRAINED + dedent(body) + RUN + report)
    outcome = streams.world.run(script, tmp_path / "job", size=3, death=BY_ITSELF, is_replaced=True)
    outcome.assert_success(workers=3)
    assert [w.result["seen"].item() for w in outcome.survivors] == [0, 0, 0], outcome.describe()


def test_a_rank_that_leaves_the_loop_is_named_while_others_wait_for_their_device(
    streams: IdiomRuns, tmp_path: Path
) -> None:
    """They read gradients whose sum waits for that rank: the link's thread finds it."""
    leaves = "return i == 5 and run.world.rank == 1"
    script = leaving_script(tmp_path, "break, and a collective of the script", leaves)
    outcome = streams.world.run(script, tmp_path / "ranks")
    ended = [worker for worker in outcome.workers if worker.exit_code is not None]
    assert ended, outcome.describe()
    for worker in ended:
        assert "rank 1 left the loop after step 5, while rank" in worker.error
