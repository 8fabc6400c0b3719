"""The sources of an agent's options: the command line, the environment, the defaults.

``--rdzv-conf key=value`` takes precedence over ``ELASTIC_KEY`` in the environment, which takes
precedence over the defaults of :class:`~elastic.tuning.agent_options.AgentOptions`. An unknown
option is refused with the nearest known name. Options of torch's own rendezvous backends are
accepted, and mapped where they have an equivalent, so that existing command lines keep working.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from elastic.errors import ConfigError
from elastic.tuning import timeouts
from elastic.tuning.agent_intervals import STOCK_LAST_CALL_S, TORCHRUN_TIMEOUT_S
from elastic.tuning.agent_options import OTHER_VARIABLES, AgentOptions

ENVIRONMENT_PREFIX = "ELASTIC_"
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
    """Merge defaults, environment and ``--rdzv-conf``.

    ``for_program``: a program calls ``elastic_launch`` and expects each node's results, so that
    the others are waited for as long as torch's own backends do (docs/decisions/0018).

    Raises:
        ConfigError: unknown name (with the nearest known one) or unusable value.
    """
    known = {f.name: str(f.type) for f in fields(AgentOptions)}
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        name = _option_of_variable(variable, known)
        if name is not None:
            values[name] = _parse(name, known[name], text, variable)
    given_as: dict[str, str] = {}
    for given, value in ((_unquoted(k), _unquoted(v)) for k, v in conf.items()):
        conf_name = _option_of_conf(given, value, known)
        if conf_name is not None:
            parsed = _parse(conf_name, known[conf_name], value, "--rdzv-conf")
            _require_one_value(given_as, conf_name, given, parsed, values)
            values[conf_name] = parsed
    last_call_s = STOCK_LAST_CALL_S if for_program else AgentOptions.last_call_s
    return AgentOptions(**{**_fitting_defaults(values, last_call_s), **values})


def _require_one_value(
    given_as: dict[str, str], option: str, given: str, value: Any, values: Mapping[str, Any]
) -> None:
    """Raise ConfigError if an option is given by two of its names, with two values."""
    other = given_as.setdefault(option, given)
    if other != given and values[option] != value:
        raise ConfigError(
            f"{other}={values[option]} and {given}={value} in --rdzv-conf are the same option, "
            f"{option}",
            hint=f"give {option} alone",
        )


def _fitting_defaults(values: Mapping[str, Any], last_call_s: float) -> dict[str, float]:
    """Defaults of options that are not given, and would contradict those that are."""
    derived = {"last_call_s": last_call_s}
    if "termination_grace_s" in values:
        derived["leave_grace_s"] = timeouts.for_pod(values["termination_grace_s"]).leave_grace_s
    if (hang_script_timeout_s := values.get("hang_script_timeout_s")) is not None:
        derived["collective_timeout_s"] = timeouts.collective_for(hang_script_timeout_s)
    for low, high in (
        ("last_call_s", "join_timeout_s"),
        ("join_window_s", "join_timeout_s"),
        ("quarantine_s", "join_timeout_s"),
        ("healthy_s", "failure_window_s"),
    ):
        if (limit_s := values.get(high, 0.0)) > 0:
            derived[low] = min(derived.get(low, getattr(AgentOptions, low)), limit_s / 2)
    return derived


def _unquoted(text: Any) -> Any:
    """Strip the quotes that a shell would remove: ``--rdzv-conf="'lease_s=4'"``, as written in
    manifests and lists of arguments. torch splits the value at commas and keeps the quotes."""
    return text.strip(_QUOTES) if isinstance(text, str) else text


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


def _option_of_conf(given: str, value: Any, known: Mapping[str, str]) -> str | None:
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
        f"unknown option {given}={value} in --rdzv-conf",
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
