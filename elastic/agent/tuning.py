"""The variables of NCCL, torch and gloo that this agent sets for its workers.

:mod:`elastic.tuning.environment` decides; this module provides the facts: this machine, the
options, the agent's environment, and the addresses in the world.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elastic.telemetry.events import WorkersTuned
from elastic.telemetry.journal import EventSink
from elastic.telemetry.log import get_logger
from elastic.tuning.environment import (
    Given,
    WorkerEnvironment,
    choose_route,
    effective,
    given_settings,
)
from elastic.tuning.network import Network, configured_address, read_network
from elastic.tuning.options import AgentOptions

IN_PROCESS = "in-process"


def check(options: AgentOptions, environ: Mapping[str, str], *, max_nodes: int) -> None:
    """Called before etcd is contacted: raises ConfigError for an impossible profile or network."""
    network = read_network()
    configured_address(None, options.network)
    given = given_settings(environ)
    _effective(options, network, given, (), max_nodes, own_address="", is_configured=False)


class WorkerTuning:
    """One per launch."""

    def __init__(
        self,
        options: AgentOptions,
        environ: Mapping[str, str],
        journal: EventSink,
        *,
        max_nodes: int,
        own_address: str,
        is_configured: bool,
        network: Network | None = None,
    ) -> None:
        self._options = options
        self._given = given_settings(environ)
        self._journal = journal
        self._max_nodes = max_nodes
        self._own_address = own_address
        self._is_configured = is_configured
        self._network = network if network is not None else read_network()
        self._last: WorkerEnvironment | None = None

    def variables(self, peers: Sequence[str]) -> dict[str, str | None]:
        """For workers that are about to start, in a world with nodes at these addresses (without
        this node, the leader first)."""
        settings = _effective(
            self._options,
            self._network,
            self._given,
            peers,
            self._max_nodes,
            own_address=self._own_address,
            is_configured=self._is_configured,
        )
        if settings != self._last:
            self._report(settings)
        self._last = settings
        return settings.variables()

    def _report(self, settings: WorkerEnvironment) -> None:
        self._journal.emit(
            WorkersTuned(
                profile=settings.profile.name,
                reason=settings.profile.reason,
                interface=settings.route.interface if settings.route is not None else None,
                interface_reason=settings.route.reason if settings.route is not None else None,
            )
        )
        if self._last is None:
            for warning in settings.warnings:
                get_logger().warning("%s (`elastic env` shows all variables)", warning)


def _effective(
    options: AgentOptions,
    network: Network,
    given: Mapping[str, Given],
    peers: Sequence[str],
    max_nodes: int,
    *,
    own_address: str,
    is_configured: bool,
) -> WorkerEnvironment:
    route = choose_route(
        network,
        max_nodes=max_nodes,
        own_address=own_address,
        is_configured=is_configured or options.network is not None,
        peers=peers,
        own_network=options.network,
    )
    return effective(
        given,
        network,
        profile=options.profile,
        is_in_process=options.mode == IN_PROCESS,
        max_nodes=max_nodes,
        route=route,
    )
