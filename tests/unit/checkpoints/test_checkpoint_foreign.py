"""Round trips through other formats, read by their own libraries."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.checkpoint_states import odd_state, same, save_all, small_state
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import checkpoints
from checkpoints.tools import Format


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def round_trip(root: Path, state: Any, form: Format, world_size: int = 1) -> Any:
    name = save_all(root, state, step=3, world_size=world_size)
    target = root.parent / f"exported.{form}"
    checkpoints.export_to(root, name, target, form)
    assert [p.name for p in root.parent.iterdir() if p.name.startswith(".")] == []
    return checkpoints.import_from(target, form, trust=form == "dcp")


@pytest.mark.parametrize("form", ["torch", "dcp", "safetensors"])
def test_an_exported_state_is_imported_unchanged(root: Path, form: Format) -> None:
    assert same(round_trip(root, small_state(3), form, world_size=2), small_state(3))


@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_unusual_states_survive_export_and_import(root: Path, form: Format) -> None:
    state = odd_state()
    del state["complex128"]
    assert same(round_trip(root, state, form), state)


@pytest.mark.parametrize(
    "state",
    [
        {"x": [(), {}]},
        {"w": torch.ones(1), "h": [{}, torch.ones(1)], "e": [[], ({}, None)]},
        {"opt": torch.optim.AdamW(torch.nn.Linear(2, 2).parameters()).state_dict(), "l": [[]]},
    ],
)
def test_empty_containers_survive_dcp(root: Path, state: Any) -> None:
    """torch's own reader cannot read the first two."""
    assert same(round_trip(root, state, "dcp"), state)


def test_a_failure_of_dcp_is_a_load_error(root: Path, tmp_path: Path) -> None:
    dcp_save({"x": [(), {}]}, checkpoint_id=tmp_path / "foreign", no_dist=True)
    with pytest.raises(checkpoints.ReadFailed, match="Missing key"):
        checkpoints.import_from(tmp_path / "foreign", "dcp", trust=True)


def test_dcp_loads_an_export_into_live_tensors(root: Path) -> None:
    round_trip(root, small_state(3), "dcp")
    live = {"model": {k: torch.zeros_like(v) for k, v in small_state(3)["model"].items()}}
    dcp_load(live, checkpoint_id=root.parent / "exported.dcp", no_dist=True)
    assert same(live["model"], small_state(3)["model"])


def test_the_safetensors_library_reads_an_export(root: Path) -> None:
    round_trip(root, small_state(3), "safetensors")
    tensors = load_file(root.parent / "exported.safetensors")
    assert same(tensors["model/weight"], small_state(3)["model"]["weight"])


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("form", ["torch", "safetensors"])
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("name", ["generator", True])
def test_a_model_is_exported_as_its_state_dict(
    root: Path, form: Format, is_compiled: bool, name: str | bool
) -> None:
    """Of a job, and with one model of a program of its own; also of a compiled model."""
    model = Tied()
    saved = torch.compile(model) if is_compiled else model
    assert isinstance(saved, torch.nn.Module)
    models = {"generator": saved.state_dict()}
    state = {"model": models if name is True else {**models, "critic": small_state(3)["model"]}}
    target = root.parent / "exported"
    checkpoints.export_to(root, save_all(root, state, step=3), target, form, model=name)
    read = load_file(target) if form == "safetensors" else torch.load(target, weights_only=True)
    other = Tied()
    other.load_state_dict(read)
    assert same(dict(other.state_dict()), dict(model.state_dict()))


def test_the_model_to_export_must_exist(root: Path) -> None:
    target = root.parent / "exported"
    several = {"model": {"net": {"w": torch.ones(1)}, "critic": {"w": torch.ones(1)}}}
    name = save_all(root, several, step=1)
    for model, reason in ((True, "has several models"), ("nte", "has no model named 'nte'")):
        with pytest.raises(checkpoints.ArgumentError, match=reason) as raised:
            checkpoints.export_to(root, name, target, "torch", model=model)
        assert "net, critic" in str(raised.value)
    name = save_all(root, {"model": {"w": torch.ones(1)}}, step=2)
    checkpoints.export_to(root, name, target, "torch", model=True)
    assert same(torch.load(target), {"w": torch.ones(1)})
    name = save_all(root, {"w": torch.ones(1)}, step=3)
    with pytest.raises(checkpoints.ArgumentError, match="has no entry 'model'"):
        checkpoints.export_to(root, name, target.with_name("other"), "torch", model=True)


def test_a_pickle_that_runs_code_is_rejected(root: Path, tmp_path: Path) -> None:
    import pickle

    class Bad:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    (tmp_path / "bad.pt").write_bytes(pickle.dumps(Bad()))
    with pytest.raises(checkpoints.LoadError):
        checkpoints.import_from(tmp_path / "bad.pt", "torch")
    with pytest.raises(checkpoints.ArgumentError, match="pickle"):
        checkpoints.import_from(tmp_path, "dcp")
    assert not (tmp_path / "ran").exists()


def test_export_overwrites_nothing_and_leaves_no_partial_files(root: Path, tmp_path: Path) -> None:
    name = save_all(root, odd_state(), step=1)
    (tmp_path / "there").write_text("mine")
    with pytest.raises(checkpoints.ArgumentError, match="exists"):
        checkpoints.export_to(root, name, tmp_path / "there", "torch")
    with pytest.raises(checkpoints.StateError, match="complex128"):
        checkpoints.export_to(root, name, tmp_path / "x.safetensors", "safetensors")
    with pytest.raises(checkpoints.SaveError):
        checkpoints.export_to(root, name, tmp_path / "no" / "folder", "torch")
    assert (tmp_path / "there").read_text() == "mine"
    assert {p.name for p in tmp_path.iterdir()} == {"there", "checkpoints"}


@pytest.mark.parametrize(
    ("form", "save", "stem", "suffix"),
    [
        ("safetensors", save_file, "model", ".safetensors"),
        ("safetensors", save_file, "diffusion_pytorch_model.fp16", ".safetensors"),
        ("torch", torch.save, "pytorch_model", ".bin"),
    ],
)
def test_a_sharded_model_of_hugging_face_is_imported(
    tmp_path: Path, form: Any, save: Callable[..., None], stem: str, suffix: str
) -> None:
    """One file for each part of the model, and an index of the tensors' files."""
    folder, state = tmp_path / "model", {"a": torch.arange(3.0), "b": torch.ones(2, 2)}
    folder.mkdir()
    files = {"a": f"{stem}-00001-of-00002{suffix}", "b": f"{stem}-00002-of-00002{suffix}"}
    for name, file in files.items():
        save({name: state[name]}, folder / file)
    index = folder / f"{stem}{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    for source in (folder, index):
        assert same(checkpoints.import_from(source, form), state)
    index.write_text(json.dumps({"weight_map": {"a": f"../outside{suffix}"}}))
    with pytest.raises(checkpoints.LoadError, match="no name of a file"):
        checkpoints.import_from(folder, form)
    index.unlink()
    with pytest.raises(checkpoints.LoadError, match=r"has 2 files .*, and 0 files"):
        checkpoints.import_from(folder, form)


def test_a_file_with_other_objects_is_refused_with_a_way_to_convert_it(tmp_path: Path) -> None:
    torch.save({"args": Namespace(lr=0.1), "model": torch.ones(2)}, tmp_path / "saved.pt")
    with pytest.raises(checkpoints.LoadError) as refused:
        checkpoints.import_from(tmp_path / "saved.pt", "torch")
    assert "objects of argparse.Namespace" in str(refused.value)
    assert "torch.save(loaded['model']" in str(refused.value)
    assert "add_safe_globals" not in str(refused.value)
