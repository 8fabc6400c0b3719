"""torch's rendezvous handler on etcd v3: what torchrun talks to.

Every method runs on torchrun's main thread; the protocol itself lives in
:class:`~elastic.agent.service.NodeService`. What torch expects here, and the traps it sets, is
PROTOCOL section 7.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import math
import os
import secrets
import socket
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import torch
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from elastic.agent import torch_private
from elastic.agent.board import JobSucceeded
from elastic.agent.guard import MARK, Guard, end_strays, kill_marked
from elastic.agent.health_server import HealthServer
from elastic.agent.identity import current_process
from elastic.agent.leaving import Leaving, Phase
from elastic.agent.node_memory import host_memory
from elastic.agent.ports import PortReserve
from elastic.agent.replacement import CALL_JOIN, Replacement
from elastic.agent.restart_notice import RestartNotice
from elastic.agent.service import FINISH_WITHOUT_STORE_S, NodeService
from elastic.agent.starting_over import StartingOver, places
from elastic.clock import SYSTEM_CLOCK
from elastic.config import AgentOptions, read_options
from elastic.coordination.etcd import EtcdStore
from elastic.coordination.etcd_endpoints import Endpoint, EtcdConfig
from elastic.coordination.etcd_options import etcd_config
from elastic.coordination.records import Keys, Node, NodeState
from elastic.errors import CoordinationError, ElasticError, Preempted
from elastic.events import HealthServed
from elastic.telemetry.journal import Journal
from elastic.telemetry.log import get_logger


def create(parameters: RendezvousParameters) -> EtcdRendezvousHandler:
    """Check the options and reach etcd; nothing is written before the first rendezvous.

    Raises:
        ConfigError: an option, endpoint or run id is wrong.
        RendezvousConnectionError: etcd cannot be used; the cause says why.
    """
    options = read_options(parameters.config, os.environ)
    keys = Keys.of(options.prefix, parameters.run_id)
    config = etcd_config(parameters.endpoint, options)
    try:
        return EtcdRendezvousHandler(parameters, options, keys, config)
    except CoordinationError as error:
        raise RendezvousConnectionError(str(error)) from error


class EtcdRendezvousHandler(RendezvousHandler):
    """One node's rendezvous; made once per torchrun process."""

    def __init__(
        self,
        parameters: RendezvousParameters,
        options: AgentOptions,
        keys: Keys,
        config: EtcdConfig,
    ) -> None:
        services: list[NodeService] = []  # filled below: the store comes first

        def on_crash(thread: str, error: BaseException) -> None:
            get_logger().error("the thread %s died", thread, exc_info=error)
            for service in services:
                service.fail(error)

        store = EtcdStore(config, on_crash=on_crash)
        self._parameters = parameters
        self._options = options
        self._ports = PortReserve()
        self._log = get_logger()
        self._guard: Guard | None = None
        self._closed = False
        node = _describe_node(parameters, options, store)
        os.environ[MARK] = node.node_id
        os.environ["ELASTIC_NODE_NAME"] = node.name
        os.environ["ELASTIC_MAX_NODES"] = str(node.max_nodes)
        self._journal = Journal(
            folder=os.environ.get("ELASTIC_JOURNAL"),
            identity={"node": node.name, "node_id": node.node_id},
        )
        self._memory = host_memory(
            node,
            options,
            self._journal,
            lambda: services[0].running if services else None,
            on_error=lambda error: self._log.error("the memory tier died", exc_info=error),
        )
        node = self._memory.published(node)
        self._service = NodeService(
            store=store,
            keys=keys,
            node=node,
            options=options,
            journal=self._journal,
            last_contact_s=lambda: store.last_contact_s,
        )
        services.append(self._service)
        self._ending = Path(tempfile.gettempdir()) / f"elastic-ending-{node.node_id}"
        os.environ["ELASTIC_ENDING"] = str(self._ending)
        self._leaving = Leaving(
            self._service,
            options.leave_grace_s,
            lambda: kill_marked(os.environ[MARK]),
            tell_workers=self._tell_workers_it_is_the_end,
        )
        self._replacement = Replacement(self._service, self._journal)
        self._notice = RestartNotice(options.mode)
        self._starting_over = StartingOver(
            lambda: places(sys.argv[1:], Path.cwd()),
            lambda: self._service.has_first_rank and not self._service.workers_have_joined,
        )
        self._has_started_workers = False
        self._health = self._serve_health()
        self._service.start()
        self._leaving.install()
        self._service.beat()

    # ── torch's interface ────────────────────────────────────────────────────────────────

    def get_backend(self) -> str:
        """The name asked for: ``etcd-v3``, or ``etcd`` where that is taken over."""
        return self._parameters.backend

    @property
    def use_agent_store(self) -> bool:
        """False: torch prefixes an agent's store with a count that differs between agents."""
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Arrive, wait for a world with this node in it, and hand it over."""
        self._leaving.phase = Phase.WAITING
        if self._leaving.told:
            self._leaving.end_if_left()
        agent = torch_private.calling_agent()
        self._first_time(agent)
        ended = end_strays(os.environ[MARK])
        if ended:
            self._log.info("ended %d processes that dead workers had left behind", ended)
        began = SYSTEM_CLOCK.monotonic()
        failure = agent.failure
        try:
            self._service.arrive(
                nproc=agent.nproc,
                role=agent.role,
                ports=self._ports.ports,
                failure=failure.text if failure else None,
                failure_exit_code=failure.exit_code if failure else None,
            )
            world = self._service.wait_for_world()
        except (ElasticError, JobSucceeded) as error:
            self._end(error)
        self._leaving.phase = Phase.STARTING
        if self._has_started_workers:
            self._starting_over.workers_start_again()
        self._has_started_workers = True
        if world is None:
            return self._warm_up()
        self._tell_workers(world.generation, world.nonce, world.lineage)
        self._service.enter(world, waited_s=SYSTEM_CLOCK.monotonic() - began)
        self._memory.look()
        self._notice.workers_start(is_first_node=self._service.has_first_rank)
        node_id = self._service.node_id
        return RendezvousInfo(
            torch_private.private_store(world.members),
            world.node_ids.index(node_id),
            len(world.members),
            RendezvousStoreInfo(world.store_host, world.store_port),
        )

    def _warm_up(self) -> RendezvousInfo:
        """A world of this node alone, in which workers get ready to join the one that runs.

        Their real ranks come over the link. A script that builds a group from the environment
        nevertheless fails at once: ``env://`` cannot parse the port, and shows it.
        """
        self._tell_workers(0, "", ())
        self._service.warm_up()
        return RendezvousInfo(
            torch_private.private_store((self._service.member,)),
            0,
            1,
            RendezvousStoreInfo("localhost", CALL_JOIN),  # type: ignore[arg-type]
        )

    def num_nodes_waiting(self) -> int:
        """1 when the workers run a world that is no longer the newest: torch then restarts
        them through :meth:`next_rendezvous`. (Torch's own backends report newcomers only:
        survivors of a lost node wait for their collectives to fail, pytorch#111646.)"""
        self._service.beat()
        self._leaving.install()
        self._leaving.phase = Phase.RUNNING
        if self._service.link_path:
            self._replacement.look(torch_private.supervision())
        self._notice.look(have_joined=self._service.workers_have_joined)
        if self._leaving.told:
            self._leaving.end_if_left()
            return 0
        try:
            if self._service.job_is_done and self._service.running is None:
                raise JobSucceeded("the job was done before this node's workers had joined it")
            return 1 if self._service.newer_world() else 0
        except (ElasticError, JobSucceeded) as error:
            self._end(error)

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        """Nothing: a node that fails leaves, it does not close the job for the others."""

    def get_run_id(self) -> str:
        return self._parameters.run_id

    def shutdown(self) -> bool:
        """Leave in order. torch calls this after success and after failure alike, inside a
        ``finally``: the exception in flight tells which (torch 2.13, launcher/api.py)."""
        if self._closed:
            return True
        self._closed = True
        self._service.beat()
        self._service.expect_end_of_workers()
        in_flight = sys.exc_info()[1]
        try:
            if in_flight is None and self._service.running is not None:
                self._finish()
            elif not self._leaving.told and self._service.done is None:
                self._service.leave(f"{type(in_flight).__name__}", failed=True)
        finally:
            self._leaving.phase = Phase.CLOSING
            self._close()
        return True

    # ── the rest ─────────────────────────────────────────────────────────────────────────

    def _finish(self) -> None:
        self._leaving.phase = Phase.FINISHING
        if self._leaving.told:  # the others' end is theirs
            self._service.finished()
            raise SystemExit(Preempted.exit_code)
        # Where it would be started again for nothing, a node has all the time there is.
        patience_s = math.inf if self._options.park else FINISH_WITHOUT_STORE_S
        if self._service.finish(patience_s=patience_s) is None:
            self._log.warning(
                "the workers of this node ended well, but etcd is out of reach: "
                "leaving without waiting for the other nodes"
            )

    def _close(self) -> None:
        self._starting_over.close()
        self._service.close()
        self._ports.close()
        self._ending.unlink(missing_ok=True)
        if self._guard is not None:
            end_strays(os.environ[MARK])
            self._guard.release()
        self._memory.close()
        if self._options.park and not self._leaving.told:
            self._service.park(self._leaving)
        if self._health is not None:
            self._health.close()
        self._journal.close()

    def _serve_health(self) -> HealthServer | None:
        if self._options.health_port is None:
            return None
        server = HealthServer(
            self._options.health_port, self._service.probes, on_error=self._service.fail
        )
        server.start()
        self._journal.emit(HealthServed(port=server.port))
        return server

    def _first_time(self, agent: torch_private.CallingAgent) -> None:
        if self._guard is not None:
            return
        self._guard = Guard(os.environ[MARK], self._service.link_path)
        parameters = self._parameters
        if agent.max_restarts == 0 and parameters.min_nodes < parameters.max_nodes:
            self._log.warning(
                "--max-restarts=0 with --nnodes=%d:%d: torchrun ends this node as soon as a "
                "worker fails, and when a node dies the workers of all others fail in their "
                "collectives. Set --max-restarts=1000, or launch with `elastic run`, where the "
                "failure budget ends a job that cannot succeed",
                parameters.min_nodes,
                parameters.max_nodes,
            )

    def _tell_workers(self, generation: int, nonce: str, lineage: tuple[int, ...]) -> None:
        os.environ["ELASTIC_GENERATION"] = str(generation)
        os.environ["ELASTIC_NONCE"] = nonce
        os.environ["ELASTIC_LINEAGE"] = ",".join(map(str, lineage))
        os.environ.pop("ELASTIC_LINK", None)
        if self._service.link_path:
            os.environ["ELASTIC_LINK"] = self._service.link_path

    def _tell_workers_it_is_the_end(self) -> None:
        """The SIGTERM that torchrun is about to send them is for good: they may save first."""
        with contextlib.suppress(OSError):  # without it they end as for a restart
            self._ending.touch()

    def _end(self, error: BaseException) -> NoReturn:
        """End this agent with a sentence and the error's exit code, not with a traceback."""
        self._leaving.phase = Phase.CLOSING  # torch ends the workers next: not to be interrupted
        self._service.expect_end_of_workers()
        self._tell_workers_it_is_the_end()
        if isinstance(error, JobSucceeded):
            self._log.info("%s", error)
            raise SystemExit(0) from None
        code = error.exit_code if isinstance(error, ElasticError) else 1
        self._log.log(logging.ERROR, "%s", error)
        raise SystemExit(code) from error


def _describe_node(
    parameters: RendezvousParameters, options: AgentOptions, store: EtcdStore
) -> Node:
    return Node(
        node_id=secrets.token_hex(8),
        name=os.environ.get("ELASTIC_NODE_NAME") or socket.gethostname(),
        nproc=0,
        role="",
        address=parameters.local_addr or options.pod_ip or _address_towards(store.endpoint),
        ports=(),
        liveness_port=0,
        process=current_process(),
        state=NodeState.ARRIVED,
        in_process=False,
        min_nodes=parameters.min_nodes,
        max_nodes=parameters.max_nodes,
        library=importlib.metadata.version("torch-elastic-harness"),
        torch=str(torch.__version__),
        running=None,
        arrived_for=0,
        failure=None,
        failure_exit_code=None,
        joined_at_s=SYSTEM_CLOCK.wall(),
    )


def _address_towards(endpoint: Endpoint | None) -> str:
    """This machine's address on the way to etcd: what the other nodes can most likely reach.

    A connected datagram socket sends nothing; it makes the kernel choose the route. Host names
    are not used: on many machines they resolve to 127.0.1.1 or not at all.
    """
    if endpoint is None:
        return socket.gethostname()
    host, port = endpoint.host, endpoint.port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, target = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()
