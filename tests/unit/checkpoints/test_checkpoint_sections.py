"""Groups of writers that save different keys of one state: pipeline stages."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoints
from checkpoints.commit import IncompleteAttempt, merge_parts, read_parts
from checkpoints.manifest import parse_part
from checkpoints.names import CheckpointName
from checkpoints.objects import storage_for
from checkpoints.tensors import TensorSpec, share_of

NONCE = "3f9c0a11"
SECTIONS = ((0, 2), (1, 3, 4))
SIZE = 5


def state_of(section: int) -> dict[str, Any]:
    values = torch.arange(7.0) + 100 * section
    return {f"part {section}": {"weight": values, "empty": torch.empty(0), "lr": section / 2}}


def section_of(rank: int) -> int:
    return next(index for index, ranks in enumerate(SECTIONS) if rank in ranks)


def save(folder: Path, rank: int, state: object = None, **more: Any) -> checkpoints.SaveResult:
    section = section_of(rank)
    return checkpoints.save(
        folder,
        state_of(section) if state is None else state,
        step=3,
        nonce=NONCE,
        rank=rank,
        world_size=SIZE,
        **{"section": SECTIONS[section], **more},
    )


@pytest.mark.parametrize("order", [range(SIZE), reversed(range(SIZE))])
def test_sections_form_one_checkpoint(tmp_path: Path, order: Any) -> None:
    results = [save(tmp_path, rank) for rank in order]
    assert [result.committed for result in results] == [False] * (SIZE - 1) + [True]
    loaded = checkpoints.load(tmp_path, results[-1].name)
    assert loaded.state.keys() == {"part 0", "part 1"}
    for section in range(2):
        own, expected = (s[f"part {section}"] for s in (loaded.state, state_of(section)))
        assert own["weight"].tolist() == expected["weight"].tolist()
        assert own["empty"].shape == (0,)
        assert own["lr"] == expected["lr"]
    checkpoints.verify(tmp_path, results[-1].name)


def test_one_key_is_loaded_alone(tmp_path: Path) -> None:
    name = [save(tmp_path, rank) for rank in range(SIZE)][-1].name
    live = torch.zeros(7)
    found = checkpoints.load(
        tmp_path, name, into={"part 1": {"weight": live}}, strict=False, only="part 1"
    )
    assert live.tolist() == state_of(1)["part 1"]["weight"].tolist()
    assert found.state.keys() == {"part 1"}
    assert found.state["part 1"]["weight"] is live
    with pytest.raises(checkpoints.StateMismatch, match="missing in the checkpoint: part 2"):
        checkpoints.load(tmp_path, name, only="part 2")


@pytest.mark.parametrize(
    ("state", "section", "reason"),
    [
        (state_of(0), (1, 3, 4), "two sections saved 'part 0/empty'"),
        ({"part 0": {"lr": 1.0}}, (1, 3, 4), "two sections saved 'part 0'"),
        ([torch.zeros(1)], (1, 3, 4), "not a dict with string keys"),
        (
            state_of(1),
            (1, 4),
            "writer 3 saved with the ranks [1, 3], not all of which did the same",
        ),
    ],
)
def test_inconsistent_sections_are_not_committed(
    tmp_path: Path, state: object, section: tuple[int, ...], reason: str
) -> None:
    for rank in range(SIZE):
        if section_of(rank) == 0:
            save(tmp_path, rank)
        elif rank in section:
            save(tmp_path, rank, state, section=section)
        else:
            save(tmp_path, rank, state, section=(1, 3))
    parts = read_parts(storage_for(tmp_path), CheckpointName(3, 0, NONCE), SIZE)
    with pytest.raises(IncompleteAttempt) as caught:
        merge_parts(parts)
    assert reason in str(caught.value)
    assert checkpoints.latest(tmp_path).checkpoint is None


def test_writers_of_a_section_save_the_same_tensors(tmp_path: Path) -> None:
    for rank in range(SIZE):
        save(tmp_path, rank, {"part 1": {"weight": torch.zeros(2)}} if rank == 3 else None)
    parts = read_parts(storage_for(tmp_path), CheckpointName(3, 0, NONCE), SIZE)
    with pytest.raises(IncompleteAttempt, match="writer 3 saved different tensors than writer 1"):
        merge_parts(parts)


@pytest.mark.parametrize("section", [(), (1, 0), (0, 5), (0, 0, 1)])
def test_a_section_is_an_ordered_tuple_of_ranks(tmp_path: Path, section: tuple[int, ...]) -> None:
    with pytest.raises(checkpoints.ArgumentError, match="is not an ordered tuple of ranks below 5"):
        save(tmp_path, 0, section=section)


@pytest.mark.parametrize("section", [(), (1, 0), (0, 5), (0, 0, 1)])
def test_an_untrusted_part_with_an_invalid_section_is_rejected(
    tmp_path: Path, section: tuple[int, ...]
) -> None:
    for rank in range(SIZE):
        save(tmp_path, rank, {f"part {section_of(rank)}": {}, "both": 0})
    part = read_parts(storage_for(tmp_path), CheckpointName(3, 0, NONCE), SIZE)[0]
    assert parse_part(part.to_bytes(), "part").section == SECTIONS[0]
    damaged = dataclasses.replace(part, section=section)
    with pytest.raises(checkpoints.CorruptCheckpoint, match="not an ordered list of ranks"):
        parse_part(damaged.to_bytes(), "part")


def test_a_writer_is_in_its_section(tmp_path: Path) -> None:
    with pytest.raises(checkpoints.ArgumentError, match=r"rank 0 is not in its section \(1, 2\)"):
        save(tmp_path, 0, section=(1, 2))


def test_the_ranks_of_a_section_share_its_bytes() -> None:
    specs = [TensorSpec("a", "F32", (5,)), TensorSpec("b", "U8", (3,))]
    whole = [share_of(specs, 2, rank) for rank in range(2)]
    assert [share_of(specs, 8, rank, (3, 6)) for rank in (3, 6)] == whole
