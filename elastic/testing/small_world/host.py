"""The host of small worlds: a warm process that forks workers and simulates all nodes' agents.

It reads one order per line from stdin, and answers each with one line on stdout. It neither imports
gRPC nor computes with torch, so that its forks behave like new processes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.metadata
import json
import os
import queue
import secrets
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elastic.agent.identity import PortReserve
from elastic.groups import deferred
from elastic.link.link import (
    Assignment,
    ClientHandshakeRequest,
    CollectiveFailure,
    Entered,
    Exiting,
    FolderAnswer,
    FolderAsk,
    Heartbeat,
    LinkServer,
    LocalReplicas,
    Message,
    Ready,
    ReplicaJoin,
    ReplicaRendezvous,
    SigtermAnswer,
    SigtermAsk,
    Worker,
    WorkerDeath,
)
from elastic.testing.small_world.recording import RecordOrder
from elastic.testing.small_world.worker import become_worker
from elastic.testing.small_world.world import RECOVER, STOP, WAIT, Death
from elastic.wire.handshake import SecretKey
from elastic.wire.messages import (
    CALL_JOIN,
    NO_WORLD,
    WorldIdentity,
    WorldState,
    world_variables,
)

# Modules that scripts import eventually: creating an optimizer imports _dynamo.
_WARM = (
    "checkpoints",
    "elastic",
    "encodings.ascii",
    "encodings.idna",  # of the first connection
    "numpy.ctypeslib",
    "numpy.ma",  # of the first look at all of numpy
    "pdb",  # of the watch for debuggers
    "torch._dynamo",
    "torch.distributed.optim",
    "torch.nn.parallel",
    "torch.optim.swa_utils",
    "torch.utils.checkpoint",
    "torch.utils.data",
)
# Not in every version of torch.
_WARM_IF_PRESENT = (
    "torch.profiler._cupti_monitor",  # of the first profiled region, which a training step is
    "torch.distributed._tools",  # of the first module that FSDP shards
    "torch.distributed.tensor.debug",
)
_ALONE = {"ELASTIC_MAX_NODES": "3"}  # the default global batch is that of a world of three
_SLICE_S = 0.02
_HEARD_WITHIN_S = 2.0  # after a failure: the time until the death that caused it is detected
_DYING_S = 10.0  # after the end of a sibling that has lost it
_MORE_WORLDS = 5  # than deaths: some failures form the world again although all ranks are alive
_STACKS_S = 1.0  # time for stuck workers to write their stacks


@dataclass(eq=False)
class _Process:
    """A worker, and the link of its node."""

    name: str
    pid: int
    server: LinkServer
    local_rank: int = 0
    worker: Worker | None = None  # as the link knows it
    is_handshaken: bool = False
    is_ready: bool = False
    has_ended: bool = False
    exit_code: int | None = None

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "pid": self.pid, "exit_code": self.exit_code}


class SmallJob:
    """One run of a script, by the workers of several nodes."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._script = Path(order["script"])
        self._folder = Path(order["folder"])
        self._size = int(order["size"])
        self._per_node = int(order["per_node"])
        self._arguments = list(order["arguments"])
        self._deaths = {death["rank"]: Death(**death) for death in order["deaths"]}
        self._on_death = str(order["on_death"])
        self._is_replaced = bool(order["is_replaced"])
        self._is_counted = bool(order["is_counted"])
        self._prepare = str(order["prepare"])
        self._environment_of_script = dict(order.get("environment") or {})
        record = order.get("record")
        self._record = RecordOrder(**record) if record is not None else None
        self._until_s = time.monotonic() + float(order["limit_s"])
        self._received: queue.Queue[tuple[Worker, Message | WorkerDeath]] = queue.Queue()
        self._ports = PortReserve()
        self._store_key = SecretKey.generate()
        self._replicas: dict[str, LocalReplicas] = {}  # by the link of their node
        self._processes: list[_Process] = []
        self._members: list[_Process] = []  # of the newest world, by rank
        self._generation = 0
        self._nonce = ""
        self._step = 0  # the highest step that was reported as committed
        self._failing_since_s: float | None = None
        self._is_ending = False  # all workers are about to be restarted
        self._job_folder = ""  # of the first process that saves checkpoints
        self._problem = ""

    def run(self) -> dict[str, Any]:
        """Run until all workers have ended."""
        try:
            self._start_all()
            while not self._problem and not all(p.has_ended for p in self._processes):
                self._turn()
        finally:
            self._end_all()
            self._ports.close()
        return {
            "workers": [p.describe() for p in self._processes],
            "worlds": self._generation,
            "problem": self._problem,
        }

    # -- processes ----------------------------------------------------------------------------

    def _start_all(self) -> None:
        self._generation, self._nonce = 1, secrets.token_hex(4)
        for rank in range(self._size):
            self._start(rank)
        self._members = list(self._processes)

    def _start(self, rank: int, *, is_joining: bool = False) -> None:
        number = len(self._processes)
        name = f"worker-{number}"
        local_rank = rank % self._per_node
        server = self._processes[-1].server if local_rank else self._server()
        environment = _ALONE
        if self._size > 1:
            environment = self._environment(rank, server.path, is_joining=is_joining)
        environment = environment | self._environment_of_script
        pid = os.fork()
        if pid == 0:
            become_worker(
                self._script,
                self._folder,
                name,
                environment,
                arguments=self._arguments,
                death=self._deaths.get(number),
                counts=self._is_counted and not self._deaths,
                is_joining=is_joining,
                prepare=self._prepare,
                record=self._record,
            )
        self._processes.append(_Process(name, pid, server, local_rank))
        if local_rank == min(self._per_node, self._size) - 1:
            server.start()  # after the last fork, which would not have its thread

    def _server(self) -> LinkServer:
        return LinkServer(
            on_message=lambda worker, message: self._received.put((worker, message)),
            on_death=lambda worker, death: self._received.put((worker, death)),
            on_error=lambda error: None,  # the run ends at its limit, with the log of the thread
        )

    def _environment(self, rank: int, link: str, *, is_joining: bool) -> dict[str, str]:
        """The variables that torchrun and our agent set. A worker that joins a running world
        receives its rank over the link (elastic/launcher/handler.py)."""
        size = self._per_node if is_joining else self._size
        local_size = min(self._per_node, size)
        identity = WorldIdentity(generation=self._generation, nonce=self._nonce, lineage=())
        values: dict[str, object] = {
            "TORCHELASTIC_RUN_ID": "small-world",
            "TORCHELASTIC_RESTART_COUNT": int(is_joining),
            "TORCHELASTIC_MAX_RESTARTS": 1000,
            "ELASTIC_LINK": link,
            "LOCAL_RANK": rank % local_size,
            "ELASTIC_MAX_NODES": self._size,
            "ELASTIC_NODE_NAME": f"node-{len(self._processes)}",
        }
        return {name: str(value) for name, value in values.items()} | world_variables(
            NO_WORLD if is_joining else identity,
            rank=rank,
            size=size,
            local_size=local_size,
            node_rank=rank // self._per_node,
            nodes=max(1, size // self._per_node),
            store_host="127.0.0.1",
            store_port=CALL_JOIN if is_joining else self._store_port,
        )

    @property
    def _store_port(self) -> int:
        return self._ports.ports[self._generation % len(self._ports.ports)]

    def _turn(self) -> None:
        with contextlib.suppress(queue.Empty):
            worker, message = self._received.get(timeout=_SLICE_S)
            if not isinstance(message, WorkerDeath):  # a death is seen below
                process = next(p for p in self._processes if p.pid == worker.pid)
                self._on_message(process, worker, message)
        for process in self._processes:
            if not process.has_ended and self._reap(process):
                self._on_end(process)
        self._handle_failures()
        if time.monotonic() > self._until_s:
            self._problem = "not finished within the limit"

    def _reap(self, process: _Process, *, options: int = os.WNOHANG) -> bool:
        pid, status = os.waitpid(process.pid, options)
        if pid:
            process.has_ended = True
            process.exit_code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # its data workers
        return bool(pid)

    def _on_end(self, process: _Process) -> None:
        if process.exit_code == 0:
            return
        victim = self._victim_of(process)
        if victim is None:
            has_died = any(p.has_ended and p.exit_code is None for p in self._processes)
            if self._on_death == RECOVER or not has_died:
                self._problem = f"{process.name} has failed"
            elif self._on_death == WAIT:
                self._restart()
            return
        process = victim
        if self._on_death == STOP:
            for other in self._processes:
                if not other.has_ended:
                    os.kill(other.pid, signal.SIGKILL)
        if self._on_death == STOP or self._restarts:
            return
        for other in self._processes:
            if other.server is process.server and not other.has_ended:
                os.kill(other.pid, signal.SIGKILL)  # a part of a replica is useless
                self._reap(other, options=0)
        if self._is_replaced or self._on_death == WAIT:
            for local_rank in range(self._per_node):
                self._start(local_rank, is_joining=True)
        self._form_next()

    @property
    def _restarts(self) -> bool:
        """Whether a death restarts all workers: not where all change worlds in process, as in
        run.once outside of run.retry."""
        is_ready = all(p.is_ready for p in self._members)
        return self._on_death == WAIT and (self._is_ending or not is_ready)

    def _restart(self) -> None:
        """A survivor ends because of the death, and with it this run: the next one restarts all
        workers. End the replacements, which would wait for the survivors."""
        self._is_ending = True
        for process in self._processes[self._size :]:
            if not process.has_ended:
                os.kill(process.pid, signal.SIGKILL)

    def _victim_of(self, process: _Process) -> _Process | None:
        """The worker that killed itself: ``process``, or the one that it has ended with."""
        for number in self._deaths:
            if number < len(self._processes):
                victim = self._processes[number]
                if process is victim or self._is_lost_with(process, victim):
                    return victim if victim.exit_code is None else None
        return None

    def _is_lost_with(self, process: _Process, victim: _Process) -> bool:
        """Whether a part of the victim's replica has ended because the victim did: a dying process
        closes its connections before its parent can see its end."""
        if process.server is not victim.server:
            return False
        until_s = time.monotonic() + _DYING_S
        while not (victim.has_ended or self._reap(victim)) and time.monotonic() < until_s:
            time.sleep(_SLICE_S)
        return victim.has_ended

    def _end_all(self) -> None:
        stuck = [p for p in self._processes if not p.has_ended]
        if stuck and "limit" in self._problem:
            for process in stuck:
                os.kill(process.pid, signal.SIGUSR2)
            time.sleep(_STACKS_S)
        for process in stuck:
            os.kill(process.pid, signal.SIGKILL)
            self._reap(process, options=0)
        for process in self._processes:
            process.server.close()

    # -- messages of the workers --------------------------------------------------------------

    def _on_message(self, process: _Process, worker: Worker, message: Message) -> None:
        match message:
            case ReplicaJoin(size=size):
                local = self._replicas.setdefault(process.server.path, LocalReplicas())
                nonce = secrets.token_hex(4)
                for member in local.join(worker, size):
                    process.server.send(
                        ReplicaRendezvous(nonce=nonce, rank=member.local_rank % size, size=size),
                        member,
                    )
            case ClientHandshakeRequest():
                process.is_handshaken, process.worker = True, worker
                if process in self._members:
                    self._announce_to(process)
            case Ready():
                process.is_ready = True
                self._form_next()
            case Heartbeat(step=step) | Entered(step=step):
                self._step = max(self._step, step)
            case CollectiveFailure(generation=generation) if generation == self._generation:
                self._failing_since_s = self._failing_since_s or time.monotonic()
            case Exiting(clean=False) if self._on_death == WAIT:
                self._restart()
            case SigtermAsk():
                process.server.send(SigtermAnswer(leaving=False), worker)
            case FolderAsk(folder=folder):
                self._job_folder = self._job_folder or folder
                process.server.send(FolderAnswer(folder=self._job_folder), worker)
            case _:
                pass

    def _handle_failures(self) -> None:
        """Form the world again after a failure while all ranks are alive."""
        since_s = self._failing_since_s
        if since_s is not None and time.monotonic() - since_s > _HEARD_WITHIN_S:
            self._form_next(even_if_complete=True)

    def _form_next(self, *, even_if_complete: bool = False) -> None:
        """Form the next world from the live processes, once the expected ones are ready."""
        if self._is_ending:
            return
        living = [p for p in self._processes if not p.has_ended]
        stayed = [p for p in self._members if p in living]
        joined = [p for p in living if p not in stayed]
        if any(not p.is_ready for p in joined):
            return
        members = stayed + joined
        if members == self._members and not even_if_complete:
            return
        if self._generation == len(self._deaths) + _MORE_WORLDS:
            self._problem = f"more than {self._generation} worlds"
            return
        self._members, self._failing_since_s = members, None
        self._generation, self._nonce = self._generation + 1, secrets.token_hex(4)
        for process in members:
            self._announce_to(process)

    def _announce_to(self, process: _Process) -> None:
        if not process.is_handshaken:
            return  # not connected yet: the world is announced after its handshake
        rank, size = self._members.index(process), len(self._members)
        local_size = min(self._per_node, size)
        assignment = Assignment(
            generation=self._generation,
            nonce=self._nonce,
            lineage=tuple(range(1, self._generation)),
            rank=rank,
            size=size,
            local_rank=rank % local_size,
            local_size=local_size,
            node_rank=rank // self._per_node,
            nodes=max(1, size // self._per_node),
            store_host="127.0.0.1",
            store_port=self._store_port,
            store_key=self._store_key.text,
            switch_at_step=None,
            state=WorldState.ACTIVE,
            committed_step=self._step or None,
        )
        process.server.send(assignment, process.worker)


def main() -> None:
    """Serve orders until stdin ends. Arguments: further modules to import."""
    torch.set_num_threads(1)
    for name in (*_WARM, *sys.argv[1:]):
        importlib.import_module(name)
    for name in _WARM_IF_PRESENT:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    importlib.metadata.version("torch-elastic-harness")  # of a handshake: the list of packages
    deferred.note_modules_without()
    gc.collect()
    gc.freeze()  # children share existing objects
    for line in sys.stdin:
        answer = SmallJob(json.loads(line)).run()
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
