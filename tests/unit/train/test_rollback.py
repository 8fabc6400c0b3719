"""An interrupted step is undone exactly, or the rank knows that its state is torn."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from kit.run_kit import dataset, job, network, parts_of, process, steps_of_job
from torch import nn
from torch.utils.data import DataLoader

from elastic import torch_private
from elastic.errors import TrainingError
from elastic.telemetry.log import get_logger
from elastic.train import rollback
from elastic.train.copies import WeightCopies
from elastic.train.ddp import ElasticDDP
from elastic.train.optimizers import OptimizerWatch
from elastic.train.rebuilding import inner_optimizers
from elastic.train.rollback import FIRST_STEPS, CopyCosts, Rollback, StepCopies
from elastic.train.state import UNKNOWN_COMMITS, JobState
from elastic.train.step import Step

COPY_EVERY = 8  # instead of 64 steps


class Script:
    """The objects of one rank that its rollback tracks, without a world."""

    def __init__(self) -> None:
        self.step: Step | None = None
        self.states: dict[int, str] = {}  # by the number of complete steps
        self.optimizer_watch = OptimizerWatch(lambda: self.step)
        self.job = JobState(seed=0)
        self.model = ElasticDDP(network(hidden=200))
        self.job.modules["model"] = self.model
        self.optimizer_watch.watch(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.job.track("optimizer", self.optimizer)
        self.optimizer_watch.allow("optimizer", self.optimizer)
        self.average = copy.deepcopy(self.model.module)
        for _ in range(3):
            self.average.append(nn.Linear(200, 200))  # too large to be copied in every step
        self.job.track("average", self.average)
        self.rollback = self.optimizer_watch.rollback = Rollback(
            self.job, self.optimizer_watch.tracked
        )

    def update(self) -> None:
        x, y = dataset()[:8]
        self.optimizer.zero_grad()
        F.mse_loss(self.model(x), y).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def commit(self) -> None:
        self.rollback.committed()
        self.rollback.take()

    def train_step(self) -> None:
        """A complete step."""
        self.update()
        self.job.progress.step += 1
        self.job.user["steps"] = self.job.progress.step
        self.commit()
        self.states[self.job.progress.step] = state_of(self)

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()]).clone()


@pytest.fixture
def script() -> Iterator[Script]:
    made = Script()
    made.rollback.take()
    made.update()
    made.commit()  # ends the first step, in which everything is copied
    yield made
    made.optimizer_watch.close()


def clip(script: Script) -> None:
    with torch.no_grad():
        for p in script.model.parameters():
            p.clamp_(-0.1, 0.1)


def state_of(script: Script) -> str:
    return repr([script.weights(), script.optimizer.state_dict(), script.average.state_dict()])


def update_and_clip(script: Script) -> None:
    script.update()
    clip(script)
    script.update()


@pytest.mark.parametrize("change", [Script.update, clip, update_and_clip])
def test_an_interrupted_step_is_undone(script: Script, change: Callable[[Script], object]) -> None:
    before = state_of(script)
    change(script)
    assert script.rollback.can_restore and script.rollback.restore()
    assert state_of(script) == before


def test_changes_through_data_are_undone(script: Script) -> None:
    before = state_of(script)
    script.model.module[0].weight.data.zero_()
    script.average[-1].weight.data.zero_()
    assert script.rollback.restore()
    assert state_of(script) == before


@pytest.fixture
def lean(script: Script) -> Script:
    """A script whose state is not copied in each step."""
    script.rollback = Rollback(script.job, script.optimizer_watch.tracked, StepCopies.NEVER)
    script.optimizer_watch.rollback = script.rollback
    script.rollback.take()
    for _ in range(5):
        script.update()
        script.commit()
    return script


def test_without_copies_a_step_is_undone_before_its_update(lean: Script) -> None:
    lean.job.user["before"] = 1
    lean.commit()
    before = state_of(lean)
    lean.job.user["before"] = 2
    assert lean.rollback.restore()
    assert state_of(lean) == before and lean.job.user["before"] == 1


def test_without_copies_a_changed_state_belongs_to_no_boundary(lean: Script) -> None:
    lean.update()
    assert not lean.rollback.can_restore and not lean.rollback.restore()
    lean.commit()  # as after receiving the state of a peer
    with torch.no_grad():
        lean.average[-1].weight.add_(1)
    assert not lean.rollback.restore()


def test_a_script_that_changes_weights_itself_gets_copies(lean: Script) -> None:
    clip(lean)
    lean.update()
    lean.commit()
    before = state_of(lean)
    lean.update()
    assert lean.rollback.restore()
    assert state_of(lean) == before
    assert lean.rollback.needs_copies == "weights change outside of optimizer.step()"


def test_restored_copies_are_no_change_by_the_script(lean: Script) -> None:
    lean.rollback.take(with_copies=True)  # as in each new world
    assert lean.rollback.restore()  # where the loop begins again
    lean.update()
    lean.commit()
    assert lean.rollback.needs_copies == ""


def test_a_script_that_communicates_after_an_update_gets_copies(
    lean: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {"world": 0}
    monkeypatch.setattr(torch_private, "collectives_of_groups", lambda: counts)
    lean.update()
    lean.commit()
    lean.update()
    counts["world"] += 1  # a mean of the loss
    lean.commit()
    before = state_of(lean)
    lean.update()
    assert lean.rollback.restore()
    assert state_of(lean) == before


def test_joining_ranks_learn_that_the_script_needs_copies(lean: Script) -> None:
    clip(lean)
    lean.update()
    lean.commit()
    new = Script()
    try:
        new.rollback = Rollback(new.job, new.optimizer_watch.tracked, StepCopies.NEVER)
        new.rollback.adopt(lean.rollback.snapshot)
        for _ in range(5):
            new.commit()
        before = new.weights()
        clip(new)
        assert new.rollback.restore()
        assert torch.equal(new.weights(), before)
    finally:
        new.optimizer_watch.close()


@pytest.fixture
def seldom(script: Script, monkeypatch: pytest.MonkeyPatch) -> Script:
    """A script whose state is copied in some steps only, because a copy is too slow."""
    monkeypatch.setattr(rollback, "AFFORDABLE_FRACTION", 0.0)
    monkeypatch.setattr(rollback, "COPY_IS_CHEAP_S", 0.0)
    monkeypatch.setattr(rollback, "COPY_EVERY", COPY_EVERY)
    script.rollback = Rollback(script.job, script.optimizer_watch.tracked)
    script.optimizer_watch.rollback = script.rollback
    script.rollback.take()
    while script.job.progress.step < COPY_EVERY + 2:
        script.train_step()
    return script


def test_a_step_that_lacks_a_copy_is_repeated_from_an_earlier_one(seldom: Script) -> None:
    was = seldom.states[COPY_EVERY]
    seldom.update()
    assert not seldom.rollback.restore() and seldom.rollback.restore_earlier()
    assert (seldom.job.progress.step, seldom.job.user) == (COPY_EVERY, {"steps": COPY_EVERY})
    assert state_of(seldom) == was


def test_an_earlier_copy_of_shards_is_found_again(
    seldom: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The local part of a DTensor is another object each time."""
    parts = [p.detach() for p in seldom.model.parameters()]
    monkeypatch.setattr(Rollback, "_weights", lambda self: [each.view_as(each) for each in parts])
    seldom.update()
    assert not seldom.rollback.restore() and seldom.rollback.restore_earlier()
    assert seldom.job.progress.step == COPY_EVERY


def test_after_it_each_step_is_copied(seldom: Script) -> None:
    seldom.update()
    seldom.rollback.restore()
    seldom.rollback.restore_earlier()
    seldom.rollback.take()
    for _ in range(2):
        seldom.train_step()
    before = state_of(seldom)
    seldom.update()
    assert seldom.rollback.restore()
    assert state_of(seldom) == before


def test_gradients_that_are_kept_for_the_first_time_are_those_of_the_earlier_copy(
    seldom: Script,
) -> None:
    def gradients() -> str:
        return repr([p.grad for p in seldom.model.parameters()])

    while seldom.job.progress.step % COPY_EVERY:
        seldom.train_step()
    before = gradients()
    seldom.train_step()
    seldom.model.earlier.are_added_to = True  # the next step has not zeroed them
    for p in seldom.model.parameters():
        p.grad = None
    assert not seldom.rollback.restore() and seldom.rollback.restore_earlier()
    assert gradients() == before and seldom.job.keeps_gradients


@pytest.mark.parametrize("has_hook", [False, True])
def test_gradients_that_a_hook_may_read_before_a_closure_are_kept(
    script: Script, has_hook: bool
) -> None:
    """They are those of the last step: the closure computes those of this one."""
    x, y = dataset()[:8]
    sums = []

    def read(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        sums.append([float(p.grad.sum()) for p in script.model.parameters() if p.grad is not None])

    def closure() -> float:
        script.optimizer.zero_grad()
        loss = F.mse_loss(script.model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    if has_hook:
        script.optimizer.register_step_pre_hook(read)
    for _ in range(2 * FIRST_STEPS):
        script.model.earlier.begin_step()
        script.optimizer.step(closure)
        script.commit()
    assert script.job.keeps_gradients == has_hook
    if has_hook:
        script.optimizer.step(closure)
        script.optimizer.zero_grad()
        assert script.rollback.restore()
        script.optimizer.step(closure)
        assert sums[-1] == sums[-2] != []


def test_gradients_are_saved_until_it_is_known_that_no_step_adds_to_them(script: Script) -> None:
    saved = []
    for script.job.progress.commits in range(UNKNOWN_COMMITS + 1):
        script.update()
        saved.append(bool(script.job.tree()["gradients"]))
    assert saved == [True] * UNKNOWN_COMMITS + [False]
    script.job.keeps_gradients = True
    assert script.job.tree()["gradients"]


def test_the_first_pass_of_an_accumulation_tells_whether_earlier_gradients_are_state(
    script: Script,
) -> None:
    x, y = dataset()[:8]
    for earlier, expected in ((script.model.earlier, True), (script.model.earlier, False)):
        earlier.begin_step()
        for _ in range(2):  # a step of two batches
            F.mse_loss(script.model(x), y).backward()  # type: ignore[no-untyped-call]
        assert earlier.are_added_to is expected
        script.optimizer.zero_grad()


def test_a_change_that_torch_does_not_count_is_seen_in_a_part_of_the_weights(
    seldom: Script,
) -> None:
    before = seldom.weights()
    seldom.rollback.has_part_changed = lambda: not torch.equal(seldom.weights(), before)
    assert seldom.rollback.can_restore
    seldom.model.module[0].weight.data.mul_(0.5)
    assert not seldom.rollback.restore() and seldom.rollback.restore_earlier()
    assert state_of(seldom) == seldom.states[COPY_EVERY]


def test_a_script_with_such_changes_gets_copies(seldom: Script) -> None:
    before = seldom.weights()
    seldom.rollback.has_part_changed = lambda: not torch.equal(seldom.weights(), before)
    seldom.model.module[0].weight.data.mul_(0.5)
    seldom.train_step()
    assert seldom.rollback.needs_copies == "weights change outside of optimizer.step()"


def test_an_earlier_copy_of_other_weights_is_not_used(seldom: Script) -> None:
    seldom.rollback.copy_also([nn.Parameter(torch.ones(3))])
    seldom.update()
    assert not seldom.rollback.restore() and not seldom.rollback.restore_earlier()


def test_a_job_that_resumes_knows_that_its_script_needs_copies(lean: Script) -> None:
    clip(lean)
    lean.update()
    lean.commit()
    resumed = Script()
    try:
        resumed.job.progress.load(lean.job.tree()["progress"])
        resumed.rollback = Rollback(resumed.job, resumed.optimizer_watch.tracked)
        assert resumed.rollback.needs_copies == "weights change outside of optimizer.step()"
    finally:
        resumed.optimizer_watch.close()


def test_without_memory_for_copies_an_interrupted_step_is_torn(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(WeightCopies, "take", full)
    script.update()
    script.commit()
    script.update()
    assert not script.rollback.restore()


def test_copies_that_exceed_the_free_memory_are_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rollback, "AFFORDABLE_MEMORY", 0.0)
    script = Script()
    try:
        with caplog.at_level(logging.INFO, "elastic"):
            for _ in range(3):
                script.rollback.take()
                script.train_step()
    finally:
        script.optimizer_watch.close()
    reports = [r.getMessage() for r in caplog.records if "none is kept" in r.getMessage()]
    assert len(reports) == 1
    assert 'elastic.join(step_copies="always")' in reports[0]


def test_copies_are_affordable_in_relation_to_a_step() -> None:
    def costs(copy_s: float, step_s: float, *, fits: bool = True) -> CopyCosts:
        made = CopyCosts()
        for number in range(5):
            made.copied(took_s=copy_s, fits=fits)
            made.step_ended(number * step_s)
        return made

    assert costs(copy_s=100e-6, step_s=1e-3).are_affordable
    assert costs(copy_s=5e-3, step_s=1.0).are_affordable
    assert not costs(copy_s=5e-3, step_s=0.1).are_affordable
    assert not costs(copy_s=100e-6, step_s=1e-3, fits=False).are_affordable


def costs_after(step: Sequence[tuple[float, int]]) -> CopyCosts:
    """Those of steps of a second with these copies: seconds, and bytes."""
    made = CopyCosts()
    for number in range(5):
        for took_s, size_bytes in step:
            made.copied(took_s=took_s, fits=True, size_bytes=size_bytes)
        made.step_ended(float(number))
    return made


def test_all_copies_of_a_step_count() -> None:
    assert costs_after([(8e-3, 100)]).are_affordable
    assert not costs_after([(8e-3, 100), (8e-3, 100)]).are_affordable


def test_copies_before_the_optimizer_has_state_do_not_count() -> None:
    made = CopyCosts()
    made.copied(took_s=1e-3, fits=True, size_bytes=100)
    for number in range(5):
        made.copied(took_s=30e-3, fits=True, size_bytes=300)
        made.step_ended(float(number))
    assert not made.are_affordable


def test_copies_restore_added_removed_and_replaced_state() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    kept = torch.full((3,), 2.0)
    optimizer.state[parameter] = {"kept": kept, "removed": torch.ones(2), "count": 4}
    copies = WeightCopies()
    copies.take([parameter], [optimizer])
    state = optimizer.state[parameter]
    kept.add_(1)
    del state["removed"]
    state["count"] = 5
    state["made"] = torch.zeros(1)
    copies.restore([parameter], [optimizer])
    assert set(state) == {"kept", "removed", "count"}
    assert state["kept"] is kept and kept.tolist() == [2.0] * 3
    assert state["removed"].tolist() == [1.0, 1.0] and state["count"] == 4


class Wrapping(torch.optim.Optimizer):
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups


def test_an_optimizer_inside_a_tracked_one_is_saved(tmp_path: Path) -> None:
    inner = torch.optim.SGD(network().parameters(), lr=0.1, momentum=0.9)
    assert inner_optimizers(Wrapping(inner)) == {"inner": inner}
    with process(tmp_path) as run:
        run.track(optimizer=Wrapping(inner))
        assert set(parts_of(run).session.job.tracked) == {"optimizer", "optimizer.inner"}
        job_state = parts_of(run).session.job
        job_state.apply_non_parameters(copy.deepcopy(job_state.tree()))
        outer = job_state.tracked["optimizer"]
        assert isinstance(outer, Wrapping)
        assert outer.param_groups is inner.param_groups, "a change of one's rate is the other's"


def test_callbacks_registered_in_a_retried_function_run_once() -> None:
    with process() as run:
        script = job(run)
        calls: list[int] = []
        run.after_step(lambda step: calls.append(-1))

        def train() -> None:
            run.after_step(lambda step: calls.append(step.number))
            script.train(1)

        attempts = parts_of(run).attempts
        attempts.begin()
        run.after_step(lambda step: calls.append(99))  # registered by an interrupted call
        attempts.begin(is_again=True)
        train()
        steps = steps_of_job(run)
        assert sorted(calls) == [-1] * steps + list(range(steps))


def test_a_commit_with_unused_gradients_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with process(tmp_path) as run:
        script = job(run)
        monkeypatch.setattr(get_logger(), "propagate", True)
        with caplog.at_level(logging.WARNING, "elastic"):
            for _ in range(2):
                run.begin()
                x, y = dataset()[:8]
                F.mse_loss(script.model(x), y).backward()  # type: ignore[no-untyped-call]
                run.commit()
        warnings = [r for r in caplog.records if "has unapplied gradients" in r.getMessage()]
        assert len({id(record) for record in warnings}) == 1
        script.optimizer.zero_grad()


def test_accumulated_steps_are_committed_with_the_optimizer_step(tmp_path: Path) -> None:
    seen = []
    with process(tmp_path, every_steps=3) as run:
        script = job(run)
        run.after_step(lambda step: seen.append(step.number))
        for _ in run.epochs(1):
            for i, (x, y) in enumerate(script.loader):
                (F.mse_loss(script.model(x), y) / 4).backward()  # type: ignore[no-untyped-call]
                if (i + 1) % 4 == 0:
                    script.optimizer.step()
                    script.optimizer.zero_grad()
        steps = steps_of_job(run)
    assert seen == [i for i in range(steps) if (i + 1) % 4 == 0 or i == steps - 1]
    names = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("step-"))
    assert {int(name.split(".")[0][5:]) for name in names} <= {4, 8, 12, steps}


def test_a_second_begin_without_a_commit_is_rejected(tmp_path: Path) -> None:
    with process(clean=False) as run:
        job(run)
        run.begin()
        with pytest.raises(
            TrainingError, match=r"run\.begin\(\) was called while step 0 is not committed"
        ):
            run.begin()


def test_exchanged_memory_is_given_back(script: Script) -> None:
    """As in an evaluation of averages, with ``parameter.data = average``."""
    average = {n: p.detach().clone() for n, p in script.model.module.named_parameters()}
    script.job.user["average"] = average
    script.commit()
    before, values = state_of(script), repr(average)
    memory = [p.data_ptr() for p in script.model.parameters()]
    for name, parameter in script.model.module.named_parameters():
        average[name].mul_(2)
        parameter.data = average[name]
    assert script.rollback.restore()
    assert state_of(script) == before and repr(script.job.user["average"]) == values
    assert [p.data_ptr() for p in script.model.parameters()] == memory


def test_memory_that_two_modules_exchange_is_given_back(script: Script) -> None:
    before = state_of(script)
    pairs = list(zip(script.model.module.parameters(), script.average.parameters(), strict=False))
    for own, other in pairs:
        own.data, other.data = other.data, own.data
    assert script.rollback.restore()
    assert state_of(script) == before


def test_weights_that_an_evaluation_exchanges_are_not_those_of_the_boundary() -> None:
    """torch does not count a change through ``.data``: only the contents show it."""
    script = Script()
    rollback = Rollback(script.job, script.optimizer_watch.tracked, StepCopies.NEVER)
    script.rollback = script.optimizer_watch.rollback = rollback
    rollback.take()
    for _ in range(FIRST_STEPS + 3):  # neither copied nor compared by contents after these
        script.update()
        script.commit()
    rollback._watch.expect(by_content=False)  # as with digests that cost too much
    surely = rollback.can_restore_surely
    assert surely(by_content=False)
    assert not surely(by_content=True), "nothing is known of the contents within a loop"
    rollback.leave_step()
    assert surely(by_content=True)
    weight = next(script.model.parameters())
    trained = weight.detach().clone()
    weight.data.zero_()
    assert not surely(by_content=False)
    weight.data.copy_(trained)
    assert surely(by_content=True), "they were exchanged back"
    script.optimizer_watch.close()


# -- gradients that steps keep for the next one ------------------------------------------------


def test_gradients_that_a_step_adds_to_are_part_of_the_boundary(tmp_path: Path) -> None:
    with process(tmp_path) as run:
        model = run.wrap(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(optimizer=optimizer)
        loader = run.loader(DataLoader(dataset(), batch_size=10), global_batch=10)
        parts, boundaries = parts_of(run), []
        for x, y in loader:
            state = parts.session.progress.rollback.snapshot.get("gradients")
            now = [p.grad for p in model.parameters()]
            assert state is None or all(
                g is None or torch.equal(state["model"][str(i)], g) for i, g in enumerate(now)
            )
            boundaries.append(state is not None)
            for gradient in now:
                if gradient is not None:
                    gradient.mul_(0.5)
            F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        assert len(boundaries) > FIRST_STEPS and all(boundaries)
        assert parts.session.job.tree()["gradients"]["model"].keys()


def test_gradients_that_are_set_to_zero_are_no_part_of_the_boundary(tmp_path: Path) -> None:
    with process(tmp_path) as run:
        script = job(run)
        parts = parts_of(run)
        parts.session.progress.step_copies = StepCopies.ALWAYS  # also on a slow machine
        for number, (x, y) in enumerate(script.loader):
            snapshot = parts.session.progress.rollback.snapshot
            assert ("gradients" in snapshot) == (number < FIRST_STEPS)
            script.optimizer.zero_grad(set_to_none=False)
            F.mse_loss(script.model(x), y).backward()  # type: ignore[no-untyped-call]
            script.optimizer.step()
        assert number >= FIRST_STEPS
        assert not parts.session.job.keeps_gradients


class CountsReads:
    """An object with state that knows how often its state was read."""

    def __init__(self) -> None:
        self.reads = self.value = 0

    def state_dict(self) -> dict[str, int]:
        self.reads += 1
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


@pytest.mark.parametrize("changes_follow", [True, False])
@pytest.mark.parametrize("own_loop", [True, False])
def test_state_is_read_once_per_step_if_none_changes_after_its_commit(
    tmp_path: Path, *, own_loop: bool, changes_follow: bool
) -> None:
    counts = CountsReads()
    read: list[int] = []
    at_begin: list[int] = []
    with process(tmp_path, every_steps=1000) as run:
        script = job(run)
        run.track(counts=counts)

        def train() -> None:
            steps = (run.begin() for _ in range(6)) if own_loop else script.loader
            for _ in steps:
                snapshot = parts_of(run).session.progress.rollback.snapshot
                at_begin.append(snapshot["tracked"]["counts"]["state"]["value"])
                read.append(counts.reads)
                x, y = dataset()[:8]
                script.optimizer.zero_grad()
                F.mse_loss(script.model(x), y).backward()  # type: ignore[no-untyped-call]
                script.optimizer.step()
                run.commit(changes_follow=changes_follow)
                counts.value += changes_follow

        run.retry(train)
    per_step = {later - earlier for earlier, later in itertools.pairwise(read)}
    assert per_step == {2 if changes_follow else 1}
    assert at_begin == [number * changes_follow for number in range(len(read))]
