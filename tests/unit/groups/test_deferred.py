"""torch.distributed as scripts and frameworks use it between elastic.join() and the first world."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from kit.assignments import assignment
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from elastic.errors import ConfigError, TrainingError
from elastic.groups.deferred import DeferredGroup
from elastic.groups.group import ProcessGroup
from elastic.groups.pending import open_works, refuse_stale_group
from elastic.groups.world import joins_running_job, world_from_environment
from elastic.telemetry.log import get_logger
from elastic.wire.messages import CALL_JOIN, NO_WORLD, WorldIdentity, world_variables

FIRST_WORLD = WorldIdentity(generation=1, nonce="3f9c", lineage=())
TORCHS = (dist.init_process_group,)  # in a tuple, which is not searched
ONES = torch.ones(3)


def environment(world: WorldIdentity, rank: int, size: int) -> dict[str, str]:
    """Of a worker, of two on its node; at most three nodes."""
    variables = world_variables(
        world,
        rank=rank,
        size=size,
        local_size=2,
        node_rank=rank // 2,
        nodes=size // 2,
        store_host="localhost",
        store_port=CALL_JOIN if world is NO_WORLD else 4711,
    )
    return {**variables, "LOCAL_RANK": str(rank % 2), "ELASTIC_MAX_NODES": "3"}


class Deferring:
    """A process that has joined."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.group = ProcessGroup(torch.device("cpu"), "gloo")
        self.has_entered = False
        self._monkeypatch = monkeypatch

    def join(self, environ: dict[str, str]) -> None:
        for name, value in environ.items():
            self._monkeypatch.setenv(name, value)
        self.group.defer(lambda: self.has_entered)

    def enter_world(self) -> None:
        self.has_entered = True
        self.group.build(assignment(), superseded=lambda: False, timeout_s=60.0)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Deferring]:
    made = Deferring(monkeypatch)
    yield made
    made.group.destroy()
    open_works()
    assert not dist.is_initialized() and dist.init_process_group is TORCHS[0]


def test_the_call_creates_no_connection_and_the_first_world_replaces_it(process: Deferring) -> None:
    process.join(environment(FIRST_WORLD, rank=1, size=4))
    assert not dist.is_initialized()
    hook = sys.excepthook
    dist.init_process_group("gloo", init_method="env://", rank=1, world_size=4)
    assert dist.is_initialized() and not process.group.is_foreign and sys.excepthook is hook
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (1, 6, "gloo")
    assert DistributedSampler(range(12)).num_replicas == 6  # type: ignore[arg-type]
    early = dist.group.WORLD

    process.enter_world()
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    dist.all_reduce(torch.ones(1))
    dist.new_group([0])
    with pytest.raises(ValueError) as stale:  # run.retry explains it
        dist.all_reduce(torch.ones(1), group=early)
    with pytest.raises(TrainingError, match="that was created before the first world"):
        refuse_stale_group(stale.value)
    dist.init_process_group("gloo")  # of the next call of the training function
    dist.destroy_process_group()  # at its end; elastic still needs the group
    assert dist.is_initialized() and dist.get_world_size() == 1


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        (environment(FIRST_WORLD, rank=0, size=4), "0"),
        (environment(FIRST_WORLD, rank=3, size=4), "3"),
        (environment(NO_WORLD, rank=0, size=2), "4"),
        (environment(NO_WORLD, rank=1, size=2), "5"),
        ({**environment(NO_WORLD, rank=0, size=2), "ELASTIC_MAX_NODES": "1"}, "1"),
    ],
    ids=["main", "third", "joining", "joining second", "replaces rank 0 of the only node"],
)
def test_before_the_first_world_the_environment_is_that_of_the_largest(
    process: Deferring, environ: dict[str, str], rank: str
) -> None:
    process.join(environ)
    nodes = int(environ["ELASTIC_MAX_NODES"])
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (rank, str(2 * nodes))
    assert os.environ["GROUP_RANK"] == str(int(rank) // 2)
    assert os.environ["LOCAL_RANK"] == environ["LOCAL_RANK"]
    assert int(os.environ["MASTER_PORT"]) and os.environ["MASTER_ADDR"]
    assert joins_running_job() == (environ["MASTER_PORT"] == CALL_JOIN)
    dist.init_process_group("gloo")
    assert dist.get_rank() == int(rank)


def test_a_world_that_the_environment_describes_is_the_agents(process: Deferring) -> None:
    """Without run.retry, the first world is formed from the environment."""
    process.join(environment(FIRST_WORLD, rank=1, size=4))
    dist.init_process_group()
    process.group.destroy()  # as at the beginning of a world
    assert (world_from_environment().rank, world_from_environment().size) == (1, 4)


def test_plain_python_is_a_world_of_one(process: Deferring) -> None:
    process.join({})
    dist.init_process_group("gloo")  # env:// would fail
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    assert process.group.form().size == 1
    dist.all_reduce(torch.ones(1))


def test_a_function_that_was_imported_by_name_is_deferred(
    process: Deferring, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = ModuleType("script")
    exec("from torch.distributed import init_process_group as begin", vars(script))
    monkeypatch.setitem(sys.modules, "script", script)
    process.join({})
    script.begin("gloo", rank=0, world_size=1)
    assert dist.get_world_size() == 1
    late = dist.init_process_group
    process.group.destroy()
    assert script.begin is TORCHS[0]
    with pytest.raises(ValueError, match="environment variable"):
        late("gloo")  # torch's again, for those that keep it


COLLECTIVES: dict[str, Callable[[], object]] = {
    "all_reduce": lambda: dist.all_reduce(ONES),
    "all_gather": lambda: dist.all_gather([ONES], ONES),
    "all_gather_object": lambda: dist.all_gather_object([None] * 6, 1),
    "all_to_all_single": lambda: dist.all_to_all_single(ONES, ONES),
    "broadcast": lambda: dist.broadcast(ONES, 0),
    "broadcast_object_list": lambda: dist.broadcast_object_list([1], 0),
    "gather": lambda: dist.gather(ONES),
    "irecv": lambda: dist.irecv(ONES, 0),
    "reduce": lambda: dist.reduce(ONES, 0),
    "reduce_scatter": lambda: dist.reduce_scatter(ONES, [ONES] * 6),
    "scatter": lambda: dist.scatter(ONES, src=0),
    "send": lambda: dist.send(ONES, 0),
    "new_group": lambda: dist.new_group([0, 1], backend="gloo"),
    "init_device_mesh": lambda: init_device_mesh("cpu", (6,)),
    "DistributedDataParallel": lambda: DistributedDataParallel(nn.Linear(2, 2)),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_before_the_first_world_collectives_are_refused_by_name(
    process: Deferring, name: str
) -> None:
    process.join(environment(FIRST_WORLD, rank=1, size=4))
    dist.init_process_group("gloo")
    with pytest.raises(TrainingError) as caught:
        COLLECTIVES[name]()
    line = COLLECTIVES[name].__code__.co_firstlineno
    assert f"{name}() at {__file__}:{line} before the first world" in str(caught.value)
    assert "run." in caught.value.hint


def test_a_barrier_returns_until_a_joining_node_takes_part(
    process: Deferring, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A joining node calls it in its first call of the training function, before its world; the
    others in a later call, in a world. They do not wait for it."""
    monkeypatch.setattr(get_logger(), "propagate", True)
    process.join(environment(FIRST_WORLD, rank=0, size=4))
    dist.init_process_group("gloo")
    dist.barrier()
    dist.barrier(device_ids=[0])
    warnings = list(
        {id(r): r.getMessage() for r in caplog.records if r.levelname == "WARNING"}.values()
    )
    assert len(warnings) == 1 and f"barrier() at {__file__}" in warnings[0]

    process.enter_world()
    counted: list[object] = []
    monkeypatch.setattr("elastic.groups.deferred._barrier", lambda *args: counted.append(args))
    process.has_entered = False  # the function is called again
    dist.barrier()
    work = dist.barrier(async_op=True)
    assert work is not None and work.wait() and not counted
    process.has_entered = True
    dist.barrier()
    assert len(counted) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dist.init_process_group("nccl"), "no backend, and the groups of worlds use gloo"),
        (lambda: dist.init_process_group(world_size=2, rank=0), "world_size=2"),
        (lambda: dist.init_process_group(device_id=torch.device("cuda", 1)), "trains on 'cpu'"),
    ],
    ids=["backend", "size", "device"],
)
def test_a_contradictory_call_is_refused(
    process: Deferring, call: Callable[[], object], message: str
) -> None:
    process.join(environment(FIRST_WORLD, rank=1, size=4))
    with pytest.raises(ConfigError, match=message) as caught:
        call()
    assert caught.value.hint and not dist.is_initialized()


def test_on_gpus_the_backend_and_the_device_of_the_worker_are_accepted() -> None:
    gpu = torch.device("cuda", 1)
    deferred = DeferredGroup(gpu, "cpu:gloo,cuda:nccl", lambda: False, lambda: False)
    deferred.install()
    try:
        for backend in (None, "nccl", "cuda:nccl,cpu:gloo"):
            dist.init_process_group(backend, device_id=gpu)
        dist.init_process_group(device_id=1)
        assert dist.get_backend() == "cpu:gloo,cuda:nccl"
        with pytest.raises(ConfigError, match="groups of worlds use nccl") as caught:
            dist.init_process_group("gloo")
        assert "elastic.join(backend='gloo')" in caught.value.hint
        with pytest.raises(ConfigError, match="trains on 'cuda:1'"):
            dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    finally:
        deferred.remove()


def test_a_group_that_was_created_in_another_way_is_named(process: Deferring) -> None:
    process.join(environment(FIRST_WORLD, rank=0, size=4))
    TORCHS[0]("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        with pytest.raises(TrainingError, match="created a process group of 1 ranks") as caught:
            process.enter_world()
        assert "init_process_group()" in caught.value.hint
    finally:
        dist.destroy_process_group()
