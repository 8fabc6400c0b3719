"""The on-disk format of sharded tensors: a fixed checkpoint that must load, and the schema."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import torch
from jsonschema import Draft202012Validator

import checkpoints

FORMAT_1 = Path(__file__).parents[2] / "data" / "checkpoint_format_1_sharded"
NAME = "step-000000001.g0.aa"
DTYPES = {"wide": torch.bfloat16, "thin": torch.int64, "deep": torch.float64}
SHAPES = {
    "even": (12, 4),
    "uneven": (5, 3),
    "wide": (3, 17),
    "thin": (1, 4),
    "deep": (4, 6, 5),
    "none": (0, 3),
    "scalar": (),
}


def test_a_sharded_checkpoint_of_format_1_loads() -> None:
    """Written by four ranks of a 2x2 mesh. Never regenerate it: it must remain loadable."""
    state = checkpoints.load(FORMAT_1, NAME).state
    assert set(state["sharded"]) == set(SHAPES)
    for name, shape in SHAPES.items():
        count = torch.Size(shape).numel()
        expected = torch.arange(1, count + 1).reshape(shape).to(DTYPES.get(name, torch.float32))
        assert state["sharded"][name].dtype == expected.dtype
        assert torch.equal(state["sharded"][name], expected)
    assert torch.equal(state["plain"], torch.arange(1000.0))
    assert state["tied"] is state["sharded"]["even"]


def test_the_manifest_conforms_to_the_schema_and_has_regions() -> None:
    schema = json.loads((resources.files("checkpoints") / "manifest.schema.json").read_text())
    manifest = json.loads((FORMAT_1 / NAME / "manifest.json").read_bytes())
    Draft202012Validator(schema).validate(manifest)
    kinds = {
        kind
        for tensor in manifest["tensors"].values()
        for chunk in tensor["chunks"]
        for kind in ("span", "box")
        if kind in chunk
    }
    assert kinds == {"span", "box"}
