"""The environment of workers: memory, profiles of networks, and torch's own settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from elastic.errors import ConfigError
from elastic.tuning import intervals
from elastic.tuning.network import (
    ETHERNET,
    INFINIBAND,
    LOOPBACK,
    Network,
    faster_interface,
    how_to_announce,
    interface_towards,
    source_address,
)

# The agent's mode, for its workers (``options.MODES``). Absent: in-process.
MODE = "ELASTIC_MODE"
RESTART = "restart"

# ----------------------------------------------------------------------------
# Whether the memory use of a node fits its limit (``ELASTIC_MEMORY_LIMIT_BYTES``).
#
# In a container ``/dev/shm`` counts towards the limit, and so do staging buffers of checkpoints. A
# process above the limit is killed without a message, so a warning is logged beforehand. Pure:
# sizes in, sentences out.

# Per process, each as large as its share of the state (checkpoints/engine.py).
STAGING_BUFFERS = 2
# The default of container runtimes.
RUNTIME_SHM_BYTES = 64 << 20


def shm_shortages(limit_bytes: int, shm_bytes: int) -> tuple[str, ...]:
    """The problems of a ``/dev/shm`` of that size."""
    if shm_bytes >= limit_bytes:
        return (
            f"/dev/shm may grow to {human(shm_bytes)}, and this node's memory is limited to "
            f"{human(limit_bytes)}: full, it gets the workers killed. Mount an emptyDir of medium "
            "Memory there, with a sizeLimit well below the limit",
        )
    if shm_bytes <= RUNTIME_SHM_BYTES:
        return (
            f"/dev/shm has {human(shm_bytes)}, the container runtime's default: data workers and "
            "NCCL need more, and end with a bus error. Mount an emptyDir of medium Memory there",
        )
    return ()


def staging_shortage(
    limit_bytes: int, used_bytes: int, share_bytes: int, world_size: int, local_size: int
) -> str | None:
    """Why a node would exceed its limit as the only remaining node of its job, or None.

    ``used_bytes`` is the memory of one worker, including its staging buffers of ``share_bytes``
    each. With fewer ranks, each rank stages a larger share.
    """
    used = used_bytes * local_size
    alone = STAGING_BUFFERS * share_bytes * (world_size - local_size)
    if used + alone <= limit_bytes:
        return None
    return (
        f"this node's workers use {human(used)}, and its memory is limited to "
        f"{human(limit_bytes)}: left alone, it would stage checkpoints in {human(alone)} more and "
        f"be killed. Raise the limit to {human(used + alone)} or more, or the minimum of nodes"
    )


def human(size_bytes: int) -> str:
    """A size for users.

    >>> human(3 << 30), human(64 << 20), human(5000)
    ('3.0 GiB', '64 MiB', '5000 bytes')
    """
    if size_bytes >= 1 << 30:
        return f"{size_bytes / (1 << 30):.1f} GiB"
    if size_bytes >= 1 << 20:
        return f"{size_bytes / (1 << 20):.0f} MiB"
    return f"{size_bytes} bytes"


# ----------------------------------------------------------------------------
# Network profiles: the variables of NCCL, torch and gloo that a job sets, each with its reason.
#
# Pure: facts of :mod:`elastic.tuning.network` in, settings out. A profile is chosen by the
# machine's hardware; ``--rdzv-conf profile=NAME`` or ``ELASTIC_PROFILE`` overrides it. The user's
# own settings take precedence.
#
# The names and defaults were read in the sources that each setting names: torch's C++ headers of
# 2.11 to 2.15, NCCL 2.28 to 2.30 (the versions bundled with those of torch) and NVIDIA's
# documentation of it.

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
            hint=intervals.where_to_set("profile"),
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
        reason=f"longer than an abort may take (ABORT_S={intervals.ABORT_S:g}), and than what a "
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


# ----------------------------------------------------------------------------
# The variables of NCCL, torch and gloo for workers: the profile's, overridden by the user's.
#
# The user's settings, in the environment or in a file that NCCL reads, take precedence; unsafe
# values and obsolete names are reported, and interfaces that do not exist are refused. The agent
# applies the result (:mod:`elastic.agent.tuning`), ``elastic env`` prints it.

# The names that an agent has set, for its workers and for agents that are started by them: what is
# listed there is not the user's.
TUNED = "ELASTIC_TUNED"

_DEBUG = "TORCH_DISTRIBUTED_DEBUG"
_PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "GLOO_", "TORCH_GLOO_", "TORCH_INCLUDE_", _DEBUG)
# torch's own spelling (c10d/Utils.hpp, getCvarBool).
_ON = frozenset({"y", "yes", "1", "t", "true"})
_MAX_IB_RETRY_COUNT, _MAX_IB_TIMEOUT_FIELD = 7, 31  # fields of three and five bits
_MAX_SOCKETS = 64  # per connection: NCCL src/transport/net_socket.cc, MAX_SOCKETS

# Names that old guides recommend, and their effect today (torch 2.11 to 2.15, NCCL 2.28 to 2.30:
# their sources, and the strings of their libraries).
DEAD_NAMES = {
    "NCCL_ASYNC_ERROR_HANDLING": f"it is an old name of {ERROR_HANDLING}, which torchrun "
    "sets for every worker and which torch then reads instead: it has no effect. Remove it",
    "NCCL_BLOCKING_WAIT": "it is an old name of TORCH_NCCL_BLOCKING_WAIT. torch still reads it, "
    "and runs no watchdog then. Remove it: agents end workers that hang in a collective",
    "NCCL_DESYNC_DEBUG": "it is an old name of TORCH_NCCL_DESYNC_DEBUG. Remove it: the flight "
    "recorder tells who is missing in a collective",
    "NCCL_ENABLE_TIMING": "it is an old name of TORCH_NCCL_ENABLE_TIMING. Use that",
    "NCCL_TIMEOUT": "neither NCCL nor torch reads it: it has no effect. Remove it",
}


@dataclass(frozen=True, kw_only=True)
class EffectiveVariable:
    """A variable as the workers see it.

    ``origin``: ``profile``, ``environment``, the path of NCCL's file, ``default`` (the library's
    own, not set), or ``worker`` (set by a worker before it makes a group that may be replaced).
    """

    name: str
    value: str
    origin: str
    reason: str
    source: str


PROFILE, ENVIRONMENT, DEFAULT, WORKER = "profile", "environment", "default", "worker"
_BY_USER = "set by the user"


class Given(NamedTuple):
    """A value that the user has set, and where."""

    value: str
    origin: str


@dataclass(frozen=True, kw_only=True)
class WorkerEnvironment:
    """The effective variables, and warnings about them."""

    profile: Choice
    route: Route | None
    entries: tuple[EffectiveVariable, ...]
    warnings: tuple[str, ...]

    def variables(self) -> dict[str, str | None]:
        """What an agent adds to the environment of its workers."""
        ours = {e.name: e.value for e in self.entries if e.origin == PROFILE}
        return {**ours, TUNED: ",".join(sorted(ours))}


def effective(
    given: Mapping[str, Given],
    network: Network,
    *,
    profile: str | None,
    is_in_process: bool,
    max_nodes: int,
    route: Route | None,
) -> WorkerEnvironment:
    """The profile's settings, overridden by the user's.

    Raises:
        ConfigError: the profile does not exist or cannot be, or an interface does not exist.
    """
    choice = (
        choose(network, max_nodes=max_nodes)
        if profile is None
        else named(profile, network, max_nodes=max_nodes)
    )
    check_interfaces(given, network)
    wanted = settings(choice.name, network, route)
    entries = [_entry(setting, given) for setting in wanted]
    known = {setting.name for setting in wanted}
    entries += [
        EffectiveVariable(
            name=name, value=value, origin=origin, reason="set by the user", source=""
        )
        for name, (value, origin) in sorted(given.items())
        if name not in known
    ]
    if is_in_process:
        entries += [
            EffectiveVariable(
                name=setting.name,
                value=setting.value,
                origin=WORKER,
                reason=f"where a worker recovers in process: {setting.reason}",
                source=setting.source,
            )
            for setting in in_process_settings()
        ]
    return WorkerEnvironment(
        profile=choice,
        route=route,
        entries=tuple(entries),
        warnings=(
            *_warnings(given, is_in_process=is_in_process),
            *((route.hint,) if route is not None and route.hint else ()),
        ),
    )


def _entry(setting: Setting, given: Mapping[str, Given]) -> EffectiveVariable:
    mine = given.get(setting.name)
    if mine is None:
        origin = DEFAULT if setting.is_default else PROFILE
        value, reason = setting.value, setting.reason
    else:
        value, origin = mine
        kept = "the default" if setting.is_default else "the profile"
        reason = f"{_BY_USER}; {kept} is {setting.value}: {setting.reason}"
    return EffectiveVariable(
        name=setting.name, value=value, origin=origin, reason=reason, source=setting.source
    )


# Which interface ------------------------------------------------------------------------------


def choose_route(
    network: Network,
    *,
    max_nodes: int,
    own_address: str,
    is_configured: bool,
    peers: Sequence[str],
    own_network: str | None = None,
    source: Callable[[str], str | None] = source_address,
) -> Route | None:
    """The interface over which the workers of this node reach the others.

    Args:
        max_nodes: of the job.
        own_address: where the other nodes reach this one.
        is_configured: whether that address was configured (``--local-addr``,
            ``network``).
        peers: addresses of the other nodes, the leader's first; none are known to the first node.
        own_network: the option ``network``, which contains that address.
        source: which of this machine's addresses the kernel uses towards another.
    """
    if max_nodes == 1 and network.interface(LOOPBACK) is not None:
        return Route(LOOPBACK, "all ranks are on this machine")
    own = network.with_address(own_address)
    if is_configured and own is not None:
        description = (
            f"this node's address in network={own_network}"
            if own_network
            else "the address that this node announces"
        )
        return Route(own.name, f"it has {own_address}, {description}")
    for peer in peers:
        towards = interface_towards(network, peer, source)
        if towards is not None:
            who = "the leader" if peer == peers[0] else "another node"
            reason = f"it is on the route to {who}, {peer}"
            return Route(towards.name, reason, _faster(network, towards.name))
    if own is not None:
        reason = f"it has {own_address}, where the other nodes reach this one"
        return Route(own.name, reason, _faster(network, own.name))
    return None


def _faster(network: Network, interface: str) -> str:
    """The hint at a faster interface. It is not chosen automatically: one node cannot determine
    whether all nodes reach each other over it."""
    faster, slow = faster_interface(network, interface), network.interface(interface)
    if faster is None or slow is None:
        return ""
    return (
        f"{interface} has {slow.speed_mbps} Mbit/s and {faster.name} {faster.speed_mbps}: if all "
        f"nodes reach each other over it, start them with {how_to_announce(faster)} "
        "(`elastic doctor --nnodes` measures both)"
    )


def check_interfaces(given: Mapping[str, Given], network: Network) -> None:
    """Raise ConfigError if the user has set an interface that this machine does not have.

    NCCL's variable is checked only on machines with NVIDIA GPUs: elsewhere nothing reads it, and
    images set it for all machines.
    """
    if (mine := given.get(GLOO_INTERFACE)) is not None:
        for name in filter(None, mine.value.split(",")):
            _require(name, f"{GLOO_INTERFACE} ({mine.origin})", network)
    mine = given.get(NCCL_INTERFACE)
    if mine is not None and network.has_nvidia and not _nccl_finds(mine.value, network):
        raise _no_interface(mine.value, f"{NCCL_INTERFACE} ({mine.origin})", network)


def _nccl_finds(value: str, network: Network) -> bool:
    """As NCCL reads it: prefixes, names after ``=``, and all others after ``^``."""
    excludes, value = value.startswith("^"), value.removeprefix("^")
    is_exact, value = value.startswith("="), value.removeprefix("=")
    names = [name.partition(":")[0] for name in value.split(",") if name]

    def is_listed(interface: str) -> bool:
        return any(interface == n if is_exact else interface.startswith(n) for n in names)

    return any(is_listed(i.name) != excludes for i in network.interfaces)


def _require(name: str, where: str, network: Network) -> None:
    if network.interface(name) is None:
        raise _no_interface(name, where, network)


def _no_interface(value: str, where: str, network: Network) -> ConfigError:
    known = ", ".join(f"{i.name} ({i.addresses[0]})" for i in network.interfaces)
    return ConfigError(
        f"{where}={value}: this machine has no such interface with an address",
        hint=f"it has {known or 'none'}; remove the setting to have the interface chosen by the "
        "route to the leader",
    )


# What the user has set ------------------------------------------------------------------------


def given_settings(
    environ: Mapping[str, str], root: Path = Path("/"), home: Path | None = None
) -> dict[str, Given]:
    """The user's settings: in the environment, or in the files that NCCL reads.

    In NCCL's order: the environment, the file that ``NCCL_CONF_FILE`` names (without it
    ``~/.nccl.conf``), ``/etc/nccl.conf``.
    """
    if home is None:
        home = Path(environ.get("HOME", "/"))
    tuned = set(environ.get(TUNED, "").split(","))
    files = (
        Path(environ.get("NCCL_CONF_FILE") or home / ".nccl.conf"),
        root / "etc/nccl.conf",
    )
    given: dict[str, Given] = {}
    for file in reversed(files):
        given.update({n: Given(v, str(file)) for n, v in _conf_settings(file)})
    given.update(
        {
            name: Given(value, ENVIRONMENT)
            for name, value in environ.items()
            if name.startswith(_PREFIXES) and name not in tuned
        }
    )
    return given


def _conf_settings(file: Path) -> Iterable[tuple[str, str]]:
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    pairs = (line.strip().partition("=") for line in lines)
    return [(n.strip(), v.strip()) for n, sign, v in pairs if sign and not n.startswith("#")]


# What is not safe -----------------------------------------------------------------------------


def _warnings(given: Mapping[str, Given], *, is_in_process: bool) -> Iterable[str]:
    for name, answer in DEAD_NAMES.items():
        if name in given:
            yield f"{name}={given[name].value}: {answer}"
    for name, is_unsafe, why in _UNSAFE:
        if name in given and is_unsafe(given[name].value):
            yield f"{name}={given[name].value}: {why}"
    if is_in_process:
        for name, is_unsafe, why in _UNSAFE_IN_PROCESS:
            if name in given and is_unsafe(given[name].value):
                yield f"{name}={given[name].value}, and mode=in-process: {why}"
    sockets = [_number(given.get(n)) for n in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")]
    threads, per_thread = sockets
    if threads is not None and per_thread is not None and threads * per_thread > _MAX_SOCKETS:
        yield (
            f"NCCL_SOCKET_NTHREADS={threads} and NCCL_NSOCKS_PERTHREAD={per_thread}: their product "
            f"is above {_MAX_SOCKETS}, and NCCL lowers it. Lower one of the two"
        )


def is_on(value: str) -> bool:
    """Whether torch reads this value of a switch as on."""
    return value.lower() in _ON


def _is_above(most: int) -> Callable[[str], bool]:
    return lambda value: value.isdecimal() and int(value) > most


def _is_at_most(most: float) -> Callable[[str], bool]:
    return lambda value: value.isdecimal() and int(value) <= most


def _number(given: Given | None) -> int | None:
    return int(given.value) if given is not None and given.value.isdecimal() else None


_NO_RECORDER = "without its buffer NCCL's flight recorder is off, and reports of hangs lack it"
_UNSAFE: tuple[tuple[str, Callable[[str], bool], str], ...] = (
    (
        "TORCH_INCLUDE_STACK_TRACE",
        is_on,
        "torch's dump waits for the interpreter lock, and hangs where a worker hangs with that "
        "held. Set 0",
    ),
    (
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
        _is_at_most(2 * intervals.ABORT_S),
        f"torch would end processes that abort communicators (ABORT_S={intervals.ABORT_S:g}). "
        f"Set {2 * intervals.ABORT_S + 1:g} or more",
    ),
    ("TORCH_NCCL_TRACE_BUFFER_SIZE", _is_at_most(0), _NO_RECORDER),
    ("TORCH_FR_BUFFER_SIZE", _is_at_most(0), _NO_RECORDER),
    (
        "NCCL_IB_RETRY_CNT",
        _is_above(_MAX_IB_RETRY_COUNT),
        f"the field has three bits: set {_MAX_IB_RETRY_COUNT} at most",
    ),
    (
        "NCCL_IB_TIMEOUT",
        _is_above(_MAX_IB_TIMEOUT_FIELD),
        f"the field has five bits: set {_MAX_IB_TIMEOUT_FIELD} at most (22 is 17 s for each try)",
    ),
)
_UNSAFE_IN_PROCESS: tuple[tuple[str, Callable[[str], bool], str], ...] = (
    (
        ERROR_HANDLING,
        lambda value: value != "0",
        "when a peer dies, it ends the surviving processes. Workers override it; remove it",
    ),
    (
        "TORCH_NCCL_DESYNC_DEBUG",
        is_on,
        f"it turns on {ERROR_HANDLING}, which ends the surviving processes when a peer "
        "dies. Workers override it; remove it",
    ),
    (
        _DEBUG,
        lambda value: value.upper() == "DETAIL",
        f"it turns on {ERROR_HANDLING}, which ends the surviving processes when a peer "
        "dies, and cannot be undone. Use INFO, or remove it",
    ),
    (
        DUMP_ON_TIMEOUT,
        is_on,
        "after an NCCL error the next group waits until torch's monitor has slept "
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC (480 s). Remove it",
    ),
    (DUMP_LIMIT_MS, _is_above(25), "a recovery waits four times this long. Remove it"),
)
