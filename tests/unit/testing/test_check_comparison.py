"""How ``elastic check`` compares the records of two runs."""

from __future__ import annotations

import math
from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.testing.small_world.comparison import (
    NOISE_FACTOR,
    KeptVariables,
    Record,
    Rounding,
    Sources,
    additional_samples,
    differing_state,
    differing_values,
    differing_variables,
    line_that_sets,
    matching_samples,
)
from elastic.testing.small_world.recording import leaves_of, sketch


def record(*weights: torch.Tensor, rate: float = 0.1) -> Record:
    """A run with a boundary after each step."""
    states = {
        (step, 0): dict(leaves_of({"model": {"net": {"w": w}}, "tracked": {"sgd": {"lr": rate}}}))
        for step, w in enumerate(weights, start=1)
    }
    return Record(steps=len(weights), boundaries=states)


@given(st.integers(1, 70_000), st.floats(1e-6, 1e3), st.integers(0, 2**31 - 1))
def test_a_sketch_estimates_the_norm_of_a_difference(size: int, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    one = torch.randn(size, generator=generator, dtype=torch.double)
    change = torch.randn(size, generator=generator, dtype=torch.double) * scale
    gaps = zip(sketch(one)[1:], sketch(one + change)[1:], strict=True)
    estimate = math.sqrt(sum((a - b) ** 2 for a, b in gaps) / 8)
    assert 0.05 < estimate / float(change.norm()) < 4


@given(st.integers(2, 100_000), st.data())
def test_sketches_of_parts_add_up(size: int, data: st.DataObject) -> None:
    whole = torch.arange(size, dtype=torch.double)
    cut = data.draw(st.integers(1, size - 1))
    parts = zip(sketch(whole[:cut]), sketch(whole[cut:], cut), strict=True)
    for total, (a, b) in zip(sketch(whole), parts, strict=True):
        assert math.isclose(total, a + b, rel_tol=1e-9, abs_tol=1e-3)


def test_the_first_step_is_named_and_values_come_before_tensors() -> None:
    w = torch.ones(10)
    wanted = record(w, w, w)
    got = record(w, w + 0.1, w + 0.2)
    (found,) = differing_state(got, wanted, Rounding(wanted, None))
    assert (found.name, found.step) == ("net.w", 2)
    both = record(w + 0.1, w, w, rate=0.2)
    assert [d.name for d in differing_state(both, wanted, Rounding(wanted, None))] == [
        "sgd.lr",
        "net.w",
    ]


def test_differences_within_the_measured_rounding_are_none() -> None:
    w = torch.ones(100)
    wanted, noisy = record(w), record(w + 1e-4)
    rounding = Rounding(wanted, noisy)
    assert not differing_state(record(w + 1e-4 * NOISE_FACTOR / 2), wanted, rounding)
    assert differing_state(record(w + 1e-4 * NOISE_FACTOR * 2), wanted, rounding)
    assert differing_state(record(w + 1e-4 * NOISE_FACTOR / 2), wanted, Rounding(wanted, None))


def test_samples_are_compared_by_step() -> None:
    wanted = Record(samples={0: Counter([1, 2]), 1: Counter([3, 4])})
    got = Record(samples={0: Counter([1, 2]), 1: Counter([4, 4, 5])})
    assert matching_samples(got, wanted) == 3
    assert additional_samples(got, wanted) == 2


def test_logged_values_are_compared_in_common_steps() -> None:
    wanted = Record(values={"loss": {1: 0.5, 2: 0.25}})
    rounding = Rounding(wanted, None)
    assert not differing_values(Record(values={"loss": {2: 0.25}}), wanted, rounding)
    (found,) = differing_values(Record(values={"loss": {1: 0.5, 2: 0.3}}), wanted, rounding)
    assert (found.name, found.step) == ("run.log loss", 2)


SOURCE = """
best = 0.0
class Trainer:
    def __init__(self):
        self.count = 0
    def train(self):
        for batch in self.batches:
            loss = batch
            self.count += 1
            for group in self.groups:
                group["lr"] = self.count
"""


def test_variables_of_loops_are_not_kept() -> None:
    kept = KeptVariables(SOURCE)
    assert kept.of(0) == {"best": 2, "self.count": 5}
    assert kept.of(6) == {"best": 2, "self.count": 5, "self": 6}
    assert line_that_sets(SOURCE, "lr") == 11
    assert line_that_sets(SOURCE, "momentum") == 0


def test_variables_that_differ_without_a_fault_are_not_reported() -> None:
    def run(count: int, best: float) -> Record:
        path = {"self.count": ["value", count]}
        return Record(variables={0: {"train.py:6": path, "train.py:0": {"best": ["value", best]}}})

    sources = Sources(lambda file: SOURCE)
    wanted, noisy = run(10, 0.5), run(10, 0.7)
    (found,) = differing_variables(run(3, 0.9), wanted, noisy, sources)
    assert (found.name, found.line, found.got, found.wanted) == ("self.count", 5, 3, 10)
    assert found.describe(sources) == "self.count (line 5: self.count = 0): 3 instead of 10"
