"""Options: frozen dataclasses with units in the names, read at the edge from three places.

``--rdzv-conf key=value`` wins over ``ELASTIC_KEY`` in the environment, which wins over the
defaults here. An unknown option is refused with the nearest known name. The names that torch's
own rendezvous backends take are accepted, and mapped where they mean something, so that a
command line written for them goes on working.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from elastic.errors import ConfigError

ENVIRONMENT_PREFIX = "ELASTIC_"
MODES = ("in-process", "restart")

# What torch's c10d, etcd and etcd-v2 backends accept (torch 2.11 to 2.13:
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
        "timeout",  # handled apart: torchrun always sends 900
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
# torch/distributed/launcher/api.py puts this into every configuration.
_TORCHRUN_DEFAULT_TIMEOUT = 900

# ELASTIC_* variables that are no options of the rendezvous.
OTHER_VARIABLES = frozenset(
    {
        "CHECKPOINTS",
        "GENERATION",
        "JOURNAL",
        "LEDGER",
        "LINEAGE",
        "LINK",
        "LOG_LEVEL",
        "MAX_NODES",
        "NODE_ID",
        "NODE_NAME",
        "NONCE",
        "STOCK_ETCD",
    }
)


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """Everything an agent can be told. Times in seconds."""

    lease_s: float = 4.0
    last_call_s: float = 3.0
    join_window_s: float = 1.0
    join_timeout_s: float = 600.0
    takeover_s: float = 300.0
    probe_s: float = 0.3
    connect_timeout_s: float = 10.0
    failure_budget: int = 10
    failure_window_s: float = 600.0
    healthy_s: float = 60.0
    cool_down_s: float = 60.0
    cacert: str | None = None
    cert: str | None = None
    key: str | None = None
    user: str | None = None
    password_file: str | None = None
    prefix: str = "/elastic"
    mode: str = "in-process"  # "restart": worlds never change without a restart of the workers
    leave_grace_s: float = 20.0  # a node told to leave ends by then, at a step's boundary or not

    def __post_init__(self) -> None:
        for name in _positive_options():
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(
                    f"{name}={value} must be a number above zero", hint=_where_to_set(name)
                )
        _require_ordered(self, "probe_s", "lease_s")
        _require_ordered(self, "lease_s", "takeover_s", factor=4)
        if self.mode not in MODES:
            raise ConfigError(
                f"mode={self.mode} is none of {', '.join(MODES)}", hint=_where_to_set("mode")
            )
        for one, other in (("cert", "key"), ("key", "cert"), ("user", "password_file")):
            if getattr(self, one) and not getattr(self, other):
                raise ConfigError(f"{one} is set and {other} is not", hint=_where_to_set(other))
        if self.password_file and not self.user:
            raise ConfigError("password_file is set and user is not", hint=_where_to_set("user"))


def _positive_options() -> list[str]:
    return [f.name for f in fields(AgentOptions) if f.name.endswith("_s")] + ["failure_budget"]


def _require_ordered(options: AgentOptions, low: str, high: str, factor: float = 1.0) -> None:
    a, b = getattr(options, low), getattr(options, high)
    if a * factor >= b:
        times = f"{factor:g} times " if factor != 1 else ""
        raise ConfigError(
            f"{low}={a:g} and {high}={b:g} do not fit: {high} must be above {times}{low}",
            hint=f"raise {high} or lower {low} in --rdzv-conf or the environment",
        )


def _where_to_set(name: str) -> str:
    return f"set it with --rdzv-conf={name}=... or {ENVIRONMENT_PREFIX}{name.upper()}"


def read_options(conf: Mapping[str, Any], environ: Mapping[str, str]) -> AgentOptions:
    """Merge defaults, environment and ``--rdzv-conf``.

    Raises:
        ConfigError: unknown name (with the nearest known one) or unusable value.
    """
    known = {f.name: str(f.type) for f in fields(AgentOptions)}
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        name = _option_of_variable(variable, known)
        if name is not None:
            values[name] = _parse(name, known[name], text, variable)
    for given, value in conf.items():
        conf_name = _option_of_conf(given, value, known)
        if conf_name is not None:
            values[conf_name] = _parse(conf_name, known[conf_name], value, "--rdzv-conf")
    return AgentOptions(**values)


def _option_of_variable(variable: str, known: Mapping[str, str]) -> str | None:
    if not variable.startswith(ENVIRONMENT_PREFIX):
        return None
    rest = variable[len(ENVIRONMENT_PREFIX) :]
    if rest in OTHER_VARIABLES:
        return None
    name = rest.lower()
    if name in known:
        return name
    # Other products use this prefix, too (ELASTIC_PASSWORD, ELASTIC_APM_...): only what looks
    # like a slip of one of our names is refused.
    names = [n.upper() for n in known] + sorted(OTHER_VARIABLES)
    near = difflib.get_close_matches(rest, names, n=1, cutoff=0.8)
    if near:
        raise ConfigError(
            f"unknown environment variable {variable}",
            hint=f"did you mean {ENVIRONMENT_PREFIX}{near[0]}?",
        )
    return None


def _option_of_conf(given: str, value: Any, known: Mapping[str, str]) -> str | None:
    if given in known:
        return given
    if given == "timeout":
        is_default = str(value) == str(_TORCHRUN_DEFAULT_TIMEOUT)
        return None if is_default else "join_timeout_s"
    if given in _STOCK_NAMES:
        return _STOCK_NAMES[given]
    if given in _STOCK_WITHOUT_MEANING:
        return None
    names = [*known, *_STOCK_NAMES]
    near = difflib.get_close_matches(given, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(
        f"unknown option {given}={value} in --rdzv-conf",
        hint=f"{hint}Known: {', '.join(sorted(known))}",
    )


def _parse(name: str, kind: str, value: Any, place: str) -> Any:
    if kind.startswith("str"):
        return str(value)
    try:
        return int(value) if kind == "int" else float(value)
    except (TypeError, ValueError):
        raise ConfigError(
            f"{name}={value!r} in {place} is not a number",
            hint=f"give a {'whole ' if kind == 'int' else ''}number"
            + (" of seconds" if name.endswith("_s") else ""),
        ) from None
