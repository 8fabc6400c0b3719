"""Options from --rdzv-conf and the environment: merged, mapped, and rejected with a hint."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.errors import ConfigError
from elastic.tuning.options import AgentOptions, read_options


def test_conf_wins_over_environment_which_wins_over_defaults() -> None:
    environ = {"ELASTIC_LEASE_S": "5", "ELASTIC_LAST_CALL_S": "7", "HOME": "/x"}
    options = read_options({"lease_s": "6", "timeout": 900}, environ)
    assert (options.lease_s, options.last_call_s) == (6.0, 7.0)
    assert options.join_timeout_s == AgentOptions().join_timeout_s


@pytest.mark.parametrize(
    ("conf", "field", "value"),
    [
        ({"join_timeout": "33"}, "join_timeout_s", 33.0),
        ({"last_call_timeout": 2}, "last_call_s", 2.0),
        ({"timeout": 120}, "join_timeout_s", 120.0),
        ({"etcd_prefix": "/p"}, "prefix", "/p"),
        ({"read_timeout": "8"}, "connect_timeout_s", 8.0),
    ],
)
def test_names_of_stock_backends_are_mapped(
    conf: dict[str, Any], field: str, value: object
) -> None:
    assert getattr(read_options(conf, {}), field) == value


@pytest.mark.parametrize(
    "conf",
    [
        {"lease_s": "'3.5'", "prefix": '"/p"'},
        {"'lease_s": "3.5", "prefix": "/p'"},  # torch splits a quoted value at its commas
        {'"lease_s': "3.5", "prefix": '/p"'},
    ],
)
def test_quotes_that_no_shell_removed_are_stripped(conf: dict[str, Any]) -> None:
    options = read_options(conf, {})
    assert (options.lease_s, options.prefix) == (3.5, "/p")


@pytest.mark.parametrize(
    ("conf", "environ", "last_call_s"),
    [
        ({}, {}, 30.0),
        ({"join_timeout": "20"}, {}, 10.0),
        ({"last_call_timeout": 2}, {}, 2.0),
        ({}, {"ELASTIC_LAST_CALL_S": "0.5"}, 0.5),
    ],
)
def test_a_program_waits_for_nodes_as_with_stock_backends(
    conf: dict[str, Any], environ: dict[str, str], last_call_s: float
) -> None:
    assert read_options(conf, environ, for_program=True).last_call_s == last_call_s
    assert AgentOptions().last_call_s < 30


def test_names_of_stock_backends_without_meaning_here_are_accepted() -> None:
    conf = {"is_host": "1", "keep_alive_interval": 5, "close_timeout": 30, "timeout": 900}
    assert read_options(conf, {}) == AgentOptions()


def test_unknown_option_is_rejected_with_the_nearest_known_name() -> None:
    with pytest.raises(ConfigError) as caught:
        read_options({"leases": "4"}, {})
    assert "leases=4" in caught.value.message
    assert "did you mean lease_s?" in caught.value.hint


def test_misspelt_variable_is_rejected_without_its_value() -> None:
    with pytest.raises(ConfigError) as caught:
        read_options({}, {"ELASTIC_LAESE_S": "secret"})
    assert "ELASTIC_LAESE_S" in caught.value.message
    assert "ELASTIC_LEASE_S" in caught.value.hint
    assert "secret" not in str(caught.value)


def test_variables_of_other_products_with_the_same_prefix_are_ignored() -> None:
    environ = {"ELASTIC_APM_SERVER_URL": "x", "ELASTIC_VERSION": "8.1"}
    assert read_options({}, environ) == AgentOptions()


def test_worker_variables_are_not_options() -> None:
    environ = {"ELASTIC_WORLD": "{}", "ELASTIC_NODE_ID": "x", "ELASTIC_LEDGER": "/l"}
    assert read_options({}, environ) == AgentOptions()


@pytest.mark.parametrize(
    ("conf", "message_part"),
    [
        ({"lease_s": "four"}, "lease_s='four'"),
        ({"lease_s": "0"}, "lease_s=0"),
        ({"last_call_s": "nan"}, "last_call_s=nan"),
        ({"failure_budget": "2.5"}, "failure_budget='2.5'"),
        ({"lease_s": "100"}, "takeover_s=300"),
        ({"hang_detection": "maybe"}, "not one of on, report, off"),
        ({"hang_timeout_s": "0.1"}, "hang_timeout_s=0.1 and MIN_HANG_TIMEOUT_S=0.5"),
        ({"straggler_action": "kill"}, "straggler_action=kill is not one of report, exclude, off"),
        ({"straggler_factor": "1"}, "straggler_factor=1 is not a number from 1.05 on"),
        ({"straggler_factor": "nan"}, "straggler_factor=nan is not a number from 1.05 on"),
        ({"straggler_factor": "inf"}, "straggler_factor=inf is not a number from 1.05 on"),
        ({"straggler_factor": "twice"}, "straggler_factor='twice' in --rdzv-conf is not a number"),
        ({"straggler_window_s": "0"}, "straggler_window_s=0"),
        ({"hang_timeout_s": "0"}, "hang_timeout_s=0"),
        ({"hang_timeout_s": "1000"}, "hang_script_timeout_s=900"),
        ({"cert": "/c.pem"}, "key is not"),
        ({"user": "u"}, "password_file is not"),
        ({"password_file": "/p"}, "user is not"),
        ({"node_cert": "/c", "node_key": "/k"}, "node_cacert is not"),
        ({"node_cacert": "/ca", "node_key": "/k"}, "node_cert is not"),
        ({"node_cacert": "/ca", "node_cert": "/c"}, "node_key is not"),
        ({"node_key": "/k"}, "node_key is set and node_cacert and node_cert are not"),
    ],
)
def test_invalid_values_are_named(conf: dict[str, str], message_part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_options(conf, {})
    assert message_part in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("leases=4", "unknown option leases=4"),
        ("mode=restart, lease_s = x", "lease_s='x'"),
        ("preflight=maybe", "preflight='maybe'"),
        ("last_call_s=3,last_call_timeout=4", "last_call_s=3.0 and last_call_timeout=4.0"),
    ],
)
def test_the_variable_of_rdzv_conf_is_named_if_it_was_the_source(text: str, what: str) -> None:
    pairs = (part.partition("=") for part in text.split(","))
    conf = {key.strip(): value.strip() for key, _, value in pairs}
    for variable, place in ((text, "PET_RDZV_CONF"), ("mode=in-process", "--rdzv-conf")):
        with pytest.raises(ConfigError) as caught:
            read_options({**conf, "timeout": 900}, {"PET_RDZV_CONF": variable})
        assert caught.value.message.startswith(f"{what} in {place}")


# Contradictory pairs: the settings, and both names with values that the error contains.
CONTRADICTIONS: list[tuple[dict[str, str], str, str]] = [
    ({"lease_s": "0.2"}, "lease_s=0.2", "PROBE_S=0.3"),
    ({"lease_s": "80"}, "lease_s=80", "takeover_s=300"),
    ({"takeover_s": "16"}, "lease_s=4", "takeover_s=16"),
    ({"last_call_s": "600"}, "last_call_s=600", "join_timeout_s=600"),
    ({"last_call_s": "40", "join_timeout_s": "30"}, "last_call_s=40", "join_timeout_s=30"),
    ({"quarantine_s": "600"}, "quarantine_s=600", "join_timeout_s=600"),
    ({"quarantine_s": "60", "join_timeout": "30"}, "quarantine_s=60", "join_timeout_s=30"),
    ({"hang_timeout_s": "900"}, "hang_timeout_s=900", "hang_script_timeout_s=900"),
    ({"hang_script_timeout_s": "3"}, "hang_timeout_s=3.5", "hang_script_timeout_s=3"),
    ({"collective_timeout_s": "900"}, "hang_script_timeout_s=900", "collective_timeout_s=900"),
    (
        {"hang_script_timeout_s": "3600", "collective_timeout_s": "1800"},
        "hang_script_timeout_s=3600",
        "collective_timeout_s=1800",
    ),
    ({"join_timeout": "30", "timeout": "60"}, "join_timeout=30", "timeout=60"),
    ({"last_call_s": "2", "last_call_timeout": "3"}, "last_call_s=2", "last_call_timeout=3"),
    ({"cert": "/c", "ssl_cert": "/d", "key": "/k"}, "cert=/c", "ssl_cert=/d"),
]


@pytest.mark.parametrize(("conf", "one", "other"), CONTRADICTIONS)
@pytest.mark.parametrize("for_program", [False, True])
def test_contradictions_are_rejected_with_both_names_and_values(
    conf: dict[str, str], one: str, other: str, for_program: bool
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_options(conf, {}, for_program=for_program)
    assert one in caught.value.message and other in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("conf", "expected"),
    [
        ({"join_timeout": "30"}, {"quarantine_s": 15.0, "last_call_s": 3.0}),
        ({"join_timeout_s": "1"}, {"quarantine_s": 0.5, "last_call_s": 0.5}),
        ({"hang_script_timeout_s": "7200"}, {"collective_timeout_s": 14400.0}),
        ({"hang_script_timeout_s": "60"}, {"collective_timeout_s": 1800.0}),
        # Ending the wait for nodes before their death is certain is allowed.
        ({"join_timeout_s": "60", "takeover_s": "120"}, {"takeover_s": 120.0}),
        # Without hang detection, only this timeout ends a wait.
        ({"hang_detection": "off", "collective_timeout_s": "60"}, {"collective_timeout_s": 60.0}),
        ({"join_timeout": "30", "join_timeout_s": "30.0"}, {"join_timeout_s": 30.0}),
    ],
)
def test_defaults_are_derived_from_given_options(
    conf: dict[str, str], expected: dict[str, float]
) -> None:
    options = read_options(conf, {})
    assert {name: getattr(options, name) for name in expected} == expected
