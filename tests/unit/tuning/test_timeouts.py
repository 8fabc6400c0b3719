"""All intervals in one place: consistent sets are accepted, inconsistent ones are rejected."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.errors import ConfigError
from elastic.tuning.intervals import EXIT_GRACE_S, Timeouts, for_pod, grace_for, of_environment
from elastic.tuning.options import read_options


def test_the_defaults_match_a_pod_with_the_default_grace_period() -> None:
    assert Timeouts() == for_pod(30)


@given(
    grace_s=st.integers(min_value=16, max_value=7200),
    step_time_s=st.floats(min_value=0.001, max_value=600),
)
def test_the_intervals_of_a_pod_are_ordered_or_rejected(grace_s: int, step_time_s: float) -> None:
    try:
        times = for_pod(grace_s, step_time_s=step_time_s)
    except ConfigError as error:
        assert grace_s < grace_for(1.0, step_time_s=step_time_s)
        assert f"termination_grace_s={grace_s}" in error.message
        return
    assert 0 < times.checkpoint_budget_s < times.leave_grace_s <= times.shutdown_timeout_s
    assert times.shutdown_timeout_s + EXIT_GRACE_S <= grace_s
    assert times.shutdown_timeout_s == int(times.shutdown_timeout_s)  # torchrun requires integers


@given(
    budget_s=st.floats(min_value=1, max_value=3600),
    step_time_s=st.floats(min_value=0.1, max_value=60),
)
def test_the_grace_for_a_checkpoint_leaves_time_to_write_it(
    budget_s: float, step_time_s: float
) -> None:
    grace_s = grace_for(budget_s, step_time_s=step_time_s)
    assert for_pod(grace_s, step_time_s=step_time_s).checkpoint_budget_s >= budget_s - 1e-6
    with pytest.raises(ConfigError):
        replace(for_pod(grace_s, step_time_s=step_time_s), checkpoint_budget_s=budget_s + 2)


def test_a_grace_too_short_for_a_checkpoint_is_rejected_with_the_minimum() -> None:
    with pytest.raises(ConfigError) as refused:
        for_pod(10)
    assert "termination_grace_s=10" in refused.value.message
    assert "15" in refused.value.hint
    for_pod(15)


@pytest.mark.parametrize(
    ("change", "both"),
    [
        ({"probe_s": 5.0}, ("probe_s=5", "lease_s=4")),
        ({"lease_s": 100.0}, ("lease_s=100", "takeover_s=300")),
        ({"checkpoint_budget_s": 18.0}, ("checkpoint_budget_s=18", "leave_grace_s=20")),
        ({"leave_grace_s": 25.0}, ("leave_grace_s=25", "termination_grace_s=30")),
        ({"shutdown_timeout_s": 30.0}, ("shutdown_timeout_s=30", "termination_grace_s=30")),
        ({"shutdown_timeout_s": 18.0}, ("checkpoint_budget_s=16", "shutdown_timeout_s=18")),
        ({"step_time_s": 30.0}, ("checkpoint_budget_s=16", "leave_grace_s=20")),
        ({"last_call_s": 600.0}, ("last_call_s=600", "join_timeout_s=600")),
        ({"join_window_s": 900.0}, ("join_window_s=900", "join_timeout_s=600")),
    ],
)
def test_inconsistent_intervals_are_rejected_with_values_and_a_hint(
    change: dict[str, float], both: tuple[str, str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        replace(Timeouts(), **change)
    assert all(value in refused.value.message for value in both)
    assert refused.value.hint


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_an_interval_that_is_not_a_positive_number_is_rejected(value: float) -> None:
    with pytest.raises(ConfigError, match="lease_s"):
        replace(Timeouts(), lease_s=value)


def test_the_agent_derives_its_intervals_from_the_pod_environment() -> None:
    options = read_options({}, {"ELASTIC_TERMINATION_GRACE_S": "120"})
    assert options.leave_grace_s == for_pod(120).leave_grace_s == 110


def test_a_worker_derives_its_intervals_from_the_pod_grace() -> None:
    assert of_environment({"ELASTIC_TERMINATION_GRACE_S": "120"}) == for_pod(120)
    assert of_environment({}) == Timeouts()
    with pytest.raises(ConfigError, match="ELASTIC_TERMINATION_GRACE_S='soon'"):
        of_environment({"ELASTIC_TERMINATION_GRACE_S": "soon"})


def test_an_explicit_leave_grace_wins_and_must_fit_the_pod_grace() -> None:
    environ = {"ELASTIC_TERMINATION_GRACE_S": "60", "ELASTIC_LEAVE_GRACE_S": "30"}
    assert read_options({}, environ).leave_grace_s == 30
    with pytest.raises(ConfigError) as refused:
        read_options({"leave_grace_s": "55"}, environ)
    assert "leave_grace_s=55" in refused.value.message
    assert "termination_grace_s=60" in refused.value.message
    assert "65" in refused.value.hint


def test_all_pod_variables_are_read() -> None:
    options = read_options(
        {},
        {
            "ELASTIC_HEALTH_PORT": "8471",
            "ELASTIC_PARK": "1",
            "ELASTIC_NODE_NAME": "trainer-0",
            "ELASTIC_POD_IP": "10.0.0.7",
            "ELASTIC_TERMINATION_GRACE_S": "60",
            "ELASTIC_MEMORY_LIMIT_BYTES": "68719476736",
            "ELASTIC_HUNG_AFTER_S": "30",
        },
    )
    assert (options.health_port, options.park, options.pod_ip) == (8471, True, "10.0.0.7")
    assert (options.memory_limit_bytes, options.hung_after_s) == (64 << 30, 30.0)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"ELASTIC_PARK": "perhaps"}, "park='perhaps'"),
        ({"ELASTIC_HEALTH_PORT": "84710"}, "health_port=84710"),
        ({"ELASTIC_HEALTH_PORT": "http"}, "health_port='http'"),
        ({"ELASTIC_TERMINATION_GRACE_S": "5"}, "termination_grace_s=5"),
        ({"ELASTIC_MEMORY_LIMIT_BYTES": "64Gi"}, "memory_limit_bytes='64Gi'"),
        ({"ELASTIC_PARKED": "1"}, "ELASTIC_PARKED"),
    ],
)
def test_invalid_pod_variables_are_rejected_by_name(environ: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_options({}, environ)
    assert expected in refused.value.message
