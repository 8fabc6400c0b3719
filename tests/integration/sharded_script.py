"""Ranks of the tests of sharded checkpoints: a process that imports torch once and forks them.

Each line on stdin is a JSON object: scenario, size, folder, and arguments. Each line on stdout is
the list of its ranks' results, or the first traceback.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import checkpoints
from checkpoints import loading
from checkpoints import loading as exchange
from checkpoints import storage as storages
from checkpoints.storage import LocalStorage, MappedFile
from checkpoints.testing import FaultyStorage
from elastic.testing.waiting import PATIENCE_S

Result = dict[str, Any]
NAME = "step-000000001.g0.aa"
COPY, ROWS, COLUMNS = Replicate(), Shard(0), Shard(1)

SHAPES: dict[str, tuple[int, ...]] = {
    "even": (12, 4),
    "uneven": (5, 3),
    "wide": (3, 17),
    "thin": (1, 4),
    "deep": (4, 6, 5),
    "none": (0, 3),
    "scalar": (),
}
DTYPES = {"wide": torch.bfloat16, "thin": torch.int64, "deep": torch.float64}


def values(name: str) -> torch.Tensor:
    """The values of the tensor of that name; all elements differ."""
    shape = torch.Size(SHAPES[name])
    return torch.arange(1, shape.numel() + 1).reshape(shape).to(DTYPES.get(name, torch.float32))


def spread(mesh: Any, turn: int, *, empty: bool = False) -> dict[str, Any]:
    """Every tensor of ``SHAPES``, cycling through all placements that a mesh allows."""
    per_dim = [COPY, ROWS, COLUMNS]
    tensors: dict[str, Any] = {}
    for index, name in enumerate(SHAPES):
        data = values(name)
        kinds = [per_dim[(turn + index + i) % 3] for i in range(mesh.ndim)]
        fits = [k for k in per_dim if not isinstance(k, Shard) or k.dim < data.dim()]
        kinds = [k if k in fits else COPY for k in kinds]
        tensors[name] = distribute_tensor(torch.zeros_like(data) if empty else data, mesh, kinds)
    return tensors


def state_of(mesh: Any, turn: int, *, empty: bool = False) -> dict[str, Any]:
    sharded = spread(mesh, turn, empty=empty)
    plain = torch.zeros(1000) if empty else torch.arange(1000.0)
    return {"sharded": sharded, "tied": sharded["even"], "plain": plain, "step": 7}


def mesh_of(size: int, shape: list[int] | None) -> Any:
    names = ("copies", "shards") if shape else ("shards",)
    return init_device_mesh("cpu", tuple(shape or [size]), mesh_dim_names=names)


# --- scenarios: (rank, size, folder, arguments) -> the result that the test checks


def save(rank: int, size: int, folder: Path, mesh: list[int] | None, turn: int) -> Result:
    state = state_of(mesh_of(size, mesh), turn)
    saved = checkpoints.save(folder, state, step=1, nonce="aa", rank=rank, world_size=size)
    dist.barrier()
    return {"bytes": saved.bytes_written}


def load(rank: int, size: int, folder: Path, mesh: list[int] | None, turn: int, how: str) -> Result:
    """Modes: each rank ``alone``, all ``together``, or as from a ``memory`` file system."""
    vars(storages)["is_memory_file_system"] = lambda device: how == "memory"
    live = state_of(mesh_of(size, mesh), turn, empty=True)
    before = {name: t.to_local().data_ptr() for name, t in live["sharded"].items()}
    group = dist.group.WORLD if how == "together" else None
    loaded = checkpoints.load(folder, NAME, into=live, group=group)
    assert loaded.state["sharded"]["even"] is live["sharded"]["even"]
    after = {name: t.to_local().data_ptr() for name, t in live["sharded"].items()}
    same = {n: torch.equal(t.full_tensor(), values(n)) for n, t in live["sharded"].items()}
    same["plain"] = torch.equal(live["plain"], torch.arange(1000.0))
    return {"same": same, "in_place": before == after, "step": loaded.state["step"]}


def engine(rank: int, size: int, folder: Path) -> Result:
    """Save asynchronously, from staged copies, while training changes the shards."""
    state = state_of(mesh_of(size, [2, size // 2]), turn=0)
    with checkpoints.Engine(folder) as engine:
        world = checkpoints.WriterGroup(nonce="aa", rank=rank, size=size)
        handle = engine.save_async(state, step=1, world=world)
        for tensor in state["sharded"].values():
            tensor.to_local().zero_()
        outcome = handle.wait(60)
    assert outcome is not None
    return {"status": outcome.status.value, "reason": outcome.reason}


class Tied(nn.Module):
    """Uneven at any size; the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.hidden = nn.Linear(6, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return self.head(torch.relu(self.hidden(self.embedding(tokens))))  # type: ignore[no-any-return]


def trained(seed: int, steps: int, mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Tied()
    fully_shard(model.hidden, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 / (seed + 1))
    for _ in range(steps):
        train_once(model, optimizer)
    return model, optimizer


def train_once(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.arange(7)
    nn.functional.cross_entropy(model(tokens), tokens).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def full(state: Any) -> Any:
    """An unsharded copy, to inspect the state."""
    if isinstance(state, dict):
        return {key: full(value) for key, value in state.items()}
    if isinstance(state, DTensor):
        state = state.full_tensor()
    return state.clone() if isinstance(state, torch.Tensor) else state


def fsdp_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def fsdp_save(rank: int, size: int, folder: Path, mesh: list[int] | None) -> Result:
    model, optimizer = trained(0, 3, mesh_of(size, mesh))
    state = fsdp_state(model, optimizer)
    checkpoints.save(folder, state, step=1, nonce="aa", rank=rank, world_size=size)
    dist.barrier()
    whole = full(state)
    train_once(model, optimizer)
    next_state = full(fsdp_state(model, optimizer))
    if rank == 0:
        torch.save({"now": whole, "next": next_state}, folder.parent / "expected.pt")
    dist.barrier()
    return {}


def fsdp_load(rank: int, size: int, folder: Path, mesh: list[int] | None, together: bool) -> Result:
    """Load into another model whose optimizer has no state yet; then continue training."""
    model, optimizer = trained(5, 0, mesh_of(size, mesh))
    state = fsdp_state(model, optimizer)
    group = dist.group.WORLD if together else None
    loaded = checkpoints.load(folder, NAME, into=state, group=group).state
    set_optimizer_state_dict(model, optimizer, loaded["optimizer"])
    expected = torch.load(folder.parent / "expected.pt", weights_only=True)
    now = full(fsdp_state(model, optimizer))
    train_once(model, optimizer)
    after = full(fsdp_state(model, optimizer))
    return {
        "now": differences(now, expected["now"]),
        "next": differences(after, expected["next"], tolerance=1e-5),
    }


def differences(a: Any, b: Any, tolerance: float = 0.0, place: str = "") -> list[str]:
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return [f"{place}: {sorted(a)} {sorted(b)}"]
        return [n for k in a for n in differences(a[k], b[k], tolerance, f"{place}/{k}")]
    if isinstance(a, torch.Tensor):
        same = a.dtype == b.dtype and torch.allclose(a, b, rtol=tolerance, atol=tolerance)
        return [] if same else [f"{place}: {a} {b}"]
    return [] if a == b else [f"{place}: {a} {b}"]


def tensor_parallel(rank: int, size: int, folder: Path) -> Result:
    """FSDP2 over tensor parallelism: strided shards of indivisible sizes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["data"])
    checkpoints.save(folder, model.state_dict(), step=1, nonce="aa", rank=rank, world_size=size)
    dist.barrier()
    loaded = checkpoints.load(folder, NAME).state
    strided = [str(p) for t in model.state_dict().values() for p in t.placements]
    return {
        "same": {name: torch.equal(loaded[name], expected[name]) for name in expected},
        "strided": any("_S" in text or "Strided" in text for text in strided),
    }


class Layered(nn.Module):
    """Layers for tensor parallelism, and between them modules outside the plan, which stay
    replicated.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(7, 6), nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 7)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embedding(tokens))
        return self.down(torch.relu(self.up(hidden)))  # type: ignore[no-any-return]


def parallel(kind: str, size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same model, replicated or sharded: ``tp`` replicates, ``tp_fsdp`` shards over the
    replicas.
    """
    model = Layered()
    across = size // 2 if kind.startswith("tp") else size
    inside = size // across
    mesh = init_device_mesh("cpu", (across, inside), mesh_dim_names=("data", "tensor"))
    if kind.startswith("tp"):
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tensor"], plan)
    if kind.endswith("fsdp"):
        fully_shard(model, mesh=mesh["data"])
    whole = DistributedDataParallel(model) if kind == "ddp" else model
    return whole, torch.optim.AdamW(whole.parameters(), lr=0.1)


def save_as(rank: int, size: int, folder: Path, kind: str) -> Result:
    torch.manual_seed(0)
    model, optimizer = parallel(kind, size)
    for _ in range(3):
        train_once(model, optimizer)
    state = fsdp_state(model, optimizer)
    checkpoints.save(folder / kind, state, step=1, nonce="aa", rank=rank, world_size=size)
    dist.barrier()
    return {"saved": [info.name for info in checkpoints.list_checkpoints(folder / kind)]}


def load_as(rank: int, size: int, folder: Path, kind: str, saved: list[str]) -> Result:
    """Load every kind of checkpoint into this kind of model, which then takes one more step."""
    found: Result = {}
    for other in saved:
        torch.manual_seed(5)
        model, optimizer = parallel(kind, size)
        state = fsdp_state(model, optimizer)
        loaded = checkpoints.load(folder / other, NAME, into=state, group=dist.group.WORLD)
        set_optimizer_state_dict(model, optimizer, loaded.state["optimizer"])
        now, expected = full(fsdp_state(model, optimizer)), checkpoints.load(folder / other, NAME)
        found[other] = differences(now, expected.state)
        train_once(model, optimizer)
        torch.manual_seed(0)
        alone = Layered()
        undisturbed = torch.optim.AdamW(alone.parameters(), lr=0.1)
        for _ in range(4):
            train_once(alone, undisturbed)
        after = full(get_model_state_dict(model))
        found[other] += differences(after, alone.state_dict(), tolerance=1e-4)
    return found


def diverged(rank: int, size: int, folder: Path) -> Result:
    """Diverged replicas of a tensor-parallel model."""
    model, _ = parallel("tp", size)
    with torch.no_grad():
        model.get_parameter("up.weight").to_local().fill_(rank // 2)  # type: ignore[attr-defined]
    state = get_model_state_dict(model)
    saved = checkpoints.save(folder, state, step=1, nonce="aa", rank=rank, world_size=size)
    dist.barrier()
    return {"committed": saved.committed, "notes": list(saved.notes)}


def refused(rank: int, size: int, folder: Path) -> Result:
    """States with unsupported shards, which are rejected before any write."""
    mesh = mesh_of(size, None)
    told = {}
    partial = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    lying = DTensor.from_local(torch.ones(3), mesh, [ROWS], run_check=False)
    lying._local_tensor = torch.ones(2)
    for case, state, world in (
        ("partial", {"w": partial}, (rank, size)),
        ("lying", {"w": lying}, (rank, size)),
        ("world", {"w": distribute_tensor(torch.ones(4), mesh, [ROWS])}, (0, 1)),
        ("rank", {"w": distribute_tensor(torch.ones(4), mesh, [ROWS])}, (1 - rank, size)),
    ):
        try:
            checkpoints.save(
                folder / case, state, step=1, nonce="aa", rank=world[0], world_size=world[1]
            )
        except checkpoints.CheckpointError as error:
            told[case] = f"{type(error).__name__}: {error.message}"
    return told


def go(way: str) -> None:
    """How ranks that load together access the parts that peers have read."""
    same_files = None if way == "exchange" else "these"
    vars(loading)["page_cache_identity"] = lambda storage, name: same_files
    vars(storages)["is_memory_file_system"] = lambda device: way == "memory"


def exchanged(rank: int, size: int, folder: Path, alone: int, packed: int, way: str) -> Result:
    """Load replicated tensors with any message size; return the bytes that this rank read from
    disk.
    """
    go(way)
    exchange.UNPACKED_BYTES, exchange.PACKED_BYTES = alone, packed
    storage = Counting(folder)
    live = {name: torch.zeros_like(values(name)) for name in SHAPES}
    live["large"] = torch.zeros(200_000)
    loaded = checkpoints.load(storage, NAME, into=live, group=dist.group.WORLD)
    same = {name: torch.equal(live[name], values(name)) for name in SHAPES}
    same["large"] = torch.equal(live["large"], torch.arange(200_000.0))
    fresh = checkpoints.load(folder, NAME, group=dist.group.WORLD).state
    same["fresh"] = torch.equal(fresh["large"], live["large"])
    return {"same": same, "read": storage.read, "unmatched": loaded.unmatched}


class Counting(LocalStorage):
    """Counts the bytes of tensors read."""

    read = 0

    def open(self, path: str) -> Any:
        source = super().open(path)
        if path.endswith(".safetensors"):
            inner = source.read_at

            def read_at(offset: int, into: memoryview) -> int:
                self.read += len(into)
                return inner(offset, into)

            source.read_at = read_at  # type: ignore[method-assign]
        return source


def together_but(rank: int, size: int, folder: Path, trouble: str, way: str) -> Result:
    """One rank fails: return the error on every rank, and whether its tensors were modified."""
    live: dict[str, Any] = {name: torch.zeros_like(values(name)) for name in SHAPES}
    live["large"] = torch.zeros(200_000)
    go(way)
    storage: Any = folder
    name = NAME
    if rank == 1 and trouble in TROUBLES:
        storage = FaultyStorage(
            LocalStorage(folder),
            before=lambda call: TROUBLES[trouble](folder) if is_read(call) else None,
        )
        look = MappedFile.view

        def look_in_trouble(file: MappedFile, begin: int, end: int) -> memoryview:
            TROUBLES[trouble](folder)
            return look(file, begin, end)

        MappedFile.view = look_in_trouble  # type: ignore[assignment,method-assign]
    elif rank == 1 and trouble == "model":
        live["new"] = torch.zeros(1)
    elif rank == 1 and trouble == "name":
        name = NAME.replace("1.g0", "2.g0")
    try:
        checkpoints.load(storage, name, into=live, group=dist.group.WORLD)
    except Exception as error:  # noqa: BLE001  reported to the test
        told = {"error": type(error).__name__, "text": str(error)}
        told["file"] = str(getattr(error, "file", ""))
        return {**told, "touched": any(bool(tensor.any()) for tensor in live.values())}
    return {"error": ""}


def is_read(call: str) -> bool:
    return call.startswith("read ") and "safetensors" in call


def unreadable(folder: Path) -> None:
    raise OSError(5, "injected")


def out_of_memory(folder: Path) -> None:
    raise MemoryError("injected")


def touched(folder: Path) -> None:
    for file in folder.glob("*/*.safetensors"):
        os.utime(file)


def dies(folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def slow(folder: Path) -> None:
    time.sleep(0.5)


TROUBLES: dict[str, Callable[[Path], None]] = {
    "disk": unreadable,
    "memory": out_of_memory,
    "changes": touched,
    "dies": dies,
    "slow": slow,
}


def restored(rank: int, size: int, folder: Path, trouble: str) -> Result:
    """A job saves twice, and restores its state, which is not sharded, in a new world. Rank 1
    fails in between. Without a page cache in common, as on several nodes."""
    from elastic import torch_private
    from elastic.groups.world import World
    from elastic.hangs.page import THREAD_NAME as BUSY_THREAD
    from elastic.train.checkpointing import CheckpointManager
    from elastic.train.folder import Checkpoints
    from elastic.train.state import JobState

    go("exchange")
    job, average = JobState(seed=0), nn.Linear(700, 700)
    job.track("average", average)
    for step in (1, 2):
        job.progress.step = step
        nn.init.constant_(average.weight, float(step))
        checkpoints.save(
            folder, job.saved_tree(), step=step, nonce="aa", rank=rank, world_size=size
        )
        dist.barrier()
    job.progress.step = 0
    if rank == 1 and trouble == "damage":
        newest = folder / NAME.replace("1.g0", "2.g0") / "00001-of-00003.safetensors"
        newest.write_bytes(newest.read_bytes()[:-1] + b"?")
    dist.barrier()
    counting = Counting(folder)

    unwatched: list[str] = []

    def before_read(call: str) -> None:
        if not is_read(call):
            return
        if rank == 1 and trouble in TROUBLES:
            TROUBLES[trouble](folder)
        if BUSY_THREAD not in [thread.name for thread in threading.enumerate()]:
            unwatched.append(call)

    faulty = FaultyStorage(counting, before=before_read)
    events: list[Any] = []
    journal: Any = SimpleNamespace(emit=lambda event, **_: events.append(event))
    saver = CheckpointManager(Checkpoints(faulty), journal)
    world = World(
        generation=1,
        nonce="bb",
        lineage=(),
        rank=rank,
        size=size,
        local_rank=rank,
        local_size=size,
        node="n1",
        is_launched=True,
    )
    error = ""
    timeout = timedelta(seconds=0.2 if trouble == "slow" else PATIENCE_S)
    torch_private.set_group_timeout(timeout)
    os.environ["ELASTIC_COLLECTIVE_TIMEOUT_S"] = str(timeout.total_seconds())
    try:
        saver.restore(world, job)
        group = torch_private.default_group()
        assert group._get_backend(torch.device("cpu")).options._timeout == timeout
    except Exception as raised:  # noqa: BLE001  reported to the test
        error = f"{type(raised).__name__}: {raised}"
    return {
        "error": error,
        "step": job.progress.step,
        "weight": [float(average.weight.min()), float(average.weight.max())],
        "read": counting.read,
        "unwatched": unwatched,
        "skipped": [
            event.reason for event in events if type(event).__name__ == "CheckpointSkipped"
        ],
    }


def background(rank: int, size: int, folder: Path) -> Result:
    """Rank 1's disk hangs while both ranks train in the group, which has a timeout of 20 s."""
    gate = threading.Event()

    def hang(call: str) -> None:
        if rank == 1 and call.startswith("write "):
            assert gate.wait(60)

    storage = FaultyStorage(LocalStorage(folder), before=hang)
    state = {f"tensor{i}": torch.full((1000,), float(i)) for i in range(20)}
    sums = []
    with checkpoints.Engine(storage) as engine:
        world = checkpoints.WriterGroup(nonce="aa", rank=rank, size=size)
        handle = engine.save_async(state, step=1, world=world)
        for _ in range(200):
            one = torch.ones(100)
            dist.all_reduce(one)
            sums.append(float(one.sum()))
        before = handle.outcome
        gate.set()
        outcome = handle.wait(60)
    assert outcome is not None
    return {
        "right": sums == [100.0 * size] * 200,
        "early": before is not None,
        "status": outcome.status.value,
    }


SCENARIOS: dict[str, Callable[..., Result]] = {
    f.__name__: f
    for f in (
        *(save, load, engine, fsdp_save, fsdp_load, tensor_parallel, refused),
        *(save_as, load_as, diverged),
        *(exchanged, together_but, restored, background),
    )
}


# --- processes


def run_rank(order: Result, rank: int, store: Path) -> Result:
    size = order["size"]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=PATIENCE_S),
    )
    scenario = SCENARIOS[order["scenario"]]
    return scenario(rank, size, Path(order["folder"]), **order["arguments"])


def fork_rank(order: Result, rank: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        told: Result = {"result": run_rank(order, rank, folder / "store")}
    except BaseException:  # noqa: BLE001  reported to the test
        told = {"traceback": traceback.format_exc()}
    (folder / f"rank{rank}.json").write_text(json.dumps(told))
    os._exit(0)  # without waiting for peers that may be dead


def serve(line: str) -> list[Result]:
    order = json.loads(line)
    folder = Path(order["scratch"])
    pids = [fork_rank(order, rank, folder) for rank in range(order["size"])]
    for pid in pids:
        os.waitpid(pid, 0)
    files = [folder / f"rank{rank}.json" for rank in range(order["size"])]
    return [json.loads(f.read_text()) if f.exists() else {"dead": True} for f in files]


if __name__ == "__main__":
    # DTensor imports it lazily: once here rather than in each rank, and not in the tests' process.
    importlib.import_module("torch._dynamo")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for request in sys.stdin:
        print(json.dumps(serve(request)), flush=True)
