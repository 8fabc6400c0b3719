"""The initial record of this node, from which the other nodes decide."""

from __future__ import annotations

import importlib.metadata
import os
import secrets
import socket

import torch
from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from elastic.clock import SYSTEM_CLOCK
from elastic.membership.records import Node, NodeState
from elastic.node.address import own_address
from elastic.node.identity import current_process
from elastic.store.etcd.store import EtcdStore
from elastic.tuning.agent_options import AgentOptions
from elastic.tuning.announced_address import configured_address


def describe_node(
    parameters: RendezvousParameters,
    options: AgentOptions,
    store: EtcdStore,
    limits: tuple[int, int],
) -> Node:
    """The record of a node before its arrival: without workers or a world."""
    return Node(
        node_id=secrets.token_hex(8),
        name=os.environ.get("ELASTIC_NODE_NAME") or socket.gethostname(),
        nproc=0,
        role="",
        address=own_address(
            configured_address(parameters.local_addr, options.network, options.pod_ip),
            store.endpoint,
            within_s=options.connect_timeout_s,
        ),
        ports=(),
        liveness_port=0,
        process=current_process(options.pod_uid or ""),
        state=NodeState.ARRIVED,
        in_process=False,
        min_nodes=limits[0],
        max_nodes=limits[1],
        library=importlib.metadata.version("torch-elastic-harness"),
        torch=str(torch.__version__),
        running=None,
        arrived_for=0,
        failure=None,
        failure_exit_code=None,
        joined_at_s=SYSTEM_CLOCK.wall(),
        replica_size=options.replica_size,
    )
