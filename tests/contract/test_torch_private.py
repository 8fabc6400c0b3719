"""torch's private names, as the handler uses them: fails if a torch version differs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, errors
from torch.distributed.elastic.multiprocessing import api as multiprocessing_api
from torch.distributed.elastic.multiprocessing.api import LogsDest, SignalException
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.utils import store as store_util

from elastic.errors import ConfigError
from elastic.launcher import torch_agent
from elastic.launcher.entrypoint import create_handler
from elastic.launcher.launch import Replacement, tolerate_unreadable_error_files
from elastic.membership.records import Member, ProcessDigest, WorldRecord
from elastic.telemetry.events import Event
from elastic.testing.forks.server import run_forked
from elastic.testing.waiting import PATIENCE_S
from elastic.wire.messages import Cause, WorldState

PROCESS = ProcessDigest(table="t", pid=1, start_ticks=1)


def world(*nprocs: int) -> WorldRecord:
    members = tuple(
        Member(
            node_id=f"n{i}",
            name=f"n{i}",
            nproc=nproc,
            role="trainer",
            liveness_host="127.0.0.1",
            liveness_port=1,
            process=PROCESS,
        )
        for i, nproc in enumerate(nprocs)
    )
    return WorldRecord(
        generation=1,
        members=members,
        store_host="127.0.0.1",
        store_port=29500,
        nonce="ab",
        mode="restart",
        switch_at_step=None,
        state=WorldState.ACTIVE,
        min_nodes=1,
        max_nodes=3,
        lineage=(),
        cause=Cause.FIRST,
        reason="test",
        time_s=0.0,
    )


class OneWorld(RendezvousHandler):
    """Always returns the same world to the agent, in the form of the real handler."""

    def __init__(self, given: WorldRecord, index: int) -> None:
        self._world, self._index = given, index
        self.calls: list[torch_agent.CallingAgent] = []

    def get_backend(self) -> str:
        return "test"

    def next_rendezvous(self) -> RendezvousInfo:
        self.calls.append(torch_agent.calling_agent())
        store = torch_agent.private_store(self._world.members)
        info = RendezvousStoreInfo(self._world.store_host, self._world.store_port)
        return RendezvousInfo(store, self._index, len(self._world.members), info)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "r"

    def shutdown(self) -> bool:
        return True


def agent_for(handler: OneWorld, nproc: int, script: str, **more: Any) -> LocalElasticAgent:
    spec = WorkerSpec(
        role="trainer",
        local_world_size=nproc,
        rdzv_handler=handler,
        entrypoint="/bin/sh",
        args=("-c", script),
        monitor_interval=0.05,
        **more,
    )
    return LocalElasticAgent(spec, DefaultLogsSpecs(), start_method="spawn")


@pytest.mark.parametrize(("index", "first"), [(0, 0), (1, 2), (2, 3)])
def test_ranks_are_assigned_and_the_exit_barrier_passes_without_any_peer(
    index: int, first: int
) -> None:
    nproc = (2, 1, 3)[index]
    agent = agent_for(OneWorld(world(2, 1, 3), index), nproc, "exit 0")
    assert agent.run().state == api.WorkerState.SUCCEEDED
    workers = agent.get_worker_group().workers
    assert [w.global_rank for w in workers] == list(range(first, first + nproc))
    assert {w.world_size for w in workers} == {6}


def test_the_exit_barrier_uses_the_prefilled_key() -> None:
    prefilled = f"{api._TERMINAL_STATE_SYNC_ID}{store_util._NUM_MEMBERS}"
    assert prefilled == torch_agent._EXIT_BARRIER_MEMBERS


def test_the_calling_agent_and_its_failure_are_found_on_the_stack() -> None:
    error = json.dumps(
        {"message": {"message": "ValueError: bad loss", "extraInfo": {"timestamp": "7"}}}
    )
    script = (
        f"[ $TORCHELASTIC_RESTART_COUNT = 0 ] && echo '{error}' > $TORCHELASTIC_ERROR_FILE "
        "&& exit 3; exit 0"
    )
    handler = OneWorld(world(1), 0)
    agent = agent_for(handler, 1, script, max_restarts=5)
    assert agent.run().state == api.WorkerState.SUCCEEDED
    first, second = handler.calls
    assert (first.nproc, first.role, first.max_restarts, first.failure) == (1, "trainer", 5, None)
    assert second.failure == torch_agent.WorkerFailure("ValueError: bad loss", 3)


@pytest.mark.parametrize(
    "half_written", ["", '{"message": {"mess', "[]", '{"message": {}}', "\\377"], ids=repr
)
def test_a_partly_written_error_file_does_not_end_the_agent(
    half_written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing_api, "ProcessFailure", errors.ProcessFailure)
    tolerate_unreadable_error_files()
    script = (  # torch replaces $$ by $
        "[ $TORCHELASTIC_RESTART_COUNT = 0 ] "
        f"&& printf '{half_written}' > $TORCHELASTIC_ERROR_FILE && kill -9 $$$$; exit 0"
    )
    handler = OneWorld(world(1), 0)
    agent = agent_for(handler, 1, script, max_restarts=5)
    assert agent.run().state == api.WorkerState.SUCCEEDED
    assert handler.calls[1].failure == torch_agent.WorkerFailure(None, -signal.SIGKILL)


class Replacing(OneWorld):
    """Replaces the killed worker, after which both workers end."""

    def __init__(self, given: WorldRecord) -> None:
        super().__init__(given, 0)
        self.replacement = Replacement(self, self, contextlib.nullcontext)
        self.replaced: list[Event] = []
        self.is_replacing = False

    def num_nodes_waiting(self) -> int:
        supervision = torch_agent.supervision()
        assert supervision is not None, "torch's internals differ"
        self.replacement.look(supervision)
        return 0

    def replacement_started(self, pid: int) -> None:
        pass

    def replacement_ended(self, pid: int, local_rank: int, exit_code: int) -> None:
        pass

    def allow_replacement(self, is_allowed: bool) -> None:
        assert is_allowed

    def is_to_be_replaced(self, pid: int) -> bool | None:
        return True

    def has_failed_with_0(self, pid: int) -> bool | None:
        return False

    def emit(self, event: Event, *, level: int = 0) -> None:
        self.replaced.append(event)


def test_torch_supervises_the_replacement_of_a_dead_worker(
    tmp_path: Path,
) -> None:
    # The second worker dies once; both end once it has been replaced.
    done = tmp_path / "done"
    script = (
        'if [ "$LOCAL_RANK" = 1 ]; then '
        f'if [ "$MASTER_PORT" = 29500 ]; then sleep 1; exit 9; fi; touch {done}; fi; '
        f"while [ ! -e {done} ]; do sleep 0.05; done"
    )
    handler = Replacing(world(2))
    agent = agent_for(handler, 2, script, max_restarts=5)
    assert agent.run().state == api.WorkerState.SUCCEEDED
    assert len(handler.calls) == 1, "torch has restarted no worker"
    (event,) = handler.replaced
    assert vars(event)["local_rank"] == 1
    assert agent._remaining_restarts == 4


def test_a_call_without_an_agent_on_the_stack_is_rejected() -> None:
    with pytest.raises(ConfigError, match="not called by torchrun's agent"):
        torch_agent.calling_agent()


class Attaching(OneWorld):
    """Attaches itself to the agent, as the real handler does, and records the calls."""

    def __init__(self, given: WorldRecord, index: int) -> None:
        super().__init__(given, index)
        self.seen: list[str] = []

    def next_rendezvous(self) -> RendezvousInfo:
        if not self.calls:
            torch_agent.attach(
                around_start=self.starting,
                on_signal=lambda e: self.seen.append(e.sigval.name),
                redirect=self.redirect,
                on_success=self.succeeded,
            )
        return super().next_rendezvous()

    def redirect(self, destinations: LogsDest) -> LogsDest:
        return destinations

    def succeeded(self) -> bool:
        self.seen.append("succeeded")
        return self.seen.count("succeeded") == 1

    @contextlib.contextmanager
    def starting(self) -> Iterator[dict[str, str | None]]:
        os.environ["STARTING"] = "1"
        self.seen.append("starting")
        yield {}
        del os.environ["STARTING"]
        self.seen.append("started")


def test_workers_are_started_inside_the_given_context_and_again_if_the_end_is_to_run() -> None:
    handler = Attaching(world(1), 0)
    agent = agent_for(handler, 1, '[ "$STARTING" = 1 ]')
    assert agent.run().state == api.WorkerState.SUCCEEDED
    assert handler.seen == ["starting", "started", "succeeded"] * 2
    assert agent._remaining_restarts == agent._worker_group.spec.max_restarts


def test_the_output_of_workers_goes_to_the_given_destinations(tmp_path: Path) -> None:
    class Redirecting(Attaching):
        def redirect(self, destinations: LogsDest) -> LogsDest:
            assert destinations.stdouts == destinations.stderrs == {0: ""}, "the agent's own"
            return replace(destinations, stdouts={0: str(tmp_path / "output")})

    handler = Redirecting(world(1), 0)
    assert agent_for(handler, 1, "echo hello").run().state == api.WorkerState.SUCCEEDED
    assert (tmp_path / "output").read_text() == "hello\n"


def test_a_signal_is_reported_after_the_workers_have_ended() -> None:
    class Interrupted(Attaching):
        def num_nodes_waiting(self) -> int:
            raise torch_agent.signal_exception(signal.SIGHUP)

    handler = Interrupted(world(1), 0)
    agent = agent_for(handler, 1, "exec sleep 600")
    with pytest.raises(SignalException) as caught:
        agent.run()
    assert caught.value.sigval == signal.SIGHUP
    assert handler.seen == ["starting", "started", "SIGHUP"]
    assert agent._pcontext is not None and agent._pcontext.wait(0) is not None


LAUNCHERS = """
import os, sys
import torch.distributed.run as torchrun
from torch.distributed.elastic.multiprocessing.api import LogsDest, SignalException
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from elastic.launcher import torch_agent as torch_private

def create(parameters):
    print(torch_private.launcher().name, flush=True)
    raise RuntimeError("seen")

rendezvous_handler_registry.register("seen", create)
command = ["--nnodes=1", "--rdzv-backend=seen", "--rdzv-id=r", "--no-python", "true"]
config = LaunchConfig(1, 1, 1, run_id="r", rdzv_backend="seen")
for launch in (
    lambda: elastic_launch(config, "true")(),
    lambda: torchrun.main(command),
    lambda: torchrun.main(args=command),
    lambda: torchrun.run(torchrun.parse_args(command)),
    lambda: (sys.argv.extend(command), torchrun.main()),
):
    try:
        launch()
    except RuntimeError:
        pass
"""


def test_the_launcher_is_identified_from_the_call_stack() -> None:
    done = run_forked([sys.executable, "-c", LAUNCHERS], timeout_s=PATIENCE_S)
    expected = ["PROGRAM", "PROGRAM", "PROGRAM", "RUN", "TORCHRUN"]
    assert done.stdout.split() == expected, done.stderr


def test_the_backends_etcd_and_etcd_v3_are_registered() -> None:
    registry = rendezvous_handler_registry._registry
    assert registry["etcd-v3"] is create_handler
    assert registry["etcd"] is create_handler


def test_torch_installs_no_handlers_of_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(torch_agent.SIGNALS_VARIABLE, "SIGTERM,SIGINT")
    assert torch_agent.handled_signals() == {signal.SIGTERM, signal.SIGINT}
    done = run_forked([sys.executable, "-c", START], timeout_s=PATIENCE_S)
    assert done.stdout.split() == ["True"], done.stderr
    assert done.stderr == "", "torch warns in other words that it handles no signal"


START = """
import signal
from torch.distributed.elastic.multiprocessing import api
from elastic.launcher import torch_agent as torch_private
from elastic.launcher.scripts import drop_signal_warnings

class Context(api.MultiprocessContext):
    def _start(self):
        pass

handled = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
before = [signal.getsignal(number) for number in handled]
torch_private.install_no_handlers()
drop_signal_warnings()
Context.start(type("Job", (Context,), {"__init__": lambda self: None, "_tail_logs": []})())
print(before == [signal.getsignal(number) for number in handled])
"""


def test_torchrun_still_sends_its_default_timeout() -> None:
    from torch.distributed.launcher.api import LaunchConfig

    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1)
    assert config.rdzv_configs == {"timeout": 900}
    assert RendezvousParameters("x", "", "r", 1, 1, **config.rdzv_configs).get("timeout") == 900
