"""Flatten a state into a JSON tree and its tensors, and unflatten it again.

Each node is an object with one key::

    {"dict": {"lr": node, …}}             all keys are strings
    {"items": [[0, node], …]}             a dict with int keys (optimizers have them)
    {"list": [node, …]}  {"tuple": [node, …]}
    {"value": …}                          None, bool, int, str, finite float
    {"float": "nan" | "inf" | "-inf"}     strict JSON cannot express these
    {"tensor": "model/fc.weight"}         a name in the table of tensors

A tensor's name is its path joined by ``/`` (``~`` and ``/`` in a key become ``~0`` and ``~1``,
as in JSON Pointer). Tensors with the same memory, shape and stride (tied weights) share one
name: they are written once and are one tensor again after loading.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from checkpoints.errors import StateError
from checkpoints.tensors import (
    TensorSpec,
    by_dtype,
    is_dtensor,
    layout_of,
    local_of,
    local_regions,
    tensor_identity,
)

if TYPE_CHECKING:
    import torch

MAX_DEPTH = 100
MAX_INT_BITS = 1024

Node = dict[str, Any]

Types = Sequence[Sequence[Any]]
"""Of the values that are not of a type of the tree (:mod:`checkpoints.values`): for each its path,
its class, and what else it needs."""


def flatten(state: object) -> tuple[Node, dict[str, torch.Tensor]]:
    """The tree of ``state`` and its tensors by name, in the order of the levels of the tree. Copies
    no tensor.

    Raises :class:`StateError`, with the path of the first item that is neither a JSON value nor a
    tensor.
    """
    flattening = _Flattening()
    node = flattening.node(state, ())
    return node, flattening.by_level()


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """The :class:`TensorSpec` of a tensor."""
    layout = layout_of(tensor) if is_dtensor(tensor) else None
    return TensorSpec(name, by_dtype()[tensor.dtype].name, tuple(tensor.shape), layout)


def unflatten(node: Node, leaf: Callable[[str, str], object]) -> Any:
    """The state that ``node`` describes; ``leaf(path, name)`` supplies each tensor.

    ``node`` must have passed :func:`check_tree`.
    """
    return _unflatten(node, (), leaf)


def text_of(node: Node) -> str:
    """The JSON text of ``node``. Not by json.dumps, which holds the GIL until it returns."""
    ((kind, body),) = node.items()
    if kind == "tensor":
        return f'{{"tensor":{json.dumps(body)}}}'
    if kind == "dict":
        items = [f"{json.dumps(key)}:{text_of(item)}" for key, item in body.items()]
        return f'{{"dict":{{{",".join(items)}}}}}'
    if kind == "items":
        items = [f"[{json.dumps(key)},{text_of(item)}]" for key, item in body]
        return f'{{"items":[{",".join(items)}]}}'
    if kind in ("list", "tuple"):
        return f'{{"{kind}":[{",".join([text_of(item) for item in body])}]}}'
    return json.dumps(node, allow_nan=False, separators=(",", ":"))


def tensor_leaves(node: Node) -> dict[str, str]:
    """The tensor name of every tensor leaf, by path (tied tensors share a name)."""
    leaves: dict[str, str] = {}

    def note(path: str, name: str) -> None:
        leaves[path] = name

    _unflatten(node, (), note)
    return leaves


def live_tensors(state: object) -> dict[str, torch.Tensor]:
    """Every tensor in a live state, by path. Leaves of other types are ignored.

    Raises :class:`StateError` if two tensors have one path.
    """
    import torch

    tensors: dict[str, torch.Tensor] = {}

    def visit(item: object, path: tuple[object, ...]) -> None:
        _check_depth(path)
        if isinstance(item, torch.Tensor):
            if tensors.setdefault(path_name(path), item) is not item:
                raise StateError(_same_path(path))
        elif isinstance(item, Mapping) and has_plain_keys(item):
            for key, value in item.items():
                visit(value, (*path, key))
        elif isinstance(item, Mapping):  # saved as a list of pairs
            for index, value in enumerate(item.values()):
                visit(value, (*path, index, 1))
        elif isinstance(item, (list, tuple, deque)):
            for index, value in enumerate(item):
                visit(value, (*path, index))

    visit(state, ())
    return tensors


def path_name(path: tuple[object, ...]) -> str:
    """A path as a string, escaped like a JSON Pointer.

    >>> path_name(("model", "a/b", 0))
    'model/a~1b/0'
    """
    return "/".join(map(escaped, path))


def escaped(key: object) -> str:
    """One part of a path."""
    return str(key).replace("~", "~0").replace("/", "~1")


def unused_name(path: str, used: Collection[str]) -> str:
    """The name of a tensor at this path."""
    wanted = name = path or "tensor"
    count = 1
    while name in used or name == "__metadata__":  # a reserved name
        count += 1
        name = f"{wanted}~{count}"
    return name


def has_plain_keys(value: Mapping[Any, Any]) -> bool:
    """Whether all keys of a dict are strings and integers, which a tree holds."""
    return all(type(key) is str or type(key) is int for key in value)


class _Flattening:
    def __init__(self) -> None:
        import torch

        self._tensor_type = torch.Tensor
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[tuple[object, ...], str] = {}
        self._paths: set[str] = set()
        self._places: dict[str, tuple[int, int]] = {}  # the level, and the position in the state

    def by_level(self) -> dict[str, torch.Tensor]:
        """The tensors, each where it is first in the highest level."""
        return {
            name: self.tensors[name] for name in sorted(self._places, key=self._places.__getitem__)
        }

    def node(self, item: object, path: tuple[object, ...]) -> Node:
        _check_depth(path)
        if isinstance(item, self._tensor_type):
            return {"tensor": self._tensor(item, path)}
        if isinstance(item, Mapping):
            return self._mapping(item, path)
        if isinstance(item, (list, tuple)):
            kind = "list" if isinstance(item, list) else "tuple"
            return {kind: [self.node(value, (*path, i)) for i, value in enumerate(item)]}
        return value_node(item, path)

    def _mapping(self, item: Mapping[Any, object], path: tuple[object, ...]) -> Node:
        for key in item:
            if not isinstance(key, (str, int)) or isinstance(key, bool):
                raise StateError(
                    f"{where(path)} has the key {key!r}; only str and int keys can be saved"
                )
            if isinstance(key, int) and key.bit_length() > MAX_INT_BITS:
                raise StateError(f"{where(path)} has an int key of more than {MAX_INT_BITS} bits")
        if all(isinstance(key, str) for key in item):
            return {"dict": {str.__str__(k): self.node(v, (*path, k)) for k, v in item.items()}}
        return {
            "items": [
                [str.__str__(k) if isinstance(k, str) else int(k), self.node(v, (*path, k))]
                for k, v in item.items()
            ]
        }

    def _tensor(self, tensor: torch.Tensor, path: tuple[object, ...]) -> str:
        _check_tensor(tensor, path)
        if path_name(path) in self._paths:
            raise StateError(_same_path(path))
        self._paths.add(path_name(path))
        # self.tensors keeps the tensor alive, so its address cannot be reused.
        memory = memory_identity(tensor)
        place = (len(path), len(self._paths))
        if tensor.numel() and memory in self._names:
            name = self._names[memory]
            self._places[name] = min(self._places[name], place)
            return name
        name = unused_name(path_name(path), self.tensors)
        self._places[name] = place
        self.tensors[name] = tensor if is_dtensor(tensor) else tensor.detach()
        self._names[memory] = name
        return name


def memory_identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """A key that tied tensors share: the same elements of the same memory."""
    if is_dtensor(tensor):
        return tensor_identity(tensor)
    return (
        tensor.device,
        tensor.data_ptr(),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _check_tensor(tensor: torch.Tensor, path: tuple[object, ...]) -> None:
    if is_dtensor(tensor):
        local_regions(tensor, where(path))
        tensor = local_of(tensor)
    if not has_plain_bytes(tensor):
        raise StateError(
            f"{where(path)} is a {_kind(tensor)} tensor: it has no plain bytes to save",
            hint="Save the plain tensors that it consists of.",
        )
    if tensor.dtype not in by_dtype():
        raise StateError(f"{where(path)} has the type {tensor.dtype}, which cannot be saved")


def has_plain_bytes(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor, or of a DTensor's local tensor, are in memory of its own.

    Not so for sparse, quantized, nested and meta tensors, for parameters of lazy modules, whose
    storage was resized to less, and for wrapper subclasses, which hold other tensors: their
    data_ptr() is 0, so that two different ones look like one.
    """
    import torch

    if torch.nn.parameter.is_lazy(tensor):  # of a lazy module: it has no shape yet
        return False
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
        return False
    if tensor.numel() == 0:
        return True
    try:
        if tensor.data_ptr() == 0:
            return False
        end = tensor.storage_offset() + _span(tensor)
        return end * tensor.element_size() <= tensor.untyped_storage().nbytes()
    except RuntimeError:  # it has no storage
        return False


def _span(tensor: torch.Tensor) -> int:
    """The number of elements from the first to the last one in memory."""
    if tensor.is_contiguous():  # nearly all are, and a model may have 100,000
        return tensor.numel()
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _kind(tensor: torch.Tensor) -> str:
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    return "sparse, quantized, nested, meta, lazy or resized"


def _same_path(path: tuple[object, ...]) -> str:
    return (
        f"two tensors have the path {path_name(path)!r}: a dict has an int key and a str key of "
        "the same text"
    )


def value_node(item: object, path: tuple[object, ...]) -> Node:
    if item is None or isinstance(item, bool):
        return {"value": item}
    if isinstance(item, str):
        return {"value": str.__str__(item)}
    if isinstance(item, int):
        if item.bit_length() > MAX_INT_BITS:
            raise StateError(f"{where(path)} is an integer of more than {MAX_INT_BITS} bits")
        return {"value": int(item)}
    if isinstance(item, float):
        number = float(item)
        return {"value": number} if math.isfinite(number) else {"float": repr(number)}
    raise StateError(
        f"{where(path)} is a {type(item).__module__}.{type(item).__qualname__}; "
        "a checkpoint holds tensors, None, bool, int, float, str, and dicts, lists and tuples",
        hint="Convert arrays to tensors (torch.from_numpy) and objects to dicts.",
    )


def _unflatten(node: Node, path: tuple[object, ...], leaf: Callable[[str, str], object]) -> Any:
    ((kind, body),) = node.items()
    if kind == "tensor":
        return leaf(path_name(path), body)
    if kind == "dict":
        return {key: _unflatten(value, (*path, key), leaf) for key, value in body.items()}
    if kind == "items":
        return {key: _unflatten(value, (*path, key), leaf) for key, value in body}
    if kind in ("list", "tuple"):
        values = [_unflatten(value, (*path, i), leaf) for i, value in enumerate(body)]
        return values if kind == "list" else tuple(values)
    return float(body) if kind == "float" else body


def check_tree(node: object, tensors: Mapping[str, object], depth: int = 0) -> str | None:
    """What is wrong with an untrusted tree, or None."""
    if depth > MAX_DEPTH:
        return f"the tree is nested more than {MAX_DEPTH} levels deep"
    if not isinstance(node, dict) or len(node) != 1:
        return "a node of the tree is not an object with one key"
    ((kind, body),) = node.items()
    if kind == "tensor":
        return None if isinstance(body, str) and body in tensors else "a leaf names no tensor"
    if kind == "float":
        return None if body in ("nan", "inf", "-inf") else f"unknown float {str(body)[:40]!r}"
    if kind == "value":
        return _check_value(body)
    children = _children(kind, body)
    if children is None:
        return f"malformed or unknown node {str(kind)[:40]!r} in the tree"
    for child in children:
        problem = check_tree(child, tensors, depth + 1)
        if problem is not None:
            return problem
    return None


def _check_value(body: object) -> str | None:
    if body is None or isinstance(body, (bool, str)):
        return None
    if isinstance(body, int) and body.bit_length() <= MAX_INT_BITS:
        return None
    if isinstance(body, float) and math.isfinite(body):
        return None
    return "a value in the tree is not None, a bool, an int, a str or a finite float"


def _children(kind: object, body: object) -> list[object] | None:
    if kind == "dict" and isinstance(body, dict):
        return list(body.values())
    if kind in ("list", "tuple") and isinstance(body, list):
        return body
    if kind == "items" and isinstance(body, list) and all(map(_is_item, body)):
        keys = [item[0] for item in body]
        return [item[1] for item in body] if len(set(keys)) == len(keys) else None
    return None


def _is_item(item: object) -> bool:
    return isinstance(item, list) and len(item) == 2 and type(item[0]) in (str, int)


def _check_depth(path: tuple[object, ...]) -> None:
    if len(path) > MAX_DEPTH:
        raise StateError(
            f"the state is nested more than {MAX_DEPTH} levels deep at {where(path[:5])} …",
            hint="Does a dict or list contain itself?",
        )


def where(path: tuple[object, ...]) -> str:
    return f"state[{path_name(path)!r}]" if path else "the state"
