"""What a script keeps in attributes of its own trainers, callbacks and modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from elastic.integrations.attributes import ChangedAttributes, own_modules
from elastic.train.copies import copied


class Callback:
    """As a process creates it: its number of steps begins at 0."""

    def __init__(self, rank: int) -> None:
        self.rank, self.steps, self.unused = rank, 0, "unused"
        self.average: dict[str, torch.Tensor] | None = None

    def step(self) -> None:
        self.steps += 1
        self.average = self.average or {"weight": torch.zeros(1)}
        self.average["weight"] += 1


def begun(*owners: Any) -> ChangedAttributes:
    attributes = ChangedAttributes({str(number): each for number, each in enumerate(owners)})
    attributes.begin()
    return attributes


def test_a_joining_process_gets_what_training_has_changed_and_keeps_its_own() -> None:
    first, joining, next_one = Callback(0), Callback(1), Callback(2)
    sender = begun(first)
    assert sender.state_dict() == {}
    first.step()
    receiver = begun(joining)
    receiver.load_state_dict(sender.state_dict())
    joining.step()
    assert (first.steps, first.average) == (1, {"weight": torch.ones(1)})
    # The names travel on: to the joining process, nothing had changed since it began.
    begun(next_one).load_state_dict(receiver.state_dict())
    assert (next_one.rank, next_one.steps) == (2, 2)
    assert next_one.average == {"weight": torch.full((1,), 2.0)}


def test_an_interrupted_step_is_undone_even_if_it_was_the_first() -> None:
    callback = Callback(0)
    attributes = begun(callback)
    before = copied(attributes.state_dict())
    callback.step()
    callback.new = 1  # type: ignore[attr-defined]
    attributes.load_state_dict(before)
    assert vars(callback) == vars(Callback(0))


def test_a_later_step_that_changes_an_attribute_for_the_first_time_is_undone() -> None:
    callback = Callback(0)
    attributes = begun(callback)
    callback.step()
    before, average = copied(attributes.state_dict()), callback.average
    callback.step()
    callback.unused = "used"
    attributes.load_state_dict(before)
    assert (callback.steps, callback.unused) == (1, "unused")
    assert callback.average is average == {"weight": torch.ones(1)}  # the script may refer to it


def test_a_dict_that_gets_other_content_is_left_alone() -> None:
    """Such as the samples of this rank, by step."""
    callback = Callback(0)
    callback.seen = {}  # type: ignore[attr-defined]
    attributes = begun(callback)
    attributes.state_dict()
    callback.seen[1] = [5]  # type: ignore[attr-defined]
    before = copied(attributes.state_dict())
    attributes.load_state_dict(before)
    assert vars(callback)["seen"] == {1: [5]}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counter = Counter()
        self.inner = nn.Sequential(self.counter, nn.BatchNorm1d(1))


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("zero", torch.zeros(1))
        self.calls = 0


def test_only_numbers_and_texts_of_a_script_s_own_modules_are_read() -> None:
    net = Net()
    assert list(own_modules(net)) == ["", "counter"]
    attributes = begun(*own_modules(net).values())
    net.counter.calls += 1
    net.eval()
    assert attributes.state_dict() == {"1": {"calls": 1}}
