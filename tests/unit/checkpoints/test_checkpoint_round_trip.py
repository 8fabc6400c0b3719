"""A saved state is restored bit for bit, at any world size, into new or live tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.checkpoint_states import bits, flip, odd_state, same, save_all, small_state
from safetensors.torch import load_file

import checkpoints
from checkpoints import tensors


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("chunk_bytes", [16 << 20, 64])
def test_every_kind_of_leaf_is_restored_bit_for_bit(
    tmp_path: Path, world_size: int, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "CHUNK_BYTES", chunk_bytes)
    state = odd_state()
    name = save_all(tmp_path, state, step=3, world_size=world_size)
    loaded = checkpoints.load(tmp_path, name).state
    assert same(loaded, state)
    assert loaded["embedding"] is loaded["head"]  # tied before, tied after


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_a_part_may_be_one_element_of_a_strided_tensor(tmp_path: Path, world_size: int) -> None:
    """torch calls such a slice contiguous, and then refuses to view it as bytes."""
    state = {
        "w": torch.arange(4.0, dtype=torch.bfloat16).reshape(2, 2).t(),
        "one": torch.ones(4)[::4],
    }
    name = save_all(tmp_path, state, step=1, world_size=world_size)
    assert same(checkpoints.load(tmp_path, name).state, state)


def test_tied_tensors_are_written_once(tmp_path: Path) -> None:
    weight = torch.randn(1000)
    saved = checkpoints.save(tmp_path, {"a": weight, "b": weight}, step=1, nonce="aa")
    info = checkpoints.verify(tmp_path, saved.name)
    assert info.tensor_count == 1
    assert info.size_bytes < 2 * weight.nbytes


@pytest.mark.slow
def test_ten_thousand_small_tensors_are_restored(tmp_path: Path) -> None:
    state = {str(i): torch.tensor([i]) for i in range(10_000)}
    name = save_all(tmp_path, state, step=1, world_size=2)
    assert same(checkpoints.load(tmp_path, name).state, state)


def test_every_writer_writes_a_part_of_equal_size(tmp_path: Path) -> None:
    state = {"big": torch.zeros(100_000), "small": torch.zeros(1000, dtype=torch.uint8)}
    sizes = [
        checkpoints.save(tmp_path, state, step=1, nonce="aa", rank=rank, world_size=4).bytes_written
        for rank in range(4)
    ]
    total = 401_000
    assert all(total / 4 <= size <= total / 4 + 3000 for size in sizes)


def test_a_checkpoint_of_one_writer_is_an_ordinary_safetensors_file(tmp_path: Path) -> None:
    state = {"fc.weight": torch.randn(3, 4), "flag": torch.tensor([True]), "none": torch.zeros(0)}
    name = save_all(tmp_path, state, step=1)
    assert same(
        dict(load_file(tmp_path / name / "00000-of-00001.safetensors")),
        {key: state[key] for key in load_file(tmp_path / name / "00000-of-00001.safetensors")},
    )
    assert set(load_file(tmp_path / name / "00000-of-00001.safetensors")) == set(state)


@pytest.mark.parametrize("world_size", [1, 3])
def test_odd_names_and_types_still_make_readable_safetensors(
    tmp_path: Path, world_size: int
) -> None:
    state = {**odd_state(), "x": torch.zeros(9), "x[0:3]": torch.zeros(2)}
    name = save_all(tmp_path, state, step=1, world_size=world_size)
    files = [load_file(file) for file in (tmp_path / name).glob("*.safetensors")]
    assert len(files) >= world_size and all(files)


def test_into_copies_into_the_live_tensors(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    name = save_all(tmp_path, {"model": model.state_dict(), "epoch": 4}, step=1)
    before = {key: bits(value) for key, value in model.state_dict().items()}
    weight = model.weight
    with torch.no_grad():
        weight.zero_()
        model.bias.zero_()
    loaded = checkpoints.load(tmp_path, name, into={"model": model.state_dict()})
    assert model.weight is weight
    assert {key: bits(value) for key, value in model.state_dict().items()} == before
    assert loaded.state["epoch"] == 4
    assert loaded.state["model"]["weight"].data_ptr() == weight.data_ptr()


def test_into_writes_through_views_that_are_not_contiguous(tmp_path: Path) -> None:
    name = save_all(tmp_path, {"w": torch.arange(6.0).reshape(2, 3)}, step=1)
    live = torch.zeros(3, 2).t()
    checkpoints.load(tmp_path, name, into={"w": live})
    assert torch.equal(live, torch.arange(6.0).reshape(2, 3))


def _other_model() -> dict[str, Any]:
    return {
        "model": {
            "weight": torch.zeros(7, 4),
            "bias": torch.zeros(5, dtype=torch.int64),
            "gamma": torch.zeros(1),
        }
    }


def test_a_checkpoint_of_another_model_is_rejected_with_a_list(tmp_path: Path) -> None:
    name = save_all(tmp_path, small_state(9), step=9)
    live = _other_model()
    with pytest.raises(checkpoints.StateMismatch) as caught:
        checkpoints.load(tmp_path, name, into=live)
    error = caught.value
    assert error.missing == ("model/gamma",)
    assert error.extra == ("model/scale", "optimizer/state/0/step")
    assert len(error.mismatched) == 1
    assert "saved float32[7, 3], here float32[7, 4]" in str(error)
    assert same(live, _other_model())


def test_non_strict_load_copies_matching_tensors_and_lists_the_rest(tmp_path: Path) -> None:
    name = save_all(tmp_path, small_state(9), step=9)
    live = _other_model()
    loaded = checkpoints.load(tmp_path, name, into=live, strict=False)
    assert torch.equal(live["model"]["bias"], torch.full((5,), 9))
    assert torch.equal(live["model"]["weight"], torch.zeros(7, 4))
    assert torch.equal(loaded.state["model"]["weight"], torch.full((7, 3), 9.0))
    assert [line.split(" ")[0].rstrip(":") for line in loaded.unmatched] == [
        "model/gamma",
        "model/scale",
        "optimizer/state/0/step",
        "model/weight",
    ]


def test_a_damaged_tensor_leaves_live_ones_untouched(tmp_path: Path) -> None:
    name = save_all(tmp_path, small_state(9), step=9, world_size=2)
    last = tmp_path / name / "00001-of-00002.safetensors"
    flip(last, last.stat().st_size - 1)
    live = small_state(0)
    with pytest.raises(checkpoints.CorruptCheckpoint) as caught:
        checkpoints.load(tmp_path, name, into=live)
    assert caught.value.file == f"{name}/00001-of-00002.safetensors"
    assert caught.value.tensor == "model/scale"
    assert same(live, small_state(0))


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"a": [object()]}, "state['a/0']"),
        ({"a": torch.ones(2).to_sparse()}, "state['a']"),
        ({"a": torch.empty(2, device="meta")}, "state['a']"),
        ({"a": 2**5000}, "state['a']"),
        ({"a": {2**5000: torch.ones(2)}}, "state['a']"),
        ({"a": {10**5000: 1}}, "state['a']"),
    ],
)
def test_an_unsupported_state_is_rejected_before_anything_is_written(
    tmp_path: Path, state: object, place: str
) -> None:
    with pytest.raises(checkpoints.StateError, match="^" + place.replace("[", r"\[")):
        checkpoints.save(tmp_path / "new", state, step=1, nonce="aa")
    assert not (tmp_path / "new").exists()


def test_a_state_that_contains_itself_is_rejected(tmp_path: Path) -> None:
    state: dict[str, Any] = {}
    state["again"] = state
    with pytest.raises(checkpoints.StateError, match="contain itself"):
        checkpoints.save(tmp_path, state, step=1, nonce="aa")


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": -1},
        {"nonce": "../x"},
        {"nonce": ""},
        {"rank": 2, "world_size": 2},
        {"world_size": 0},
        {"lineage": [(3, 0), (2, 5)], "generation": 2},
        {"lineage": [(1, 0)], "generation": 2},
        {"lineage": [(2, 9)], "generation": 2},
        {"data_position": float("nan")},
    ],
)
def test_invalid_arguments_are_rejected(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises((checkpoints.ArgumentError, checkpoints.StateError)):
        checkpoints.save(tmp_path, {}, **{"step": 1, "nonce": "aa", **wrong})
    assert list(tmp_path.iterdir()) == []


def test_data_position_lineage_and_time_are_stored(tmp_path: Path) -> None:
    saved = checkpoints.save(
        tmp_path,
        {},
        step=12,
        nonce="aa",
        generation=3,
        lineage=[(1, 0), (3, 10)],
        data_position={"epoch": 2, "index": 7},
        clock=lambda: 1234.5,
    )
    (info,) = checkpoints.list_checkpoints(tmp_path)
    assert (info.name, info.data_position, info.wall_time_s) == (
        saved.name,
        {"epoch": 2, "index": 7},
        1234.5,
    )
    assert info.lineage == (checkpoints.Ancestor(1, 0), checkpoints.Ancestor(3, 10))
    assert json.dumps(dict(info.versions))


def test_loading_a_missing_checkpoint_raises_not_found(tmp_path: Path) -> None:
    for name in ("step-000000001.g0.aa", "../etc", "LATEST"):
        with pytest.raises(checkpoints.CheckpointNotFound):
            checkpoints.load(tmp_path, name)
    assert checkpoints.latest(tmp_path / "nowhere").checkpoint is None
    assert checkpoints.list_checkpoints(tmp_path / "nowhere") == ()


def test_a_relative_folder_stays_the_same_after_chdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hydra changes the working directory of a script."""
    monkeypatch.chdir(tmp_path)
    storage = checkpoints.LocalStorage("ckpt")
    (tmp_path / "outputs").mkdir()
    monkeypatch.chdir(tmp_path / "outputs")
    saved = checkpoints.save(storage, {"weight": torch.ones(2)}, step=1, nonce="ab")
    assert [i.name for i in checkpoints.list_checkpoints(tmp_path / "ckpt")] == [saved.name]
    assert (storage.place, storage.folder) == ("ckpt", str(tmp_path / "ckpt"))
    assert list((tmp_path / "outputs").iterdir()) == []
