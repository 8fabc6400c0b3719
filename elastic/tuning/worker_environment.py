"""The variables of NCCL, torch and gloo for workers: the profile's, overridden by the user's.

The user's settings, in the environment or in a file that NCCL reads, take precedence; unsafe values
and obsolete names are reported, and interfaces that do not exist are refused. The agent applies the
result (:mod:`elastic.agent.worker_tuning`), ``elastic env`` prints it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from elastic.errors import ConfigError
from elastic.tuning import profiles, timeouts
from elastic.tuning.network import (
    LOOPBACK,
    Network,
    faster_interface,
    how_to_announce,
    interface_towards,
    source_address,
)
from elastic.tuning.profiles import Choice, Route, Setting

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
    "NCCL_ASYNC_ERROR_HANDLING": f"it is an old name of {profiles.ERROR_HANDLING}, which torchrun "
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
        profiles.choose(network, max_nodes=max_nodes)
        if profile is None
        else profiles.named(profile, network, max_nodes=max_nodes)
    )
    check_interfaces(given, network)
    wanted = profiles.settings(choice.name, network, route)
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
            for setting in profiles.in_process_settings()
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
    interface: str | None = None,
    own_network: str | None = None,
    source: Callable[[str], str | None] = source_address,
) -> Route | None:
    """The interface over which the workers of this node reach the others.

    Args:
        max_nodes: of the job.
        own_address: where the other nodes reach this one.
        is_configured: whether that address was configured (``--local-addr``, ``pod_ip``,
            ``network``).
        peers: addresses of the other nodes, the leader's first; none are known to the first node.
        interface: its name, if configured.
        own_network: the option ``network``, which contains that address.
        source: which of this machine's addresses the kernel uses towards another.

    Raises:
        ConfigError: there is no interface of that name.
    """
    if interface is not None:
        _require(interface, "interface", network)
        return Route(interface, "the interface is configured")
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
    if (mine := given.get(profiles.GLOO_INTERFACE)) is not None:
        for name in filter(None, mine.value.split(",")):
            _require(name, f"{profiles.GLOO_INTERFACE} ({mine.origin})", network)
    mine = given.get(profiles.NCCL_INTERFACE)
    if mine is not None and network.has_nvidia and not _nccl_finds(mine.value, network):
        raise _no_interface(mine.value, f"{profiles.NCCL_INTERFACE} ({mine.origin})", network)


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
    found: dict[str, Given] = {}
    for file in reversed(files):
        found.update({n: Given(v, str(file)) for n, v in _conf_settings(file)})
    found.update(
        {
            name: Given(value, ENVIRONMENT)
            for name, value in environ.items()
            if name.startswith(_PREFIXES) and name not in tuned
        }
    )
    return found


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
        _is_at_most(2 * timeouts.ABORT_S),
        f"torch would end processes that abort their communicators (ABORT_S={timeouts.ABORT_S:g}). "
        f"Set {2 * timeouts.ABORT_S + 1:g} or more",
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
        profiles.ERROR_HANDLING,
        lambda value: value != "0",
        "when a peer dies, it ends the surviving processes. Workers override it; remove it",
    ),
    (
        "TORCH_NCCL_DESYNC_DEBUG",
        is_on,
        f"it turns on {profiles.ERROR_HANDLING}, which ends the surviving processes when a peer "
        "dies. Workers override it; remove it",
    ),
    (
        _DEBUG,
        lambda value: value.upper() == "DETAIL",
        f"it turns on {profiles.ERROR_HANDLING}, which ends the surviving processes when a peer "
        "dies, and cannot be undone. Use INFO, or remove it",
    ),
    (
        profiles.DUMP_ON_TIMEOUT,
        is_on,
        "after an NCCL error the next group waits until torch's monitor has slept "
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC (480 s). Remove it",
    ),
    (profiles.DUMP_LIMIT_MS, _is_above(25), "a recovery waits four times this long. Remove it"),
)
