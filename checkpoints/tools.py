"""Compare, convert and prune checkpoints."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from checkpoints.commit import committed_names, read_manifest
from checkpoints.errors import (
    ArgumentError,
    CheckpointError,
    CorruptCheckpoint,
    LoadError,
    NotWritable,
    ReadFailed,
    StateError,
    WriteFailed,
)
from checkpoints.loading import load, verify
from checkpoints.manifest import Manifest, TensorEntry
from checkpoints.names import CheckpointName
from checkpoints.objects import Root, storage_for
from checkpoints.policies import RetentionFunction, Validity, to_remove
from checkpoints.reader import TensorBuffer, into_buffers, read_chunks
from checkpoints.retention import remove_committed, validity_of
from checkpoints.storage import Storage, patient, reading, writing
from checkpoints.tiers import readable
from checkpoints.torch_private import load_dcp, load_dcp_leaves
from checkpoints.tree import check_tree, flatten, path_name, tensor_leaves, unflatten
from checkpoints.values import plain_form

# ----------------------------------------------------------------------------
# Compares two checkpoints tensor by tensor, with one tensor of each in memory at a time.


@dataclass(frozen=True)
class Difference:
    """A tensor that differs between two checkpoints, and how."""

    tensor: str
    what: str


def compare(
    root: Root, old: str, new: str, *, progress: Callable[[int], object] | None = None
) -> tuple[Difference, ...]:
    """The differences between the tensors of two checkpoints, ordered by path.

    Tensors whose chunks have equal places and hashes are equal and are not read. ``progress`` is
    called with the number of bytes processed; their sum is the size of both checkpoints.
    Raises the same errors as :func:`checkpoints.load`.
    """
    storage = readable(root)
    sides = tuple(_Side(storage, read_manifest(storage, name)) for name in (old, new))
    before, after = sides
    differences = []
    for path in sorted(before.leaves.keys() | after.leaves.keys()):
        what = _difference(before, after, path)
        if what:
            differences.append(Difference(path, what))
        if progress is not None:
            progress(sum(side.size_bytes(path) for side in sides))
    return tuple(differences)


class _Side:
    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self._storage = storage
        self._manifest = manifest
        self.leaves = tensor_leaves(manifest.tree)

    def tensor(self, path: str) -> TensorEntry | None:
        name = self.leaves.get(path)
        return None if name is None else self._manifest.tensors[name]

    def size_bytes(self, path: str) -> int:
        tensor = self.tensor(path)
        return 0 if tensor is None else tensor.spec.size_bytes

    def read(self, tensor: TensorEntry) -> torch.Tensor:
        """The verified elements of a tensor."""
        name = tensor.spec.name
        buffers = {name: TensorBuffer(tensor.spec)}
        target, done = into_buffers(buffers)
        items = [(tensor, chunk) for chunk in tensor.chunks]
        read_chunks(self._storage, self._manifest, items, target, headers=(), done=done)
        return buffers[name].tensor


def _difference(before: _Side, after: _Side, path: str) -> str:
    old, new = before.tensor(path), after.tensor(path)
    if old is None or new is None:
        return f"only in the {'new' if old is None else 'old'} one"
    if (old.spec.dtype, old.spec.shape) != (new.spec.dtype, new.spec.shape):
        return f"{_form(old)} became {_form(new)}"
    if {(c.place, c.xxh3_128) for c in old.chunks} == {(c.place, c.xxh3_128) for c in new.chunks}:
        return ""
    return _by_element(before.read(old), after.read(new))


def _form(tensor: TensorEntry) -> str:
    return f"{tensor.spec.dtype} {list(tensor.spec.shape)}"


def _by_element(old: torch.Tensor, new: torch.Tensor) -> str:
    if torch.equal(_bytes(old), _bytes(new)):
        return ""  # equal, but written at different world sizes
    wide = torch.complex128 if old.is_complex() else torch.float64
    difference = (new.to(wide) - old.to(wide)).abs()
    count = int((difference != 0).sum())  # NaN differs from everything
    return f"{count} of {old.numel()} elements differ, by at most {float(difference.max()):.3g}"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


# ----------------------------------------------------------------------------
# Interoperability: torch.save, torch.distributed.checkpoint (DCP), safetensors.
#
# An export appears under its final name only once it is complete and durable. An import reads
# tensors and JSON values; torch.save files are read with ``weights_only=True``. DCP stores its
# metadata as a pickle, which can execute arbitrary code: reading one requires ``trust=True``.

Format = Literal["torch", "dcp", "safetensors"]
FORMATS: tuple[Format, ...] = ("torch", "dcp", "safetensors")
_INDEX = ".index.json"  # behind the suffix of its files, in Hugging Face's sharded models
_TREE = "checkpoints.tree"  # our key in the header of a safetensors file


def export_to(
    root: Root,
    name: str,
    target: str | os.PathLike[str],
    form: Format,
    *,
    model: str | bool = False,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Write a verified checkpoint as another format: a file, or DCP's folder.

    ``model``: write only the state dict of a model, as its ``load_state_dict`` takes it: of the one
    with that name, or of the only one (True). ``progress`` is called with the number of bytes of
    each chunk read.
    Raises the same errors as :func:`checkpoints.load`, :class:`ArgumentError` if the target exists
    or there is no such model, :class:`NotWritable` if its folder does not exist,
    :class:`DiskFull` if it has no space, and :class:`WriteFailed` if the state cannot be written in
    that format.
    """
    write = _of(_WRITERS, form)
    final = Path(target)
    if os.path.lexists(final):
        raise ArgumentError(f"{final} exists", hint="Remove it, or choose another target.")
    # Other programs need not have the classes of values.
    state, _ = plain_form(load(root, name, strict=False, progress=progress).state)
    if model:
        state = _state_dict_of(state, None if model is True else model, name)
        if form == "safetensors":
            _untie(state)
    if not final.parent.is_dir():
        raise NotWritable(
            f"there is no folder {final.parent}", hint="Create it, or choose another target."
        )
    private = final.with_name(f".{final.name}.{secrets.token_hex(4)}.tmp")
    with writing(str(final)):
        try:
            write(state, private)
            _make_durable(private)
            os.rename(private, final)
            _sync(final.parent)
        except (CheckpointError, OSError):
            raise
        except Exception as error:  # any failure of the other library
            raise WriteFailed(f"{name} cannot be written as {form}: {error}") from error
        finally:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                shutil.rmtree(private) if private.is_dir() else private.unlink()


def _state_dict_of(state: Any, model: str | None, name: str) -> dict[str, Any]:
    """The state dict of one model of a checkpoint, with the keys of the model before compilation.

    A job saves ``{"model": {name: state dict}, …}``; other programs usually ``{"model": state
    dict}``.
    """
    models = state.get("model") if isinstance(state, dict) else None
    if not isinstance(models, dict) or not models:
        raise ArgumentError(
            f"{name} has no entry 'model'", hint="Export the complete state, without a model."
        )
    if any(isinstance(value, torch.Tensor) for value in models.values()):
        models = {"model": models}
    chosen = next(iter(models)) if model is None and len(models) == 1 else model
    if chosen not in models:
        raise ArgumentError(
            f"{name} has several models"
            if model is None
            else f"{name} has no model named {model!r}",
            hint=f"Choose one of: {', '.join(map(str, models))}.",
        )
    return {str(key).replace("_orig_mod.", ""): value for key, value in models[chosen].items()}


def _untie(state: dict[str, Any]) -> None:
    """Copy tied tensors, so that a file has each of them under its own name."""
    seen: set[int] = set()
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            state[key] = value.clone() if id(value) in seen else value
            seen.add(id(value))


def import_from(source: str | os.PathLike[str], form: Format, *, trust: bool = False) -> Any:
    """Read the state from a file or folder of another format, for :func:`checkpoints.save`.

    ``trust`` is required for DCP, whose metadata is a pickle, and refused for other formats, where
    it has no effect: :class:`ArgumentError`. Raises :class:`ReadFailed`, a :class:`LoadError`, if
    the source is not of that format.
    """
    read = _of(_READERS, form)
    if form == "dcp" and not trust:
        raise ArgumentError(
            f"{source}: the metadata of torch.distributed.checkpoint is a pickle",
            hint="Reading it can execute arbitrary code; pass trust=True (--trust) if you trust "
            "its source.",
        )
    if trust and form != "dcp":
        raise ArgumentError(
            f"trust=True (--trust) has no effect on the format {form}: no file of it is unpickled",
            hint="Omit it; it is for DCP only.",
        )
    with reading(str(source)):
        try:
            return read(Path(source))
        except (LoadError, OSError):
            raise
        except Exception as error:  # any failure of the other library
            raise ReadFailed(
                f"{source} cannot be read as {form}: {error}",
                hint="Check its format. A torch.save file may contain only tensors and plain "
                "values.",
            ) from error


def _of(table: dict[Format, Any], form: Format) -> Callable[..., Any]:
    if form not in table:
        raise ArgumentError(f"unknown format {form!r}", hint=f"Known: {', '.join(FORMATS)}.")
    function: Callable[..., Any] = table[form]
    return function


def _write_torch(state: Any, path: Path) -> None:
    torch.save(state, path)


def _read_torch(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # torch's own text advises options of torch.load, which are not available here.
        refused = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"objects of {refused[1]}" if refused else "objects other than tensors"
        raise ReadFailed(
            f"{path} contains {what}: only tensors and plain values are imported, because "
            "loading other objects can execute code",
            hint="If you trust the file, load it with torch.load(…, weights_only=False), and save "
            "its tensors again: torch.save(loaded['model'], …).",
        ) from error


def _write_dcp(state: Any, path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    if not isinstance(state, dict):
        raise StateError("torch.distributed.checkpoint can only save a dict")
    # DCP turns dicts with int keys into lists and drops empty ones: the tree restores them.
    tree, _ = flatten(state)
    with warnings.catch_warnings():
        # torch warns that it saves in a single process, also if no_dist asks for that.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        with _dcp_errors():
            dcp_save({**state, _TREE: json.dumps(tree)}, checkpoint_id=path, no_dist=True)


def _read_dcp(path: Path) -> Any:
    with warnings.catch_warnings(), _dcp_errors():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        text, tensors = load_dcp_leaves(path, _TREE)
        if text is None:
            return load_dcp(path)
    return _in_tree(text, path, {path_name(p): t for p, t in tensors.items()}, by_path=True)


@contextlib.contextmanager
def _dcp_errors() -> Iterator[None]:
    """DCP's exception is a BaseException, which would end programs that catch every Exception."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        failures = "; ".join(str(failure[0]) for failure in error.failures.values())
        raise RuntimeError(failures or str(error)) from error


def _write_safetensors(state: Any, path: Path) -> None:
    from safetensors.torch import save_file

    tree, tensors = flatten(state)
    refused = [name for name, tensor in tensors.items() if tensor.dtype == torch.complex128]
    if refused:
        raise StateError(f"safetensors has no complex128: {refused[0]}")
    # Separate memory for each: safetensors rejects tensors that share memory.
    plain = {
        name: tensor.clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    save_file(plain, path, metadata={"format": "pt", _TREE: json.dumps(tree)})


def _read_parts(path: Path, suffix: str, read: Callable[[Path], Any]) -> Any:
    """The state of a file, or the tensors of a folder as Hugging Face's ``save_pretrained`` writes
    it: one file, or several and an index. ``path`` may be that index."""
    if path.name.endswith(f"{suffix}{_INDEX}"):
        return _read_indexed(path, read)
    if not path.is_dir():
        return read(path)
    indices, files = (sorted(path.glob(f"*{end}")) for end in (suffix + _INDEX, suffix))
    if len(indices) == 1:
        return _read_indexed(indices[0], read)
    if indices or len(files) != 1:
        raise ReadFailed(
            f"{path} has {len(files)} files *{suffix}, and {len(indices)} files *{suffix}{_INDEX}",
            hint="Give one file, one index, or a folder that save_pretrained has written.",
        )
    return read(files[0])


def _read_indexed(index: Path, read: Callable[[Path], Any]) -> Any:
    names: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
    tensors: dict[str, Any] = {}
    for file in sorted(set(names.values())):
        if Path(file).name != file:
            raise CorruptCheckpoint(f"{file!r} is no name of a file", file=str(index))
        tensors |= read(index.with_name(file))
    if missing := sorted(names.keys() - tensors.keys()):
        raise CorruptCheckpoint(f"no file has the tensor {missing[0]}", file=str(index))
    return {name: tensors[name] for name in names}


def _read_safetensors_file(path: Path) -> Any:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if _TREE not in metadata:
        return tensors
    return _in_tree(metadata[_TREE], path, tensors, by_path=False)


def _in_tree(text: str, path: Path, tensors: dict[str, torch.Tensor], *, by_path: bool) -> Any:
    """Rebuild the state from an untrusted tree and its tensors."""
    try:
        tree = json.loads(text)
        # Tied tensors share a name, but each has its own path.
        problem = check_tree(tree, _AnyName() if by_path else tensors)
        if problem is None:
            return unflatten(tree, lambda p, name: tensors[p if by_path else name])
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        problem = repr(error)
    raise CorruptCheckpoint(problem, file=str(path))


class _AnyName(dict[str, object]):
    """Contains every name: tensors are looked up by path later."""

    def __contains__(self, name: object) -> bool:
        return True


_WRITERS: dict[Format, Any] = {
    "torch": _write_torch,
    "dcp": _write_dcp,
    "safetensors": _write_safetensors,
}
_READERS: dict[Format, Any] = {
    "torch": lambda path: _read_parts(path, ".bin", _read_torch),
    "dcp": _read_dcp,
    "safetensors": lambda path: _read_parts(path, ".safetensors", _read_safetensors_file),
}


def _make_durable(path: Path) -> None:
    for folder, _, files in os.walk(path):
        for file in files:
            _sync(Path(folder, file))
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ----------------------------------------------------------------------------
# Removes the checkpoints that a retention policy does not keep, on request.


def prune(root: Root, keep: RetentionFunction, *, dry_run: bool = False) -> tuple[str, ...]:
    """Remove the committed checkpoints that ``keep`` does not retain; returns their names.

    Only checkpoints count of which every byte is verified. The newest of them is always retained,
    and so is a checkpoint that cannot be read now.

    Raises :class:`ReadFailed` if the folder cannot be listed, :class:`SaveError` if a checkpoint
    cannot be removed, :class:`ArgumentError` for a ``root`` that names no storage.
    """
    storage = patient(storage_for(root))
    with reading(storage.place):
        names = committed_names(storage)

    @functools.cache
    def validity(name: CheckpointName) -> Validity:
        try:
            verify(storage, str(name))
        except LoadError as error:
            return validity_of(error)
        return Validity.VALID

    @functools.cache
    def manifest_of(name: CheckpointName) -> Manifest | None:
        try:
            return read_manifest(storage, str(name))
        except LoadError:
            return None

    old = to_remove(names, keep, manifest_of, validity)
    with writing(storage.place):
        for name in () if dry_run else old:
            remove_committed(storage, name)
    return tuple(map(str, old))
