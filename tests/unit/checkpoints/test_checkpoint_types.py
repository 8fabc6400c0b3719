"""Values return as the types that they had, or are refused before anything changes."""

from __future__ import annotations

import collections
import copy
import enum
import pathlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from kit.checkpoint_states import save_all

import checkpoints
from checkpoints.engine import Engine
from checkpoints.saving import WriterGroup


class Point(NamedTuple):
    x: float
    tensor: torch.Tensor


class Level(enum.IntEnum):
    LOW = 1


class Mode(str, enum.Enum):
    MAX = "max"


class Bits(enum.Flag):
    A = 1
    B = 2


class Text(str):
    __slots__ = ()


class Settings(dict[str, Any]):
    pass


class Described(dict[str, Any]):
    def __init__(self) -> None:
        self.unit = "ms"


def schedulers() -> dict[str, Any]:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.param_groups[0]["params"][0].sum().backward()
    optimizer.step()
    of = torch.optim.lr_scheduler
    return {
        "optimizer": optimizer.state_dict(),
        "milestones": of.MultiStepLR(optimizer, [2, 2, 5]).state_dict(),
        "plateau": of.ReduceLROnPlateau(optimizer).state_dict(),
        "one cycle": of.OneCycleLR(optimizer, 0.1, total_steps=9).state_dict(),
        "restarts": of.CosineAnnealingWarmRestarts(optimizer, 3).state_dict(),
        "sequence": of.SequentialLR(
            optimizer, [of.ConstantLR(optimizer), of.ExponentialLR(optimizer, 0.9)], [3]
        ).state_dict(),
    }


T = torch.ones(2)
KEPT: dict[str, Any] = {
    "ordered": collections.OrderedDict(b=1, a=torch.ones(2)),
    "counter": collections.Counter([3, 3, 5]),
    "defaultdict": collections.defaultdict(list, a=[1]),
    "deque": collections.deque([1, torch.ones(1)], maxlen=3),
    "size": torch.Size([2, 3]),
    "numpy": [np.float64(0.1), np.float32(0.1), np.int64(3), np.bool_(True)],
    "named": Point(1.5, torch.arange(3)),
    "enums": (Level.LOW, Mode.MAX, Bits.A | Bits.B),
    "text": [Text("a"), Text("a")],
    "sets": [{1, 2}, frozenset({"a"})],
    "other": [b"bytes", 1 + 2j, torch.float16, pathlib.PurePosixPath("a/b")],
    "subclass": Settings(lr=0.1, nested=Settings(a=1)),
    "keys": {(1, 2): torch.ones(1), True: 2, 1.5: 3, Level.LOW: 4} | {None: [5]},
    "module": torch.nn.Linear(2, 2).state_dict(),
    "schedulers": schedulers(),
}


def is_same(one: Any, other: Any) -> bool:
    """Whether two values have the same types, order and contents."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        factories = [getattr(d, "default_factory", None) for d in (one, other)]
        return factories[0] is factories[1] and is_same([*one.items()], [*other.items()])
    if isinstance(one, (list, tuple, collections.deque)):
        bounds = [getattr(d, "maxlen", None) for d in (one, other)]
        return bounds[0] == bounds[1] and len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


def save_async(root: Path, state: Any) -> str:
    """With the plan of an earlier save of the same structure."""
    with Engine(root, keep=None) as engine:
        for step in (1, 2):
            handle = engine.save_async(state, step=step, world=WriterGroup(nonce="aa"))
            outcome = handle.wait(60)
            assert outcome is not None and outcome.status is checkpoints.SaveStatus.COMMITTED
    return handle.name


def save_by_three(root: Path, state: Any) -> str:
    return save_all(root, state, step=1, world_size=3)


@pytest.mark.parametrize("save", [save_async, save_by_three])
@pytest.mark.parametrize("name", KEPT)
def test_a_value_returns_as_the_type_that_it_had(
    tmp_path: Path, name: str, save: Callable[[Path, Any], str]
) -> None:
    value = KEPT[name]
    state = {"value": value, "again": [{"value": value}]}
    saved = save(tmp_path, state)
    assert is_same(checkpoints.load(tmp_path, saved).state, state)
    assert is_same(checkpoints.load(tmp_path, saved, only="again").state, {"again": state["again"]})
    live = copy.deepcopy(state)
    for tensor in tensors_in(live):
        tensor.zero_()
    loaded = checkpoints.load(tmp_path, saved, into=live)
    assert is_same(loaded.state, state)
    assert all(map(torch.equal, tensors_in(live), tensors_in(state))), "loaded in place"


def tensors_in(item: Any) -> list[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        return [item.detach()]
    if isinstance(item, dict):
        item = item.values()
    elif not isinstance(item, (list, tuple, collections.deque)):
        return []
    return [tensor for part in item for tensor in tensors_in(part)]


def local_class() -> Any:
    class Local(NamedTuple):
        x: int

    return Local(1)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (local_class(), "its class is not defined at the top level of a module"),
        (Described(), "it has attributes, which would be lost"),
        (collections.defaultdict(lambda: 1), "its default_factory is a function"),
        (MappingProxyType({"a": 1}), "Save a dict of it"),
        (np.ones(2), "torch.from_numpy"),
        (np.complex64(1), "it is no bool, int, float or str"),
    ],
    ids=["local", "attributes", "factory", "mapping", "array", "complex"],
)
def test_a_value_that_would_change_is_refused_before_anything_is_written(
    tmp_path: Path, value: Any, reason: str
) -> None:
    state = {"a": [0, {"b": value}], "tensor": torch.ones(1)}
    with Engine(tmp_path / "new") as engine:
        for save in (
            lambda: checkpoints.save(tmp_path / "new", state, step=1, nonce="aa"),
            lambda: engine.save_async(state, step=1, world=WriterGroup(nonce="aa")),
        ):
            with pytest.raises(checkpoints.StateError, match=r"^state\['a/1/b'\] is a ") as caught:
                save()
            assert reason in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_a_class_that_is_not_imported_is_named_before_a_tensor_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("a_library")
    Schedule = enum.IntEnum("Schedule", {"LINEAR": 1}, module="a_library")
    vars(module)["Schedule"] = Schedule
    monkeypatch.setitem(sys.modules, "a_library", module)
    state = {"weight": torch.ones(2), "schedule": [Schedule["LINEAR"]], "level": Level.LOW}
    name = checkpoints.save(tmp_path, state, step=1, nonce="aa").name

    monkeypatch.delitem(sys.modules, "a_library")
    live = {"weight": torch.zeros(2)}
    with pytest.raises(
        checkpoints.LoadError, match=r"state\['schedule/0'\] was saved as a a_library.Schedule"
    ) as caught:
        checkpoints.load(tmp_path, name, into=live)
    assert "strict=False" in str(caught.value)
    assert live["weight"].tolist() == [0, 0]

    plain = checkpoints.load(tmp_path, name, into=live, strict=False)
    assert plain.state["schedule"] == [1] and plain.state["level"] is Level.LOW
    assert live["weight"].tolist() == [1, 1]
    assert len(plain.unmatched) == 1 and "a_library.Schedule" in plain.unmatched[0]
    assert checkpoints.latest(tmp_path).checkpoint is not None, "it is no damage"

    # A member that the class no longer has.
    monkeypatch.setitem(sys.modules, "a_library", module)
    vars(module)["Schedule"] = enum.IntEnum("Schedule", {"COSINE": 2}, module="a_library")
    with pytest.raises(checkpoints.LoadError, match="cannot have the saved value here"):
        checkpoints.load(tmp_path, name, into={"weight": torch.zeros(2)})


@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_an_export_has_plain_values(tmp_path: Path, form: Any) -> None:
    """Programs that read it need no classes, and torch.load refuses most."""
    kept = {"level": Level.LOW, "mode": [Mode.MAX], "loss": np.float32(0.5), "point": Point(1, T)}
    name = checkpoints.save(tmp_path / "from", kept, step=1, nonce="aa").name
    checkpoints.export_to(tmp_path / "from", name, tmp_path / "file", form)
    read = checkpoints.import_from(tmp_path / "file", form)
    assert is_same(read, {"level": 1, "mode": ["max"], "loss": 0.5, "point": (1, T)})


def test_the_type_of_a_value_is_a_part_of_the_state(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, {"a": Level.LOW}, step=1, nonce="aa")
    assert checkpoints.save(tmp_path, {"a": Level.LOW}, step=1, nonce="aa").committed
    with pytest.raises(checkpoints.NameTaken):
        checkpoints.save(tmp_path, {"a": "LOW"}, step=1, nonce="aa")


def test_a_metric_may_be_a_number_of_numpy(tmp_path: Path) -> None:
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.9), (4, 0.8)):
        keep = checkpoints.BestN(1, "loss")
        checkpoints.save(tmp_path, {"loss": np.float32(loss)}, step=step, nonce="aa", keep=keep)
    assert [info.step for info in checkpoints.list_checkpoints(tmp_path)] == [4, 2]
