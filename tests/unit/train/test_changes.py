"""Untracked averages of weights and gradients are found, and nothing else that resembles them."""

from __future__ import annotations

import copy
import random
import re
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from elastic.errors import TrainingError
from elastic.groups.world import World
from elastic.telemetry.log import get_logger
from elastic.train.changes import ChangeDetector
from elastic.train.ddp import ElasticDDP
from elastic.train.state import JobState

Make = Callable[["Training"], Callable[[], object]]


class Training:
    """Trains a model by itself, and checks before each step."""

    def __init__(self, *, lr: float = 1e-2, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=lr)
        self.job = JobState(seed=0)
        self.job.modules["model"] = ElasticDDP(self.network)
        self.job.track("optimizer", self.optimizer)
        self.changes = ChangeDetector(self.job)
        self.steps = 0

    def run(self, update: Callable[[], object], steps: int = 20) -> None:
        """``update``: the training function, called after each optimizer step."""
        self.changes.call(update, (), {})
        for _ in range(steps):
            self.changes.begin(0)
            self.steps += 1
            x = torch.randn(8, 4)
            self.optimizer.zero_grad()
            (self.network(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
            self.optimizer.step()
            update()


def names(training: Training) -> dict[str, torch.Tensor]:
    return {name: p.data.clone() for name, p in training.network.named_parameters()}


class Shadow:
    """The classic class."""

    def __init__(self, training: Training, decay: float) -> None:
        self.training, self.decay = training, decay
        self.shadow = names(training)

    @torch.no_grad()
    def update(self) -> None:
        for name, p in self.training.network.named_parameters():
            self.shadow[name] = self.decay * self.shadow[name] + (1 - self.decay) * p.data


def classic(training: Training) -> Callable[[], object]:
    ema = Shadow(training, 0.999)
    return lambda: ema.update()


def of_a_method(training: Training) -> Callable[[], object]:
    return Shadow(training, 0.9999).update


def in_place(training: Training) -> Callable[[], object]:
    average = names(training)

    def update() -> None:
        for name, p in training.network.named_parameters():
            average[name].lerp_(p.data, 0.1)

    return update


def list_of_tensors(training: Training) -> Callable[[], object]:
    average = [p.detach().clone() for p in training.network.parameters()]

    def update() -> None:
        for a, p in zip(average, training.network.parameters(), strict=True):
            a.mul_(0.99).add_(p.data, alpha=0.01)

    return update


def copied_state_dict(training: Training) -> Callable[[], object]:
    average = copy.deepcopy(training.network.state_dict())

    def update() -> None:
        for name, value in training.network.state_dict().items():
            average[name] = 0.9 * average[name] + 0.1 * value

    return update


def teacher(training: Training) -> Callable[[], object]:
    teacher = copy.deepcopy(training.network).requires_grad_(False)

    def update() -> None:
        for t, p in zip(teacher.parameters(), training.network.parameters(), strict=True):
            t.data.mul_(0.996).add_(p.data, alpha=0.004)

    return update


def of_a_part(training: Training) -> Callable[[], object]:
    target = copy.deepcopy(training.network)
    training.network = nn.Sequential(training.network, nn.Sequential(nn.Linear(1, 1)))
    training.optimizer = torch.optim.Adam(training.network.parameters(), lr=1e-2)
    training.job.modules["model"] = ElasticDDP(training.network)

    def update() -> None:
        for t, p in zip(target.parameters(), training.network[0].parameters(), strict=True):
            t.data.mul_(0.99).add_(p.data, alpha=0.01)

    return update


def mean_of_all_steps(training: Training) -> Callable[[], object]:
    average = names(training)

    def update() -> None:
        for name, p in training.network.named_parameters():
            average[name] += (p.data - average[name]) / (training.steps + 1)

    return update


def every_fifth_step(training: Training) -> Callable[[], object]:
    average = names(training)

    def update() -> None:
        if training.steps % 5 == 0:
            for name, p in training.network.named_parameters():
                average[name].lerp_(p.data, 0.1)

    return update


def created_in_the_first_step(training: Training) -> Callable[[], object]:
    holder: dict[str, Any] = {}

    def update() -> None:
        average = holder.setdefault("average", names(training))
        for name, p in training.network.named_parameters():
            average[name].lerp_(p.data, 0.1)

    return update


AVERAGES: list[Make] = [
    classic,
    of_a_method,
    in_place,
    list_of_tensors,
    copied_state_dict,
    teacher,
    of_a_part,
    mean_of_all_steps,
    every_fifth_step,
    created_in_the_first_step,
]


@pytest.mark.parametrize("make", AVERAGES)
def test_an_untracked_average_is_refused(make: Make) -> None:
    training = Training()
    update = make(training)
    with pytest.raises(TrainingError, match="averages the weights, but is not tracked"):
        training.run(update)
    assert training.steps <= 12


def test_a_slow_average_of_a_small_learning_rate_is_refused_in_the_first_steps() -> None:
    training = Training(lr=1e-4)
    with pytest.raises(TrainingError, match=r"run\.track\(ema=ema\)"):
        training.run(classic(training))
    assert training.steps <= 6


def test_the_error_shows_the_methods_that_the_class_lacks() -> None:
    training = Training()
    with pytest.raises(TrainingError, match=r"ema\.shadow averages the weights") as refused:
        training.run(classic(training))
    assert 'return {"shadow": self.shadow}' in refused.value.hint
    assert "in class Shadow" in refused.value.hint


def sums_of_gradients(training: Training) -> Callable[[], object]:
    velocity = [torch.zeros_like(p) for p in training.network.parameters()]

    def update() -> None:
        for v, p in zip(velocity, training.network.parameters(), strict=True):
            assert p.grad is not None
            v.mul_(0.9).add_(p.grad, alpha=0.1)

    return update


def mean_squares_of_gradients(training: Training) -> Callable[[], object]:
    squares = {n: torch.zeros_like(p) for n, p in training.network.named_parameters()}

    def update() -> None:
        for name, p in training.network.named_parameters():
            assert p.grad is not None
            squares[name] = 0.99 * squares[name] + 0.01 * p.grad**2

    return update


def amplified_gradients(training: Training) -> Callable[[], object]:
    averages = {n: torch.zeros_like(p) for n, p in training.network.named_parameters()}

    def update() -> None:  # changes the gradients, too
        for name, p in training.network.named_parameters():
            assert p.grad is not None
            averages[name] = averages[name] * 0.98 + p.grad * 0.02
            p.grad = p.grad + averages[name] * 2.0

    return update


@pytest.mark.parametrize(
    "make", [sums_of_gradients, mean_squares_of_gradients, amplified_gradients]
)
def test_an_untracked_average_of_gradients_is_refused(make: Make) -> None:
    training = Training()
    update = make(training)
    with pytest.raises(TrainingError, match="averages the gradients, but is not tracked") as error:
        training.run(update)
    assert training.steps <= 5
    assert "run.untracked(" in error.value.hint


def test_an_average_of_gradients_that_is_only_shown_can_be_excluded() -> None:
    training = Training()
    update = sums_of_gradients(training)
    training.changes.ignore(["velocity"])
    training.run(update)


# What is not refused -------------------------------------------------------------------------


def frozen_teacher(training: Training) -> Callable[[], object]:
    teacher = copy.deepcopy(training.network)
    return lambda: teacher(torch.zeros(1, 4))


def initial_weights(training: Training) -> Callable[[], object]:
    anchor = names(training)
    return lambda: sum((anchor[n] - p).norm() for n, p in training.network.named_parameters())


def previous_weights(training: Training) -> Callable[[], object]:
    previous = names(training)

    def update() -> None:
        for name, p in training.network.named_parameters():
            previous[name].copy_(p.data)

    return update


def weights_before_the_last_step(training: Training) -> Callable[[], object]:
    history: deque[dict[str, torch.Tensor]] = deque(maxlen=4)
    return lambda: history.append(names(training))


def last_gradients(training: Training) -> Callable[[], object]:
    gradients: dict[str, Any] = {}

    def update() -> None:
        for name, p in training.network.named_parameters():
            assert p.grad is not None
            gradients[name] = p.grad.clone()

    return update


def weights_before_a_perturbation(training: Training) -> Callable[[], object]:
    state: dict[Any, torch.Tensor] = {}

    def update() -> None:
        for p in training.network.parameters():
            assert p.grad is not None
            state[p] = p.data.clone()
            p.data.add_(p.grad, alpha=0.01)
            p.data.copy_(state[p])

    return update


def target_copied_now_and_then(training: Training) -> Callable[[], object]:
    target = copy.deepcopy(training.network)

    def update() -> None:
        if training.steps % 3 == 0:
            target.load_state_dict(training.network.state_dict())

    return update


def another_model(training: Training) -> Callable[[], object]:
    other = copy.deepcopy(training.network)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)

    def update() -> None:
        optimizer.zero_grad()
        x = torch.randn(8, 4)
        (other(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
        optimizer.step()

    return update


def activations(training: Training) -> Callable[[], object]:
    cache = [torch.zeros(4, 16), torch.zeros(16), torch.zeros(16, 1), torch.zeros(1)]

    def update() -> None:
        x = torch.randn(4, 4)
        cache[0] = training.network[0](x).detach()

    return update


def distances(training: Training) -> Callable[[], object]:
    start, moved = names(training), names(training)

    def update() -> None:
        for name, p in training.network.named_parameters():
            moved[name] = p.data - start[name]

    return update


def tracked_shadow(training: Training) -> Callable[[], object]:
    class Tracked(Shadow):
        def state_dict(self) -> dict[str, Any]:
            return {"shadow": self.shadow}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.shadow = state["shadow"]

    ema = Tracked(training, 0.9)
    alias = ema.shadow  # reachable on another way, too
    training.job.track("ema", ema)
    return lambda: (ema.update(), alias)


def tracked_teacher(training: Training) -> Callable[[], object]:
    update = teacher(training)
    module = next(
        cell.cell_contents
        for cell in update.__closure__ or ()
        if isinstance(cell.cell_contents, nn.Module)
    )
    training.job.track("teacher", module)
    return update


def average_in_the_state(training: Training) -> Callable[[], object]:
    average = training.job.user["average"] = names(training)

    def update() -> None:
        for name, p in training.network.named_parameters():
            average[name].lerp_(p.data, 0.1)

    return update


def state_of_the_optimizer(training: Training) -> Callable[[], object]:
    moments: list[torch.Tensor] = []

    def update() -> None:
        moments[:] = [training.optimizer.state[p]["exp_avg"] for p in training.network.parameters()]

    return update


def sum_of_tracked_averages(training: Training) -> Callable[[], object]:
    """As in PyTorch's DQN tutorial."""
    target = copy.deepcopy(training.network)
    training.job.track("target", target)
    entries: dict[str, torch.Tensor] = {}

    def update() -> None:
        entries.update(target.state_dict())
        for name, value in training.network.state_dict().items():
            entries[name] = 0.1 * value + 0.9 * entries[name]
        target.load_state_dict(entries)

    return update


def scaled_gradients(training: Training) -> Callable[[], object]:
    total = {n: torch.zeros_like(p) for n, p in training.network.named_parameters()}

    def update() -> None:
        for name, p in training.network.named_parameters():
            assert p.grad is not None
            total[name] = p.grad * 0.5

    return update


OTHERS: list[Make] = [
    state_of_the_optimizer,
    sum_of_tracked_averages,
    scaled_gradients,
    frozen_teacher,
    initial_weights,
    previous_weights,
    weights_before_the_last_step,
    last_gradients,
    weights_before_a_perturbation,
    target_copied_now_and_then,
    another_model,
    activations,
    distances,
    tracked_shadow,
    tracked_teacher,
    average_in_the_state,
]


@pytest.mark.parametrize("make", OTHERS)
def test_nothing_else_is_refused(make: Make) -> None:
    training = Training()
    training.run(make(training), steps=40)


@pytest.mark.parametrize("make", [weights_before_the_last_step, another_model, distances])
def test_weights_that_hardly_move_do_not_look_like_an_average(make: Make) -> None:
    training = Training(lr=1e-4)
    training.run(make(training), steps=40)


class Proxy:
    """An object that can hardly be read."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"no {name} yet")


def test_what_cannot_be_read_is_not_searched() -> None:
    training = Training()
    lazy, sparse, proxy = nn.LazyLinear(2), torch.eye(3).to_sparse(), Proxy()
    training.run(lambda: (lazy, [sparse], proxy, None), steps=4)
    assert training.steps == 4


def test_steps_without_a_candidate_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    searched = []
    observe = ChangeDetector._observe

    def counted(averages: ChangeDetector) -> None:
        searched.append(training.steps)
        observe(averages)

    monkeypatch.setattr(ChangeDetector, "_observe", counted)
    training.run(lambda: None, steps=200)
    assert searched[:5] == [0, 1, 2, 3, 4]
    assert len(searched) < 20


# Buffers -------------------------------------------------------------------------------------


class Centre(nn.Module):
    """A loss with a running centre, like DINO's."""

    centre: torch.Tensor

    def __init__(self, *, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(4), persistent=persistent)

    def update(self) -> None:
        self.centre = 0.9 * self.centre + 0.1 * torch.randn(4)


@pytest.mark.parametrize(
    ("is_tracked", "persistent", "warns"),
    [(False, True, True), (True, True, False), (False, False, False)],
)
def test_a_buffer_of_an_untracked_loss_causes_a_warning(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    is_tracked: bool,
    persistent: bool,
    warns: bool,
) -> None:
    monkeypatch.setattr(get_logger(), "propagate", True)
    training, loss = Training(), Centre(persistent=persistent)
    if is_tracked:
        training.job.track("loss", loss)
    training.run(lambda: loss.update(), steps=6)
    warnings = {record.getMessage() for record in caplog.records}
    assert len(warnings) == warns
    assert ("run.track(loss=loss)" in caplog.text) == warns


def test_the_running_means_of_a_frozen_model_cause_no_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(get_logger(), "propagate", True)
    training, frozen = Training(), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    training.run(lambda: frozen(torch.randn(8, 4)), steps=6)
    assert "changes in every step" not in caplog.text


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Each once: records reach the handler of the fixture on two ways."""
    return list(dict.fromkeys(record.getMessage() for record in caplog.records))


# Generators ----------------------------------------------------------------------------------

GENERATORS: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "torch": (torch.Generator, lambda draws: torch.rand(1, generator=draws)),
    "NumPy": (np.random.default_rng, lambda draws: draws.random()),
    "NumPy's old one": (np.random.RandomState, lambda draws: draws.rand()),
    "random": (random.Random, lambda draws: draws.random()),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_draws_in_every_step_cause_one_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(get_logger(), "propagate", True)
    create, draw = GENERATORS[kind]
    draws = create()
    Training().run(lambda: draw(draws), steps=8)
    (warning,) = warnings_of(caplog)
    assert "  draws draws random numbers in every step: draw from torch's" in warning


def test_draws_from_a_local_variable_of_the_loop_cause_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins anew when run.retry calls the function again."""
    monkeypatch.setattr(get_logger(), "propagate", True)
    training, chosen = Training(), []

    def train() -> None:
        local = random.Random(0)
        for _ in range(6):
            training.changes.begin(0)
            chosen.append(local.random())

    train()
    assert "  local draws random numbers in every step" in caplog.text


def seeded_in_each_step(training: Training) -> Callable[[], object]:
    draws = torch.Generator()
    return lambda: torch.rand(1, generator=draws.manual_seed(training.steps))


def created_in_each_step(training: Training) -> Callable[[], object]:
    created = [random.Random(0)]

    def update() -> None:
        created[0] = random.Random(training.steps)
        created[0].random()

    return update


def used_for_each_epoch(training: Training) -> Callable[[], object]:
    draws = torch.Generator()
    return lambda: training.steps % 3 or torch.randperm(4, generator=draws)


@pytest.mark.parametrize("make", [seeded_in_each_step, created_in_each_step, used_for_each_epoch])
def test_generators_that_need_no_state_cause_no_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    monkeypatch.setattr(get_logger(), "propagate", True)
    training = Training()
    training.run(make(training), steps=12)
    assert not caplog.records


# Counters ------------------------------------------------------------------------------------


class Trainer:
    """Looks like a class of the script."""

    def __init__(self) -> None:
        self.global_step, self.seen, self.shown = 0, 0, 0
        self.epsilon, self.floor, self.loss, self.elapsed = 1.0, 1.0, 0.0, 0.0

    def fit(self) -> None:
        self.global_step += 1
        self.seen += 8
        self.shown += 1
        self.epsilon = max(0.1, 0.99 * self.epsilon)
        self.floor -= 0.0625
        self.loss += float(torch.rand(1))
        self.elapsed += 2.0
        is_over = self.global_step > 100 or self.loss > self.elapsed + self.seen
        f"{self.shown}"
        torch.full((1,), self.epsilon * self.floor * is_over)


Trainer.__module__ = "__main__"


def test_numbers_that_count_or_decay_are_reported_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With their line and what saves them; not what is measured, nor what is only shown."""
    monkeypatch.setattr(get_logger(), "propagate", True)
    training = Training()
    training.run(Trainer().fit, steps=8)
    (warning,) = warnings_of(caplog)
    lines = [line.strip() for line in warning.splitlines()[1:]]
    path, number = __file__, Trainer.fit.__code__.co_firstlineno + 1
    assert lines == [
        f'self.global_step ({path}:{number}) counts steps: run.state["global_step"] in its place',
        f"self.epsilon ({path}:{number + 3}) changes by the same amount in every step: "
        'run.state["epsilon"] in its place',
        f"self.floor ({path}:{number + 4}) changes by the same amount in every step: "
        'run.state["floor"] in its place',
    ]


def test_what_does_not_influence_training_can_be_excluded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(get_logger(), "propagate", True)
    training = Training()
    training.changes.ignore(["self.global_step", "self.epsilon", "self.floor"])
    training.run(Trainer().fit, steps=8)
    assert not caplog.records
    training = Training()
    training.changes.ignore(["ema.shadow"])
    training.run(classic(training))


def test_a_counter_in_the_state_causes_no_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(get_logger(), "propagate", True)
    training = Training()
    state, trainer = training.job.user, Trainer()
    training.changes.ignore(["trainer.epsilon", "trainer.floor"])

    def update() -> None:
        state["step"] = state.get("step", 0) + 1
        trainer.fit()  # its count is that of the state

    training.run(update, steps=8)
    assert not caplog.records


class Average:
    """A tracked average that is updated in every fourth step."""

    def __init__(self, *, is_saved: bool) -> None:
        self.updates, self.is_saved = 0, is_saved

    def update(self) -> None:
        self.updates += 1
        min(0.999, (1 + self.updates) / (10 + self.updates))  # its decay

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": torch.zeros(1), **({"updates": self.updates} if self.is_saved else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state.get("updates", 0)


Average.__module__ = "__main__"


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_counter_that_a_tracked_object_does_not_save_causes_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, *, is_saved: bool
) -> None:
    monkeypatch.setattr(get_logger(), "propagate", True)
    training = Training()
    average = Average(is_saved=is_saved)
    training.job.track("ema", average)
    training.run(average.update, steps=8)
    warning = "counts steps, but is not in the state_dict of ema"
    assert (warning in caplog.text) == ("ema.updates" in caplog.text) == (not is_saved)
    assert ("counts steps" in caplog.text) == (not is_saved)


steps_done = 0
index = 0


def test_a_global_counter_causes_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    global steps_done
    monkeypatch.setattr(get_logger(), "propagate", True)
    training = Training()
    for _ in range(8):
        training.changes.begin(0)
        steps_done += 1
        max(0.1, 1 - steps_done / 100)
    assert 'counts steps: run.state["steps_done"] in its place' in caplog.text


def test_the_index_of_a_loop_causes_no_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the top level of a script it is a global variable, which no function assigns."""
    monkeypatch.setattr(get_logger(), "propagate", True)
    training = Training()
    for number in range(8):
        globals()["index"] = number
        training.changes.begin(0)
    assert "counts steps" not in caplog.text


def test_variables_that_a_later_loop_carries_are_refused() -> None:
    training = Training()
    training.changes = ChangeDetector(training.job, lambda: True)
    factor = 1.0
    for _ in range(2):
        training.changes.begin(0)
    with pytest.raises(TrainingError, match=r"`factor \*= 0.5` in test_variables_that_a_later"):
        for _ in range(2):
            training.changes.begin(0)
            training.optimizer.param_groups[0]["lr"] = factor
            factor *= 0.5


@pytest.mark.parametrize(("rank", "step", "is_named"), [(0, 3, True), (1, 3, False), (0, 0, False)])
def test_what_a_resumed_loop_reports_is_named(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    step: int,
    is_named: bool,
) -> None:
    monkeypatch.setattr(get_logger(), "propagate", True)
    training = Training()
    training.changes = ChangeDetector(training.job, lambda: True)
    training.changes.enter_world(cast(World, SimpleNamespace(rank=rank)), step)
    training.job.progress.step = step
    total, best, unread = 0.0, 0.0, 0.0
    for _ in range(2):
        training.changes.begin(0)
        total += 1.0
        unread += 1.0
        if total > best:
            best = total
    assert total / 2 == 1.0
    named = {m for r in caplog.records if "begin again" in (m := r.getMessage())}
    assert len(named) == is_named
    for text in named:
        assert re.search(r": best \(line \d+\), total \(line \d+\)\.", text)


def test_a_group_of_a_tracked_optimizer_is_part_of_the_state() -> None:
    training = Training()
    training.changes = ChangeDetector(training.job, lambda: True)
    kept = SimpleNamespace(group=training.optimizer.param_groups[0])
    for _ in range(2):
        training.changes.begin(0)
        kept.group["lr"] *= 0.5
