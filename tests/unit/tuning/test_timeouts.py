"""What follows from the grace period of a node, and the settings of pods."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.errors import ConfigError
from elastic.tuning.intervals import (
    BOUNDARY_S,
    EXIT_GRACE_S,
    MIN_CHECKPOINT_S,
    checkpoint_budget_s,
    leave_grace_s,
    termination_grace_of,
)
from elastic.tuning.options import AgentOptions, read_options


@given(grace_s=st.floats(min_value=0.1, max_value=7200))
def test_a_leaving_node_saves_before_it_is_killed_or_the_grace_period_is_refused(
    grace_s: float,
) -> None:
    try:
        leave_s = leave_grace_s(grace_s)
    except ConfigError as error:
        assert grace_s < BOUNDARY_S + MIN_CHECKPOINT_S + EXIT_GRACE_S
        assert f"termination_grace_s={grace_s:g}" in error.message
        return
    assert MIN_CHECKPOINT_S <= checkpoint_budget_s(grace_s) < leave_s
    assert leave_s + EXIT_GRACE_S <= grace_s
    assert leave_s == int(leave_s)  # torchrun requires integers


def test_a_grace_too_short_for_a_checkpoint_is_rejected_with_the_minimum() -> None:
    with pytest.raises(ConfigError) as refused:
        leave_grace_s(10)
    assert "termination_grace_s=10" in refused.value.message
    assert "15" in refused.value.hint
    leave_grace_s(15)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["lease_s", "termination_grace_s"])
def test_an_interval_that_is_not_a_positive_number_is_rejected(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        AgentOptions(**{name: value})  # type: ignore[arg-type]


def test_agent_and_workers_derive_their_intervals_from_one_grace_period() -> None:
    environ = {"ELASTIC_TERMINATION_GRACE_S": "120"}
    assert read_options({}, environ).leave_grace_s == 110
    assert checkpoint_budget_s(termination_grace_of(environ)) == 106
    assert checkpoint_budget_s(termination_grace_of({})) == 16
    with pytest.raises(ConfigError, match="ELASTIC_TERMINATION_GRACE_S='soon'"):
        termination_grace_of({"ELASTIC_TERMINATION_GRACE_S": "soon"})


def test_all_pod_variables_are_read() -> None:
    options = read_options(
        {},
        {
            "ELASTIC_HEALTH_PORT": "8471",
            "ELASTIC_PARK": "1",
            "ELASTIC_NODE_NAME": "trainer-0",
            "ELASTIC_POD_UID": "7c6e",
            "ELASTIC_TERMINATION_GRACE_S": "60",
            "ELASTIC_MEMORY_LIMIT_BYTES": "68719476736",
        },
    )
    assert (options.health_port, options.park, options.pod_uid) == (8471, True, "7c6e")
    assert (options.memory_limit_bytes, options.leave_grace_s) == (64 << 30, 50.0)


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
