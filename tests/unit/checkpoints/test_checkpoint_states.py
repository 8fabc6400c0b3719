"""Checkpoints of states that occur in real training."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from kit.checkpoint_states import same, save_all, small_state
from torch import nn

import checkpoints
from checkpoints.commit import read_manifest
from checkpoints.testing import FaultyStorage, MemoryStorage, StorageFault

ALONE = checkpoints.WriterGroup(nonce="aa")


class Net(nn.Module):
    """Tied weights, integer and bool buffers, an empty one, half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.norm = nn.BatchNorm1d(4)
        self.body = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("nothing", torch.empty(0, 5))
        self.register_buffer("scale", torch.tensor(0.5).to(torch.float8_e4m3fn))
        self.register_buffer("view", torch.arange(6.0).reshape(2, 3).t())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embedding(tokens))
        return self.head(self.body(hidden.bfloat16()).float())  # type: ignore[no-any-return]


def train_once(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.arange(11)
    nn.functional.cross_entropy(model(tokens), tokens).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def build_model(seed: int) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_restored_model_trains_as_if_uninterrupted(tmp_path: Path, world_size: int) -> None:
    model, optimizer = build_model(0)
    train_once(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    name = save_all(tmp_path, state, step=1, world_size=world_size)
    other, other_optimizer = build_model(1)
    loaded = checkpoints.load(tmp_path, name, into={"model": other.state_dict()}, strict=False)
    other_optimizer.load_state_dict(loaded.state["optimizer"])
    for _ in range(2):
        train_once(model, optimizer)
        train_once(other, other_optimizer)
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert other.head.weight is other.embedding.weight


def test_an_optimizer_may_create_its_state_after_the_first_save(tmp_path: Path) -> None:
    """It has no state before its first step. A load names the tensors that are missing."""
    model, optimizer = build_model(0)

    def state() -> dict[str, Any]:
        return {"optimizer": optimizer.state_dict()}

    with checkpoints.Engine(tmp_path, keep=None) as engine:
        engine.reserve(state())
        before = engine.save_async(state(), step=0, world=ALONE).wait(60)
        train_once(model, optimizer)
        after = engine.save_async(state(), step=1, world=ALONE).wait(60)
    assert before is not None and after is not None
    assert checkpoints.load(tmp_path, before.name).state["optimizer"]["state"] == {}
    assert same(checkpoints.load(tmp_path, after.name).state, state())
    with pytest.raises(checkpoints.StateMismatch, match="optimizer/state/0/exp_avg"):
        checkpoints.load(tmp_path, after.name, into={"optimizer": build_model(1)[1].state_dict()})


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_clock_that_jumps_changes_only_timestamps(tmp_path: Path, seed: int) -> None:
    jumps = itertools.cycle([1e9, 2e9, 5.0, -1e9, 0.0, 4e9])
    for _ in range(seed):
        next(jumps)
    keep = checkpoints.LatestN(2) | checkpoints.EveryNSeconds(3600)
    with checkpoints.Engine(tmp_path, keep=keep, clock=lambda: next(jumps)) as engine:
        for step in range(8):
            outcome = engine.save_async(small_state(step), step=step, world=ALONE).wait(60)
            assert outcome is not None and outcome.status is checkpoints.SaveStatus.COMMITTED
            newest = checkpoints.latest(tmp_path)
            assert newest.checkpoint is not None and newest.checkpoint.step == step
    for info in checkpoints.list_checkpoints(tmp_path):
        assert same(checkpoints.load(tmp_path, info.name).state, small_state(info.step))
    # Garbage collection with a wrong clock removes leftovers at most, nothing committed.
    for now in (0.0, 1e12):
        checkpoints.collect_garbage(tmp_path, clock=lambda now=now: now)  # type: ignore[misc]
    assert checkpoints.list_checkpoints(tmp_path)[0].step == 7


@pytest.mark.slow
@pytest.mark.parametrize("fault", list(StorageFault))
def test_a_fault_at_any_storage_call_leaves_complete_checkpoints(fault: StorageFault) -> None:
    """Listed checkpoints are complete after each fault, and a successor continues."""

    def run(at: int | None) -> tuple[MemoryStorage, int]:
        storage = MemoryStorage()
        checkpoints.save(storage, small_state(1), step=1, nonce="aa")
        faulty = FaultyStorage(storage, at=at, fault=fault)
        engine = checkpoints.Engine(faulty, keep=checkpoints.LatestN(2))
        try:
            for step in (2, 3):
                handle = engine.save_async(small_state(step), step=step, world=ALONE)
                handle.wait(60)
            engine.close()
        except RuntimeError as error:
            assert "thread died" in str(error)
        return storage, len(faulty.calls)

    _, count = run(None)
    assert count > 40
    for at in range(count):
        storage, _ = run(at)
        listed = checkpoints.list_checkpoints(storage)
        assert listed
        for info in listed:
            assert same(checkpoints.load(storage, info.name).state, small_state(info.step))
        entries = [entry for entry in storage.list("") if entry.startswith("step-")]
        assert len(entries) == len(listed), "none is partly removed"
        checkpoints.collect_garbage(storage, generation=1, nonce="bb")
        assert [entry for entry in storage.list("") if entry.startswith(".tmp-step")] == []
        save_all(storage, small_state(4), step=4, generation=1, nonce="bb")


GIB = 1 << 30


@pytest.mark.soak
def test_a_tensor_of_six_gib_is_restored(tmp_path: Path) -> None:
    """Offsets beyond 32 bits, in a tensor and in its file."""
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free_kib = int(memory["MemAvailable"].split()[0])
    if free_kib < 14 << 20 or shutil.disk_usage(tmp_path).free < 8 * GIB:
        pytest.skip("needs 14 GiB of memory and 8 GiB of disk")
    # Untouched pages of zeros take no memory until they are read.
    large = torch.from_numpy(numpy.zeros(6 * GIB, numpy.uint8))
    places = [0, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 5 * GIB + 12345, 6 * GIB - 1]
    for value, place in enumerate(places, start=1):
        large[place] = value
    name = save_all(tmp_path, {"large": large, "small": torch.ones(3)}, step=1, world_size=2)
    live = {"large": torch.from_numpy(numpy.zeros(6 * GIB, numpy.uint8)), "small": torch.zeros(3)}
    checkpoints.load(tmp_path, name, into=live)
    for value, place in enumerate(places, start=1):
        assert int(live["large"][place]) == value
    assert torch.equal(live["large"], large)


def test_a_wrapper_subclass_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """Its own data_ptr() is 0: two different ones would count as tied."""
    from torch.testing._internal.two_tensor import TwoTensor

    parts = {"a": torch.full((3,), 1.0), "b": torch.full((3,), 2.0)}
    wrapped = {key: TwoTensor(part, part) for key, part in parts.items()}  # type: ignore[no-untyped-call]
    with pytest.raises(checkpoints.StateError, match="TwoTensor"):
        checkpoints.save(tmp_path, wrapped, step=1, nonce="aa")
    with checkpoints.Engine(tmp_path) as engine, pytest.raises(checkpoints.StateError):
        engine.save_async(wrapped, step=1, world=ALONE)
    assert list(tmp_path.iterdir()) == []


def _with_storage_of(tensor: torch.Tensor, size_bytes: int) -> torch.Tensor:
    tensor.untyped_storage().resize_(size_bytes)
    return tensor


@pytest.mark.parametrize(
    "bodiless",
    [
        torch.nn.UninitializedParameter,
        lambda: _with_storage_of(torch.zeros(3), 0),
        lambda: _with_storage_of(torch.zeros(3), 8),
    ],
)
def test_a_tensor_without_its_memory_is_refused_before_anything_is_written(
    tmp_path: Path, bodiless: Any
) -> None:
    with pytest.raises(checkpoints.StateError, match="no plain bytes"):
        checkpoints.save(tmp_path, {"a": bodiless(), "b": torch.ones(3)}, step=1, nonce="aa")
    assert list(tmp_path.iterdir()) == []
    name = save_all(tmp_path, {"a": torch.ones(3), "b": torch.ones(3)}, step=1)
    live = {"a": bodiless(), "b": torch.zeros(3)}
    with pytest.raises(checkpoints.StateMismatch, match="without memory"):
        checkpoints.load(tmp_path, name, into=live)
    assert same(live["b"], torch.zeros(3))


@pytest.mark.parametrize("base", [None, "/dev/shm"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_two_saved_tensors_are_not_loaded_into_one(base: str | None, world_size: int) -> None:
    """Unless they are equal: the weights of an untied copy of a tied model are."""
    with tempfile.TemporaryDirectory(dir=base) as root:
        ones = torch.ones(100)
        for step, second in ((1, torch.ones(100)), (2, torch.arange(100.0))):
            state = {"a": ones, "b": second, "z": torch.ones(7)}
            name = save_all(Path(root), state, step=step, world_size=world_size)
            tied = torch.zeros(100)
            live = {"a": tied, "b": tied, "z": torch.zeros(7)}
            if step == 1:
                checkpoints.load(root, name, into=live)
                assert same(tied, ones)
                continue
            with pytest.raises(checkpoints.StateMismatch, match="the same memory as b"):
                checkpoints.load(root, name, into=live)
            assert same(tied, torch.zeros(100)) and same(live["z"], torch.zeros(7))
            loaded = checkpoints.load(root, name, into=live, strict=False)
            assert len(loaded.unmatched) == 2 and same(live["z"], torch.ones(7))
            assert same(tied, torch.zeros(100))


@pytest.mark.parametrize("base", [None, "/dev/shm"])
@pytest.mark.parametrize(
    ("unwritable", "why"),
    [
        (lambda: torch.zeros(3, device="meta"), "on the meta device"),
        (lambda: torch.zeros(1).expand(3), "share memory"),
        (lambda: _with_storage_of(torch.zeros(3), 0), "without memory"),
        (lambda: _with_storage_of(torch.zeros(3), 8), "without memory"),
        (lambda: _mapped_for_reading(3), "mapped for reading only"),
    ],
)
def test_a_tensor_that_cannot_be_loaded_into_is_refused_before_any_is_changed(
    base: str | None, unwritable: Any, why: str
) -> None:
    with tempfile.TemporaryDirectory(dir=base) as root:
        live = {"a": torch.zeros(3), "b": unwritable(), "z": torch.zeros(3)}
        saved = {key: torch.ones(value.shape) for key, value in live.items()}
        name = save_all(Path(root), saved, step=1)
        with pytest.raises(checkpoints.StateMismatch, match=why) as refused:
            checkpoints.load(root, name, into=live)
        assert len(refused.value.mismatched) == 1
        assert same(live["a"], torch.zeros(3)) and same(live["z"], torch.zeros(3))
        loaded = checkpoints.load(root, name, into=live, strict=False)
        assert [why in line for line in loaded.unmatched] == [True]
        assert same(live["z"], torch.ones(3))


def test_two_saved_tensors_of_one_path_are_not_loaded_into_one() -> None:
    """Earlier versions saved such states: a dict with an int key and a str key of the same text."""
    storage = MemoryStorage()
    saved = {0: torch.ones(3), 1: torch.full((3,), 2.0)}
    name = checkpoints.save(storage, saved, step=1, nonce="aa").name
    manifest = read_manifest(storage, name)
    (_, first), (_, second) = manifest.tree["items"]
    manifest = dataclasses.replace(manifest, tree={"items": [[0, first], ["0", second]]})
    storage.contents(f"{name}/manifest.json")[:] = manifest.to_bytes()
    state = checkpoints.load(storage, name).state
    assert same(state[0], saved[0]) and same(state["0"], saved[1])
    live = {"0": torch.zeros(3)}
    with pytest.raises(checkpoints.StateMismatch, match="two saved tensors have this path"):
        checkpoints.load(storage, name, into=live, strict=False)
    assert not live["0"].any()


@given(dimensions=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 6)), min_size=1, max_size=3))
@example(dimensions=[(2, 0), (3, 5)])
@example(dimensions=[(3, 2), (2, 4)])
@example(dimensions=[(3, 2), (2, 3)])
def test_a_tensor_is_loaded_into_unless_two_elements_share_memory(
    dimensions: list[tuple[int, int]],
) -> None:
    shape, strides = zip(*dimensions, strict=True)
    live = torch.zeros(64).as_strided(shape, strides)
    saved = torch.arange(1.0, 1 + live.numel()).reshape(shape)
    offsets = torch.arange(64).as_strided(shape, strides).reshape(-1).tolist()
    storage = MemoryStorage()
    name = checkpoints.save(storage, {"x": saved}, step=1, nonce="aa").name
    if len(set(offsets)) == len(offsets):
        checkpoints.load(storage, name, into={"x": live})
        assert same(live, saved)
        return
    with pytest.raises(checkpoints.StateMismatch, match="share memory"):
        checkpoints.load(storage, name, into={"x": live})
    assert not live.any()


def _mapped_for_reading(count: int) -> torch.Tensor:
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(4 * count))
        file.flush()
        mapped = numpy.memmap(file.name, dtype="f4", mode="r")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it is not writable
        return torch.from_numpy(mapped)


def test_keys_with_the_same_text_are_refused_for_tensors_and_exact_for_values() -> None:
    root = MemoryStorage()
    with pytest.raises(checkpoints.StateError, match="'x/0'"):
        checkpoints.save(root, {"x": {0: torch.ones(1), "0": torch.zeros(1)}}, step=1, nonce="aa")
    assert root.list("") == []
    values = {"x": {0: 1, "0": 2}}
    name = checkpoints.save(root, values, step=1, nonce="aa").name
    assert checkpoints.load(root, name).state == values
    name = checkpoints.save(root, {"x": {0: torch.ones(1)}}, step=2, nonce="aa").name
    live = {0: torch.zeros(1), "0": torch.zeros(1)}
    with pytest.raises(checkpoints.StateError, match="'x/0'"):
        checkpoints.load(root, name, into={"x": live})
    assert not any(live.values())


@pytest.mark.parametrize("position", [(1, 2), {"epoch": (1,)}, {1: 2}])
def test_a_data_position_that_json_changes_is_refused(position: Any) -> None:
    root = MemoryStorage()
    with pytest.raises(checkpoints.StateError, match="another value"):
        checkpoints.save(root, {}, step=1, nonce="aa", data_position=position)
    assert root.list("") == []


def test_a_rolled_back_run_does_not_report_old_states_as_saved(tmp_path: Path) -> None:
    def save(step: int, value: float) -> checkpoints.SaveOutcome:
        state = {"w": torch.full((2,), value)}
        outcome = engine.save_async(state, step=step, world=ALONE).wait(60)
        assert outcome is not None
        return outcome

    with checkpoints.Engine(tmp_path) as engine:
        for step in (10, 20):
            assert save(step, step).status is checkpoints.SaveStatus.COMMITTED
        again = save(20, 20)
        assert (again.status, again.bytes_written) == (checkpoints.SaveStatus.COMMITTED, 0)
        other = save(20, -20)
    assert other.status is checkpoints.SaveStatus.FAILED
    assert isinstance(other.error, checkpoints.NameTaken) and "new nonce" in other.reason


def test_the_share_of_an_abandoned_step_is_never_completed_with_a_new_one() -> None:
    root = MemoryStorage()
    save = functools.partial(checkpoints.save, root, step=1, nonce="aa", world_size=2)
    save(small_state(1), rank=0)
    with pytest.raises(checkpoints.NameTaken):
        save(small_state(2), rank=0)
    assert save(small_state(1), rank=1).committed
