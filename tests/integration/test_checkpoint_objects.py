"""Checkpoints in an S3 server on loopback: URLs, the command line, failures, killed writers."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from s3_server import KEYS, S3Server, s3_server

import checkpoints
from checkpoints import objects
from checkpoints.objects import ObjectStorage, open_url
from elastic.cli.main import main
from elastic.testing.forks.server import run_forked
from elastic.testing.waiting import PATIENCE_S

PART_BYTES = 6 << 20  # S3 takes no smaller parts than 5 MiB
LARGE_BYTES = 20 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.fixture
def root(server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The URL of a new bucket; endpoint and credentials come from the environment."""
    for name, value in environment(server, tmp_path).items():
        monkeypatch.setenv(name, value)
    _forget_clients()
    yield f"s3://{server.bucket(f'bucket-{len(server.requests)}')}/jobs/one"
    server.fails = lambda count, request: False
    _forget_clients()


def environment(server: S3Server, home: Path) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": KEYS["key"],
        "AWS_SECRET_ACCESS_KEY": KEYS["secret"],
        "AWS_EC2_METADATA_DISABLED": "true",  # no request leaves this machine
        "AWS_CONFIG_FILE": str(home / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(home / "none"),
    }


def _forget_clients() -> None:
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()


def state(step: int) -> dict[str, Any]:
    return {"weight": torch.full((1000,), float(step)), "step": step}


def save(root: str, step: int, **more: Any) -> checkpoints.SaveResult:
    return checkpoints.save(root, state(step), step=step, nonce="aa", **more)


def test_a_url_is_a_valid_checkpoint_root(root: str) -> None:
    assert checkpoints.latest(root).checkpoint is None
    for step in (1, 2, 3):
        for rank in (0, 1):
            saved = save(root, step, rank=rank, world_size=2, keep=checkpoints.LatestN(2))
        assert saved.committed and saved.notes == ()
    found = checkpoints.latest(root).checkpoint
    assert found is not None and found.step == 3
    live = {"weight": torch.zeros(1000)}
    checkpoints.load(root, found.name, into=live, strict=False)
    assert bool((live["weight"] == 3).all())
    assert [info.step for info in checkpoints.list_checkpoints(root)] == [3, 2]


@pytest.mark.slow
def test_the_command_line_accepts_urls(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        save(root, step)
    assert main(["checkpoints", "ls", root, "-o", "json"]) == 0
    assert [row["step"] for row in json.loads(capsys.readouterr().out)] == [2, 1]
    assert main(["checkpoints", "verify", root, "-o", "json"]) == 0
    assert all(row["valid"] for row in json.loads(capsys.readouterr().out))
    assert main(["checkpoints", "prune", root, "--keep", "1", "--yes"]) == 0
    assert [info.step for info in checkpoints.list_checkpoints(root)] == [2]


def test_transient_failures_of_the_object_store_are_retried(server: S3Server, root: str) -> None:
    """Every twelfth request is answered with a 500."""
    server.fails = lambda count, request: count % 12 == 0
    assert save(root, 1).committed
    server.fails = lambda count, request: False
    assert checkpoints.latest(root).skipped == ()
    assert checkpoints.list_checkpoints(root)[0].step == 1


@pytest.mark.slow
def test_a_permanent_failure_of_the_object_store_fails_only_the_save(
    server: S3Server, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import s3fs

    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    save(root, 1)
    _forget_clients()
    server.fails = lambda count, request: "step-000000002" in request
    with pytest.raises(checkpoints.WriteFailed, match=r"We failed|Internal Server Error"):
        save(root, 2)
    server.fails = lambda count, request: False
    found = checkpoints.latest(root).checkpoint
    assert found is not None and found.step == 1


def test_missing_credentials_are_named_in_the_error(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    _forget_clients()
    with pytest.raises(checkpoints.NotWritable, match="no usable credentials"):
        save(root, 1)
    with pytest.raises(checkpoints.ReadFailed, match="no usable credentials"):
        checkpoints.latest(root)


@pytest.mark.slow
def test_a_missing_bucket_fails_the_save(root: str) -> None:
    with pytest.raises(checkpoints.SaveError):
        save("s3://no-such-bucket/jobs", 1)


@pytest.mark.slow
def test_a_large_tensor_is_stored_by_multipart_upload(
    server: S3Server, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "PART_BYTES", PART_BYTES)
    before = len(server.requests)
    large = {"weight": torch.arange(LARGE_BYTES // 4, dtype=torch.int32)}
    name = checkpoints.save(root, large, step=1, nonce="aa").name
    assert sum("partNumber" in request for request in server.requests[before:]) > 1
    assert torch.equal(checkpoints.load(root, name).state["weight"], large["weight"])


_KILLED_WHILE_UPLOADING = """
    import os, signal, sys, torch
    import checkpoints
    from checkpoints import objects as fsspec_store
    from checkpoints.testing import FaultyObjects
    from checkpoints.objects import open_url
    from checkpoints.objects import ObjectStorage

    fsspec_store.PART_BYTES = int(sys.argv[2])
    begin_multipart, sent = fsspec_store.FsspecObjects.begin_multipart, []
    def begin(self, key):
        sent.append(key)
        return begin_multipart(self, key)
    fsspec_store.FsspecObjects.begin_multipart = begin
    def before(call):
        if sent and call.startswith("write "):
            os.kill(os.getpid(), signal.SIGKILL)

    storage = ObjectStorage(FaultyObjects(open_url(sys.argv[1]), before=before))
    state = {"weight": torch.zeros(int(sys.argv[3]) // 4)}
    checkpoints.save(storage, state, step=2, nonce="bb", generation=1)
"""


def test_a_writer_killed_during_an_upload_leaves_no_visible_object(
    server: S3Server, root: str, tmp_path: Path
) -> None:
    save(root, 1)
    command = [sys.executable, "-c", textwrap.dedent(_KILLED_WHILE_UPLOADING), root]
    killed = run_forked(
        [*command, str(PART_BYTES), str(2 * LARGE_BYTES)],
        env={**os.environ, **environment(server, tmp_path)},
        timeout_s=PATIENCE_S,
    )
    assert killed.returncode == -signal.SIGKILL
    assert any("uploadId" in r and "step-000000002" in r for r in server.requests)
    storage = ObjectStorage(open_url(root))
    assert set(storage.list("")) == {"step-000000001.g0.aa", "LATEST", ".summaries.json"}
    assert checkpoints.collect_garbage(root, generation=2, nonce="cc").retained == ()
    assert checkpoints.latest(root).skipped == ()
    assert save(root, 3).committed
