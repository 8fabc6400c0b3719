"""The on-disk format: the schema, a fixed checkpoint that must remain loadable, public names."""

from __future__ import annotations

import collections
import inspect
import json
from importlib import resources
from pathlib import Path
from typing import Any, get_origin

import torch
from jsonschema import Draft202012Validator
from kit.checkpoint_states import odd_state, same, save_all

import checkpoints
from checkpoints import errors
from checkpoints.tensors import BY_NAME

FORMAT_1 = Path(__file__).parents[2] / "data" / "checkpoint_format_1"
NAME = "step-000000042.g3.3f9c"


def test_a_checkpoint_of_format_1_loads() -> None:
    """Written by three writers of version 0.1.0. Never regenerate it: it must remain loadable."""
    loaded = checkpoints.load(FORMAT_1, NAME)
    weight = torch.arange(40, dtype=torch.float32).reshape(5, 8) / 8
    assert same(
        loaded.state,
        {
            "model": {
                "fc.weight": weight,
                "fc.tied": weight,
                "half": torch.tensor([1.5, -2.25, float("inf")], dtype=torch.bfloat16),
                "float8": torch.tensor([0.5, -1.0], dtype=torch.float8_e4m3fn),
                "count": torch.tensor(7),
                "mask": torch.tensor([True, False, True]),
                "empty": torch.zeros(0, 4),
                "wave": torch.tensor([1 + 2j, -3j], dtype=torch.complex128),
            },
            "optimizer": {
                "state": {0: {"step": torch.tensor(42.0)}},
                "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [0]}],
            },
            "best": float("-inf"),
            "note": "Grüße",
        },
    )
    assert loaded.state["model"]["fc.weight"] is loaded.state["model"]["fc.tied"]
    info = loaded.info
    assert (info.step, info.generation, info.nonce, info.world_size) == (42, 3, "3f9c", 3)
    assert info.lineage == (checkpoints.Ancestor(1, 0), checkpoints.Ancestor(3, 30))
    assert info.data_position == {"epoch": 1, "index": 10}
    assert info.wall_time_s == 1_700_000_000.0
    found = checkpoints.latest(FORMAT_1).checkpoint
    assert found is not None
    assert found.name == NAME


def _schema() -> dict[str, Any]:
    text = resources.files("checkpoints").joinpath("manifest.schema.json").read_text()
    schema: dict[str, Any] = json.loads(text)
    Draft202012Validator.check_schema(schema)
    return schema


def test_manifests_conform_to_the_schema(tmp_path: Path) -> None:
    state = {**odd_state(), "window": collections.deque([1], 3), "size": torch.Size([2])}
    name = save_all(tmp_path, state, step=1, generation=2, lineage=[(1, 0), (2, 1)], world_size=3)
    validator = Draft202012Validator(_schema())
    for path in (tmp_path / name, FORMAT_1 / NAME):
        manifest = json.loads((path / "manifest.json").read_bytes())
        assert [error.message for error in validator.iter_errors(manifest)] == []


def test_the_schema_rejects_invalid_manifests() -> None:
    validator = Draft202012Validator(_schema())
    good = json.loads((FORMAT_1 / NAME / "manifest.json").read_bytes())
    for change in (
        {"format": 2},
        {"step": -1},
        {"nonce": "../x"},
        {"extra": 1},
        {"tree": {"pickle": "x"}},
        {"tensors": {"w": {"dtype": "F7", "shape": [], "chunks": []}}},
    ):
        assert not validator.is_valid({**good, **change}), change


def test_the_schema_lists_every_element_type() -> None:
    enum = _schema()["$defs"]["tensor"]["properties"]["dtype"]["enum"]
    assert set(BY_NAME) <= set(enum)


def test_every_public_name_exists_and_is_documented() -> None:
    assert checkpoints.__all__ == sorted(checkpoints.__all__)
    for name in checkpoints.__all__:
        public = getattr(checkpoints, name)
        if get_origin(public) is not None:
            continue  # an alias, which is a class in Python 3.10
        if inspect.isclass(public) or inspect.isfunction(public):
            assert public.__doc__, name


def test_every_error_is_public_and_in_the_documented_tree() -> None:
    tree = str(errors.__doc__)
    for name, thing in vars(errors).items():
        if isinstance(thing, type) and issubclass(thing, Exception):
            assert name in tree
            assert name in checkpoints.__all__
            assert issubclass(thing, checkpoints.CheckpointError)
