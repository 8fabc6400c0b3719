"""The process group's patches of torch: applied by a build, removed with the last group, and never
applied by an import (test_imports.py)."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from kit.assignments import assignment

from elastic.errors import GroupAborted, Superseded
from elastic.groups.group import ProcessGroup
from elastic.groups.pending import PendingWorks, open_works, pending_works

DEADLINE_S = 60.0
OF_TORCH = vars(dist.Work)["wait"]
SPEC = assignment()


def build(group: ProcessGroup) -> None:
    group.build(SPEC, superseded=lambda: False, timeout_s=DEADLINE_S)


def summed() -> float:
    one = torch.ones(1)
    dist.all_reduce(one)
    return float(one)


@pytest.fixture
def group() -> Iterator[ProcessGroup]:
    made = ProcessGroup(torch.device("cpu"), "gloo")
    yield made
    made.destroy()
    open_works()


def is_patched() -> bool:
    return vars(dist.Work)["wait"] is not OF_TORCH


def test_waits_are_patched_from_the_first_build_to_the_last_destroy(
    group: ProcessGroup,
) -> None:
    hook = sys.excepthook
    assert not is_patched()
    build(group)
    assert is_patched() and sys.excepthook is not hook
    assert summed() == 1.0
    group.destroy(is_for_next=True)
    assert is_patched() and sys.excepthook is hook
    build(group)
    group.destroy()
    assert not is_patched() and sys.excepthook is hook


def test_torchs_own_wait_works_after_the_patch_is_removed(group: ProcessGroup) -> None:
    build(group)
    group.destroy()
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert summed() == 1.0
    finally:
        dist.destroy_process_group()


def test_waits_stay_patched_after_a_failed_build(group: ProcessGroup) -> None:
    """Another world is attempted, while threads of the script may wait."""
    with pytest.raises(Superseded):
        group.build(SPEC, superseded=lambda: True, timeout_s=DEADLINE_S)
    assert is_patched()
    group.destroy()
    assert not is_patched()


def test_a_patch_by_other_code_on_top_is_preserved(
    group: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(group)
    ours = dist.Work.wait
    calls: list[dist.Work] = []

    def on_top(work: dist.Work, *given: object) -> bool:
        calls.append(work)
        return ours(work, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(dist.Work, "wait", on_top)
    group.destroy()
    assert vars(dist.Work)["wait"] is on_top
    build(group)
    assert summed() == 1.0 and calls == []  # this library's patch is the outermost again
    group.destroy()
    assert not is_patched()


def test_pending_works_belong_to_one_group(group: ProcessGroup) -> None:
    """A thread that waits for a collective of an ended world gets an error, even if the next world
    has been built by then."""
    build(group)
    first = pending_works()
    states = [group.is_aborted]
    group.abort()
    states.append(group.is_aborted)
    group.destroy(is_for_next=True)
    build(group)
    states.append(group.is_aborted)
    assert states == [False, True, False]
    assert pending_works() is not first
    pending_works().raise_if_aborted()
    with pytest.raises(GroupAborted):
        first.raise_if_aborted()


def test_an_abort_ends_only_the_works_of_its_own_group(group: ProcessGroup) -> None:
    build(group)
    of_group = pending_works()
    other = PendingWorks(is_on_stream=True)
    group.abort()
    other.raise_if_aborted()
    with pytest.raises(GroupAborted):
        of_group.raise_if_aborted()
