"""What is imported where: cheap entry points, and no grpc in workers."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "grpc", "etcd3", "msgspec", "numpy", "rich", "google.protobuf")


def modules_after(code: str) -> set[str]:
    script = f"{code}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_importing_elastic_is_cheap() -> None:
    assert not modules_after("import elastic") & set(HEAVY)


def test_importing_the_entry_point_is_cheaper() -> None:
    loaded = modules_after("import elastic.rendezvous.entrypoint")
    assert not loaded & set(HEAVY)
    heavier = ("elastic.store", "elastic.membership", "elastic.node")
    assert not {m for m in loaded if m.startswith(heavier)}


@pytest.mark.parametrize(
    "package", ["torch.distributed.elastic.rendezvous", "elastic.training.run"]
)
def test_workers_never_import_grpc(package: str) -> None:
    loaded = modules_after(f"import {package}")
    assert package in loaded
    assert not loaded & {"grpc", "etcd3"}


def test_a_worker_that_logs_before_it_joins_reads_no_messages() -> None:
    code = "from elastic.telemetry.log import get_logger; get_logger().warning('x')"
    assert "msgspec" not in modules_after(code)
