"""The etcd client works with every major version of protobuf that users have installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.store.embedded import EmbeddedEtcd

_SMOKE = """
import sys
import google.protobuf
assert google.protobuf.__version__.split(".")[0] == sys.argv[1], google.protobuf.__version__
from elastic.store.client import EtcdConfig, parse_endpoints
from elastic.store.etcd import EtcdStore
from elastic.store.client import load_rpc

rpc = load_rpc()
import etcd3
assert etcd3.etcdrpc.RangeRequest is rpc.RangeRequest
event = rpc.WatchResponse(watch_id=3, events=[{"type": 1, "kv": {"key": b"k", "lease": 2**62}}])
again = rpc.WatchResponse.FromString(event.SerializeToString())
assert again == event and again.events[0].type == again.events[0].DELETE
assert rpc.Compare(result=rpc.Compare.EQUAL, target=rpc.Compare.MOD).target == 2

store = EtcdStore(EtcdConfig(endpoints=parse_endpoints(sys.argv[2]), connect_timeout_s=30))
key = sys.argv[3] + "a"
revision = store.put(key, b"\\x00\\xff", lease=store.lease(30))
entry = store.get(key)
assert entry.value == b"\\x00\\xff" and entry.mod_revision == revision and entry.lease_id
assert store.compare_and_swap(key, b"2", expected_revision=revision) == revision + 1
store.close()
sys.stdout.write("fine")
"""


@pytest.fixture(scope="session")
def protobuf_folder(request: pytest.FixtureRequest) -> Path:
    assert request.config.cache is not None
    return request.config.cache.mkdir("protobuf")


def install(folder: Path, requirement: str) -> Path:
    """Install only the wheel into a separate folder, which is kept between runs."""
    target = folder / requirement.replace("~=", "-")
    if target.exists():
        return target
    partial = target.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--only-binary=:all:", "--target", str(partial), requirement]
    done = subprocess.run([*pip, *options], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{requirement} cannot be installed here: {done.stderr.strip()[-200:]}")
    partial.rename(target)
    return target


@pytest.mark.parametrize(
    "version",
    [
        "3.20.3",
        *(
            pytest.param(v, marks=pytest.mark.slow)
            for v in ("4.25.0", "5.29.0", "6.30.0", "7.34.0")
        ),
    ],
)
def test_the_etcd_client_works_with_protobuf(
    version: str, protobuf_folder: Path, shared_etcd: EmbeddedEtcd, root: str
) -> None:
    major = version.split(".", maxsplit=1)[0]
    target = install(protobuf_folder, f"protobuf~={version}")
    arguments = [sys.executable, "-W", "error", "-c", _SMOKE, major, shared_etcd.endpoint, root]
    done = subprocess.run(
        arguments,
        env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == ("fine", "")


def test_the_protobuf_setting_does_not_leak_into_workers(shared_etcd: EmbeddedEtcd) -> None:
    code = """if True:
        import os
        before = dict(os.environ)
        from elastic.store.client import EtcdConfig, parse_endpoints
        from elastic.store.etcd import EtcdStore
        import sys
        EtcdStore(EtcdConfig(endpoints=parse_endpoints(sys.argv[1]))).close()
        assert dict(os.environ) == before
    """
    done = subprocess.run([sys.executable, "-c", code, shared_etcd.endpoint], timeout=120)
    assert done.returncode == 0
