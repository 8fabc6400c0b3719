"""Wrapped modules whose parameters are replaced, added or removed in training."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from elastic import torch_private
from elastic.errors import TrainingError
from elastic.groups.world import world_from_environment
from elastic.train.ddp import ElasticDDP
from elastic.train.state import JobState
from elastic.train.structure import ModuleStructures

WORLD = world_from_environment({})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.norm, self.out = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.blocks = nn.ModuleList()
        prune.identity(self.out, "weight")  # type: ignore[no-untyped-call]


@pytest.fixture
def net() -> Net:
    return Net()


class Check:
    """As the loop over steps, when a step begins."""

    def __init__(self, net: Net) -> None:
        self.job = JobState(0, modules={"model": ElasticDDP(net)})
        self.is_new_loop = True
        self.structures = ModuleStructures(self.job, lambda: self.is_new_loop)

    def __call__(self) -> None:
        self.structures.begin(0)
        self.is_new_loop = False

    def call(self, function: Callable[[], object], *, is_again: bool = True) -> None:
        """As run.retry, whose first calls in a world are interrupted before a step begins."""
        for is_interrupted in (True, True, False):
            self.structures.begin_call(is_again=is_again)
            self.structures.enter_world(WORLD, 0)
            is_again = True
            function()
            if not is_interrupted:
                self()


@pytest.fixture
def check(net: Net) -> Iterator[Check]:
    check = Check(net)
    check()
    yield check
    check.structures.close()


def replace(net: Net) -> None:
    net.hidden.weight = nn.Parameter(net.hidden.weight.detach().clone())


def replace_frozen(net: Net) -> None:
    net.hidden.weight = nn.Parameter(net.hidden.weight.detach().clone(), requires_grad=False)


def grow(net: Net) -> None:
    net.blocks.append(nn.Linear(1, 1))


def start_pruning(net: Net) -> None:
    prune.l1_unstructured(net.hidden, "weight", amount=0.5)  # type: ignore[no-untyped-call]


def add_a_buffer(net: Net) -> None:
    net.hidden.register_buffer("seen", torch.zeros(1))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (replace, "'hidden.weight' was replaced"),
        (replace_frozen, "'hidden.weight' was replaced"),
        (grow, "got the new entry 'blocks.0.weight'"),
        (start_pruning, "got the new entry 'hidden.weight_orig'"),
        (add_a_buffer, "got the new entry 'hidden.seen'"),
    ],
)
def test_a_change_is_refused_in_each_later_step(
    net: Net,
    check: Check,
    change: Callable[[Net], None],
    named: str,
) -> None:
    change(net)
    for _ in range(2):
        with pytest.raises(TrainingError, match=named):
            check()


def change_in_place(net: Net) -> None:
    with torch.no_grad():
        net.hidden.weight.copy_(net.hidden.weight + 1)
    net.hidden.weight.data = net.hidden.weight.data * 2


def assign_a_buffer(net: Net) -> None:
    assert net.norm.running_mean is not None
    net.norm.running_mean = net.norm.running_mean + 1


def prune_more(net: Net) -> None:
    mask = net.out.weight_mask
    assert isinstance(mask, torch.Tensor)
    mask.zero_()


def cache(net: Net) -> None:
    net.hidden.register_buffer("cached", torch.zeros(1), persistent=False)


def freeze(net: Net) -> None:
    net.requires_grad_(False)


def change_a_copy(net: Net) -> None:
    copy.deepcopy(net.hidden).register_buffer("seen", torch.zeros(1))


@pytest.mark.parametrize(
    "change", [change_in_place, assign_a_buffer, prune_more, cache, freeze, change_a_copy]
)
def test_other_changes_are_accepted(net: Net, check: Check, change: Callable[[Net], None]) -> None:
    change(net)
    check()


def test_another_module_is_compared_with_itself(net: Net) -> None:
    """The function of run.retry may create its objects again."""
    check = Check(net)
    check()
    other = Net()
    grow(other)
    check.job.modules["model"] = ElasticDDP(other)
    check()
    check.structures.close()


@pytest.mark.parametrize("change", [replace, grow])
def test_a_change_before_the_first_step_is_refused(
    net: Net, change: Callable[[Net], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parameters of the world's beginning are those that DDP reduces."""
    wrapped = ElasticDDP(net)
    monkeypatch.setattr(wrapped, "_in_world_parameters", tuple(net.parameters()))
    monkeypatch.setattr(wrapped, "in_world", True)
    change(net)
    structures = ModuleStructures(JobState(0, modules={"model": wrapped}), lambda: True)
    with pytest.raises(TrainingError, match=r"was replaced|got the new entry"):
        structures.begin(0)
    structures.close()


def test_a_layer_is_refused_that_replaces_another_one(net: Net, check: Check) -> None:
    net.norm = nn.Identity()  # type: ignore[assignment]
    with pytest.raises(TrainingError, match=r"lost the entry 'norm\.weight'"):
        check()


def test_an_activation_is_refused_that_replaces_another_one() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    job = JobState(0, modules={"model": ElasticDDP(model)})
    structures = ModuleStructures(job, lambda: False)
    structures.begin(0)
    model[1] = nn.GELU()
    with pytest.raises(TrainingError, match=r"layer '1' is GELU instead of the Tanh before"):
        structures.begin(1)
    model[1] = nn.Tanh()
    structures.enter_world(WORLD, 1)
    structures.begin(1)  # as the function, called again, creates it
    model[1] = nn.Tanh()
    with pytest.raises(TrainingError, match=r"layer '1' is Tanh instead of the Tanh before"):
        structures.begin(2)
    structures.close()


# -- hooks ----------------------------------------------------------------------------------------


def doubled(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
    return output * 2


class Halving:
    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / 2

    def of(self, optimizer: object, arguments: object, named: object) -> None:
        """Before an update."""


@torch.no_grad()
def clamped(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clamp(-1, 1)


def on_a_layer(net: Net) -> object:
    return net.hidden.register_forward_hook(doubled)


def on_a_parameter(net: Net) -> object:
    return net.hidden.weight.register_hook(Halving())  # type: ignore[no-untyped-call]


def in_a_decorator(net: Net) -> object:
    return net.hidden.bias.register_hook(functools.partial(clamped))  # type: ignore[no-untyped-call]


def after_accumulation(net: Net) -> object:
    return net.hidden.bias.register_post_accumulate_grad_hook(lambda p: None)  # type: ignore[no-untyped-call]


HOOKS = [on_a_layer, on_a_parameter, in_a_decorator, after_accumulation]


def hooks_on(net: Net) -> int:
    owners: list[object] = [*net.modules(), *net.parameters()]
    return sum(len(table) for owner in owners for table in torch_private.hooks_of(owner)) - 1


@pytest.mark.parametrize("register", HOOKS)
def test_a_function_that_is_called_again_registers_its_hooks_once(
    net: Net, register: Callable[[Net], object]
) -> None:
    check = Check(net)
    on_a_layer(net)  # by the script, before its function

    def function() -> None:
        register(net)
        register(net)

    before = hooks_on(net)
    check.call(function, is_again=False)
    for _ in range(3):
        check.call(function)
        assert hooks_on(net) == before + 2
    check.structures.close()


@pytest.mark.parametrize("register", HOOKS)
def test_a_hook_that_a_loop_registers_is_refused(
    net: Net, check: Check, register: Callable[[Net], object]
) -> None:
    register(net)
    for _ in range(2):
        with pytest.raises(TrainingError, match=r"registered the hook '.*test_module_structures"):
            check.structures.begin(1)
    check.structures.enter_world(WORLD, 1)
    with pytest.raises(TrainingError, match="registered the hook"):
        check()


def test_a_hook_on_an_optimizer_is_one_of_the_job(net: Net) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    check = Check(net)
    check.job.track("optimizer", optimizer)
    halving = Halving()

    def function() -> None:
        optimizer.register_step_pre_hook(halving.of)

    check.call(function, is_again=False)
    check.call(function)
    assert [len(table) for table in torch_private.hooks_of(optimizer) if table] == [1]
    check.structures.close()


def test_hooks_of_one_step_of_libraries_and_before_another_loop_are_accepted(
    net: Net, check: Check
) -> None:
    for _ in range(100):
        on_a_layer(net).remove()  # type: ignore[attr-defined]
        check()
    prune.identity(net.hidden, "bias")  # type: ignore[no-untyped-call]
    prune.remove(net.hidden, "bias")  # type: ignore[no-untyped-call]
    net.hidden.bias.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
    on_a_layer(net)
    check.is_new_loop = True
    check()


def test_a_hook_is_found_where_each_step_registers_others(net: Net, check: Check) -> None:
    for _ in range(100):
        net.hidden(torch.zeros(2, 3)).register_hook(clamped)
        check()
    on_a_layer(net)
    with pytest.raises(TrainingError, match="registered the hook 'doubled'"):
        for _ in range(64):
            net.hidden(torch.zeros(2, 3)).register_hook(clamped)
            check()


def test_another_call_registers_its_hooks_and_its_loop_none(net: Net) -> None:
    check = Check(net)
    check.call(lambda: on_a_layer(net), is_again=False)
    before = hooks_on(net)
    check.call(lambda: on_a_layer(net), is_again=False)
    assert hooks_on(net) == before + 1, "as in plain torch"
    check.structures.begin_call(is_again=False)
    check()
    on_a_layer(net)
    with pytest.raises(TrainingError, match="registered the hook 'doubled'"):
        for _ in range(64):
            check()
    check.structures.close()
