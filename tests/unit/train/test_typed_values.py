"""Values of a state return as the type that they had, or are refused with their path."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import json
import math
import pathlib
import random
import threading
import types
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from kit.run_kit import job, parts_of, process
from torch import nn

from checkpoints.tree import flatten, unflatten
from elastic.errors import TrainingError
from elastic.train.copies import copied
from elastic.train.state import JobState
from elastic.train.values import _are_equal, plain_form, typed_form


class Point(NamedTuple):
    x: float
    y: Any


Pair = collections.namedtuple("Pair", "left right")


class Level(enum.IntEnum):
    LOW = 1


class Colour(enum.Enum):
    RED = (1, 2)


class Mode(str, enum.Enum):
    MAX = "max"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Bits(enum.IntFlag):
    A = 1
    B = 2


class Text(str):
    __slots__ = ()


class Number(int):
    pass


class Share(float):
    pass


class Record(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        raise AssertionError("bypassed, as by dict.update")


class Rows(list[Any]):
    pass


class Triple(tuple[Any, ...]):
    __slots__ = ()


class Described(dict[str, Any]):
    def __init__(self) -> None:
        self.unit = "ms"


@dataclasses.dataclass
class Best:
    epoch: int = 0


class Measured(list[Any]):
    """Not a part of the list: an attribute in a slot."""

    __slots__ = ("unit",)

    def __init__(self) -> None:
        self.unit = "ms"


class Window(collections.deque[Any]):
    def __init__(self, size: int) -> None:
        super().__init__(maxlen=size)


class Names(set[str]):
    def __init__(self, *, prefix: str) -> None:
        super().__init__(prefix)


class Doubled(NamedTuple("_Doubled", [("x", int)])):
    __slots__ = ()

    def __new__(cls, x: int) -> Doubled:
        return super().__new__(cls, 2 * x)


class Code(bytes):
    def __new__(cls, number: int) -> Code:
        return super().__new__(cls, bytes([number]))


class Constants(frozenset[int]):
    pass


class Embedding(torch.Tensor):
    pass


class Scale(nn.Parameter):
    pass


def local_class() -> Any:
    class Inner(NamedTuple):
        x: int

    return Inner(1)


KEPT: dict[str, Any] = {
    "none": None,
    "bool": True,
    "int": -3,
    "large int": 1 << 900,
    "float": 0.1,
    "negative zero": -0.0,
    "nan": math.nan,
    "infinity": -math.inf,
    "str": "é\n",
    "complex": 1 - 2j,
    "bytes": b"\x00\xff",
    "bytearray": bytearray(b"ab"),
    "dict": {"a": 1},
    "dict of ints": {1: "a", 2: "b"},
    "dict of int and str": {1: "a", "1": "b"},
    "dict of bools": {True: 1, False: 2},
    "dict of tuples": {(1, "a"): [torch.ones(2)]},
    "dict of None": {None: 1},
    "dict of floats": {0.5: 1},
    "dict of enums": {Level.LOW: 1, Colour.RED: 2},
    "dict of texts": {Text("a"): 1},
    "list": [1, [2]],
    "tuple": (1, (2,)),
    "empty containers": [{}, [], (), set()],
    "Counter": collections.Counter("abca"),
    "Counter of milestones": collections.Counter([60, 60, 90]),
    "OrderedDict": collections.OrderedDict(b=1, a=2),
    "defaultdict of lists": collections.defaultdict(list, a=[1]),
    "defaultdict of floats": collections.defaultdict(float, {3: 0.5}),
    "defaultdict without factory": collections.defaultdict(None, a=1),
    "deque": collections.deque([1, torch.zeros(1)]),
    "bounded deque": collections.deque([1, 2], maxlen=2),
    "set": {"b", "a", "c"},
    "set of tuples": {(1, 2), (0, 1)},
    "frozenset": frozenset([1, 2]),
    "NamedTuple": Point(0.5, [1]),
    "namedtuple": Pair(torch.ones(1), {"a": (1,)}),
    "nested namedtuples": Pair(Pair(1, 2), [Point(1.0, None)]),
    "torch.Size": torch.Size([2, 3]),
    "result of torch.max": torch.ones(2, 2).max(0),
    "IntEnum": Level.LOW,
    "Enum": Colour.RED,
    "Enum of str": Mode.MAX,
    "Flag": Access.READ | Access.WRITE,
    "IntFlag": Bits.A | Bits.B,
    "subclass of str": Text("a"),
    "subclass of int": Number(3),
    "subclass of float": Share(0.25),
    "subclass of dict": dict.__new__(Record),
    "subclass of list": Rows([1]),
    "subclass of tuple": Triple([1, 2]),
    "deque with other arguments": Window(3),
    "set with other arguments": Names(prefix="ab"),
    "namedtuple with other arguments": Doubled(2),
    "bytes with other arguments": Code(7),
    "subclass of frozenset": Constants([1]),
    "numpy.float64": np.float64(0.5),
    "numpy.float32": np.float32(0.1),
    "numpy.float16": np.float16(0.1),
    "numpy.int64": np.int64(-3),
    "numpy.uint8": np.uint8(255),
    "numpy.bool": np.bool_(True),
    "numpy.str": np.str_("a"),
    "array": np.arange(6.0).reshape(2, 3).T,
    "array of bools": np.array([True, False]),
    "array without dimensions": np.array(1.5, dtype=np.float32),
    "tensor": torch.arange(3),
    "bfloat16 tensor": torch.ones(2, dtype=torch.bfloat16),
    "tensor without elements": torch.zeros(0, 3),
    "tensor that requires gradients": torch.ones(2, requires_grad=True),
    "Parameter": nn.Parameter(torch.ones(2)),
    "frozen Parameter": nn.Parameter(torch.ones(2), requires_grad=False),
    "conjugated tensor": torch.ones(2, dtype=torch.complex64).conj(),
    "subclass of a tensor": torch.ones(2).as_subclass(Embedding),
    "subclass of Parameter": Scale(torch.ones(2)),
    "torch.dtype": torch.bfloat16,
    "path": pathlib.PurePosixPath("a/b"),
    "state_dict of a module": nn.Linear(2, 2).state_dict(),
}

ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)

REFUSED: dict[str, Any] = {
    "object": object(),
    "dataclass": Best(),
    "namespace": types.SimpleNamespace(a=1),
    "mapping proxy": types.MappingProxyType({"a": 1}),
    "UserDict": collections.UserDict(a=1),
    "ChainMap": collections.ChainMap({"a": 1}),
    "function": len,
    "class": Level,
    "generator": torch.Generator(),
    "random.Random": random.Random(0),
    "device": torch.device("cpu"),
    "range": range(3),
    "slice": slice(3),
    "iterator": iter([1]),
    "lock": threading.Lock(),
    "datetime": datetime.datetime(2020, 1, 1),
    "timedelta": datetime.timedelta(1),
    "Decimal": decimal.Decimal("0.1"),
    "Fraction": fractions.Fraction(1, 3),
    "UUID": uuid.UUID(int=1),
    "numpy.datetime64": np.datetime64("2020-01-01"),
    "numpy.complex64": np.complex64(1j),
    "array of objects": np.array([{}], dtype=object),
    "masked array": np.ma.masked_array([1.0], mask=[True]),
    "dict with attributes": Described(),
    "list with attributes in slots": Measured(),
    "parameter of a lazy module": nn.UninitializedParameter(),
    "defaultdict of a function": collections.defaultdict(lambda: 1),
    "class of a function": local_class(),
    "integer of 2000 bits": 1 << 2000,
    "sparse tensor": torch.ones(2).to_sparse(),
    "list that contains itself": ENDLESS,
}


def is_same(one: Any, other: Any) -> bool:
    """Whether two values have the same types, order and contents."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.requires_grad == other.requires_grad and _are_equal(one.detach(), other.detach())
    if isinstance(one, dict):
        factories = [getattr(d, "default_factory", None) for d in (one, other)]
        return factories[0] is factories[1] and is_same([*one.items()], [*other.items()])
    if isinstance(one, (set, frozenset)):
        return bool(one == other)
    if isinstance(one, (list, tuple, collections.deque)):
        bounds = [getattr(d, "maxlen", None) for d in (one, other)]
        return len(one) == len(other) and bounds[0] == bounds[1] and all(map(is_same, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and bool(np.array_equal(one, other))
    return bool(repr(one) == repr(other) and (one == other or one != one))


class Holder:
    """As most scripts write it: what was loaded replaces what was there."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


def sent(job_state: JobState) -> dict[str, Any]:
    """The state as another rank, or a checkpoint, has it."""
    node, tensors = flatten(job_state.tree())
    tree: dict[str, Any] = unflatten(
        json.loads(json.dumps(node)), lambda path, name: tensors[name].clone()
    )
    return tree


@pytest.mark.parametrize("name", KEPT)
def test_a_value_returns_as_the_type_that_it_had(name: str) -> None:
    value = KEPT[name]
    source, target = JobState(seed=0), JobState(seed=0)
    source.track("holder", Holder([value]))
    source.user["value"] = {"nested": value}
    holder = Holder(None)  # nothing here has the type
    target.track("holder", holder)
    target.apply(sent(source))
    assert is_same(holder.values, [value])
    assert is_same(target.user["value"], {"nested": value})


@pytest.mark.parametrize("name", KEPT)
def test_a_copy_has_the_same_type_and_is_independent(name: str) -> None:
    value = KEPT[name]
    copy = copied([value])
    assert is_same(copy, [value])
    mutable = (dict, list, set, bytearray, collections.deque, np.ndarray, torch.Tensor)
    assert (copy[0] is not value) == isinstance(value, mutable) or isinstance(value, tuple)


@pytest.mark.parametrize("name", REFUSED)
def test_other_values_are_refused_with_their_path(name: str) -> None:
    holder = Holder([{"at": REFUSED[name]}])
    path = "state['values/0/at" + ("/0" if "itself" in name else "'")
    with pytest.raises(TrainingError) as caught:
        JobState(seed=0).track("holder", holder)
    assert "run.track(holder=…)" in str(caught.value) and path in str(caught.value)


def test_settings_of_an_optimizer_are_checked_without_its_state() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.param_groups[0]["schedule"] = len
    with pytest.raises(TrainingError, match=r"param_groups/0/schedule'\] is a builtins.builtin"):
        JobState(seed=0).track("optimizer", optimizer)


def test_a_type_that_the_script_no_longer_has_is_named() -> None:
    plain, types_ = plain_form({"a": [Level.LOW]})
    types_[0][1] = types_[0][1].replace("Level", "Former")
    with pytest.raises(TrainingError, match=r"state\['a/0'\] was saved as a .*\.Former"):
        typed_form(plain, types_)


@pytest.mark.parametrize("name", ["builtins:print", "os:system", "subprocess:Popen", "nothing:x"])
def test_only_types_of_values_are_created(name: str) -> None:
    with pytest.raises(TrainingError, match="which this script has not defined"):
        typed_form({"a": "true"}, [[["a"], name, None]])


def test_checkpoints_keep_all_types(tmp_path: Path) -> None:
    make: Callable[[], Any] = lambda: Holder(copied(KEPT))  # noqa: E731
    with process(tmp_path) as run:
        script, holder = job(run), make()
        run.track(holder=holder)
        run.state["kept"] = copied(KEPT)
        script.train(epochs=1)
    with process(tmp_path) as run:
        script, holder = job(run), Holder({})
        run.track(holder=holder)
        script.train(epochs=1)
        assert is_same(holder.values, KEPT)
        assert is_same(run.state["kept"], KEPT)
        assert parts_of(run).session.job.progress.epoch == 1


def test_a_checkpoint_without_types_is_loaded() -> None:
    source, target = JobState(seed=0), JobState(seed=0)
    source.user["counts"] = [1]
    tree = sent(source)
    del tree["types"]
    target.apply(tree)
    assert target.user == {"counts": [1]}
