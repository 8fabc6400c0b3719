"""The embedded etcd: a real process, its data, its addresses, and its shutdown."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from etcd_fixtures import PATIENCE_S

from elastic.errors import StoreUnreachable
from elastic.store.embedded import EmbeddedEtcd
from elastic.store.etcd import EtcdStore
from elastic.testing.waiting import eventually

Connect = Callable[..., EtcdStore]

_OWNER = """
import sys, time
from elastic.store.embedded import EmbeddedEtcd
etcd = EmbeddedEtcd(data_dir=sys.argv[1]).start()
sys.stdout.write(f"{etcd.pid}\\n")
sys.stdout.flush()
time.sleep(600)
"""


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_the_child_process_is_etcd_itself() -> None:
    with EmbeddedEtcd() as etcd:
        process = psutil.Process(etcd.pid)
        assert Path(process.exe()).name == "etcd"
        assert process.ppid() == os.getpid()
    assert etcd.pid is None
    assert is_gone(process.pid)


def test_data_persists_across_restarts(connect: Connect, tmp_path: Path) -> None:
    with EmbeddedEtcd(data_dir=tmp_path) as etcd:
        revision = connect(etcd.endpoint).put("/a", b"1")
        etcd.kill()
        etcd.start()
        entry = connect(etcd.endpoint).get("/a")
    assert entry is not None and entry.mod_revision == revision
    with EmbeddedEtcd(data_dir=tmp_path) as etcd:
        assert connect(etcd.endpoint, connect_timeout_s=PATIENCE_S).get("/a") == entry


def test_temporary_data_is_deleted() -> None:
    with EmbeddedEtcd() as etcd:
        folder = etcd.log_path.parent
        assert folder.exists()
    assert not folder.exists()


def test_etcd_ends_with_a_killed_owner(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    with owner:
        pid = int(owner.stdout.readline())
        assert not is_gone(pid)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    eventually(lambda: is_gone(pid), "etcd ends with its owner")


def test_etcd_outlives_the_thread_that_started_it(connect: Connect) -> None:
    etcd = EmbeddedEtcd()
    try:
        thread = threading.Thread(target=etcd.start)
        thread.start()
        thread.join()
        assert connect(etcd.endpoint).put("/a", b"1") > 0
        assert etcd.pid is not None
    finally:
        etcd.close()


def test_an_address_stays_reserved_while_etcd_is_down() -> None:
    import socket

    with EmbeddedEtcd() as etcd:
        etcd.kill()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", etcd.port), timeout=PATIENCE_S)
        taken = {etcd.port}
        for _ in range(50):
            with socket.create_server(("127.0.0.1", 0)) as other:
                assert other.getsockname()[1] not in taken
        etcd.start()


def test_a_frozen_etcd_can_be_closed(tmp_path: Path) -> None:
    with EmbeddedEtcd(data_dir=tmp_path) as etcd:
        pid = etcd.pid
        etcd.pause()
    assert pid is not None and is_gone(pid)


def test_a_failed_start_of_etcd_reports_the_reason(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file where a folder should be")
    with pytest.raises(StoreUnreachable, match="ended before it served") as caught:
        EmbeddedEtcd(data_dir=tmp_path).start()
    assert "not a directory" in caught.value.message
    assert str(tmp_path) in caught.value.hint
