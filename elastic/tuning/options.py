"""The options of an agent, and where they come from."""

from __future__ import annotations

import difflib
import ipaddress
import math
import signal
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from elastic.errors import ConfigError
from elastic.tuning import environment, intervals
from elastic.tuning.intervals import (
    COLLECTIVE_TIMEOUT_S,
    FAILURE_WINDOW_S,
    FIRST_CONTACT_S,
    HANG_SCRIPT_TIMEOUT_S,
    HANG_TIMEOUT_S,
    JOIN_TIMEOUT_S,
    LAST_CALL_S,
    LEASE_S,
    LEASES_TO_TAKEOVER,
    MIN_HANG_TIMEOUT_S,
    PROBE_S,
    QUARANTINE_S,
    STOCK_LAST_CALL_S,
    STRAGGLER_WINDOW_S,
    TAKEOVER_S,
    TERMINATION_GRACE_S,
    TORCHRUN_TIMEOUT_S,
)

# ----------------------------------------------------------------------------
# The options of an agent: one frozen dataclass, with units in the names and every rule checked.
#
# They are read from the command line and the environment (below).

MODES = ("in-process", "restart")
HANG_DETECTION = ("on", "report", "off")
STRAGGLER_ACTIONS = ("report", "exclude", "off")
MIN_STRAGGLER_FACTOR = 1.05  # below this, ranks on equal machines would be reported in turn
NODE_TLS = ("node_cacert", "node_cert", "node_key")
# Options of which the first, times the factor, is below the second. Intervals that are set
# independently eventually contradict each other: such sets are refused with both values.
_ORDERS = (
    ("lease_s", "takeover_s", LEASES_TO_TAKEOVER),
    ("last_call_s", "join_timeout_s", 1.0),
    # A paused job may be waiting for a node in quarantine.
    ("quarantine_s", "join_timeout_s", 1.0),
    ("hang_timeout_s", "hang_script_timeout_s", 1.0),
)
# Lower bounds: an option, the constant that it must exceed, and the reason.
_MINIMA = (
    ("lease_s", "PROBE_S", PROBE_S, "a suspected node has that long to answer a probe"),
    (
        "hang_timeout_s",
        "MIN_HANG_TIMEOUT_S",
        MIN_HANG_TIMEOUT_S,
        "a rank that only waits for a core would be considered hung",
    ),
)

# ELASTIC_* variables that are not options of the rendezvous.
OTHER_VARIABLES = frozenset(
    {
        "CHECKPOINTS",
        "DASHBOARD_TOKEN",
        "ENDING",
        "ERROR_FILE_OWNER",
        "JOURNAL",
        "LEDGER",
        "LINK",
        "LOG_LEVEL",
        "MAX_NODES",
        "NODE_ID",
        "NODE_MEMORY",
        "NODE_NAME",
        "OTEL",
        "PEER_SILENCE_S",
        "PREFLIGHT_PASSED",
        "PROGRESS",
        "RUN_INSTANCE",
        "STOCK_ETCD",
        "TENSORBOARD",
        "TUNED",
        "WORLD",
    }
)


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """All options of an agent. Times in seconds."""

    lease_s: float = LEASE_S
    last_call_s: float = LAST_CALL_S
    join_timeout_s: float = JOIN_TIMEOUT_S
    takeover_s: float = TAKEOVER_S
    connect_timeout_s: float = FIRST_CONTACT_S
    failure_budget: int = 10
    failure_window_s: float = FAILURE_WINDOW_S
    quarantine_s: float = QUARANTINE_S
    cacert: str | None = None
    cert: str | None = None
    key: str | None = None
    # TLS between nodes, independent of etcd's (elastic/agent/node.py). All or none.
    node_cacert: str | None = None
    node_cert: str | None = None
    node_key: str | None = None
    user: str | None = None
    password_file: str | None = None
    prefix: str = "/elastic"
    # Share of this node's memory for its own parts of checkpoints, and as much for copies.
    node_memory_share: float = 0.25  # 0: no memory tier
    node_memory_copies: int = 1  # nodes that hold copies: as many adjacent ones may be lost at once
    # Action on a worker that hangs (elastic/hangs): "on" ends it, "report" only writes a report,
    # "off" disables detection.
    hang_detection: str = "on"
    hang_timeout_s: float = HANG_TIMEOUT_S
    hang_script_timeout_s: float = HANG_SCRIPT_TIMEOUT_S
    collective_timeout_s: float = COLLECTIVE_TIMEOUT_S
    # Action on a rank that is slower than the others (elastic/stragglers): "report" writes an
    # event, "exclude" also replaces its node by a waiting one, "off" disables measurement.
    straggler_action: str = "report"
    straggler_factor: float = 1.3  # of the others' time per sample
    straggler_window_s: float = STRAGGLER_WINDOW_S
    # Ranks that hold the model once. If there are more of them than workers on a node, worlds
    # consist of complete replicas over several nodes; the remaining nodes wait
    # (elastic/membership/replicas.py).
    replica_size: int = 1
    mode: str = "in-process"  # "restart": worlds never change without a restart of the workers
    # Of the network: the variables that workers get (elastic/tuning/environment.py).
    profile: str | None = None  # None: chosen by the machine's hardware
    # The network between nodes: each announces its address in it. None: the one towards etcd.
    network: str | None = None  # "172.30.0.0/24"

    preflight: bool = False  # check this node before it may join (elastic/doctor/network.py)

    # From SIGTERM to SIGKILL: of a pod, a Slurm job, a spot machine.
    termination_grace_s: float = TERMINATION_GRACE_S

    # Set by a pod's manifest (deploy/base).
    health_port: int | None = None  # probes and metrics; 0: any free port, None: no server
    park: bool = False  # keep running when the job is done: some launchers would restart this node
    pod_uid: str | None = None  # distinguishes pods of one machine (agent/identity.py)
    memory_limit_bytes: int | None = None  # of this node, workers and shared memory included

    def __post_init__(self) -> None:
        self._check_times()
        self._check_ports()
        self._check_memory()
        self._check_modes()
        self._check_stragglers()
        self._check_store_credentials()
        self._check_node_tls()

    @property
    def leave_grace_s(self) -> float:
        """A node asked to leave ends its workers by then, at a step's boundary or not."""
        return intervals.leave_grace_s(self.termination_grace_s)

    def _check_times(self) -> None:
        for name in _positive_options():
            if (value := getattr(self, name)) is not None:
                intervals.require_positive(name, value)
        for low, high, factor in _ORDERS:
            intervals.require_below(
                low, getattr(self, low), high, getattr(self, high), factor=factor
            )
        for name, least, least_s, why in _MINIMA:
            if getattr(self, name) <= least_s:
                raise ConfigError(
                    f"{name}={getattr(self, name):g} and {least}={least_s:g} are incompatible: "
                    f"{why}",
                    hint=intervals.where_to_set(name),
                )
        if self.hang_detection == "on":  # otherwise nothing else ends a wait
            intervals.require_below(
                "hang_script_timeout_s",
                self.hang_script_timeout_s,
                "collective_timeout_s",
                self.collective_timeout_s,
            )
        intervals.leave_grace_s(self.termination_grace_s)

    def _check_ports(self) -> None:
        if self.health_port is not None and not 0 <= self.health_port <= 65535:
            raise ConfigError(
                f"health_port={self.health_port} is not a port (0 to 65535)",
                hint=intervals.where_to_set("health_port"),
            )

    def _check_memory(self) -> None:
        if not 0 <= self.node_memory_share <= 0.45:
            raise ConfigError(
                f"node_memory_share={self.node_memory_share:g} is not between 0 and 0.45",
                hint=intervals.where_to_set("node_memory_share"),
            )
        copies = self.node_memory_copies
        if copies < 1 or (taken := (1 + copies) * self.node_memory_share) > 0.9:
            raise ConfigError(
                f"node_memory_copies={copies}"
                + (f": parts and copies would take {taken:.0%} of memory" if copies > 0 else ""),
                hint="at least one copy, and (1 + copies) × node_memory_share at most 0.9",
            )

    def _check_modes(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(
                f"mode={self.mode} is not one of {', '.join(MODES)}",
                hint=intervals.where_to_set("mode"),
            )
        if self.profile is not None:
            environment.check_name(self.profile)
        self._check_network()
        if self.hang_detection not in HANG_DETECTION:
            raise ConfigError(
                f"hang_detection={self.hang_detection} is not one of {', '.join(HANG_DETECTION)}",
                hint=intervals.where_to_set("hang_detection"),
            )

    def _check_network(self) -> None:
        try:
            ipaddress.ip_network(self.network or "0.0.0.0/0", strict=False)
        except ValueError as error:
            raise ConfigError(
                f"network={self.network} is not a network: {error}",
                hint="write it as 172.30.0.0/24; " + intervals.where_to_set("network"),
            ) from None

    def _check_stragglers(self) -> None:
        if self.straggler_action not in STRAGGLER_ACTIONS:
            raise ConfigError(
                f"straggler_action={self.straggler_action} is not one of "
                f"{', '.join(STRAGGLER_ACTIONS)}",
                hint=intervals.where_to_set("straggler_action"),
            )
        if not MIN_STRAGGLER_FACTOR <= self.straggler_factor < math.inf:
            raise ConfigError(
                f"straggler_factor={self.straggler_factor:g} is not a number from "
                f"{MIN_STRAGGLER_FACTOR:g} on: it is a multiple of the others' time per sample",
                hint=intervals.where_to_set("straggler_factor"),
            )

    def _check_store_credentials(self) -> None:
        for one, other in (("cert", "key"), ("key", "cert"), ("user", "password_file")):
            if getattr(self, one) and not getattr(self, other):
                raise ConfigError(
                    f"{one} is set and {other} is not", hint=intervals.where_to_set(other)
                )
        if self.password_file and not self.user:
            raise ConfigError(
                "password_file is set and user is not", hint=intervals.where_to_set("user")
            )

    def _check_node_tls(self) -> None:
        given = [name for name in NODE_TLS if getattr(self, name)]
        missing = [name for name in NODE_TLS if name not in given]
        if given and missing:
            raise ConfigError(
                f"{' and '.join(given)} {'are' if given[1:] else 'is'} set and "
                f"{' and '.join(missing)} {'are' if missing[1:] else 'is'} not: TLS between nodes "
                "takes all three",
                hint="; ".join(map(intervals.where_to_set, missing)),
            )


def _positive_options() -> list[str]:
    in_seconds = [f.name for f in fields(AgentOptions) if f.name.endswith("_s")]
    return [*in_seconds, "failure_budget", "memory_limit_bytes", "replica_size"]


# ----------------------------------------------------------------------------
# The sources of an agent's options: the command line, the environment, the defaults.
#
# ``--rdzv-conf key=value`` takes precedence over ``ELASTIC_KEY`` in the environment, which takes
# precedence over the defaults of :class:`~elastic.tuning.options.AgentOptions`. An unknown
# option is refused with the nearest known name. Options of torch's own rendezvous backends are
# accepted, and mapped where they have an equivalent, so that existing command lines keep working.

ENVIRONMENT_PREFIX = "ELASTIC_"
CONF_VARIABLE = "PET_RDZV_CONF"  # torchrun's default of --rdzv-conf
_SWITCH = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}

# What torch's c10d, etcd and etcd-v2 backends accept (torch 2.11 to 2.15:
# rendezvous/{dynamic,etcd,c10d}_rendezvous*.py), and what it means here.
_STOCK_NAMES = {
    "join_timeout": "join_timeout_s",
    "last_call_timeout": "last_call_s",
    "etcd_prefix": "prefix",
    "ca_cert": "cacert",
    "ssl_cert": "cert",
    "ssl_cert_key": "key",
    "read_timeout": "connect_timeout_s",
}
_STOCK_WITHOUT_MEANING = frozenset(
    {
        "timeout",  # handled separately: torchrun always sends 900
        "is_host",
        "store_type",
        "close_timeout",
        "heartbeat_timeout",
        "keep_alive_interval",
        "keep_alive_max_attempt",
        "rank",
        "protocol",
        "use_libuv",
    }
)
_QUOTES = "\"'"


def read_options(
    conf: Mapping[str, Any], environ: Mapping[str, str], *, for_program: bool = False
) -> AgentOptions:
    """Merge defaults, environment and ``--rdzv-conf`` (or its variable).

    ``for_program``: a program calls ``elastic_launch`` and expects each node's results, so that
    the others are waited for as long as torch's own backends do (docs/decisions/0018).

    Raises:
        ConfigError: unknown name (with the nearest known one) or unusable value.
    """
    known = {f.name: str(f.type) for f in fields(AgentOptions)}
    place = _place_of(conf, environ)
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        name = _option_of_variable(variable, known)
        if name is not None:
            values[name] = _parse(name, known[name], text, variable)
    given_as: dict[str, str] = {}
    for given, value in ((_unquoted(k), _unquoted(v)) for k, v in conf.items()):
        conf_name = _option_of_conf(given, value, known, place)
        if conf_name is not None:
            parsed = _parse(conf_name, known[conf_name], value, place)
            _require_one_value(given_as, conf_name, given, parsed, values, place)
            values[conf_name] = parsed
    last_call_s = STOCK_LAST_CALL_S if for_program else AgentOptions.last_call_s
    return AgentOptions(**{**_fitting_defaults(values, last_call_s), **values})


def _place_of(conf: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """Where ``conf`` was given, for errors: in torchrun's variable, if all of that is in it."""
    pairs = (part.partition("=") for part in environ.get(CONF_VARIABLE, "").split(","))
    of_variable = {key.strip(): value.strip() for key, _, value in pairs if key.strip()}
    has_all = all(str(conf.get(key)) == value for key, value in of_variable.items())
    return CONF_VARIABLE if of_variable and has_all else "--rdzv-conf"


def _require_one_value(
    given_as: dict[str, str],
    option: str,
    given: str,
    value: Any,
    values: Mapping[str, Any],
    place: str,
) -> None:
    """Raise ConfigError if an option is given by two of its names, with two values."""
    other = given_as.setdefault(option, given)
    if other != given and values[option] != value:
        raise ConfigError(
            f"{other}={values[option]} and {given}={value} in {place} are the same option, "
            f"{option}",
            hint=f"give {option} alone",
        )


def _fitting_defaults(values: Mapping[str, Any], last_call_s: float) -> dict[str, float]:
    """Defaults of options that are not given, and would contradict those that are."""
    derived = {"last_call_s": last_call_s}
    if (hang_script_timeout_s := values.get("hang_script_timeout_s")) is not None:
        derived["collective_timeout_s"] = intervals.collective_for(hang_script_timeout_s)
    if (limit_s := values.get("join_timeout_s", 0.0)) > 0:
        for name, default in (("last_call_s", last_call_s), ("quarantine_s", QUARANTINE_S)):
            derived[name] = min(default, limit_s / 2)
    return derived


def _unquoted(text: Any) -> Any:
    """Strip the quotes that a shell would remove: ``--rdzv-conf="'lease_s=4'"``, as written in
    manifests and lists of arguments. torch splits the value at commas and keeps the quotes."""
    return text.strip(_QUOTES) if isinstance(text, str) else text


def signals_to_handle(text: str) -> frozenset[signal.Signals]:
    """The signals of torchrun's ``--signals-to-handle``, separated by commas.

    Raises:
        ConfigError: a name is none, or that of a signal that no process can handle. torch omits
            both with a warning; the signal, once it is sent, would end the agent without a save.
    """
    known = {s.name: s for s in signal.Signals if s not in (signal.SIGKILL, signal.SIGSTOP)}
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(
                f"--signals-to-handle={text}: {name!r} is not a signal that a process can handle"
                + (f", did you mean {near[0]!r}?" if near else ""),
                hint="for example --signals-to-handle=SIGTERM,SIGINT,SIGUSR1",
            )
    return frozenset(known[name] for name in names)


def _option_of_variable(variable: str, known: Mapping[str, str]) -> str | None:
    if not variable.startswith(ENVIRONMENT_PREFIX):
        return None
    rest = variable[len(ENVIRONMENT_PREFIX) :]
    if rest in OTHER_VARIABLES:
        return None
    name = rest.lower()
    if name in known:
        return name
    # Other products use this prefix, too (ELASTIC_PASSWORD, ELASTIC_APM_...): only a likely
    # misspelling of a known name is refused.
    names = [n.upper() for n in known] + sorted(OTHER_VARIABLES)
    near = difflib.get_close_matches(rest, names, n=1, cutoff=0.8)
    if near:
        raise ConfigError(
            f"unknown environment variable {variable}",
            hint=f"did you mean {ENVIRONMENT_PREFIX}{near[0]}?",
        )
    return None


def _option_of_conf(given: str, value: Any, known: Mapping[str, str], place: str) -> str | None:
    if given in known:
        return given
    if given == "timeout":
        is_default = str(value) == str(TORCHRUN_TIMEOUT_S)
        return None if is_default else "join_timeout_s"
    if given in _STOCK_NAMES:
        return _STOCK_NAMES[given]
    if given in _STOCK_WITHOUT_MEANING:
        return None
    names = [*known, *_STOCK_NAMES]
    near = difflib.get_close_matches(given, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(
        f"unknown option {given}={value} in {place}",
        hint=f"{hint}Known: {', '.join(sorted(known))}",
    )


def _parse(name: str, kind: str, value: Any, place: str) -> Any:
    if kind.startswith("str"):
        return str(value)
    if kind == "bool":
        return _parse_switch(name, str(value), place)
    is_whole = kind.startswith("int")
    try:
        return int(value) if is_whole else float(value)
    except (TypeError, ValueError):
        raise ConfigError(
            f"{name}={value!r} in {place} is not a number",
            hint=f"give a {'whole ' if is_whole else ''}number"
            + (" of seconds" if name.endswith("_s") else ""),
        ) from None


def _parse_switch(name: str, text: str, place: str) -> bool:
    switch = _SWITCH.get(text.lower())
    if switch is None:
        raise ConfigError(f"{name}={text!r} in {place} is neither 1 nor 0", hint="give 1 or 0")
    return switch
