"""``elastic status`` on a real etcd: with few permissions, with none, and while etcd is
unreachable.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kit.manual_clock import ManualClock
from kit.memory_store import MemoryServer, MemoryStore
from test_node_service import TestNode

from elastic.agent.liveness import NodeHeartbeat, ReceivedHeartbeat
from elastic.agent.progress import (
    PROGRESS_IDLE_S,
    ProgressWriter,
)
from elastic.cli.main import main
from elastic.errors import StoreUnreachable
from elastic.membership.progress import RecordedHeartbeat, decode_progress
from elastic.membership.records import Keys
from elastic.membership.view import StepRate
from elastic.store.client import load_grpc, load_rpc
from elastic.store.embedded import EmbeddedEtcd
from elastic.store.keyvalue import Lease

KEYS = Keys.of("/elastic", "llama-7")
# docs/security.md: the minimum permissions of a read-only user.
VIEWED = ("world", "done", "leader", "progress", "stop")


@pytest.fixture(scope="module")
def guarded() -> Iterator[EmbeddedEtcd]:
    """An etcd with auth enabled: ``viewer`` may read the job, ``stranger`` has no access to it."""
    with EmbeddedEtcd(name="viewed") as etcd:
        rpc = load_rpc()
        with load_grpc().insecure_channel(etcd.endpoint) as channel:
            auth = rpc.AuthStub(channel)

            def user(name: str, role: str) -> None:
                auth.UserAdd(rpc.AuthUserAddRequest(name=name, password=name))
                auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user=name, role=role))

            def may_read(role: str, key: str, end: str = "") -> None:
                grant = rpc.AuthRoleGrantPermissionRequest(name=role)
                grant.perm.permType = 0  # READ of authpb.Permission.Type
                grant.perm.key, grant.perm.range_end = key.encode(), end.encode()
                auth.RoleGrantPermission(grant)

            user("root", "root")
            for role in ("viewing", "strange"):
                auth.RoleAdd(rpc.AuthRoleAddRequest(name=role))
            for key in VIEWED:
                may_read("viewing", KEYS.root + key)
            may_read("viewing", KEYS.nodes, KEYS.nodes[:-1] + "0")
            may_read("strange", "/other")
            user("viewer", "viewing")
            user("stranger", "strange")
            auth.AuthEnable(rpc.AuthEnableRequest())
        yield etcd


def status(etcd: EmbeddedEtcd, user: str, folder: Path) -> int:
    password = folder / "password"
    password.write_text(f"{user}\n")
    conf = f"--rdzv-conf=user={user},password_file={password},connect_timeout_s=60"
    return main(["status", f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-id=llama-7", conf])


def test_status_needs_only_a_read_only_role(
    guarded: EmbeddedEtcd, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(guarded, "viewer", tmp_path) == 1
    captured = capsys.readouterr()
    assert "no such job: there is nothing under /elastic/llama-7/" in captured.out
    assert captured.err == ""


def test_a_user_without_permissions_gets_a_clear_error(
    guarded: EmbeddedEtcd, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(guarded, "stranger", tmp_path) == 69
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "permission denied" in captured.err
    assert "Traceback" not in captured.err


def test_status_does_not_import_torch(guarded: EmbeddedEtcd, tmp_path: Path) -> None:
    """Otherwise it could not answer within half a second."""
    password = tmp_path / "password"
    password.write_text("viewer\n")
    code = (
        "import sys\n"
        "from elastic.cli.main import main\n"
        f"code = main(['status', '--rdzv-endpoint={guarded.endpoint}', '--rdzv-id=llama-7',"
        f" '--rdzv-conf=user=viewer,password_file={password},connect_timeout_s=60'])\n"
        "print(code, 'grpc' in sys.modules,"
        " sorted({'torch', 'numpy', 'jinja2', 'rich', 'starlette'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "1 True []", done.stderr


def test_status_exits_with_69_if_etcd_is_unreachable(capsys: pytest.CaptureFixture[str]) -> None:
    with EmbeddedEtcd(name="gone") as etcd:
        endpoint = etcd.endpoint
    conf = "--rdzv-conf=connect_timeout_s=0.5"
    assert main(["status", f"--rdzv-endpoint={endpoint}", "--rdzv-id=x", conf]) == 69
    assert endpoint in capsys.readouterr().err


# The progress record --------------------------------------------------------------------------


class CountingStore(MemoryStore):
    """Counts writes."""

    def __init__(self, server: MemoryServer) -> None:
        super().__init__(server)
        self.puts: list[str] = []

    def put(self, key: str, value: bytes, *, lease: Lease | None = None) -> int:
        self.puts.append(key)
        return super().put(key, value, lease=lease)


@pytest.fixture
def node() -> Iterator[TestNode]:
    """A node of a job on an in-memory store, which has not arrived."""
    made = TestNode(MemoryServer())
    yield made
    made.service.close()


def test_only_the_leader_writes_progress_on_change_and_under_its_lease(node: TestNode) -> None:
    server = node.store.server
    context = node.context
    store = CountingStore(server)
    leases: list[Lease | None] = [None]
    clock = ManualClock(1_769_860_800.0)
    context = replace(context, store=store, clock=clock)
    heard: dict[str, ReceivedHeartbeat] = {}
    steps: list[int | None] = [None]
    writer = ProgressWriter(
        context, lambda: leases[0], lambda: steps[0], lambda: 500, lambda: heard
    )
    writer.write()
    assert store.puts == []
    leases[0] = store.lease(60.0)
    writer.write()
    writer.write()
    assert store.puts == [context.keys.progress]

    def written() -> Any:
        entry = store.get(context.keys.progress)
        assert entry is not None and leases[0] is not None
        assert entry.lease_id == leases[0].id
        return decode_progress(entry.key, entry.value)

    assert (written().step, written().checkpoint_step) == (None, None)
    context.status.step_rate = StepRate(generation=2, step=41, step_time_s=0.25, at_s=0.0)
    steps[0] = 40
    writer.write()
    found = written()
    assert (found.generation, found.step, found.step_time_s) == (2, 41, 0.25)
    assert found.checkpoint_step == 40
    assert found.checkpoint_at_s is not None and found.planned_steps == 500
    writes = len(store.puts)
    for _ in range(3):  # the job makes no progress: elapsed time is not a change
        writer.write()
    assert len(store.puts) == writes
    began = NodeHeartbeat(generation=2, step=39, has_joined=True)
    heard["id-b"] = ReceivedHeartbeat(began, clock.monotonic())
    writer.write()
    writes += 1
    assert len(store.puts) == writes, "that a node's workers have begun to step is news"
    heard["id-b"] = ReceivedHeartbeat(replace(began, step=40), clock.monotonic() - 3.0)
    writer.write()
    assert len(store.puts) == writes, "nor are heartbeats alone"
    clock.advance(PROGRESS_IDLE_S)
    writer.write()
    assert len(store.puts) == writes + 1, "but they are written every few seconds"
    at_s = clock.wall() - PROGRESS_IDLE_S - 3.0
    assert written().heartbeats == (
        RecordedHeartbeat(node_id="id-b", generation=2, step=40, heard_at_s=at_s, has_joined=True),
    )
    writer.write()
    assert len(store.puts) == writes + 1, "and not more often"
    writes += 1
    context.status.store_problem = StoreUnreachable("etcd does not answer")
    context.status.step_rate = StepRate(generation=2, step=42, step_time_s=0.25, at_s=0.0)
    writer.write()
    assert len(store.puts) == writes, "a store in trouble is left alone"
    (lease,) = leases
    assert lease is not None
    lease.close()
    assert store.get(context.keys.progress) is None, "it goes with its leader"
