"""One rank of a test of process groups; ``test_process_group.py`` starts one per rank.

Each scenario is a function here; its return value is printed as JSON. Ranks synchronise through
files in a shared folder.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import functools
import gc
import json
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from elastic.errors import GroupBuildFailed, Superseded
from elastic.groups import group as group_module
from elastic.groups.faults import is_world_fault
from elastic.groups.group import ProcessGroup
from elastic.groups.store import WorldStore
from elastic.link.link import GroupSpec
from elastic.train import transfer
from elastic.train.ddp import ElasticDDP
from elastic.train.order import ControlFlags, StepFlags
from elastic.wire.handshake import SecretKey

DEADLINE_S = 180.0
Result = dict[str, Any]


class Rank:
    """The context of a scenario on one rank."""

    def __init__(self, rank: int, size: int, ports: list[int], folder: Path) -> None:
        self.rank = rank
        self.size = size
        self.ports = ports
        self.folder = folder
        self.group = ProcessGroup(torch.device("cpu"), None)

    def spec(self, generation: int, rank: int | None = None, size: int | None = None) -> GroupSpec:
        return GroupSpec(
            generation=generation,
            nonce=f"nonce{generation}",
            rank=self.rank if rank is None else rank,
            size=self.size if size is None else size,
            store_host="127.0.0.1",
            store_port=self.ports[generation % len(self.ports)],
            store_key=SecretKey(bytes(32)).text,
        )

    def build(self, spec: GroupSpec, timeout_s: float = DEADLINE_S) -> None:
        self.group.build(spec, superseded=lambda: False, timeout_s=timeout_s)

    def say(self, flags: str) -> None:
        (self.folder / f"{flags}.{self.rank}").touch()

    def hear(self, flags: str, rank: int) -> None:
        """Wait until ``rank`` has signalled ``word``."""
        until(lambda: (self.folder / f"{flags}.{rank}").exists())

    def abort_when(self, flags: str, rank: int) -> None:
        """Abort from another thread once ``rank`` signals ``word``."""

        def abort() -> None:
            self.hear(flags, rank)
            self.group.abort()

        threading.Thread(target=abort).start()


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "nothing has happened"
        time.sleep(0.002)


def failure_of(action: Callable[[], object]) -> BaseException | None:
    try:
        action()
    except Exception as error:  # noqa: BLE001  reported to the test
        return error
    return None


def summed() -> float:
    """The result of an all-reduce of 1 over all ranks."""
    one = torch.ones(1)
    dist.all_reduce(one)
    return float(one)


def held() -> Result:
    """The open resources and the memory size of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "rss_mib": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
    }


def held_after(early: Result) -> Result:
    """``held()`` once joined threads have left /proc, which ``join`` does not wait for."""
    deadline = time.monotonic() + 30.0
    while (now := held())["threads"] > early["threads"] and time.monotonic() < deadline:
        time.sleep(0.01)
    return now


# -- one group after another ------------------------------------------------------------------


def rebuilds(me: Rank, cycles: int, *, aborted: bool) -> Result:
    """Train in each of many groups until DDP has rebuilt its buckets; ``aborted``: abort each group
    in a collective.
    """
    model = ElasticDDP(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)))
    early: Result = {}
    times: dict[str, list[float]] = {"build": [], "wrap": [], "destroy": []}
    for cycle in range(cycles):
        with timed(times["build"]):
            me.build(me.spec(cycle))
        with timed(times["wrap"]):
            model.enter_world()
        assert summed() == me.size
        for _ in range(2):
            model(torch.randn(4, 64)).sum().backward()
        if aborted:
            abort_while_waiting(me)
        with timed(times["destroy"]):
            model.leave_world()
            me.group.destroy()
        model.zero_grad(set_to_none=True)
        if cycle == 20:
            early = held()
    milliseconds = {name: 1000 * sorted(took)[len(took) // 2] for name, took in times.items()}
    late, hook = held_after(early), sys.excepthook.__name__
    return {"early": early, "late": late, "ms": milliseconds, "hook": hook}


def abort_while_waiting(me: Rank) -> None:
    """Wait for the next rank, which sends nothing, until an abort releases this rank."""
    waiting = threading.Event()

    def abort() -> None:
        waiting.wait()
        me.group.abort()

    thread = threading.Thread(target=abort)
    thread.start()

    def wait() -> None:
        try:
            work = dist.irecv(torch.zeros(1), src=(me.rank + 1) % me.size)
        finally:
            waiting.set()
        assert work is not None
        work.wait()

    error = failure_of(wait)
    thread.join()
    assert error is not None and is_world_fault(error), error


class timed:
    def __init__(self, into: list[float]) -> None:
        self._into = into

    def __enter__(self) -> None:
        self._began_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._into.append(time.perf_counter() - self._began_s)


def orderly(me: Rank) -> Result:
    return rebuilds(me, int(os.environ["CYCLES"]), aborted=False)


def aborted(me: Rank) -> Result:
    return rebuilds(me, int(os.environ["CYCLES"]), aborted=True)


# -- gradients --------------------------------------------------------------------------------


class Branches(nn.Module):
    """One unused layer, and two layers that are used as the caller specifies."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)
        self.never = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, parts: str) -> torch.Tensor:
        hidden: torch.Tensor = self.first(x).tanh()
        return torch.stack([getattr(self, part)(hidden) for part in parts.split()]).sum(0)


class Checkpointed(nn.Module):
    """Activation checkpointing: a nested backward pass recomputes activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


class Sparse(nn.Module):
    """An embedding with sparse gradients, registered last: it is the first bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.table = nn.Linear(6, 6), nn.Embedding(20, 6, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.table(x.abs().mul(10).long().clamp(max=19)).mean(1))
        return found


WAYS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "one bucket": (lambda: nn.Linear(6, 6), {}),
    "many buckets": (
        lambda: nn.Sequential(*(nn.Linear(6, 6) for _ in range(5))),
        {"bucket_cap_mb": 1e-4},
    ),
    "copied": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)),
        {"gradient_as_bucket_view": False},
    ),
    "unused": (Branches, {"find_unused_parameters": True}),
    "static": (Checkpointed, {"static_graph": True}),
    "sparse": (Sparse, {"gradient_as_bucket_view": False}),
}


def gradients(me: Rank) -> Result:
    """For each kind of model: the deviation of its gradients from those of one process with all
    data.
    """
    me.build(me.spec(1))
    worst: Result = {}
    for name, (make, options) in WAYS.items():
        torch.manual_seed(1)
        alone = make().double()
        model = ElasticDDP(copy.deepcopy(alone), **options)
        model.reduction.flags = flags = ControlFlags()
        model.enter_world()
        worst[name], generator = 0.0, torch.Generator().manual_seed(2)
        for step in range(4):
            batch = torch.randn(8, 6, generator=generator, dtype=torch.float64)
            share = batch[:2] if me.rank == 0 else batch[2:]
            given: list[str] = []
            if name == "unused":  # in one pass no rank uses the right layer
                given = ["left"] if step == 0 else ["left right"]
            flags.send(StepFlags(save=me.rank == 0 and step == 2))
            model.reduction.begin(len(share) / len(batch))
            for module, data in ((alone, batch), (model, share)):
                module.zero_grad(set_to_none=step % 2 == 0)
                module(data, *given).square().mean().backward()
            assert model.reduction.failure is None
            heard = flags.received()
            assert heard == StepFlags(save=step == 2), (name, step, heard)
            for mine, its in zip(model.parameters(), alone.parameters(), strict=True):
                assert (mine.grad is None) == (its.grad is None), (name, step)
                if mine.grad is not None and its.grad is not None:
                    off = (mine.grad.to_dense() - its.grad.to_dense()).abs().max()
                    worst[name] = max(worst[name], float(off))
        model.leave_world()
    worst["chain"], worst["join"] = gradients_of_a_chain(me), gradients_in_join(me)
    me.group.destroy()
    return {"worst": worst}


def gradients_in_join(me: Rank) -> float:
    """torch's ``join`` for uneven data: a rank without data participates outside a pass."""
    torch.manual_seed(3)
    alone = nn.Linear(6, 6).double()
    model = ElasticDDP(copy.deepcopy(alone))
    model.enter_world()
    model.reduction.begin(1.0)
    batch = torch.randn(8, 6, dtype=torch.float64)
    with model.join():
        for _ in range(2 - me.rank):
            model.zero_grad()
            model(batch).square().mean().backward()
    alone(batch).square().mean().backward()
    worst = 0.0
    if me.rank == 0:  # its second pass was averaged with the zeros of rank 1
        for mine, its in zip(model.parameters(), alone.parameters(), strict=True):
            assert mine.grad is not None and its.grad is not None
            worst = float((mine.grad - its.grad).abs().max())
    model.leave_world()
    return worst


def gradients_of_a_chain(me: Rank) -> float:
    """Two wrapped models in one backward pass."""
    torch.manual_seed(3)
    alone = [nn.Linear(6, 6).double(), nn.Linear(6, 6).double()]
    models = [ElasticDDP(copy.deepcopy(module)) for module in alone]
    for model in models:
        model.enter_world()
        model.reduction.begin(0.5)
    batch = torch.randn(8, 6, dtype=torch.float64)
    alone[1](alone[0](batch).tanh()).square().mean().backward()
    share = batch[me.rank * 4 : me.rank * 4 + 4]
    time.sleep(0.2 * me.rank)  # rank 0 waits for longer than one slice
    models[1](models[0](share).tanh()).square().mean().backward()
    worst = 0.0
    for model, module in zip(models, alone, strict=True):
        for mine, its in zip(model.parameters(), module.parameters(), strict=True):
            assert mine.grad is not None and its.grad is not None
            worst = max(worst, float((mine.grad - its.grad).abs().max()))
        model.leave_world()
    return worst


# -- state ------------------------------------------------------------------------------------


def moved_state(me: Rank) -> Result:
    """Rank 1 sends its tensors to rank 2, in one chunk and in many; rank 0 only participates."""
    torch.manual_seed(1)
    kept = {
        "weights": torch.randn(300, 7),
        "turned": torch.randn(40, 30).T,
        "step": torch.tensor(3.0),
        "none": torch.empty(0, 4),
        "half": torch.randn(1001).bfloat16(),
        "flags": torch.rand(77) > 0.5,
        "strided": torch.arange(200)[::2],
    }
    me.build(me.spec(1))
    ends = {}
    for chunk_bytes in (1 << 20, 1000, 3):
        transfer.SHORTEST_CHUNK_BYTES = transfer.LONGEST_CHUNK_BYTES = chunk_bytes
        if chunk_bytes == 3:  # otherwise there would be thousands of broadcasts
            kept = {name: kept[name] for name in ("step", "none", "flags")}
        got = transfer.transfer(
            {"so": "far"} if me.rank == 1 else None,
            kept if me.rank == 1 else {},
            sources=(1,),
            receivers=(2,),
            device=torch.device("cpu"),
        )
        ends[str(chunk_bytes)] = got.tensors is not None and (
            got.node == {"so": "far"}
            and got.tensors.keys() == kept.keys()
            and all(torch.equal(got.tensors[name], kept[name]) for name in kept)
            and all(got.tensors[name].dtype == kept[name].dtype for name in kept)
        )
    if me.rank == 2:  # one bit flips in transit
        send = transfer.ChunkedTransfer.send_chunk

        def damage(self: Any, *args: Any) -> Any:
            sent = send(self, *args)
            assert sent.work is not None and sent.work.wait()
            sent.memory[-1] ^= 1
            return sent._replace(work=None)

        transfer.ChunkedTransfer.send_chunk = damage  # type: ignore[assignment,method-assign]
    damaged = failure_of(
        lambda: transfer.transfer(
            None,
            kept if me.rank == 1 else {},
            sources=(1,),
            receivers=(2,),
            device=torch.device("cpu"),
        )
    )
    me.group.destroy()
    return {"got": ends, "damaged": str(damaged)}


def sum_for_ever() -> None:
    while True:
        summed()


# -- aborts -----------------------------------------------------------------------------------


def half_broken_ring(me: Rank) -> Result:
    """Rank 1 is killed and rank 0 detects it; rank 2 waits for rank 0, which does nothing."""
    me.build(me.spec(1))
    me.say("built")
    if me.rank == 1:
        me.hear("built", 0)
        me.hear("built", 2)
        os.kill(os.getpid(), signal.SIGKILL)
    if me.rank == 2:
        me.abort_when("broken", 0)
    error = failure_of(lambda: dist.recv(torch.zeros(1), src=1 if me.rank == 0 else 0))
    me.say("broken")
    me.hear("broken", 2)
    me.group.destroy()
    me.build(me.spec(2, rank=min(me.rank, 1), size=2))
    total = summed()
    me.group.destroy()
    return {
        "fault": error is not None and is_world_fault(error),
        "error": str(error),
        "total": total,
    }


def group_of_a_launcher(me: Rank) -> Result:
    """The last rank fails, and its process ends only after the others are released."""
    with socket.socket() as probe:  # the store of a launcher listens on a port of its own
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    chosen = me.folder / "port"
    if me.rank == 0:
        (staged := me.folder / "port.new").write_text(str(port))
        staged.rename(chosen)
    until(chosen.exists)
    os.environ |= {"RANK": str(me.rank), "WORLD_SIZE": str(me.size), "LOCAL_RANK": str(me.rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(me.size), "GROUP_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": chosen.read_text()}
    me.group.form()
    total = summed()
    if me.rank == me.size - 1:
        me.group.abort()
        for rank in range(me.size - 1):
            me.hear("released", rank)
        return {"total": total, "fault": True}
    failure = failure_of(sum_for_ever)
    me.say("released")
    return {"total": total, "fault": failure is not None and is_world_fault(failure)}


def own_collectives(me: Rank) -> Result:
    """A script's own all-reduces, aborted at random times: the duration of each wait after the
    abort.
    """
    chance, took_s = random.Random(me.rank), []
    for cycle in range(int(os.environ["CYCLES"])):
        me.build(me.spec(cycle))
        took_s.append(until_aborted(me, cycle, chance.random() * 0.004, sum_for_ever))
        me.group.destroy()
    return {"longest_s": max(took_s)}


def own_backward(me: Rank) -> Result:
    """Backward passes of several buckets, aborted at random times, as in own_collectives.

    Starts with the first step of a world: in the second, DDP rebuilds its buckets by rank 0's plan.
    """
    chance, took_s = random.Random(me.rank), []
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    is_searching = os.environ["UNUSED"] == "1"  # for unused parameters
    model = ElasticDDP(layers, bucket_cap_mb=0.02, find_unused_parameters=is_searching)
    model.reduction.flags = ControlFlags()

    def train() -> None:
        while model.reduction.failure is None:
            model.reduction.begin(1 / me.size)
            model(torch.randn(4, 64)).sum().backward()
        raise model.reduction.failure

    model(torch.randn(4, 64)).sum().backward()  # the first pass of a process takes up to a second
    for cycle in range(int(os.environ["CYCLES"])):
        me.build(me.spec(cycle))
        model.enter_world()
        took_s.append(until_aborted(me, cycle, chance.random() * 0.02, train))
        model.reduction.begin(1.0)
        model.zero_grad(set_to_none=True)
        model.leave_world()
        me.group.destroy()
    return {"longest_s": max(took_s)}


def until_aborted(me: Rank, cycle: int, delay_s: float, act: Callable[[], object]) -> float:
    """The duration of ``act`` after this rank's abort, ``delay_s`` after all ranks arrived."""
    me.say(f"built{cycle}")
    for rank in range(me.size):
        me.hear(f"built{cycle}", rank)
    aborted_s: list[float] = []

    def abort() -> None:
        time.sleep(delay_s)
        aborted_s.append(time.monotonic())
        me.group.abort()

    thread = threading.Thread(target=abort)
    thread.start()
    error = failure_of(act)
    ended_s = time.monotonic()
    thread.join()
    assert error is not None and is_world_fault(error), error
    traceback.clear_frames(error.__traceback__)  # they hold the group
    return max(0.0, ended_s - aborted_s[0])


def users_sockets(me: Rank) -> Result:
    """A server and a connection of the user, opened during a group build, survive its abort."""
    listener = socket.create_server(("127.0.0.1", 0))
    opened: list[socket.socket] = []

    def open_more() -> None:
        client = socket.create_connection(listener.getsockname())
        opened.extend([client, listener.accept()[0], socket.create_server(("127.0.0.1", 0))])

    build = me.group._assemble

    def assemble(*args: Any) -> None:
        opener = threading.Thread(target=open_more)
        opener.start()
        opener.join()
        build(*args)

    me.group._assemble = assemble  # type: ignore[assignment,method-assign]
    me.build(me.spec(1))
    sockets = me.group.sockets()
    mine = {s.fileno() for s in (listener, *opened)}
    inherited = in_child(sockets)
    total = summed()
    me.say("summed")
    me.hear("summed", 1 - me.rank)
    me.group.abort()
    me.group.abort()
    opened[0].sendall(b"still here")
    opened[1].settimeout(DEADLINE_S)
    heard = opened[1].recv(100).decode()
    with socket.create_connection(opened[2].getsockname()):
        opened[2].accept()[0].close()
    me.group.destroy()
    return {
        "total": total,
        "heard": heard,
        "mine": sorted(mine & set(sockets)),
        "sockets": len(sockets),
        "inherited": inherited,
        "initialized": dist.is_initialized(),
    }


def in_child(fds: tuple[int, ...]) -> list[str]:
    """The targets of these descriptors in a forked child."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        names = sorted({os.readlink(f"/proc/self/fd/{fd}") for fd in fds})
        os.write(writer, json.dumps(names).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        names = json.load(told)
    os.waitpid(child, 0)
    return [str(name) for name in names]


# -- builds that fail -------------------------------------------------------------------------


def missing_rank(me: Rank) -> Result:
    """Ranks 0 and 1 wait in vain for rank 2, with each possible outcome; then rank 2 arrives."""
    if me.rank == 2:
        me.hear("tried", 0)
        me.hear("tried", 1)
        me.build(me.spec(4))
        return {"total": summed()}
    timeout = failure_of(lambda: me.build(me.spec(1), timeout_s=1.0))
    # Rank 0 hosts the store: it gives up last, since rank 1 would otherwise only see a lost store.
    newer = newer_after(5) if me.rank == 1 else (me.folder / "announced.1").exists
    announced = failure_of(
        lambda: me.group.build(me.spec(2), superseded=newer, timeout_s=DEADLINE_S)
    )
    me.say("announced")
    last = None if me.rank == 1 else "aborted"
    aborted = failure_of(lambda: build_and_abort(me, me.spec(3), after=last))
    me.say("aborted")
    me.say("tried")
    me.build(me.spec(4))
    return {
        "total": summed(),
        "timeout": type(timeout).__name__,
        "missing": timeout.missing if isinstance(timeout, GroupBuildFailed) else None,
        "announced": type(announced).__name__,
        "aborted": type(aborted).__name__,
    }


def build_and_abort(me: Rank, spec: GroupSpec, after: str | None = None) -> None:
    """Abort from another thread while the main thread waits for its peers, and ``after`` rank 1 has
    reported the same.
    """
    waits = threading.Event()

    def superseded() -> bool:
        if look():
            waits.set()
        return False

    look = newer_after(3)

    def abort() -> None:
        waits.wait()
        if after is not None:
            me.hear(after, 1)
        me.group.abort()

    threading.Thread(target=abort, daemon=True).start()
    me.group.build(spec, superseded=superseded, timeout_s=DEADLINE_S)


def newer_after(looks: int) -> Callable[[], bool]:
    left = iter(range(looks))
    return lambda: next(left, None) is None


def dies_in_build(me: Rank) -> Result:
    """After the handshake, one rank dies instead of building; the others build without it.

    A rank that waits for the host of the store detects its death; one that waits for another rank
    is released.
    """
    victim = int(os.environ["VICTIM"])
    if me.rank == victim:

        def die(*_: Any, **__: Any) -> None:
            me.say("met")
            os.kill(os.getpid(), signal.SIGKILL)

        mock.patch.object(group_module, "init_process_group", die).start()
    elif victim != 0:
        me.abort_when("met", victim)
    error = failure_of(lambda: me.build(me.spec(1), timeout_s=10 * DEADLINE_S))
    group = failure_of(dist.get_world_size)
    left = [rank for rank in range(me.size) if rank != victim]
    me.build(me.spec(2, rank=left.index(me.rank), size=len(left)))
    return {
        "error": type(error).__name__,
        "fault": error is not None and is_world_fault(error),
        "group": str(group),
        "total": summed(),
    }


def dies_before_connecting(me: Rank) -> Result:
    """The rank that would connect to all others dies when they wait for that, and are released.

    Of two ranks, gloo lets the one with the higher address connect, and the other one wait. If that
    is rank 0, all end: the store would die with it, and the others would notice that first.
    """
    publish, read = WorldStore.set, WorldStore.get

    def publish_or_die(store: WorldStore, key: str, value: Any) -> None:
        publish(store, key, value)
        if "//cpu//" not in key:
            return
        at = bytes(value).index(socket.inet_aton("127.0.0.1"))
        # As gloo compares ports: in network byte order (transport/tcp/pair.cc, Pair::connect).
        port = int.from_bytes(bytes(value)[at - 2 : at], sys.byteorder)
        me.say(f"published-{port:05}")
        until(lambda: len(list(me.folder.glob("published-*"))) == me.size)
        victim = max(me.folder.glob("published-*"))
        if victim.suffix == ".0" or victim.name == f"published-{port:05}.{me.rank}":
            print(json.dumps({"died": True}), flush=True)
            os._exit(0)

    def read_and_say(store: WorldStore, key: str) -> bytes:
        value = read(store, key)
        victim = max(me.folder.glob("published-*"), default=Path()).suffix
        if "//cpu//" in key and key.endswith(victim.replace(".", "/")):
            me.say("waits")
        return value

    def abort() -> None:
        until(lambda: len(list(me.folder.glob("waits.*"))) == me.size - 1)
        me.group.abort()

    with mock.patch.multiple(WorldStore, set=publish_or_die, get=read_and_say):
        threading.Thread(target=abort, daemon=True).start()
        began_s = time.monotonic()
        error = failure_of(lambda: me.build(me.spec(1), timeout_s=10 * DEADLINE_S))
        took_s = time.monotonic() - began_s
    alive = sorted(int(path.suffix[1:]) for path in me.folder.glob("waits.*"))
    me.build(me.spec(2, rank=alive.index(me.rank), size=len(alive)))
    return {"died": False, "error": type(error).__name__, "total": summed(), "took_s": took_s}


def mute_host(me: Rank) -> Result:
    """Rank 0's port accepts connections and never answers, like that of a stopped process."""
    mute = socket.create_server(("127.0.0.1", 0))
    me.ports = [mute.getsockname()[1]]
    before = held()
    timeout = failure_of(lambda: me.build(me.spec(1, rank=1, size=2), timeout_s=1.0))
    aborted = failure_of(lambda: build_and_abort(me, me.spec(1, rank=1, size=2)))
    nccls = ProcessGroup(torch.device("cpu"), "cpu:gloo,cuda:nccl")  # with torch's own store
    torchs = failure_of(
        lambda: nccls.build(me.spec(1, rank=1, size=2), superseded=lambda: False, timeout_s=1.0)
    )
    return {
        "errors": [type(error).__name__ for error in (timeout, aborted, torchs)],
        "more_fds": held()["fds"] - before["fds"],
    }


def alone(me: Rank) -> Result:
    totals: list[float] = []
    timeouts: list[str | float] = []
    for generation, told in enumerate((None, "77", "soon")):
        os.environ.pop("ELASTIC_COLLECTIVE_TIMEOUT_S", None)
        if told is not None:  # as set by the agent from its options
            os.environ["ELASTIC_COLLECTIVE_TIMEOUT_S"] = told
        if refused := failure_of(functools.partial(me.build, me.spec(generation, rank=0, size=1))):
            timeouts.append(type(refused).__name__)
            continue
        totals.append(summed())
        group = torch.distributed.group.WORLD
        assert group is not None
        backend = group._get_backend(torch.device("cpu"))
        timeouts.append(backend.options._timeout.total_seconds())
        me.group.destroy()
    me.group.destroy()
    superseded = failure_of(
        lambda: me.group.build(me.spec(9, size=1), superseded=lambda: True, timeout_s=1)
    )
    return {
        "totals": totals,
        "timeouts_s": timeouts,
        "superseded": isinstance(superseded, Superseded),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("scenario")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--ports", type=int, nargs="+", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    faulthandler.enable()
    faulthandler.dump_traceback_later(DEADLINE_S + 60, exit=True)
    torch.set_num_threads(1)
    me = Rank(args.rank, args.size, args.ports, args.folder)
    print(json.dumps(globals()[args.scenario](me)), flush=True)
    me.group.destroy()  # a gloo thread that frees a tensor during shutdown raises SIGABRT


if __name__ == "__main__":
    main()
