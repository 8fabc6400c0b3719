"""Changes that a script makes to weights outside of the optimizer are detected."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from elastic.train.rollback import ChangeWatch, contents, digest_on_device


def weights() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(3, 2)), torch.nn.Parameter(torch.zeros(4))]


def in_place(parameters: list[torch.nn.Parameter]) -> None:
    with torch.no_grad():
        parameters[0].sub_(0.1)


def through_data(parameters: list[torch.nn.Parameter]) -> None:
    parameters[1].data[2] = 1e-30


def through_numpy(parameters: list[torch.nn.Parameter]) -> None:
    parameters[0].detach().numpy()[1, 1] += 1


def by_new_memory(parameters: list[torch.nn.Parameter]) -> None:
    parameters[0].data = parameters[0].data + 1


@pytest.mark.parametrize("change", [in_place, through_data, through_numpy, by_new_memory])
def test_changes_are_detected_by_content(
    change: Callable[[list[torch.nn.Parameter]], None],
) -> None:
    parameters = weights()
    watch = ChangeWatch(lambda: parameters)
    watch.expect(by_content=True)
    assert not watch.has_changed
    change(parameters)
    assert watch.has_changed


def test_version_counters_detect_in_place_changes_at_no_cost() -> None:
    parameters = weights()
    watch = ChangeWatch(lambda: parameters)
    watch.expect(by_content=False)
    through_data(parameters)
    assert not watch.has_changed, "only a comparison of contents detects it"
    in_place(parameters)
    assert watch.has_changed


def test_no_change_is_reported_before_expect_and_after_forget() -> None:
    parameters = weights()
    watch = ChangeWatch(lambda: parameters)
    in_place(parameters)
    assert not watch.has_changed
    watch.expect(by_content=True)
    watch.forget()
    in_place(parameters)
    assert not watch.has_changed


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.int8, torch.bool],
)
def test_contents_differ_after_a_change_for_any_dtype(dtype: torch.dtype) -> None:
    tensor = torch.ones(5).to(dtype)
    before = contents([tensor])
    tensor[3] = 0
    assert contents([tensor]) != before


@pytest.mark.parametrize("digest", [lambda t: contents([t]), lambda t: int(digest_on_device(t))])
def test_exchanged_values_and_signs_change_the_digest(
    digest: Callable[[torch.Tensor], object],
) -> None:
    tensor = torch.arange(1.0, 9.0)
    flipped = tensor.clone()
    flipped[:2].neg_()
    assert len({digest(t) for t in (tensor, tensor.flip(0), flipped, -tensor)}) == 4
    assert digest(tensor.clone()) == digest(tensor)


def test_contents_of_no_elements_are_empty() -> None:
    assert contents([]) == contents([torch.empty(0)]) == ()


def test_a_change_that_was_undone_is_none_where_contents_are_compared() -> None:
    parameters = weights()
    watch = ChangeWatch(lambda: parameters)
    watch.expect(by_content=True)
    before = parameters[0].detach().clone()
    in_place(parameters)
    assert watch.has_changed
    with torch.no_grad():
        parameters[0].copy_(before)
    assert not watch.has_changed
