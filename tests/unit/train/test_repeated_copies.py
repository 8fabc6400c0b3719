"""Copies of long lists from step to step: equal to the list, whatever was done to it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from elastic.train.copies import RepeatedCopies

Log = list[Any]


def _cut(draw: random.Random, log: Log) -> None:
    log[draw.randrange(len(log)) :] = [1]


def _edit(draw: random.Random, log: Log) -> None:
    at = draw.randrange(len(log))
    log[at] = {"loss": draw.random(), "step": at}


def _edit_inside(draw: random.Random, log: Log) -> None:
    entry = draw.choice(log)
    if isinstance(entry, dict):
        entry[draw.choice(["loss", "step", "late"])] = draw.choice(
            [0, 0.0, -0.0, True, 1, 1.0, "1"]
        )


EDITS: tuple[Callable[[random.Random, Log], object], ...] = (
    lambda draw, log: log.append({"loss": draw.random(), "step": len(log)}),
    lambda draw, log: log.append(draw.random()),
    lambda draw, log: log.extend({"n": n} for n in range(draw.randrange(400))),
    lambda draw, log: log.pop(draw.randrange(len(log))),
    lambda draw, log: log.insert(draw.randrange(len(log)), None),
    lambda draw, log: log.append([draw.random(), {"deep": [1, 2]}]),
    lambda draw, log: log.append(torch.ones(2)),
    lambda draw, log: log.append(np.ones(2)),
    lambda draw, log: log.reverse(),
    lambda draw, log: draw.choice(log),
    _cut,
    _edit,
    _edit_inside,
    _edit_inside,
)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_every_edit_is_found(seed: int) -> None:
    draw = random.Random(seed)
    log: Log = [{"loss": 1.0 / (n + 1), "step": n} for n in range(700)]
    copies, before = RepeatedCopies(), "[]"
    earlier: Log = []
    for _ in range(60):
        copy = copies.copy({"log": log})["log"]
        assert repr(earlier) == before  # an edit does not reach the copies of earlier steps
        assert copy is not log and repr(copy) == repr(log)
        earlier, before = copy, repr(copy)
        for _ in range(draw.randrange(3)):
            draw.choice(EDITS)(draw, log)


def test_what_has_not_changed_is_not_copied_again() -> None:
    log = [{"step": n} for n in range(1000)]
    copies = RepeatedCopies()
    first = copies.copy(log)
    log.append({"step": 1000})
    log[300]["step"] = -1
    second = copies.copy(log)
    same = [one is other for one, other in zip(first, second, strict=False)]
    assert all(same[:256]) and all(same[512:768]) and not any(same[256:512])
    assert not any(one is other for one, other in zip(second, log, strict=True))


def test_an_array_of_the_same_bytes_is_another_value() -> None:
    log: Log = [np.zeros(1, dtype=np.int64) for _ in range(256)]
    copies = RepeatedCopies()
    copies.copy(log)
    log[0] = np.zeros(1, dtype=np.float64)
    assert copies.copy(log)[0].dtype == np.float64


def test_a_list_that_the_object_creates_each_time_is_known_by_its_place() -> None:
    entries = [{"step": n} for n in range(300)]
    copies = RepeatedCopies()
    first, second = copies.copy({"log": list(entries)}), copies.copy({"log": list(entries)})
    assert first["log"][0] is second["log"][0]
