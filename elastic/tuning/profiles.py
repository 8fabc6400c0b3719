"""Network profiles: the variables of NCCL, torch and gloo that a job sets, each with its reason.

Pure: facts of :mod:`elastic.tuning.network` in, settings out. A profile is chosen by the machine's
hardware; ``--rdzv-conf profile=NAME`` or ``ELASTIC_PROFILE`` overrides it. The user's own settings
take precedence (:mod:`elastic.tuning.worker_environment`).

The names and defaults were read in the sources that each setting names: torch's C++ headers of 2.11
to 2.15, NCCL 2.28 to 2.30 (the versions bundled with those of torch) and NVIDIA's documentation of
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from elastic.errors import ConfigError
from elastic.tuning import timeouts
from elastic.tuning.network import ETHERNET, INFINIBAND, LOOPBACK, Network

IB, ROCE, SOCKETS, CLOUD, SINGLE_NODE = (
    "infiniband",
    "roce",
    "ethernet",
    "cloud",
    "single-node",
)
NAMES = (IB, ROCE, SOCKETS, CLOUD, SINGLE_NODE)

ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
DUMP_ON_TIMEOUT = "TORCH_NCCL_DUMP_ON_TIMEOUT"
DUMP_LIMIT_MS = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"
NCCL_INTERFACE, GLOO_INTERFACE = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"

_PG_HPP = "torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
_PG_CPP = "torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp"
_FLIGHT_RECORDER = "torch/csrc/distributed/c10d/FlightRecorder.hpp"
_GLOO = "torch/csrc/distributed/c10d/ProcessGroupGloo.cpp"
_NCCL_ENV = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
_NCCL_IB = "NCCL src/transport/net_ib/connect.cc"
_NCCL_SOCKET = "NCCL src/transport/net_socket.cc"

# ibv_modify_qp's timeout: 4.096 us times two to the power of it, for each of 1 + retry_cnt tries.
_ROCE_TIMEOUT_EXPONENT = 22
_FAST_ETHERNET_MBPS = 100_000  # NVIDIA's documentation: "generic 100G networks"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A variable, and the reason for its value.

    ``is_default``: it is the library's default; it is shown, but not set.
    """

    name: str
    value: str
    reason: str
    source: str
    is_default: bool = False


class Choice(NamedTuple):
    """A profile, and why it was chosen."""

    name: str
    reason: str


class Route(NamedTuple):
    """The interface for collectives, and why it was chosen."""

    interface: str
    reason: str
    hint: str = ""  # a possibly better interface, and how to select it


def choose(network: Network, *, max_nodes: int) -> Choice:
    """The profile of a machine, by its hardware.

    >>> choose(Network(interfaces=()), max_nodes=1).name
    'single-node'
    """
    if max_nodes == 1:
        return Choice(SINGLE_NODE, "the job has one node at most")
    rdma = ", ".join(device.name for device in network.rdma)
    if INFINIBAND in network.link_layers():
        return Choice(IB, f"there are RDMA devices with an InfiniBand link layer: {rdma}")
    if network.cloud:
        # Also with RDMA over Ethernet: a cloud's NCCL plugin handles its adapters.
        return Choice(CLOUD, f"this is a virtual machine of {network.cloud}")
    if ETHERNET in network.link_layers():
        return Choice(ROCE, f"there are RDMA devices with an Ethernet link layer: {rdma}")
    if network.rdma_out_of_reach:
        devices = ", ".join(network.rdma_out_of_reach)
        return Choice(
            SOCKETS,
            f"the machine has RDMA devices ({devices}), but none is in /dev/infiniband here: give "
            "this container the devices to use them",
        )
    return Choice(SOCKETS, "there are no active RDMA devices")


def named(profile: str, network: Network, *, max_nodes: int) -> Choice:
    """The profile that the user named.

    Raises:
        ConfigError: it does not exist, or does not match this machine or job.
    """
    check_name(profile)
    needed = {IB: INFINIBAND, ROCE: ETHERNET}.get(profile)
    if needed is not None and needed not in network.link_layers():
        raise ConfigError(
            f"profile={profile} and this machine has no active RDMA device with link layer "
            f"{needed}: NCCL would silently use sockets",
            hint="check /sys/class/infiniband and, in a container, /dev/infiniband, or omit the "
            "profile",
        )
    if profile == SINGLE_NODE and max_nodes > 1:
        raise ConfigError(
            f"profile={profile} and --nnodes up to {max_nodes} are incompatible: other nodes "
            f"could not reach the interface {LOOPBACK}",
            hint="omit the profile, or start with --nnodes=1",
        )
    return Choice(profile, "the profile was given")


def check_name(profile: str) -> None:
    """Raise ConfigError unless there is a profile of that name."""
    if profile not in NAMES:
        raise ConfigError(
            f"unknown profile={profile}: known are {', '.join(NAMES)}",
            hint=timeouts.where_to_set("profile"),
        )


def settings(profile: str, network: Network, route: Route | None) -> tuple[Setting, ...]:
    """The settings of a node's workers in both recovery modes."""
    return (
        *(_interface(route) if route is not None else ()),
        *_transport(profile, network, route),
        *_OF_TORCH,
        *_WITHIN_A_NODE,
    )


def in_process_settings() -> tuple[Setting, ...]:
    """The settings of a worker before it creates a group that it may have to abort and rebuild."""
    return (
        Setting(
            name=ERROR_HANDLING,
            value="0",
            reason="in-process recovery aborts and replaces the group; otherwise, when a peer "
            "dies, torch's watchdog ends the surviving processes",
            source=f"{_PG_CPP} (WorkNCCL::handleException); distributed_c10d.py "
            "(_abort_process_group)",
        ),
        Setting(
            name=DUMP_ON_TIMEOUT,
            value="0",
            reason="after an error the monitor of the first group would write a dump and then "
            "sleep TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC (480 s), and the group's destructor joins it",
            source=f"{_PG_CPP} (HeartbeatMonitor::runLoop)",
        ),
        Setting(
            name=DUMP_LIMIT_MS,
            value="1",
            reason="when a peer dies, the watchdog sleeps four times this long (60 s by default), "
            "for a dump that is off here, and recovery waits for it",
            source=f"{_PG_CPP} (Watchdog::runLoop)",
        ),
    )


def _interface(route: Route) -> tuple[Setting, ...]:
    return (
        Setting(
            name=NCCL_INTERFACE,
            value=f"={route.interface}",
            reason=f"{route.reason}; by default NCCL uses the first one whose name begins with ib, "
            "then any but lo, docker* and virbr*",
            source="NCCL src/misc/socket.cc (ncclFindInterfaces)",
        ),
        Setting(
            name=GLOO_INTERFACE,
            value=route.interface,
            reason=f"{route.reason}; by default gloo uses the address that the host's name "
            "resolves to",
            source=f"{_GLOO} (Options::create_default)",
        ),
    )


def _transport(profile: str, network: Network, route: Route | None) -> tuple[Setting, ...]:
    if profile == IB:
        return (_ib_timeout("20", is_default=True), _IB_RETRIES)
    if profile == ROCE:
        return (_ib_timeout(str(_ROCE_TIMEOUT_EXPONENT), is_default=False), _IB_RETRIES)
    if profile == SOCKETS:
        return (*_without_rdma(network), *_socket_threads(network, route))
    if profile == CLOUD:
        return (
            Setting(
                name="NCCL_SOCKET_NTHREADS",
                value="-2",
                reason="-2: NCCL knows the adapters of AWS (2 threads of 8 sockets) and Google (4 "
                "threads) by their PCI vendor",
                source=f"{_NCCL_SOCKET} (ncclNetSocketGetNsockNthread)",
                is_default=True,
            ),
        )
    return ()


def _ib_timeout(value: str, *, is_default: bool) -> Setting:
    tries_s = 4.096e-6 * 2 ** int(value)
    why = (
        "credits prevent InfiniBand from losing packets"
        if is_default
        else "a congested Ethernet loses packets, and links flap for longer than NCCL's default "
        "(20) tolerates"
    )
    return Setting(
        name="NCCL_IB_TIMEOUT",
        value=value,
        reason=f"4.096 us * 2^{value} = {tries_s:.1f} s for each of 8 tries: {why}. A dead peer is "
        "detected by the agents, not by this timeout",
        source=f"{_NCCL_IB}; {_NCCL_ENV}#nccl-ib-timeout",
        is_default=is_default,
    )


def _without_rdma(network: Network) -> tuple[Setting, ...]:
    """If the profile requires sockets, and there are RDMA devices."""
    if not network.rdma:
        return ()
    return (
        Setting(
            name="NCCL_IB_DISABLE",
            value="1",
            reason="the profile requires sockets, but NCCL would use the RDMA devices of this "
            "machine",
            source=f"{_NCCL_ENV}#nccl-ib-disable",
        ),
    )


def _socket_threads(network: Network, route: Route | None) -> tuple[Setting, ...]:
    interface = network.interface(route.interface) if route is not None else None
    speed_mbps = interface.speed_mbps if interface is not None else None
    is_fast = speed_mbps is not None and speed_mbps >= _FAST_ETHERNET_MBPS
    reason = (
        f"the interface has {speed_mbps} Mbit/s, more than one socket carries"
        if is_fast
        else "-2: NCCL decides; more than one thread with one socket pays from 100 Gbit/s on"
    )
    return tuple(
        Setting(
            name=name,
            value="4" if is_fast else "-2",
            reason=reason,
            source=f"{_NCCL_SOCKET}; {_NCCL_ENV}#{anchor}",
            is_default=not is_fast,
        )
        for name, anchor in (
            ("NCCL_SOCKET_NTHREADS", "nccl-socket-nthreads"),
            ("NCCL_NSOCKS_PERTHREAD", "nccl-nsocks-perthread"),
        )
    )


_IB_RETRIES = Setting(
    name="NCCL_IB_RETRY_CNT",
    value="7",
    reason="the maximum of a field of three bits",
    source=f"{_NCCL_IB}; {_NCCL_ENV}#nccl-ib-retry-cnt",
    is_default=True,
)

_OF_TORCH = (
    Setting(
        name=ERROR_HANDLING,
        value="3",
        reason="restarted workers end without an abort of their communicators, which "
        "can hang (torchrun's default, 1, aborts them first)",
        source=f"{_PG_HPP} (ErrorHandlingMode); torch.distributed.elastic (LocalElasticAgent)",
    ),
    Setting(
        name="TORCH_INCLUDE_STACK_TRACE",
        value="0",
        reason="to take the stacks for a dump, torch's watchdog waits for the interpreter lock: "
        "where a worker hangs with that held, the dump hangs too",
        source=f"{_FLIGHT_RECORDER} (TORCH_INCLUDE_STACK_TRACE); {_PG_CPP} (dumpDebuggingInfo)",
    ),
    Setting(
        name="TORCH_NCCL_ENABLE_MONITORING",
        value="1",
        reason="ends a process whose NCCL watchdog is itself stuck",
        source=f"{_PG_HPP}; {_PG_CPP} (HeartbeatMonitor)",
        is_default=True,
    ),
    Setting(
        name="TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
        value="480",
        reason=f"longer than an abort may take (ABORT_S={timeouts.ABORT_S:g}), and than what a "
        "CUDA call blocks while a module is loaded",
        source=f"{_PG_CPP} (HeartbeatMonitor)",
        is_default=True,
    ),
    Setting(
        name="TORCH_NCCL_TRACE_BUFFER_SIZE",
        value="2000",
        reason="the flight recorder keeps that many collectives, for reports of hangs",
        source=f"{_FLIGHT_RECORDER} (TORCH_FR_BUFFER_SIZE)",
        is_default=True,
    ),
)

_WITHIN_A_NODE = (
    Setting(
        name="NCCL_P2P_DISABLE",
        value="0",
        reason="NCCL finds out by itself which GPUs reach each other's memory",
        source=f"{_NCCL_ENV}#nccl-p2p-disable",
        is_default=True,
    ),
    Setting(
        name="NCCL_SHM_DISABLE",
        value="0",
        reason="ranks of different containers do not share /dev/shm, and NCCL sees that; a small "
        "one is warned of when the node starts",
        source=f"NCCL src/transport/shm.cc; {_NCCL_ENV}#nccl-shm-disable",
        is_default=True,
    ),
)
