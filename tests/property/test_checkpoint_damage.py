"""Any byte of any file flipped, any file truncated or extended: rejected, named, and skipped."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import checkpoints

Pristine = dict[str, bytes]
STATE = {
    "weight": torch.arange(60, dtype=torch.float32).reshape(6, 10),
    "bias": torch.arange(9, dtype=torch.int64),
    "flags": torch.tensor([True, False]),
    "lr": 0.1,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damaged")
    for step in (1, 2):
        for rank in range(3):
            checkpoints.save(folder, STATE, step=step, nonce="aa", rank=rank, world_size=3)
    return folder


NAME = "step-000000002.g0.aa"


@pytest.fixture(scope="module")
def pristine(root: Path) -> Pristine:
    return {path.name: path.read_bytes() for path in sorted((root / NAME).iterdir())}


@st.composite
def damages(draw: st.DrawFn) -> tuple[int, str, float, int]:
    kind = draw(st.sampled_from(["flip", "flip", "cut", "grow", "remove", "zero"]))
    where = draw(st.floats(0, 1, exclude_max=True))
    return draw(st.integers(0, 3)), kind, where, draw(st.integers(1, 255))


def _damaged(data: bytes, kind: str, at: int, mask: int) -> bytes | None:
    if kind == "flip":
        return data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]
    if kind == "zero":
        return data[:at] + bytes(len(data) - at)
    return {"cut": data[:at], "grow": data + bytes([mask]), "remove": None}[kind]


def _tensors_at(root: Path, file: str, at: int) -> set[str]:
    """The tensors that contain a byte of a file, according to the intact manifest of step 1."""
    import json

    manifest = json.loads((root / "step-000000001.g0.aa" / "manifest.json").read_bytes())
    return {
        name
        for name, tensor in manifest["tensors"].items()
        for chunk in tensor["chunks"]
        if chunk["file"] == file and chunk["bytes"][0] <= at < chunk["bytes"][1]
    }


@given(damage=damages())
def test_any_damage_is_rejected_named_and_skipped(
    root: Path, pristine: Pristine, damage: tuple[int, str, float, int]
) -> None:
    index, kind, where, mask = damage
    file = list(pristine)[index]
    data = pristine[file]
    at = int(where * len(data))
    damaged = _damaged(data, kind, at, mask)
    if damaged == data:
        return  # zeros over zeros
    path = root / NAME / file
    try:
        path.unlink()
        if damaged is not None:
            path.write_bytes(damaged)
        live = {key: torch.zeros_like(v) for key, v in STATE.items() if torch.is_tensor(v)}
        with pytest.raises(checkpoints.LoadError) as caught:
            checkpoints.load(root, NAME, into=live)
        assert not any(bool(tensor.any()) for tensor in live.values())
        if file != "manifest.json":
            assert isinstance(caught.value, checkpoints.CorruptCheckpoint)
            assert caught.value.file == f"{NAME}/{file}"
            if kind == "flip" and (tensors := _tensors_at(root, file, at)):
                assert caught.value.tensor in tensors
        found = checkpoints.latest(root)
        assert found.checkpoint is not None
        assert found.checkpoint.step == 1
        # Without its manifest it is not a checkpoint, but the folder is still reported.
        assert [passed.name for passed in found.skipped] == [NAME]
        assert file in found.skipped[0].reason or kind == "remove"
    finally:
        shutil.rmtree(root / NAME)
        (root / NAME).mkdir()
        for name, content in pristine.items():
            (root / NAME / name).write_bytes(content)
