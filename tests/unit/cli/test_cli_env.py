"""``elastic env``: the effective variables, the origin of each value, and the reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from elastic.cli import env
from elastic.cli.main import main
from elastic.tuning.network import Interface, Network

NETWORK = Network(
    interfaces=(
        Interface(name="eth0", addresses=("10.1.0.5",)),
        Interface(name="lo", addresses=("127.0.0.1",)),
    )
)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(env, "read_network", lambda: NETWORK)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("GLOO_SOCKET_IFNAME", "ELASTIC_PROFILE", "ELASTIC_TUNED", "NCCL_CONF_FILE"):
        monkeypatch.delenv(name, raising=False)


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["env", "-o", "json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_names_value_origin_reason_and_source(capsys: pytest.CaptureFixture[str]) -> None:
    shown = document(capsys, "--leader", "127.0.0.1", "--rdzv-conf", "mode=restart")
    assert shown["profile"]["name"] == "ethernet"
    assert shown["interface"]["interface"] == "lo"
    variables = {v["name"]: v for v in shown["variables"]}
    gloo = variables["GLOO_SOCKET_IFNAME"]
    assert (gloo["value"], gloo["origin"], gloo["is_set"]) == ("lo", "profile", True)
    assert "127.0.0.1" in gloo["reason"] and "ProcessGroupGloo" in gloo["source"]
    assert variables["TORCH_NCCL_ENABLE_MONITORING"]["is_set"] is False
    assert shown["warnings"] == []


def test_the_table_has_every_variable_and_warnings_go_to_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_BLOCKING_WAIT", "1")
    assert main(["env", "--nnodes", "1", "-o", "wide"]) == 0
    captured = capsys.readouterr()
    assert "profile single-node: the job has one node at most" in captured.out
    assert "interface lo" in captured.out and "GLOO_SOCKET_IFNAME" in captured.out
    assert "NCCL_BLOCKING_WAIT" in captured.out and "default" in captured.out
    assert "NCCL_BLOCKING_WAIT=1: it is an old name" in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rdzv-conf", "profile=infinband"], "infiniband, roce, ethernet, cloud, single-node"),
        (["--rdzv-conf", "profile"], "KEY=VALUE"),
        (["--nnodes", "3:2"], "--nnodes=3:2"),
        (["--leader", "no-such-host.invalid"], "no-such-host.invalid"),
        (["--output", "yaml"], "yaml"),
    ],
)
def test_invalid_input_is_a_usage_error(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["env", *arguments]) == 2
    assert message in capsys.readouterr().err
