"""Malicious manifests are rejected, without access outside the folder or large allocations."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.checkpoint_states import flip, save_all

import checkpoints
from checkpoints.manifest import digest
from checkpoints.storage import LocalStorage

Fields = dict[str, Any]


@pytest.fixture
def name(tmp_path: Path) -> str:
    return save_all(
        tmp_path,
        {"w": torch.arange(8.0).reshape(2, 4), "v": torch.ones(3), "n": 1, "h": []},
        step=1,
        world_size=2,
    )


def _rewrite(folder: Path, change: Callable[[Fields], object]) -> None:
    """Change the manifest and update its checksum, as an attacker would."""
    fields = json.loads((folder / "manifest.json").read_bytes())
    del fields["xxh3_128"]
    change(fields)
    (folder / "manifest.json").write_bytes(_checksummed_json(fields))


def _checksummed_json(fields: Fields) -> bytes:
    """Like the library's serializer, for values that it rejects: NaN is written as ``NaN``."""
    text = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in fields.items()) + "\n}\n"
    return _with_checksum(text.encode("ascii"))


def _with_checksum(body: bytes) -> bytes:
    return b'{"xxh3_128": "' + digest(body).encode() + b'",\n' + body


def _chunk(fields: Fields, tensor: str = "w", index: int = 0) -> Fields:
    chunk: Fields = fields["tensors"][tensor]["chunks"][index]
    return chunk


def _set(*path: str | int, to: object) -> Callable[[Fields], None]:
    def change(fields: Fields) -> None:
        at: Any = fields
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = to

    return change


CHUNK = ("tensors", "w", "chunks", 0)
OUTSIDE = [
    "../../../etc/passwd",
    "/etc/passwd",
    "..",
    "manifest.json",
    "00000-of-00001.safetensors",
]

MALICIOUS = {
    **{f"chunk file {f}": _set(*CHUNK, "file", to=f) for f in OUTSIDE},
    **{f"writer file {f}": _set("writers", 0, "file", to=f) for f in OUTSIDE},
    "chunk file null": _set(*CHUNK, "file", to=None),
    "absurd shape": _set("tensors", "w", "shape", to=[2**40, 2**40]),
    "absurd shape with zero": _set("tensors", "w", "shape", to=[0, 2**40, 2**40]),
    "large shape": _set("tensors", "w", "shape", to=[2**38]),
    "many dimensions": _set("tensors", "w", "shape", to=[1] * 1000),
    "negative shape": _set("tensors", "w", "shape", to=[-2, -4]),
    "float shape": _set("tensors", "w", "shape", to=[2.0, 4]),
    "bool shape": _set("tensors", "w", "shape", to=[True, 8]),
    "NaN offset": _set(*CHUNK, "bytes", to=[float("nan"), 16]),
    "infinite offset": _set(*CHUNK, "bytes", to=[0, float("inf")]),
    "huge offset": _set(*CHUNK, "bytes", to=[2**70, 2**70 + 16]),
    "negative offset": _set(*CHUNK, "bytes", to=[-16, 0]),
    "bytes reversed": _set(*CHUNK, "bytes", to=[200, 100]),
    "bytes in the header": _set(*CHUNK, "bytes", to=[0, 24]),
    "span outside": _set(*CHUNK, "span", to=[100, 6]),
    "span absurd": _set(*CHUNK, "span", to=[0, 2**61]),
    "overlapping spans": lambda f: _chunk(f, "w", 1).update(span=_chunk(f, "w", 0)["span"]),
    "a chunk twice": lambda f: f["tensors"]["w"]["chunks"].append(_chunk(f)),
    "a chunk missing": lambda f: f["tensors"]["w"]["chunks"].pop(),
    "no chunks": _set("tensors", "w", "chunks", to=[]),
    "bytes of another tensor": lambda f: _chunk(f, "v").update(
        bytes=[_chunk(f, "w", 1)["bytes"][0]] * 1 + [_chunk(f, "w", 1)["bytes"][0] + 12]
    ),
    "span and box": lambda f: _chunk(f).update(box=[[0], [6]]),
    "unknown dtype": _set("tensors", "w", "dtype", to="F7"),
    "dtype a list": _set("tensors", "w", "dtype", to=["F32"]),
    "hash null": _set(*CHUNK, "xxh3_128", to=None),
    "wrong hash": _set(*CHUNK, "xxh3_128", to="0" * 32),
    "size lies": _set("writers", 0, "size_bytes", to=10**15),
    "header larger than file": _set("writers", 0, "header_bytes", to=10**15),
    "writers twice": lambda f: f["writers"].append(f["writers"][0]),
    "world size absurd": _set("world_size", to=10**9),
    "world size zero": _set("world_size", to=0),
    "step of another": _set("step", to=2),
    "nonce of another": _set("nonce", to="bb"),
    "nonce a path": _set("nonce", to="../x"),
    "step a string": _set("step", to="1"),
    "step true": _set("step", to=True),
    "lineage goes back": _set("lineage", to=[[2, 0], [1, 5]]),
    "lineage malformed": _set("lineage", to=[[1]]),
    "tree names no tensor": _set("tree", to={"tensor": "nothing"}),
    "tree unknown node": _set("tree", to={"pickle": "gASV"}),
    "tree two kinds": _set("tree", to={"list": [], "tuple": []}),
    "tree a string": _set("tree", to="x"),
    "tree float": _set("tree", to={"float": "1e5"}),
    "tree infinite value": _set("tree", to={"value": float("inf")}),
    "tree key twice": _set("tree", to={"items": [[1, {"value": 1}], [1, {"value": 2}]]}),
    "tree key a list": _set("tree", to={"items": [[[], {"value": 1}]]}),
    "types no list": _set("types", to={}),
    "type of two": _set("types", to=[[[], "a:b"]]),
    "type path a string": _set("types", to=[["n", "a:b", None]]),
    "type path too long": _set("types", to=[[["n"] * 101, "a:b", None]]),
    "type path a list": _set("types", to=[[[["n"]], "a:b", None]]),
    "type name a number": _set("types", to=[[["n"], 1, None]]),
    "field missing": lambda f: f.pop("versions"),
    "field unknown": _set("extra", to=1),
    "time NaN": _set("wall_time_s", to=float("nan")),
    "versions numbers": _set("versions", to={"torch": 2}),
    "format zero": _set("format", to=0),
    "format true": _set("format", to=True),
}


@pytest.mark.parametrize("change", MALICIOUS.values(), ids=MALICIOUS.keys())
def test_a_malicious_manifest_is_rejected(
    tmp_path: Path, name: str, change: Callable[[Fields], object]
) -> None:
    _rewrite(tmp_path / name, change)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((checkpoints.CorruptCheckpoint, checkpoints.UnsupportedFormat)) as caught:
        checkpoints.load(tmp_path, name)
    assert name in str(caught.value)
    assert "its checksum does not match" not in str(caught.value)  # that comes later
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB
    found = checkpoints.latest(tmp_path)
    assert found.checkpoint is None
    assert found.skipped[0].name == name


@pytest.mark.parametrize(
    "body",
    [
        b'"format": ' + b"[" * 10_000_000,
        b'"format": ' + b'{"dict":' * 1_000_000,
        b'"format": ' + b"9" * 100_000 + b"}",
        b'"format": 1, "format": 1}',
        b'"format": 1',
        b"\xff\xfe}",
        b"}",
    ],
    ids=["brackets", "braces", "digits", "twice", "open", "not-utf8", "empty"],
)
def test_malicious_json_is_rejected(tmp_path: Path, name: str, body: bytes) -> None:
    (tmp_path / name / "manifest.json").write_bytes(_with_checksum(body))
    with pytest.raises(checkpoints.CorruptCheckpoint, match=r"manifest\.json"):
        checkpoints.load(tmp_path, name)


def test_a_deeply_nested_tree_is_rejected(tmp_path: Path, name: str) -> None:
    tree: Fields = {"value": 1}
    for _ in range(150):
        tree = {"list": [tree]}
    _rewrite(tmp_path / name, _set("tree", to=tree))
    with pytest.raises(checkpoints.CorruptCheckpoint, match="nested more than 100 levels deep"):
        checkpoints.load(tmp_path, name)


@pytest.mark.parametrize(
    ("kind", "detail"),
    [
        ("os:system", None),
        ("subprocess:Popen", None),
        ("builtins:print", None),
        ("nothing:x", None),
        ("torch.nn:Linear", None),
        ("numpy:void", None),
        ("builtins:bool", None),
        ("collections:deque", 1 << 80),
        ("collections:defaultdict", 99),
    ],
)
def test_only_types_of_values_are_created(
    tmp_path: Path, name: str, kind: str, detail: object
) -> None:
    where = "h" if kind.startswith("collections") else "n"
    _rewrite(tmp_path / name, _set("types", to=[[[where], kind, detail]]))
    with pytest.raises(checkpoints.LoadError, match=rf"state\['{where}'\] was saved as"):
        checkpoints.load(tmp_path, name)
    loaded = checkpoints.load(tmp_path, name, strict=False)
    assert loaded.state["n"] == 1 and loaded.state["h"] == [] and len(loaded.unmatched) == 1


def test_a_manifest_of_absurd_size_is_not_read(tmp_path: Path, name: str) -> None:
    with open(tmp_path / name / "manifest.json", "r+b") as file:
        file.truncate(1 << 40)  # sparse: it takes no space
    with pytest.raises(checkpoints.CorruptCheckpoint, match="too many for a manifest"):
        checkpoints.load(tmp_path, name)


def test_a_newer_format_asks_for_an_upgrade(tmp_path: Path, name: str) -> None:
    _rewrite(tmp_path / name, _set("format", to=2))
    with pytest.raises(checkpoints.UnsupportedFormat, match="Upgrade"):
        checkpoints.load(tmp_path, name)
    assert "format 2" in checkpoints.latest(tmp_path).skipped[0].reason


@pytest.mark.parametrize("file", ["manifest.json", "00000-of-00002.safetensors"])
def test_symlinks_and_pipes_are_not_opened(tmp_path: Path, name: str, file: str) -> None:
    real = tmp_path / name / file
    moved = tmp_path / "elsewhere"
    real.rename(moved)
    real.symlink_to(moved)
    with pytest.raises(checkpoints.LoadError):
        checkpoints.load(tmp_path, name)
    real.unlink()
    os.mkfifo(real)  # opening it would block until there is a writer
    with pytest.raises(checkpoints.LoadError):
        checkpoints.load(tmp_path, name)


def test_a_planted_symlink_is_not_followed_by_a_write(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    attempt = tmp_path / "root" / ".tmp-step-000000001.g0.aa"
    attempt.mkdir(parents=True)
    (attempt / "00000-of-00001.safetensors").symlink_to(victim)
    with pytest.raises(checkpoints.SaveError):
        checkpoints.save(tmp_path / "root", {"w": torch.ones(2)}, step=1, nonce="aa")
    assert victim.read_text() == "precious"


def test_regions_of_sharded_tensors_are_read_and_validated(tmp_path: Path, name: str) -> None:
    """This version writes spans for this tensor; sharded tensors are stored as regions."""
    halves = [torch.tensor([[0.0, 1.0], [4.0, 5.0]]), torch.tensor([[2.0, 3.0], [6.0, 7.0]])]
    name = save_all(tmp_path, {"w": torch.cat([half.reshape(-1) for half in halves])}, step=9)

    def change(fields: Fields) -> None:
        tensor = fields["tensors"]["w"]
        (old_chunk,) = tensor["chunks"]
        begin = old_chunk["bytes"][0]
        tensor["shape"] = [2, 4]
        tensor["chunks"] = [
            {
                "file": old_chunk["file"],
                "bytes": [begin + 16 * side, begin + 16 * side + 16],
                "box": [[0, 2 * side], [2, 2]],
                "xxh3_128": _hash(halves[side]),
            }
            for side in (0, 1)
        ]

    _rewrite(tmp_path / name, change)
    loaded = checkpoints.load(tmp_path, name).state["w"]
    assert torch.equal(loaded, torch.arange(8.0).reshape(2, 4))
    for box in ([[0, 1], [2, 2]], [[0, 0], [2, 2]], [[0, 3], [2, 2]], [[0], [4]], [[0, 2], [4, 1]]):
        _rewrite(tmp_path / name, _set("tensors", "w", "chunks", 1, "box", to=box))
        with pytest.raises(checkpoints.CorruptCheckpoint, match="region"):
            checkpoints.load(tmp_path, name)


def _hash(tensor: torch.Tensor) -> str:
    return digest(tensor.reshape(-1).view(torch.uint8).numpy().data)


def test_a_corrupt_part_is_never_committed(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, {"w": torch.ones(9)}, step=1, nonce="aa", world_size=2, rank=0)
    attempt = tmp_path / ".tmp-step-000000001.g0.aa"
    flip(attempt / "part-00000-of-00002.json", 200)
    saved = checkpoints.save(
        tmp_path, {"w": torch.ones(9)}, step=1, nonce="aa", world_size=2, rank=1
    )
    assert not saved.committed
    assert "part-00000-of-00002.json" in saved.notes[0]


@pytest.mark.timeout(60)
def test_a_pipe_with_the_name_of_an_old_checkpoint_is_removed(tmp_path: Path) -> None:
    """Opening it, as rmtree does, would wait for a writer."""
    for old in (f"step-{1:09d}.g0.aa", f".tmp-step-{2:09d}.g0.aa"):
        os.mkfifo(tmp_path / old)
        LocalStorage(tmp_path).remove_folder(old)
    assert os.listdir(tmp_path) == []
