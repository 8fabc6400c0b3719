"""The small world itself: its reports on workers that die, fail, or never end."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from catalogue import SCRIPTS
from idiom_runs import SIZE, IdiomRuns

import checkpoints
from elastic.testing.small_world.worker import _Events
from elastic.testing.small_world.world import CALLS, WAIT, Death

JOIN = """
import elastic
run = elastic.join()
run.track()
"""


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(JOIN + text)
    return path


def test_the_victim_dies_at_the_given_event(runs: IdiomRuns, tmp_path: Path) -> None:
    plain = SCRIPTS / "plain_loop.py"
    undisturbed = runs.world.run(plain, tmp_path / "undisturbed")
    undisturbed.assert_success(workers=SIZE)
    assert undisturbed.worlds == 1
    last = undisturbed.workers[1].lines
    assert {w.lines for w in undisturbed.workers} == {last}
    assert last > 5 * undisturbed.workers[1].steps  # five lines a step

    killed = runs.world.run(plain, tmp_path / "killed", death=Death(rank=1, event=last))
    assert [w.exit_code for w in killed.workers] == [0, None, 0]
    assert killed.worlds == 2
    assert killed.died_at.startswith("line "), killed.died_at

    after = runs.world.run(plain, tmp_path / "after", death=Death(rank=1, event=last + 1))
    assert [w.exit_code for w in after.workers] == [0, 0, 0]
    assert not after.died_at


def test_a_replacement_joins_training(runs: IdiomRuns, tmp_path: Path) -> None:
    outcome = runs.world.run(
        SCRIPTS / "plain_loop.py",
        tmp_path,
        death=Death(rank=0, event=2000, counted=CALLS),
        is_replaced=True,
    )
    outcome.assert_success(workers=SIZE)
    assert [w.exit_code for w in outcome.workers] == [None, 0, 0, 0]
    assert "in " in outcome.died_at  # a function
    joining_node, survivor = outcome.workers[3], outcome.workers[1]
    assert joining_node.steps == survivor.steps
    assert joining_node.result.keys() == survivor.result.keys()


def test_workers_are_isolated_from_the_host_process(runs: IdiomRuns, tmp_path: Path) -> None:
    outcome = runs.world.run(
        script(
            tmp_path,
            """
import os, random, torch
result = {
    "pid": os.getpid(),
    "leader": os.getsid(0),
    "descriptors": len(os.listdir("/proc/self/fd")),
    "drawn": random.random(),
    "rank": int(os.environ["RANK"]),
}
run.retry(lambda: run.mean(1.0))
""",
        ),
        tmp_path / "out",
    )
    outcome.assert_success(workers=SIZE)
    results = [w.result for w in outcome.workers]
    assert [int(r["rank"]) for r in results] == [0, 1, 2]
    assert all(torch.equal(r["pid"], r["leader"]) for r in results)
    assert len({float(r["drawn"]) for r in results}) == SIZE
    assert all(int(r["descriptors"]) < 12 for r in results)
    assert not any(Path(f"/proc/{int(r['pid'])}").exists() for r in results)


def test_a_failed_script_is_reported_with_its_error(runs: IdiomRuns, tmp_path: Path) -> None:
    mistake = script(tmp_path, "raise ValueError('a mistake of the user')")
    outcome = runs.world.run(mistake, tmp_path / "out")
    assert "has failed" in outcome.problem
    failed = [w for w in outcome.workers if w.error]
    assert failed
    assert failed[0].error == "ValueError: a mistake of the user"
    assert "Traceback" in failed[0].log


def test_a_run_over_its_time_limit_is_killed_with_stack_traces(
    runs: IdiomRuns, tmp_path: Path
) -> None:
    endless = script(tmp_path, "import threading\nthreading.Event().wait()")
    outcome = runs.world.run(endless, tmp_path / "out", limit_s=2.0)
    assert outcome.problem == "not finished within the limit"
    assert all("most recent call first" in w.log for w in outcome.workers)
    for worker in outcome.workers:
        assert not os.path.exists(f"/proc/{worker.pid}")


def test_a_death_at_a_call_is_not_that_of_a_data_worker(tmp_path: Path) -> None:
    """Hooks that run in a new fork make calls: one that counted them would die in place of its
    parent, which makes fewer."""
    calls: list[int] = []

    def call_often() -> None:
        while 0 < len(calls) < 100:
            call()

    def call() -> None:
        calls.append(1)

    os.register_at_fork(after_in_child=call_often)
    death = Death(rank=0, event=50, counted=CALLS)
    counted = _Events(__file__, death, tmp_path / "note", is_joining=False, are_wanted=True)
    counted._counts = lambda: True  # type: ignore[method-assign]
    calls.append(1)
    sys.settrace(counted.trace)
    child = os.fork()
    if child == 0:
        os._exit(0)
    sys.settrace(None)
    calls.clear()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


ONCE_AND_LOOP = """
import torch
from torch.utils.data import DataLoader, TensorDataset
run = elastic.join(checkpoints="CHECKPOINTS", when=1000)
model = run.wrap(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(TensorDataset(torch.randn(24, 2)), batch_size=2), global_batch=6)

def start():
    run.state["starts"] = run.state.get("starts", 0) + 1

run.once("start", start)
for epoch in run.epochs(3):
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
result = {"starts": run.state["starts"]}
"""


def once_and_loop(folder: Path) -> tuple[Path, Path]:
    path, saved = folder / "script.py", folder / "checkpoints"
    text = "import elastic\n" + ONCE_AND_LOOP.replace("CHECKPOINTS", str(saved))
    path.write_text(text)
    return path, saved


def line_of(path: Path, text: str) -> int:
    return next(n for n, line in enumerate(path.read_text().splitlines(), 1) if text in line)


def test_workers_that_change_worlds_in_process_do_so_in_restart_mode(
    runs: IdiomRuns, tmp_path: Path
) -> None:
    """As the agent has them do: it does not know whether their script has more than run.once."""
    path, _ = once_and_loop(tmp_path)
    at = Death(rank=1, event=1, line=line_of(path, 'run.state["starts"] = '))
    outcome = runs.world.run(path, tmp_path / "out", death=at, on_death=WAIT)
    outcome.assert_success(workers=SIZE)
    assert outcome.died_at and outcome.worlds == 2
    assert {int(w.result["starts"]) for w in outcome.survivors} == {1}


def test_a_death_in_a_loop_outside_of_retry_loses_no_step_after_run_once(
    runs: IdiomRuns, tmp_path: Path
) -> None:
    """run.once changes worlds in process, but the loop after it does not: nobody continues with the
    state of the survivors."""
    path, saved = once_and_loop(tmp_path)
    at = Death(rank=1, event=8, line=line_of(path, "optimizer.zero_grad()"))
    outcome = runs.world.run(path, tmp_path / "out", death=at, on_death=WAIT)
    assert outcome.died_at.endswith("7 steps committed") and not outcome.survivors
    assert [each.step for each in checkpoints.list_checkpoints(saved)] == [7]
