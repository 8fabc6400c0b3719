"""Errors for invalid scripts, folders and checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from kit.run_kit import SAMPLES, dataset, job, network, parts_of, process
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.utils.data import DataLoader, dataloader

import checkpoints
from elastic.errors import CheckpointRequired, ConfigError, TrainingError
from elastic.groups.world import world_from_environment
from elastic.membership.failures import Action, FailureFacts, judge_failure
from elastic.telemetry.events import RunClosed
from elastic.telemetry.log import get_logger
from elastic.testing.forks.server import run_forked
from elastic.testing.waiting import PATIENCE_S
from elastic.tracebacks import for_a_line
from elastic.train import checks
from elastic.train.folder import CheckpointFolder, Checkpoints
from elastic.train.run import Run, start_components
from elastic.train.state import _differing_tensors


def train_some(folder: Path, steps: int | None = 8) -> None:
    with process(folder, clean=steps is None) as run:
        job(run).train(2, steps)


def damage(folder: Path, name: str) -> None:
    file = next((folder / name).glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_a_checkpoint_of_another_model_is_rejected_without_changes(
    tmp_path: Path,
) -> None:
    train_some(tmp_path)
    with process(tmp_path, clean=False) as run:
        script = job(run, hidden=16)
        before = script.weights()
        with pytest.raises(TrainingError, match=r"0\.weight has shape \(8, 4\), here \(16, 4\)"):
            script.train()
        assert torch.equal(script.weights(), before)


def test_tensors_of_another_model_are_listed_in_its_order() -> None:
    """So that the same error has the same text in each process."""
    here = nn.Sequential(*(nn.Linear(2, 2) for _ in range(12)))
    saved = nn.Sequential(*(nn.Linear(3, 3) for _ in range(12))).state_dict()
    listed = [line.split()[1] for line in _differing_tensors("model", here, saved)]
    assert listed == list(here.state_dict())


def test_a_tracked_object_missing_from_the_checkpoint_is_named(tmp_path: Path) -> None:
    train_some(tmp_path)
    with process(tmp_path, clean=False) as run:
        script = job(run)
        run.track(ema=nn.Linear(1, 1))
        with pytest.raises(TrainingError, match="tracked object 'ema' is not in the checkpoint"):
            script.train()


def test_other_parameter_groups_are_rejected_before_the_model_changes(tmp_path: Path) -> None:
    train_some(tmp_path)
    with process(tmp_path, clean=False) as run:
        script = job(run)
        before = script.weights()
        optimizer = torch.optim.Adam([{"params": [p]} for p in script.model.parameters()], lr=0.01)
        parts_of(run).session.job.tracked["optimizer"] = optimizer
        with pytest.raises(TrainingError, match=r"groups have sizes \[4\], here \[1, 1, 1, 1\]"):
            script.train()
        assert torch.equal(script.weights(), before)


def test_another_global_batch_is_rejected_with_both_values(tmp_path: Path) -> None:
    train_some(tmp_path)
    with process(tmp_path, clean=False) as run:
        script = job(run, global_batch=13)
        with pytest.raises(ConfigError, match=r"global_batch=10.*global_batch=13"):
            script.train()


def test_an_omitted_global_batch_defaults_to_the_saved_one(tmp_path: Path) -> None:
    with process(tmp_path, clean=False) as run:
        job(run, global_batch=20).train(2, stop_after=4)
    with process(tmp_path) as run:
        script = job(run, global_batch=None)
        script.train(2)
        assert len(script.loader) == -(-SAMPLES // 20)


def test_another_seed_is_rejected_with_both_values(tmp_path: Path) -> None:
    train_some(tmp_path)
    with process(tmp_path, seed=7, clean=False) as run:
        script = job(run)
        with pytest.raises(ConfigError, match=r"seed=7, but.*seed=0"):
            script.train()


def test_a_damaged_newest_checkpoint_is_skipped_and_named(tmp_path: Path) -> None:
    train_some(tmp_path)
    newest, second, *_ = checkpoints.list_checkpoints(tmp_path)
    damage(tmp_path, newest.name)
    events: list[str] = []
    with process(tmp_path, journal=EventRecorder(events)) as run:
        script = job(run)
        assert script.train() == 2 * 6 - second.step
    assert any(newest.name in text and "damaged" in text for text in events)


class EventRecorder:
    """Records the text of each event."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def emit(self, event: object, *, level: int = 0) -> None:
        self._texts.append(str(event))


def test_a_job_with_only_damaged_checkpoints_does_not_start_over(tmp_path: Path) -> None:
    train_some(tmp_path)
    for info in checkpoints.list_checkpoints(tmp_path):
        damage(tmp_path, info.name)
    with process(tmp_path, clean=False) as run:
        script = job(run)
        with pytest.raises(CheckpointRequired, match="none of the 2 checkpoints"):
            script.train()


def test_a_missing_required_checkpoint_is_an_error(tmp_path: Path) -> None:
    run = Run(start_components(Checkpoints(folder=tmp_path, required=True)))
    try:
        script = job(run)
        with pytest.raises(CheckpointRequired, match="there is no checkpoint"):
            script.train()
        assert CheckpointRequired.exit_code == 65
        with pytest.raises(CheckpointRequired) as raised:
            run.retry(script.train)
        # Hydra prints it and exits with 1: no excepthook is called.
        assert run._parts.attempts.failure.text == f"CheckpointRequired: {raised.value.args[0]}"
    finally:
        run.close(clean=False)
        torch.distributed.destroy_process_group()


def test_an_unwritable_folder_is_rejected_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with process(tmp_path / "file" / "folder", clean=False) as run:
        script = job(run)
        with pytest.raises(ConfigError, match="checkpoints cannot be written to"):
            script.train()
        assert script.loader.position.step == 0


def test_a_failed_save_does_not_stop_training(tmp_path: Path) -> None:
    events: list[str] = []
    with process(tmp_path, journal=EventRecorder(events)) as run:
        script = job(run)
        script.train(1, stop_after=4)
        assert parts_of(run).session.checkpoints.wait(30.0)
        moved = tmp_path.rename(tmp_path.with_name("moved"))
        tmp_path.write_text("a file where the folder was")
        assert script.train(1) == 2
        assert parts_of(run).session.checkpoints.wait(30.0)
        tmp_path.unlink()
        moved.rename(tmp_path)
    assert any("CheckpointSkipped" in text for text in events)
    assert [info.step for info in checkpoints.list_checkpoints(tmp_path)] == [3]


def test_a_folder_that_the_nodes_do_not_share_causes_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(get_logger(), "propagate", True)
    first = CheckpointFolder(tmp_path / "a", lambda name, reason: None)
    first.check_writable(0)  # creates it
    found = first.resolve(world_from_environment({}), required=False)
    first.check_shared(0, found.generation)
    CheckpointFolder(tmp_path / "a", lambda name, reason: None).check_shared(1, found.generation)
    assert not caplog.messages
    CheckpointFolder(tmp_path / "b", lambda name, reason: None).check_shared(1, found.generation)
    # By each handler that an elastic.join() of this process has kept.
    (warning,) = set(caplog.messages)
    assert f"the checkpoint folder {tmp_path / 'b'} is not shared by all nodes: rank 1" in warning


def test_an_empty_dataset_is_rejected() -> None:
    with process() as run, pytest.raises(ConfigError, match="the dataset is empty"):
        run.loader(DataLoader(dataset(0), batch_size=10), global_batch=10)


def test_an_untracked_optimizer_on_wrapped_parameters_is_rejected() -> None:
    with process() as run:
        script = job(run)
        other = torch.optim.SGD(script.model.parameters(), lr=0.1)
        with pytest.raises(TrainingError, match="SGD is about to change wrapped parameters"):
            for x, y in script.loader:
                F.mse_loss(script.model(x), y).backward()  # type: ignore[no-untyped-call]
                other.step()


class _SchedulerOfTimm:
    """Like timm's schedulers: no LRScheduler, and its state excludes the optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.t = optimizer, 0

    def state_dict(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "optimizer"}

    def load_state_dict(self, state: dict[str, object]) -> None:
        vars(self).update(state)


class _Wrapper(_SchedulerOfTimm):
    """A wrapper of an optimizer, whose state includes the optimizer's."""

    def state_dict(self) -> dict[str, object]:
        return {"t": self.t, "inner": self.optimizer.state_dict()}


def _train_with_tracked(wrap: Callable[[torch.optim.Optimizer], object]) -> None:
    with process() as run:
        model = run.wrap(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        run.track(tracked=wrap(optimizer))
        for x, y in run.loader(DataLoader(dataset(), batch_size=10), global_batch=10):
            F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


@pytest.mark.parametrize(
    "scheduler", [lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9), _SchedulerOfTimm]
)
def test_an_optimizer_is_not_tracked_by_its_scheduler(
    scheduler: Callable[[torch.optim.Optimizer], object],
) -> None:
    """The scheduler's state has no momentum: a restart would lose it silently."""
    with pytest.raises(TrainingError, match="SGD is about to change wrapped parameters"):
        _train_with_tracked(scheduler)


def test_an_optimizer_is_tracked_by_a_wrapper_whose_state_includes_it() -> None:
    _train_with_tracked(_Wrapper)


def test_an_optimizer_of_parameters_within_a_step_is_not_restricted() -> None:
    with process() as run:
        script = job(run)
        for x, y in script.loader:
            own = nn.Linear(1, 1)
            other = torch.optim.SGD(own.parameters(), lr=0.1)
            own(torch.ones(1, 1)).sum().backward()
            before = own.weight.detach().clone()
            other.step()
            script.update(x, y)
            assert not torch.equal(own.weight, before)


def test_an_untracked_optimizer_of_parameters_that_outlive_a_step_is_rejected() -> None:
    with process() as run:
        script = job(run)
        own = nn.Linear(1, 1)
        other = torch.optim.SGD(own.parameters(), lr=0.1)
        with pytest.raises(TrainingError, match="SGD, which is not tracked, updates parameters"):
            for x, y in script.loader:
                own(torch.ones(1, 1)).sum().backward()
                other.step()
                script.update(x, y)


def test_a_step_before_the_last_micro_batch_is_rejected() -> None:
    with process() as run:
        script = job(run)
        loader = run.loader(DataLoader(dataset(), batch_size=10), global_batch=10, micro_batch=4)
        with pytest.raises(TrainingError, match="before the last of its 3 micro-batches"):
            for step in run.steps(loader):
                for x, y in step:
                    step.backward(F.mse_loss(script.model(x), y))
                    script.optimizer.step()


def test_unweighted_gradients_of_micro_batches_are_rejected() -> None:
    with process() as run:
        script = job(run)
        loader = run.loader(DataLoader(dataset(), batch_size=10), global_batch=10, micro_batch=4)
        with pytest.raises(TrainingError, match="unweighted gradients of 3 micro-batches"):
            for step in run.steps(loader):
                for x, y in step:
                    F.mse_loss(script.model(x), y).backward()  # type: ignore[no-untyped-call]
                script.optimizer.step()


def test_unreduced_gradients_are_rejected() -> None:
    """In eval mode the module has no collectives: a step would let the ranks diverge."""
    with process() as run:
        script = job(run)
        script.model.eval()
        with pytest.raises(TrainingError, match="were not reduced"):
            script.train()


def test_an_optimizer_step_outside_the_loop_is_rejected() -> None:
    with process() as run:
        script = job(run)
        script.train(1)
        with pytest.raises(TrainingError, match="outside of a step"):
            script.optimizer.step()


def test_micro_batches_in_a_plain_loop_are_rejected() -> None:
    with process() as run:
        job(run)
        loader = run.loader(DataLoader(dataset(), batch_size=10), global_batch=10, micro_batch=4)
        with pytest.raises(TrainingError, match=r"run\.steps\(loader\)"):
            next(iter(loader))


def test_a_nested_loop_is_rejected() -> None:
    with process() as run:
        script = job(run)
        with pytest.raises(TrainingError, match="a second loop begins a step"):
            for _ in script.loader:
                for _ in script.loader:
                    pass


def test_wrapping_after_the_first_loop_is_rejected() -> None:
    with process() as run:
        script = job(run)
        script.train(1)
        with pytest.raises(TrainingError, match=r"run\.wrap\(\) is called too late"):
            run.wrap(nn.Linear(1, 1))


def test_an_iterator_created_before_retry_is_rejected() -> None:
    with process() as run:
        script = job(run)
        batches = iter(script.loader)
        with pytest.raises(TrainingError, match=r"was created before run\.retry called"):
            run.retry(lambda: script.update(*next(batches)))


def test_a_generator_that_contains_the_attempts_is_accepted() -> None:
    with process() as run:
        script = job(run)

        def trained() -> Iterator[int]:
            for attempt in run.attempts():
                with attempt:
                    for x, y in script.loader:
                        script.update(x, y)
                        yield len(x)

        assert sum(trained()) == SAMPLES


def test_counting_batches_of_a_resumed_epoch_from_zero_is_rejected(tmp_path: Path) -> None:
    with process(tmp_path) as run:
        job(run).train(stop_after=2)
    with process(tmp_path) as run:
        script = job(run)

        def train() -> None:
            for _ in run.epochs(1):
                batches = iter(script.loader)
                for _ in range(len(script.loader)):
                    script.update(*next(batches))

        with pytest.raises(TrainingError, match="counts the batches that next"):
            run.retry(train)


def test_state_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    with process(tmp_path, clean=False) as run:
        script = job(run)
        run.state["model"] = nn.Linear(1, 1)
        with pytest.raises(Exception, match=r"state/model.*Linear"):
            script.train()


def test_an_object_without_state_dict_cannot_be_tracked() -> None:
    with process() as run, pytest.raises(TrainingError, match="a int has no state_dict") as error:
        run.track(step=3)
    assert 'run.state["step"]' in error.value.hint


def test_a_debug_level_that_crashes_workers_is_rejected() -> None:
    code = (
        "import elastic, torch.distributed as dist\n"
        "dist.set_debug_level(dist.DebugLevel.DETAIL)  # as torch from TORCH_DISTRIBUTED_DEBUG\n"
        "elastic.join()"
    )
    done = run_forked([sys.executable, "-c", code], timeout_s=PATIENCE_S)
    assert done.returncode != 0
    assert "TORCH_DISTRIBUTED_DEBUG=DETAIL: torch then wraps process groups" in done.stderr


@pytest.mark.parametrize(
    ("code", "error"),
    [(0, ""), (None, ""), (3, "the script called sys.exit(3)")],
)
def test_sys_exit_with_an_error_is_not_the_end_of_training(code: int | None, error: str) -> None:
    """No excepthook is called for it, so at exit it looks like a script that has ended."""
    journal = Mock()
    with process(journal=journal) as run, pytest.raises(SystemExit):
        run.retry(sys.exit, code)
    closed = next(c.args[0] for c in journal.emit.mock_calls if isinstance(c.args[0], RunClosed))
    assert (closed.clean, closed.error) == (not error, error)


def test_an_exception_that_the_script_handles_is_reported_with_its_place_when_it_exits() -> None:
    """Or it would be another failure than the same one in torch's error file (Hydra, Typer)."""
    with process() as run, pytest.raises(ZeroDivisionError):
        worlds = parts_of(run).shutdown._worlds = Mock()
        run.retry(lambda: 1 / 0)
    (reported,) = (call.kwargs["error"] for call in worlds.close.mock_calls)
    assert for_a_line(reported).startswith("ZeroDivisionError: division by zero (test_run_errors.")


def test_torchs_join_before_the_first_world_is_rejected() -> None:
    with process() as run, pytest.raises(TrainingError, match=r"Join\(\[model\]\) was entered"):
        Join([job(run).model])


def test_a_stateful_dataloader_is_rejected_by_name() -> None:
    kind = type(
        "StatefulDataLoader", (DataLoader,), {"__module__": "torchdata.stateful_dataloader"}
    )
    with process() as run, pytest.raises(ConfigError, match="a StatefulDataLoader keeps its own"):
        run.loader(kind(dataset(), batch_size=10))


CHILD = """
import multiprocessing as mp
import elastic
{guard}
"""


@pytest.mark.parametrize("is_guarded", [pytest.param(False, marks=pytest.mark.slow), True])
def test_join_in_a_child_process_names_the_guard(tmp_path: Path, is_guarded: bool) -> None:
    start = "print(mp.get_context('spawn').Pool(1).map(abs, [-2]))"
    guard = f"if __name__ == '__main__':\n    elastic.join()\n    {start}"
    script = tmp_path / "script.py"
    unguarded = (
        "elastic.join()\n"
        "child = mp.get_context('spawn').Process(target=print)\n"
        "if __name__ == '__main__':\n    child.start()\n    child.join()"
    )
    script.write_text(CHILD.format(guard=guard if is_guarded else unguarded))
    done = run_forked([sys.executable, str(script)], timeout_s=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert ("called in a data worker or another child process" in done.stderr) is not is_guarded
    assert ("[2]" in done.stdout) is is_guarded


LOSES_ITS_FOLDER = """
import os, shutil, sys, torch, elastic
from torch import nn
from torch.utils.data import DataLoader

folder = sys.argv[1]
run = elastic.join(checkpoints=folder)
model = run.wrap(nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.track(optimizer=optimizer)
for x in run.loader(DataLoader(torch.ones(8, 1), batch_size=2)):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
shutil.rmtree(folder)
os.symlink("/nowhere", folder)
"""


def test_a_process_whose_last_state_cannot_be_saved_fails(tmp_path: Path) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "checkpoints"
    script.write_text(LOSES_ITS_FOLDER)
    done = run_forked([sys.executable, str(script), str(folder)], timeout_s=PATIENCE_S)
    assert done.returncode == 1, done.stderr
    said = next(line for line in done.stderr.splitlines() if "SaveError" in line)
    assert f"the last state, of step 4, could not be saved in {folder}: " in said
    verdict = judge_failure(FailureFacts(text=said, exit_code=1))
    assert verdict.action is not Action.STOP, verdict  # the storage may be back at the next start


READS_WITH_DATA_WORKERS = """
loader = DataLoader(range(4), num_workers=1, multiprocessing_context={context!r})
if is_of_job:
    loader = run.loader(loader)
{statement}
    next(iter(loader), None)
"""
UNGUARDED, GUARDED = "for _ in range(1):", 'if __name__ == "__main__":'


@pytest.mark.parametrize(
    ("context", "statement", "is_of_job", "is_refused"),
    [
        ("spawn", UNGUARDED, True, True),
        ("spawn", UNGUARDED, False, True),
        ("fork", UNGUARDED, False, False),
        ("spawn", GUARDED, False, False),
    ],
)
def test_data_workers_that_would_run_the_script_again_are_refused_before_they_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    context: str,
    statement: str,
    is_of_job: bool,
    is_refused: bool,
) -> None:
    started = Mock(side_effect=lambda _: iter([]))
    monkeypatch.setattr(dataloader, "_MultiProcessingDataLoaderIter", started)
    script = tmp_path / "script.py"
    script.write_text(READS_WITH_DATA_WORKERS.format(context=context, statement=statement))
    code = compile(script.read_text(), str(script), "exec")
    error: ConfigError | None = None
    with process(clean=False) as run:
        job(run)
        try:
            exec(code, {**globals(), "__name__": "__main__", "run": run, "is_of_job": is_of_job})
        except ConfigError as refusal:
            error = refusal
    assert started.called is (error is None) is not is_refused
    if error is not None:
        assert "each would run the script from its beginning" in error.message
        assert error.hint is not None and GUARDED in error.hint


def test_join_in_a_data_worker_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "get_worker_info", object)
    with pytest.raises(ConfigError, match="called in a data worker"):
        checks.refuse_child_process()


JOINS_IN_A_CHILD = """
import multiprocessing as mp
import elastic
elastic.join()
assert elastic.join() is elastic.join()
child = mp.get_context("fork").Process(target=elastic.join)
child.start()
child.join()
print(child.exitcode)
"""


def test_join_in_a_process_forked_from_a_worker_is_rejected(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(JOINS_IN_A_CHILD)
    done = run_forked([sys.executable, str(script)], timeout_s=PATIENCE_S)
    assert done.stdout == "1\n", done.stderr
    assert "called in a data worker or another child process of this worker\n" in done.stderr
