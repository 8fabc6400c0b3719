"""The worker API in a world of one: loops resume, state is restored, steps are committed."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kit.run_kit import SAMPLES, dataset, job, parts_of, process
from torch import nn
from torch.utils.data import DataLoader

import checkpoints
from elastic.errors import ConfigError, NoWorld
from elastic.hangs.page import phases
from elastic.testing.ledger import read_ledger
from elastic.train.step import Progress, Step

STEPS_PER_EPOCH = math.ceil(SAMPLES / 10)


def uninterrupted(epochs: int) -> torch.Tensor:
    with process() as run:
        script = job(run)
        script.train(epochs)
        return script.weights()


@pytest.mark.parametrize("stop_after", [1, 6, 11])
def test_a_killed_job_resumes_to_the_weights_of_an_uninterrupted_one(
    tmp_path: Path, stop_after: int
) -> None:
    with process(tmp_path, clean=False) as run:
        job(run).train(2, stop_after)
    with process(tmp_path) as run:
        script = job(run)
        steps_left = script.train(2)
        resumed = script.weights()
    saved_step = (stop_after - 1) // 3 * 3  # every 3 steps, when the next one begins
    assert steps_left == 2 * STEPS_PER_EPOCH - saved_step
    assert torch.equal(resumed, uninterrupted(2))


def test_every_sample_counts_once_per_epoch_across_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTIC_LEDGER", str(tmp_path / "ledger"))
    for stop_after in (5, 2, 8):
        with process(tmp_path / "saved", clean=False) as run:
            job(run).train(3, stop_after)
    with process(tmp_path / "saved") as run:
        job(run).train(3)
    ledger = read_ledger(tmp_path / "ledger")
    ledger.assert_exactly_once(SAMPLES, 3)
    assert ledger.last_generation == 4
    assert ledger.recomputed_steps > 0
    ledger.final_hash()


def test_a_complete_job_that_starts_again_trains_no_steps(tmp_path: Path) -> None:
    with process(tmp_path) as run:
        script = job(run)
        script.train(2)
        run.state["best"] = 0.5
        weights = script.weights()
    names = [info.name for info in checkpoints.list_checkpoints(tmp_path)]
    with process(tmp_path) as run:
        script = job(run)
        assert script.train(2) == 0
        assert torch.equal(script.weights(), weights)
    assert [info.name for info in checkpoints.list_checkpoints(tmp_path)] == names


def test_a_complete_job_that_starts_again_repeats_the_code_after_its_last_pass_once(
    tmp_path: Path,
) -> None:
    """The last checkpoint contains no effect of that code, which cannot be skipped."""

    def train(epochs: int) -> tuple[float, int]:
        with process(tmp_path) as run:
            script = job(run)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(script.optimizer, 0.5)
            run.track(scheduler=scheduler)
            for epoch in run.epochs(9):
                for x, y in script.loader:
                    script.update(x, y)
                scheduler.step()
                run.state["ends"] = run.state.get("ends", 0) + 1
                if epoch + 1 == epochs:
                    break
            return float(scheduler.get_last_lr()[0]), run.state["ends"]

    for epochs in (2, 2, 3):
        rate, ends = train(epochs)
        assert rate == pytest.approx(0.01 * 0.5**epochs)
        assert ends == epochs


def test_the_agent_learns_the_planned_number_of_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[int] = []
    monkeypatch.setattr(phases, "plan_steps", planned.append)
    with process(tmp_path) as run:
        job(run).train(2)
    assert set(planned) == {2 * STEPS_PER_EPOCH}
    with process(tmp_path) as run:  # resumed, with more epochs
        job(run).train(3)
    assert planned[-1] == 3 * STEPS_PER_EPOCH


def test_a_complete_job_can_continue_with_more_epochs(tmp_path: Path) -> None:
    with process(tmp_path) as run:
        job(run).train(1)
    with process(tmp_path) as run:
        script = job(run)
        assert script.train(2) == STEPS_PER_EPOCH
        assert torch.equal(script.weights(), uninterrupted(2))


def test_a_later_start_saves_with_a_higher_generation(tmp_path: Path) -> None:
    """Launchers that count from one again must not write checkpoints that rank below older ones."""
    for _ in range(3):
        with process(tmp_path, clean=False) as run:
            job(run).train(3, stop_after=4)
    newest = checkpoints.list_checkpoints(tmp_path)[0]
    assert (newest.generation, newest.step) == (3, 9)


def test_code_after_the_loader_runs_before_the_next_save(
    tmp_path: Path,
) -> None:
    """A scheduler that steps once per epoch does so exactly once, wherever the job is killed."""

    def train(stop_after: int | None) -> float:
        with process(tmp_path, every_steps=2, clean=stop_after is None) as run:
            script = job(run)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(script.optimizer, 0.5)
            run.track(scheduler=scheduler)
            run.untracked("done")
            done = 0
            for _ in run.epochs(3):
                for x, y in script.loader:
                    script.update(x, y)
                    done += 1
                    if done == stop_after:
                        return 0.0
                scheduler.step()
            return float(scheduler.get_last_lr()[0])

    for stop_after in (6, 3, 5):
        train(stop_after)
    assert train(None) == pytest.approx(0.01 * 0.5**3)


def test_user_state_is_saved_and_restored(tmp_path: Path) -> None:
    with process(tmp_path, clean=False) as run:
        script = job(run)
        for epoch in run.epochs(3):
            run.state["best"] = {"epoch": epoch, "loss": [0.5, None]}
            for x, y in script.loader:
                script.update(x, y)
            if epoch == 1:
                break
    with process(tmp_path) as run:
        script = job(run)
        next(iter(run.epochs(3)))
        assert run.state == {"best": {"epoch": 1, "loss": [0.5, None]}}


def test_the_world_is_available_only_within_retry() -> None:
    with process() as run:
        job(run)
        for name in ("world", "is_main"):
            with pytest.raises(NoWorld, match="no world yet"):
                getattr(run, name)
        assert run.retry(lambda number: (run.is_main, run.world.size, number), 3) == (True, 1, 3)


def test_attempts_is_the_inline_form_of_retry() -> None:
    with process() as run:
        script = job(run)
        for attempt in run.attempts():
            with attempt:
                assert script.train(1) == STEPS_PER_EPOCH


def test_peeking_at_a_batch_does_not_consume_it() -> None:
    with process() as run:
        script = job(run)
        first, _ = next(iter(script.loader))
        seen = [x for x, _ in script.loader]
        assert torch.equal(first, seen[0])
        assert len(seen) == STEPS_PER_EPOCH
        assert script.loader.position.step == STEPS_PER_EPOCH


def test_the_data_can_be_inspected_before_the_model_is_built(tmp_path: Path) -> None:
    with process(tmp_path) as run:
        loader = run.loader(DataLoader(dataset(), batch_size=10), global_batch=10)
        x, _ = next(iter(loader))
        model = run.wrap(torch.nn.Linear(x.shape[1], 1).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(optimizer=optimizer)
        assert sum(1 for _ in loader) == STEPS_PER_EPOCH


def test_break_commits_a_step_only_after_an_optimizer_step() -> None:
    with process() as run:
        script = job(run)
        for _ in script.loader:
            break
        assert script.loader.position.step == 0
        for x, y in script.loader:
            script.update(x, y)
            break
        assert script.loader.position.step == 0, "it ends with the code after the loop"
        for _ in script.loader:
            break
        assert script.loader.position.step == 1


def test_passes_without_run_epochs_count_as_epochs() -> None:
    with process() as run:
        script = job(run)
        epochs = []
        run.after_step(lambda step: epochs.append(step.epoch))
        for _ in range(2):
            for x, y in script.loader:
                script.update(x, y)
        assert epochs == [0] * STEPS_PER_EPOCH + [1] * STEPS_PER_EPOCH


def test_steps_report_their_number_epoch_and_index() -> None:
    with process() as run:
        script = job(run)
        seen: list[tuple[int, int, int, int]] = []
        for _ in run.epochs(2):
            for step in run.steps(script.loader):
                for x, y in step:
                    script.update(x, y)
                    assert (step.is_last_micro_batch, step.weight) == (True, 1)
                seen.append((step.number, step.epoch, step.index, step.samples))
        assert seen[5:7] == [(5, 0, 5, 2), (6, 1, 0, 10)]


def test_a_repeated_step_draws_the_same_random_numbers(tmp_path: Path) -> None:
    def draws(stop_after: int | None) -> dict[int, tuple[float, float, float]]:
        drawn = {}
        with process(tmp_path, clean=False) as run:
            script = job(run)
            for _ in run.epochs(2):
                for step in run.steps(script.loader):
                    for x, y in step:
                        drawn[step.number] = (
                            float(torch.rand(())),
                            random.random(),
                            float(np.random.rand()),
                        )
                        script.update(x, y)
                    if step.number == stop_after:
                        return drawn
                torch.rand(7)  # draws between steps have no effect
        return drawn

    before, after = draws(4), draws(None)
    assert before.keys() & after.keys() == {3, 4}
    assert all(before[number] == after[number] for number in (3, 4))
    assert len({*before.values(), *after.values()}) == 12


def test_accumulated_gradients_equal_those_of_the_full_batch() -> None:
    def weights(micro_batch: int | None) -> torch.Tensor:
        with process() as run:
            script = job(run)
            loader = run.loader(
                DataLoader(dataset(), batch_size=10, shuffle=True),
                global_batch=10,
                micro_batch=micro_batch,
            )
            for step in run.steps(loader):
                script.optimizer.zero_grad()
                for x, y in step:
                    step.backward(F.mse_loss(script.model(x), y))
                script.optimizer.step()
            return script.weights()

    assert torch.allclose(weights(3), weights(None), rtol=0, atol=1e-12)


def test_callbacks_run_at_commit_and_at_a_new_world() -> None:
    calls: list[object] = []
    with process() as run:
        script = job(run)
        run.on_world(lambda world: calls.append(("world", world.size)))
        run.on_main(lambda: calls.append("main"))
        run.after_step(lambda step: calls.append(step.number))
        steps = iter(run.steps(script.loader))
        for x, y in next(steps):
            script.update(x, y)
        assert calls == [("world", 1), "main"]
        assert isinstance(next(steps), Step)
        assert calls[2:] == [0]
        run.on_main(lambda: calls.append("late"))
        assert calls[3:] == ["late"]


def test_mean_ignores_ranks_without_weight() -> None:
    with process() as run:
        assert run.mean(4, loss=torch.tensor(0.5), accuracy=1) == {"loss": 0.5, "accuracy": 1.0}
        assert math.isnan(run.mean(0, loss=math.nan)["loss"])
        assert type(run.mean(1, loss=0.5)["loss"]) is float, "torch.load refuses other types"


def test_shard_in_a_world_of_one_is_the_whole_dataset() -> None:
    with process() as run:
        seen = torch.cat([x for x, _ in run.shard(DataLoader(dataset(), batch_size=7))])
        assert torch.equal(seen, dataset().tensors[0])


def test_checkpoints_contain_only_json_and_tensors(tmp_path: Path) -> None:
    with process(tmp_path) as run:
        job(run).train(1)
    newest = checkpoints.list_checkpoints(tmp_path)[0]
    state = checkpoints.load(tmp_path, newest.name).state
    last = (STEPS_PER_EPOCH - 1, 0, STEPS_PER_EPOCH - 1)
    assert state["progress"] == vars(
        Progress(
            step=STEPS_PER_EPOCH,
            commits=STEPS_PER_EPOCH,
            epoch=1,
            last=last,
            passes=1,
            place="run.epochs",
        )
    )
    assert set(state["tracked"]["optimizer"]["state"]) == {0, 1, 2, 3}  # integer keys survive
    json.loads((tmp_path / newest.name / "manifest.json").read_text())


@pytest.mark.parametrize(
    ("layers", "global_batch", "most"),
    [
        ([nn.Linear(4, 1)], 10, 10),
        ([nn.Linear(4, 4), nn.BatchNorm1d(4)], 10, 5),
        ([nn.Linear(4, 4), nn.BatchNorm1d(4)], 14, 2),  # the last step has 4 samples
        ([nn.Linear(4, 4), nn.BatchNorm1d(4)], 59, 29),  # it has 1, and fails in any world
        ([nn.Linear(4, 4), nn.BatchNorm1d(4).eval()], 10, 10),
        ([nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4)], 10, 10),
    ],
)
def test_a_share_of_one_sample_is_too_small_for_statistics_of_a_batch(
    layers: list[nn.Module], global_batch: int, most: int
) -> None:
    with process() as run:
        run.wrap(nn.Sequential(*layers))
        run.loader(DataLoader(dataset(60), batch_size=10), global_batch=global_batch)
        assert parts_of(run).session.registry.max_ranks() == most


@pytest.mark.parametrize(
    ("global_batch", "hint"),
    [
        (1, r"at least 2, or run on at most 1 ranks"),
        (59, r"at least 2, pass drop_last=True to the DataLoader, or run on at most 1 ranks"),
    ],
)
def test_the_error_of_a_share_of_one_sample_names_batch_world_and_remedy(
    global_batch: int, hint: str
) -> None:
    with process() as run:
        model = run.wrap(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        loader = run.loader(DataLoader(dataset(60), batch_size=60), global_batch=global_batch)

        def train() -> None:
            for x, _ in loader:
                model(x.float()).sum().backward()

        said = f"a global batch of {global_batch} .* a world of 1 ranks"
        with pytest.raises(ConfigError, match=said) as caught:
            run.retry(train)
        assert re.search(hint, caught.value.hint)
