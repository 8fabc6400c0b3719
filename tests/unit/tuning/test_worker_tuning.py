"""The variables that an agent sets for its workers from a profile, and what it logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.agent.tuning import WorkerTuning, check
from elastic.errors import ConfigError
from elastic.telemetry.events import Event, WorkersTuned
from elastic.tuning.environment import TUNED
from elastic.tuning.network import Interface, Network
from elastic.tuning.options import AgentOptions

NETWORK = Network(
    interfaces=(
        Interface(name="eth0", addresses=("127.0.0.9",)),
        Interface(name="lo", addresses=("127.0.0.1",)),
    )
)


class Events:
    """A journal that records events."""

    def __init__(self) -> None:
        self.seen: list[Event] = []

    def emit(self, event: Event, *, level: int = logging.INFO) -> None:
        self.seen.append(event)


def tuning(
    tmp_path: Path, journal: Events, environ: dict[str, str] | None = None, **options: str
) -> WorkerTuning:
    return WorkerTuning(
        AgentOptions(**options),  # type: ignore[arg-type]
        {"HOME": str(tmp_path), **(environ or {})},
        journal,
        max_nodes=2,
        own_address="127.0.0.9",
        is_configured=False,
        network=NETWORK,
    )


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Captures the log, even if the logger does not propagate."""
    logger = logging.getLogger("elastic")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def test_the_interface_follows_the_leader_and_changes_are_logged(tmp_path: Path) -> None:
    journal = Events()
    tuned = tuning(tmp_path, journal)
    assert tuned.variables([])["GLOO_SOCKET_IFNAME"] == "eth0"  # no peer is known yet
    assert tuned.variables([])["GLOO_SOCKET_IFNAME"] == "eth0"
    assert tuned.variables(["127.0.0.1"])["GLOO_SOCKET_IFNAME"] == "lo"
    assert [e.interface for e in journal.seen if isinstance(e, WorkersTuned)] == ["eth0", "lo"]


def test_user_settings_are_kept_and_cause_one_warning(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    tuned = tuning(
        tmp_path, Events(), {"GLOO_SOCKET_IFNAME": "lo", "NCCL_ASYNC_ERROR_HANDLING": "1"}
    )
    for peers in ([], ["127.0.0.1"]):
        variables = tuned.variables(peers)
        assert "GLOO_SOCKET_IFNAME" not in variables
        assert "GLOO_SOCKET_IFNAME" not in (variables[TUNED] or "").split(",")
    (warning,) = {record.getMessage() for record in log.records}  # the handler may be added twice
    assert warning.startswith("NCCL_ASYNC_ERROR_HANDLING=1") and "elastic env" in warning
    before = len(log.records)
    tuned.variables([])
    assert len(log.records) == before


@pytest.mark.parametrize(
    ("options", "environ", "expected"),
    [
        ({"profile": "single-node"}, {}, "--nnodes up to 3"),
        ({}, {"GLOO_SOCKET_IFNAME": "no-such0"}, "GLOO_SOCKET_IFNAME (environment)=no-such0"),
    ],
)
def test_invalid_settings_are_rejected_before_etcd_is_contacted(
    options: dict[str, str], environ: dict[str, str], expected: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check(AgentOptions(**options), environ, max_nodes=3)  # type: ignore[arg-type]
    assert expected in refused.value.message
