"""Which checkpoint a new start resumes from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from kit.checkpoint_states import flip, save_all, small_state

import checkpoints


def _save(root: Path, generation: int, step: int, *lineage: tuple[int, int]) -> str:
    return save_all(
        root, small_state(step), step=step, generation=generation, lineage=lineage, keep=None
    )


def _damage(root: Path, name: str) -> None:
    flip(root / name / "00000-of-00001.safetensors", -1)


def test_the_newest_checkpoint_has_the_highest_generation(tmp_path: Path) -> None:
    _save(tmp_path, 1, 1000)
    newest = _save(tmp_path, 2, 250)
    found = checkpoints.latest(tmp_path)
    assert found.checkpoint is not None
    assert (found.checkpoint.name, found.skipped) == (newest, ())


def test_latest_falls_back_to_the_newest_complete_one_with_reasons(tmp_path: Path) -> None:
    complete = _save(tmp_path, 0, 1)
    flipped, cut, gone = (_save(tmp_path, 0, step) for step in (2, 3, 4))
    _damage(tmp_path, flipped)
    (tmp_path / cut / "manifest.json").write_bytes(b"")
    (tmp_path / gone / "00000-of-00001.safetensors").unlink()
    found = checkpoints.latest(tmp_path)
    assert found.checkpoint is not None
    assert found.checkpoint.name == complete
    assert [passed.name for passed in found.skipped] == [gone, cut, flipped]
    assert "missing" in found.skipped[0].reason
    assert "manifest.json" in found.skipped[1].reason
    assert "00000-of-00001.safetensors, tensor 'model/scale'" in found.skipped[2].reason


def test_without_a_complete_checkpoint_latest_returns_every_reason(tmp_path: Path) -> None:
    name = _save(tmp_path, 0, 1)
    shutil.rmtree(tmp_path / name)
    (tmp_path / name).mkdir()
    found = checkpoints.latest(tmp_path)
    assert found.checkpoint is None
    assert [passed.name for passed in found.skipped] == [name]


def _branched(root: Path) -> dict[tuple[int, int], str]:
    """Generation 2 began at step 200 of generation 1, which had continued to 300."""
    names = {(1, step): _save(root, 1, step, (1, 0)) for step in (100, 200, 300)}
    names[2, 250] = _save(root, 2, 250, (1, 0), (2, 200))
    return names


def test_an_abandoned_branch_is_skipped_when_falling_back(tmp_path: Path) -> None:
    names = _branched(tmp_path)
    _damage(tmp_path, names[2, 250])
    found = checkpoints.latest(tmp_path)
    assert found.checkpoint is not None
    assert found.checkpoint.name == names[1, 200]
    reasons = {passed.name: passed.reason for passed in found.skipped}
    assert set(reasons) == {names[2, 250], names[1, 300]}
    assert "generation 2 began at step 200 of generation 1" in reasons[names[1, 300]]


def test_an_abandoned_branch_is_used_last_and_only_without_a_lineage(tmp_path: Path) -> None:
    names = _branched(tmp_path)
    for key in ((2, 250), (1, 200), (1, 100)):
        _damage(tmp_path, names[key])
    found = checkpoints.latest(tmp_path)
    assert found.checkpoint is not None
    assert found.checkpoint.name == names[1, 300]
    strict = checkpoints.latest(tmp_path, lineage=[(1, 0), (2, 200)])
    assert strict.checkpoint is None
    assert {passed.name for passed in strict.skipped} == set(names.values())


def test_a_given_lineage_takes_precedence_over_the_newest(tmp_path: Path) -> None:
    names = _branched(tmp_path)
    other = _save(tmp_path, 3, 999, (3, 0))
    found = checkpoints.latest(tmp_path, lineage=[(1, 0), (2, 200)])
    assert found.checkpoint is not None
    assert found.checkpoint.name == names[2, 250]
    assert found.skipped == (
        checkpoints.SkippedCheckpoint(other, "abandoned: generation 3 is not in the lineage"),
    )


def test_derive_lineage_extends_the_lineage_of_the_origin(tmp_path: Path) -> None:
    assert checkpoints.derive_lineage(None, 1) == (checkpoints.Ancestor(1, 0),)
    _save(tmp_path, 1, 200, (1, 0))
    (origin,) = checkpoints.list_checkpoints(tmp_path)
    lineage = checkpoints.derive_lineage(origin, 4)
    assert lineage == (checkpoints.Ancestor(1, 0), checkpoints.Ancestor(4, 200))
    assert checkpoints.derive_lineage(origin, 1) == origin.lineage
    newest = save_all(tmp_path, {}, step=201, generation=4, lineage=lineage)
    found = checkpoints.latest(tmp_path, lineage=lineage)
    assert found.checkpoint is not None
    assert found.checkpoint.name == newest


def test_later_steps_of_an_isolated_generation_do_not_win(tmp_path: Path) -> None:
    """Generation 1, isolated, continues to 900 while generation 2 trains from 200."""
    names = _branched(tmp_path)
    _save(tmp_path, 1, 900, (1, 0))
    found = checkpoints.latest(tmp_path)
    assert found.checkpoint is not None
    assert found.checkpoint.name == names[2, 250]


@pytest.mark.parametrize("began", [[(1, 0), (1, 5)], [(2, 0), (1, 5)], [(1, -1)]])
def test_an_invalid_lineage_is_rejected(tmp_path: Path, began: list[tuple[int, int]]) -> None:
    with pytest.raises(checkpoints.ArgumentError, match="lineage"):
        checkpoints.latest(tmp_path, lineage=began)
