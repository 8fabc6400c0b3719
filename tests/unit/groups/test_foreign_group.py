"""A process group that the script created, under torchrun's own rendezvous backends."""

from __future__ import annotations

import pytest

from elastic.groups.group import warn_of_a_shared_store
from elastic.telemetry.log import get_logger


@pytest.mark.parametrize(
    ("env", "warns"),
    [
        ({"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}, True),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "0"}, False),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False", "TORCHELASTIC_MAX_RESTARTS": "3"}, False),
        ({}, False),
    ],
)
def test_a_store_shared_between_restarts_causes_a_warning(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    env: dict[str, str],
    warns: bool,
) -> None:
    monkeypatch.setattr(get_logger(), "propagate", True)
    warn_of_a_shared_store(env)
    assert ("pytorch/issues/135712" in caplog.text) == warns
