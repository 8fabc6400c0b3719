"""A dashboard in this process: on a store's twin and on journals that tests write."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from kit.membership_nodes import node, world
from kit.memory_store import MemoryServer, MemoryStore

from elastic.cli.dashboard_feed import EventLog, JobFeed, JournalFeed
from elastic.cli.dashboard_server import application, listening, policy_of, serve, server_of
from elastic.errors import SYSTEM_CLOCK, Clock, StoreUnreachable
from elastic.membership.progress import JobProgress, RecordedHeartbeat, encode_progress
from elastic.membership.records import (
    BreakageRecord,
    Done,
    FailureRecord,
    Keys,
    Leader,
    NodeState,
    Outcome,
    WorldRecord,
    encode,
)
from elastic.store.keyvalue import KeyValue
from elastic.testing.waiting import eventually

KEYS = Keys.of("/elastic", "llama-7")
NODES = ("n1", "n2", "n3", "n4")


class FakeJob:
    """Writes the records of a job that trains, loses a node, and ends."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self.server = MemoryServer()
        self.store = MemoryStore(self.server)
        self.clock = clock
        self.is_away = False  # connections to the store fail

    @contextmanager
    def opened(self) -> Iterator[KeyValue]:
        """As the command connects to etcd."""
        if self.is_away:
            raise StoreUnreachable("etcd at 127.0.0.1:2379 does not answer", hint="start it")
        yield self.store

    def train(self, names: tuple[str, ...] = NODES, generation: int = 7, **more: object) -> None:
        """These nodes are in a world, and train."""
        now_s = self.clock.wall()
        record = replace(
            world(*names, generation=generation),
            max_nodes=len(NODES),
            time_s=now_s,
            reason="all nodes arrived",
            **more,  # type: ignore[arg-type]
        )
        self._put_world(record)
        for name in names:
            self.put_node(name, record, NodeState.READY)
        leader = Leader(node_id=f"id-{names[0]}", address="10.0.0.1", liveness_port=1)
        self.store.put(KEYS.leader, encode(leader))
        self.progress(52, generation=generation)

    def put_node(
        self, name: str, running: WorldRecord | None, state: NodeState, /, **more: str
    ) -> None:
        """A live node."""
        joined_s = self.clock.wall() - 60
        made = replace(
            node(name),
            running=running,
            state=state,
            joined_at_s=joined_s,
            **more,  # type: ignore[arg-type]
        )
        self.store.put(KEYS.node(made.node_id), encode(made))

    def progress(self, step: int, *, silent: tuple[str, ...] = (), generation: int = 7) -> None:
        """The leader's record. Of ``silent`` nodes it has heard nothing for 21 s, of n5 never."""
        now_s = self.clock.wall()
        heartbeats = tuple(
            RecordedHeartbeat(
                node_id=f"id-{name}",
                generation=generation,
                step=step,
                heard_at_s=now_s - (21.0 if name in silent else 1.0),
            )
            for name in NODES
        )
        record = JobProgress(
            node_id="id-n1",
            generation=generation,
            step=step,
            step_time_s=0.5,
            checkpoint_step=40,
            time_s=now_s,
            checkpoint_at_s=now_s - 6,
            planned_steps=500,
            goodput=0.93,
            goodput_since_s=now_s - 3600,
            heartbeats=heartbeats,
        )
        self.store.put(KEYS.progress, encode_progress(record))

    def kill(self, name: str, text: str = "Traceback:\n  RuntimeError: boom") -> None:
        """A node dies, and the others form the next world."""
        entry = self.store.get(KEYS.world)
        assert entry is not None
        names = tuple(n for n in NODES if n != name)
        breakage = BreakageRecord(
            generation=7,
            lived_s=300.0,
            steps=120,
            failures=(FailureRecord(node=name, text=text, exit_code=-9),),
            lost=(name,),
            time_s=self.clock.wall(),
            step=52,
            verdict="killed by signal 9",
            response="its node is left out",
        )
        self.store.delete(KEYS.node(f"id-{name}"))
        self.train(names, generation=8, breakages=(breakage,))

    def finish(self) -> None:
        """With success."""
        done = Done(
            outcome=Outcome.SUCCESS,
            reason="all workers are done",
            exit_code=0,
            generation=8,
            final_step=500,
            time_s=self.clock.wall(),
        )
        self.store.put(KEYS.done, encode(done))

    def _put_world(self, record: WorldRecord) -> None:
        self.store.put(KEYS.world, encode(record))


class DashboardUnderTest:
    """The parts of ``elastic dashboard``, with a server on a thread of its own if it is started."""

    def __init__(
        self,
        job: FakeJob | None,
        journals: Path | None = None,
        *,
        token: str | None = None,
        run_id: str = "",
    ) -> None:
        self.died: list[BaseException] = []
        log = EventLog()
        self.feed = JobFeed(
            KEYS if job is not None else None,
            job.opened if job is not None else None,
            JournalFeed(journals, run_id, log) if journals is not None else None,
            log,
            on_error=self.died.append,
        )
        self.token = token

    def app(self, host: str = "127.0.0.1", port: int = 80) -> object:
        """The application, to be called without a server."""
        return application(self.feed, policy_of(host, port, self.token))

    @contextmanager
    def served(self, port: int = 0) -> Iterator[int]:
        """On loopback; the port."""
        with listening("127.0.0.1", port) as listener:
            port = listener.getsockname()[1]
            server = server_of(application(self.feed, policy_of("127.0.0.1", port, self.token)))
            thread = threading.Thread(
                target=serve, args=(server, listener), name="test-dashboard", daemon=True
            )
            self.feed.start()
            thread.start()
            try:
                eventually(lambda: server.started, "the server listens")
                yield port
            finally:
                server.should_exit = True
                thread.join()
                self.feed.close()
        assert not self.died, self.died
