"""Import rules: cheap entry points, and no grpc in workers."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

HEAVY = ("torch", "grpc", "etcd3", "msgspec", "numpy", "rich", "google.protobuf")


def modules_after(code: str) -> set[str]:
    script = f"{code}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_import_of_elastic_is_cheap() -> None:
    assert not modules_after("import elastic") & set(HEAVY)


def test_import_of_the_entry_point_is_cheaper() -> None:
    loaded = modules_after("import elastic.launcher.entrypoint")
    assert not loaded & set(HEAVY)
    heavier = ("elastic.store", "elastic.membership", "elastic.agent")
    assert not {m for m in loaded if m.startswith(heavier)}


def test_elastic_status_does_not_import_journals() -> None:
    """Nor the decision code: the command has half a second, and each record class adds to it."""
    loaded = modules_after("import elastic.cli.status, elastic.store.etcd")
    journals = {"elastic.telemetry.events", "elastic.telemetry.journal", "elastic.telemetry.reader"}
    assert not loaded & {"torch", "rich", *journals, "elastic.membership.view"}


def test_logging_before_joining_does_not_import_msgspec() -> None:
    code = "from elastic.telemetry.log import get_logger; get_logger().warning('x')"
    assert "msgspec" not in modules_after(code)


# Importing torch takes seconds, so that one process serves all these tests.
BESIDE_TORCH = """
import importlib, json, os, sys
from elastic.testing.forks import server
ours = [name for name in server._WARM if name.startswith(("elastic.", "checkpoints."))]
for name in set(server._WARM) - set(ours):
    importlib.import_module(name)
import torch.distributed as dist
found = []
def note(*_):
    frame = sys._getframe(2)
    while frame.f_globals["__name__"] in ("os", "collections.abc", "_collections_abc"):
        frame = frame.f_back
    if frame.f_globals["__name__"].startswith(("elastic", "checkpoints")):
        found.append(f"{frame.f_globals['__name__']}:{frame.f_lineno}")
def noting(method):
    def noted(*args):
        note()
        return method(*args)
    return noted
for name in ("__getitem__", "__iter__"):
    setattr(os._Environ, name, noting(getattr(os._Environ, name)))
before = vars(dist.Work)["wait"], sys.excepthook
for name in ours:
    importlib.import_module(name)
reads = sorted(set(found))
for name in ("elastic.groups", "kit.nccl_semantics"):
    importlib.import_module(name)
changes = (vars(dist.Work)["wait"], sys.excepthook) != before
assert len(ours) > 2
seen = {"reads": reads, "changes": changes, "modules": list(sys.modules)}
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def imports_of_torch() -> dict[str, Any]:
    """What a process reads, changes and imports when it imports all of a worker and an agent."""
    done = subprocess.run(
        [sys.executable, "-c", BESIDE_TORCH], capture_output=True, text=True, check=True
    )
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


def test_workers_never_import_grpc(imports_of_torch: dict[str, Any]) -> None:
    """Neither through the modules that torch imports, nor through a script."""
    loaded = set(imports_of_torch["modules"])
    assert {"torch.distributed.elastic.rendezvous", "elastic.train.run"} <= loaded
    assert not loaded & {"grpc", "etcd3"}


def test_imports_do_not_read_the_environment(imports_of_torch: dict[str, Any]) -> None:
    """The tests' fork server sets a process's environment after the imports."""
    assert imports_of_torch["reads"] == []


def test_imports_do_not_change_torch(imports_of_torch: dict[str, Any]) -> None:
    assert not imports_of_torch["changes"]
