"""The findings on operations, speeds and devices, from the results of all ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.doctor import collectives
from elastic.doctor.checks import Status, broken
from elastic.doctor.collectives import Rank, gpu_findings, of_speed, verdict, wrong

NODES = ({"name": "a", "ranks": 1}, {"name": "b", "ranks": 2})
ME = Rank(rank=0, size=3, device="cpu", nodes=NODES, node=0, is_first=True)


def result(**changes: Any) -> dict[str, Any]:
    return {"wrong": "", "unsupported": "", "took_ms": 1.0, **changes}


def test_a_corrupted_element_is_detected() -> None:
    tensor = torch.full((1000,), 3.0)
    assert wrong(tensor, 3) == ""
    tensor[17] = 5.0
    assert wrong(tensor, 3) == "1 of 1000 elements are wrong: 5, not 3"
    assert wrong(torch.tensor([float("nan")]), 3) == "1 of 1 elements are wrong: nan, not 3"


def test_an_operation_is_ok_wrong_or_unsupported() -> None:
    well = verdict("gloo reduce", ME, [result(), result(took_ms=4.0), result()])
    assert (well.status, well.measured) == (Status.OK, "correct on 3 ranks, 4.0 ms")
    lacking = [result(unsupported="gloo does not support it")] * 3
    assert verdict("gloo reduce", ME, lacking).status is Status.SKIPPED
    bad = [result(), result(), result(wrong="3 of 1000 elements are wrong")]
    found = verdict("gloo reduce", ME, bad)
    assert found.status is Status.FAILED
    assert "rank 2 (node b)" in found.measured and "3 of 1000" in found.measured


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("b failed: hang: rank 1 on b is stopped: its process is in state T (SIGSTOP)", "-CONT"),
        ("b failed: local rank 0 was killed by SIGKILL", "dmesg"),
        ("b failed: RuntimeError: Connection refused", "GLOO_SOCKET_IFNAME"),
    ],
)
def test_a_check_that_has_ended_its_world_fails_with_the_reason(reason: str, remedy: str) -> None:
    found = broken("gloo gather", f"{reason}; report: /tmp/hang-b.txt")
    assert (found.status, found.measured) == (Status.FAILED, reason)
    assert remedy in found.remedy


def test_names_of_two_nodes_on_one_machine_differ() -> None:
    twins = ({"name": "vm", "ranks": 1}, {"name": "vm", "ranks": 1})
    assert Rank(rank=0, size=2, device="cpu", nodes=twins, node=0, is_first=True).names == [
        "vm#0",
        "vm#1",
    ]


def test_a_slow_backend_is_a_warning_between_machines_only() -> None:
    rows = [
        {"size_bytes": 4, "torch_ms": 0.1, "raw_ms": 0.05},
        {"size_bytes": 64 << 20, "torch_ms": 100.0, "raw_ms": 10.0},
    ]
    assert of_speed("gloo", 1, rows, is_one_machine=False).status is Status.WARNING
    assert of_speed("gloo", 1, rows, is_one_machine=True).status is Status.OK


def test_gpus_that_are_faulty_or_invisible_to_torch_are_reported() -> None:
    build = {"gpus": 2, "gpu_errors": [], "has_driver": True, "CUDA": "12.8", "torch": "2.13.0"}
    assert [f.status for f in gpu_findings(build)] == [Status.OK]
    (unseen,) = gpu_findings({**build, "gpus": 0})
    assert unseen.status is Status.WARNING and "CUDA_VISIBLE_DEVICES" in unseen.remedy
    assert gpu_findings({**build, "gpus": 0, "has_driver": False}) == []
    (faulty,) = gpu_findings({**build, "gpu_errors": ["GPU 1: CUDA error: unspecified launch"]})
    assert faulty.status is Status.FAILED and "GPU 1" in faulty.measured


@pytest.mark.parametrize("is_seen_by_others", [True, False])
def test_only_a_folder_that_all_nodes_see_is_shared_and_no_file_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_seen_by_others: bool
) -> None:
    def everyone(value: Any) -> list[Any]:
        return [value, is_seen_by_others] if isinstance(value, bool) else [value, value]

    monkeypatch.setattr(collectives, "everyone", everyone)
    me = replace(ME, nodes=({**NODES[0], "folder": str(tmp_path)}, NODES[1]))
    path = collectives._shared_path(me)
    assert [str(p) for p in tmp_path.iterdir()] == ([path] if is_seen_by_others else [])
    lacking = replace(ME, nodes=({**NODES[0], "folder": None}, NODES[1]))
    assert collectives._shared_path(lacking) is None
