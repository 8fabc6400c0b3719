"""Interoperability: torch.save, torch.distributed.checkpoint (DCP), safetensors.

An export appears under its final name only once it is complete and durable. An import reads tensors
and JSON values; torch.save files are read with ``weights_only=True``. DCP stores its metadata as a
pickle, which can execute arbitrary code: reading one requires ``trust=True``.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch

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
from checkpoints.format.state_tree import check_tree, flatten, path_name, unflatten
from checkpoints.loading.load import load
from checkpoints.storage.failures import reading, writing
from checkpoints.storage.roots import Root
from checkpoints.tensors.torch_private import load_dcp, load_dcp_leaves

Format = Literal["torch", "dcp", "safetensors"]
FORMATS: tuple[Format, ...] = ("torch", "dcp", "safetensors")
_INDEX = "model.safetensors.index.json"  # of Hugging Face's sharded models
_TREE = "checkpoints.tree"  # our key in the header of a safetensors file


def export_to(
    root: Root,
    name: str,
    target: str | os.PathLike[str],
    form: Format,
    *,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Write a verified checkpoint as another format: a file, or DCP's folder.

    ``progress`` is called with the number of bytes of each chunk read.
    Raises the same errors as :func:`checkpoints.load`, :class:`ArgumentError` if the target exists,
    :class:`NotWritable` if its folder does not, :class:`DiskFull` if it has no space, and
    :class:`WriteFailed` if the state cannot be written in that format.
    """
    write = _of(_WRITERS, form)
    final = Path(target)
    if os.path.lexists(final):
        raise ArgumentError(f"{final} exists", hint="Remove it, or choose another target.")
    state = load(root, name, progress=progress).state
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


def import_from(source: str | os.PathLike[str], form: Format, *, trust: bool = False) -> Any:
    """Read the state from a file or folder of another format, for :func:`checkpoints.save`.

    ``trust`` is required for DCP, whose metadata is a pickle; without it :class:`ArgumentError` is
    raised. Raises :class:`ReadFailed`, a :class:`LoadError`, if the source is not of that format.
    """
    read = _of(_READERS, form)
    if form == "dcp" and not trust:
        raise ArgumentError(
            f"{source}: the metadata of torch.distributed.checkpoint is a pickle",
            hint="Reading it can execute arbitrary code; pass trust=True (--trust) if you trust "
            "its source.",
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
    found: Callable[..., Any] = table[form]
    return found


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


def _read_safetensors(path: Path) -> Any:
    if path.is_dir():
        return _read_hugging_face(path)
    return _read_safetensors_file(path)


def _read_hugging_face(folder: Path) -> Any:
    """The tensors of a folder as ``save_pretrained`` writes it: one file, or several and an
    index."""
    if not (folder / _INDEX).exists():
        files = sorted(folder.glob("*.safetensors"))
        if len(files) != 1:
            raise ReadFailed(
                f"{folder} has {len(files)} safetensors files and no {_INDEX}",
                hint="Give one file, or a folder that save_pretrained has written.",
            )
        return _read_safetensors_file(files[0])
    index = json.loads((folder / _INDEX).read_bytes())
    names: dict[str, str] = index["weight_map"]
    tensors: dict[str, Any] = {}
    for file in sorted(set(names.values())):
        if Path(file).name != file:
            raise CorruptCheckpoint(f"{file!r} is no name of a file", file=str(folder / _INDEX))
        tensors |= _read_safetensors_file(folder / file)
    if missing := sorted(names.keys() - tensors.keys()):
        raise CorruptCheckpoint(f"no file has the tensor {missing[0]}", file=str(folder / _INDEX))
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
    "torch": _read_torch,
    "dcp": _read_dcp,
    "safetensors": _read_safetensors,
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
