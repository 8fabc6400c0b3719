"""``elastic finish``: the end of the job becomes a scale of 0 and an exit code, despite errors of
the API server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_certificates import Authority
from fake_api_server import DROP, NAMESPACE, FakeApiServer
from kit.manual_clock import ManualClock
from kit.memory_store import MemoryStore

from elastic.cli import finish
from elastic.cli.main import main
from elastic.cli.scale import (
    CLUSTER_PATIENCE_S,
    ApiServer,
    scale_statefulset,
)
from elastic.errors import ClusterRefused, ClusterUnreachable, ConfigError
from elastic.membership.records import Done, Keys, Outcome, encode

KEYS = Keys.of("/elastic", "job-1")


@pytest.fixture
def api(tmp_path: Path) -> Iterator[FakeApiServer]:
    with FakeApiServer(tmp_path, scales={(NAMESPACE, "workers"): 3}) as server:
        yield server


def scale(api: FakeApiServer, name: str = "workers", clock: ManualClock | None = None) -> list[str]:
    """Scale to 0; return the messages that were shown."""
    messages: list[str] = []
    scale_statefulset(
        ApiServer.of_pod(api.environ, api.credentials),
        namespace=NAMESPACE,
        name=name,
        replicas=0,
        say=messages.append,
        clock=clock or ManualClock(),
    )
    return messages


# The API server -------------------------------------------------------------------------------


def test_only_the_given_statefulset_is_scaled_to_0(api: FakeApiServer) -> None:
    api.scales[NAMESPACE, "others"] = 5
    assert scale(api) == []
    assert api.scales == {(NAMESPACE, "workers"): 0, (NAMESPACE, "others"): 5}


def test_transient_errors_are_retried(api: FakeApiServer) -> None:
    api.faults += [503, 429, 500, 409, DROP, DROP, 504]
    clock = ManualClock()
    messages = scale(api, clock=clock)
    assert api.scales[NAMESPACE, "workers"] == 0
    assert len(messages) == 7
    assert "503" in messages[0] and "told to answer 503" in messages[0]
    assert 0 < clock.monotonic() < CLUSTER_PATIENCE_S


def test_a_rotated_token_is_read_again(api: FakeApiServer) -> None:
    api.token = "the-next-one"
    kept = (api.credentials / "token").read_text()
    messages: list[str] = []

    def rotate(text: str) -> None:
        messages.append(text)
        (api.credentials / "token").write_text("the-next-one")

    server = ApiServer.of_pod(api.environ, api.credentials)
    scale_statefulset(
        server, namespace=NAMESPACE, name="workers", replicas=0, say=rotate, clock=ManualClock()
    )
    assert api.scales[NAMESPACE, "workers"] == 0
    assert len(messages) == 1 and "401" in messages[0]
    assert kept.strip() not in messages[0]


def test_an_unreachable_api_server_raises_with_a_hint(api: FakeApiServer) -> None:
    api.faults += [503] * 10_000
    clock = ManualClock()
    with pytest.raises(ClusterUnreachable) as gone:
        scale(api, clock=clock)
    assert "503" in gone.value.message
    assert "kubectl scale statefulset/workers" in gone.value.hint
    assert clock.monotonic() > CLUSTER_PATIENCE_S
    assert api.scales[NAMESPACE, "workers"] == 3


@pytest.mark.parametrize(("name", "status"), [("others", "403"), ("gone", "404")])
def test_a_denied_request_is_not_retried(api: FakeApiServer, name: str, status: str) -> None:
    api.may |= {"gone"}
    with pytest.raises(ClusterRefused) as refused:
        scale(api, name)
    assert status in refused.value.message and name in refused.value.message
    assert refused.value.hint
    assert api.requests == 1


def test_the_token_is_not_sent_to_an_unverified_server(api: FakeApiServer, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    stranger = Authority(other, "other-cluster").cacert
    (api.credentials / "ca.crt").write_bytes(Path(stranger).read_bytes())
    with pytest.raises(ClusterRefused) as refused:
        scale(api)
    assert "ca.crt" in refused.value.message
    assert api.requests == 0


@pytest.mark.parametrize("name", ["../pods", "Workers", "a/b", ""])
def test_an_invalid_name_is_not_sent_to_the_api_server(api: FakeApiServer, name: str) -> None:
    with pytest.raises(ConfigError):
        scale(api, name)
    assert api.requests == 0


def test_use_outside_of_a_pod_is_rejected(api: FakeApiServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="KUBERNETES_SERVICE_HOST"):
        ApiServer.of_pod({})
    with pytest.raises(ConfigError, match="token"):
        ApiServer.of_pod(api.environ, tmp_path)


def test_a_dry_run_changes_nothing_and_needs_the_same_permissions(api: FakeApiServer) -> None:
    server = ApiServer.of_pod(api.environ, api.credentials)

    def try_it(name: str) -> None:
        scale_statefulset(
            server,
            namespace=NAMESPACE,
            name=name,
            replicas=0,
            say=lambda _: None,
            clock=ManualClock(),
            dry_run=True,
        )

    try_it("workers")
    assert (api.dry_runs, api.scales[NAMESPACE, "workers"]) == (1, 3)
    with pytest.raises(ClusterRefused, match="403"):
        try_it("others")


# The job's end --------------------------------------------------------------------------------


def ended(outcome: Outcome = Outcome.SUCCESS, exit_code: int = 0, reason: str = "done") -> Done:
    return Done(
        outcome=outcome, reason=reason, exit_code=exit_code, generation=3, final_step=9, time_s=0.0
    )


def test_a_job_that_has_already_ended_is_not_waited_for() -> None:
    store = MemoryStore()
    store.put(KEYS.done, encode(ended()))
    assert finish.wait_for_done(store, KEYS) == ended()


def test_the_wait_ends_with_the_given_job_only() -> None:
    store, found = MemoryStore(), list[Done]()
    thread = threading.Thread(target=lambda: found.append(finish.wait_for_done(store, KEYS)))
    thread.start()
    store.put(Keys.of("/elastic", "job-10").done, encode(ended(reason="another job")))
    store.put(KEYS.done + "-but-not", b"x")
    store.put(KEYS.done, encode(ended(reason="this one")))
    thread.join(60)
    assert [done.reason for done in found] == ["this one"]


@pytest.fixture
def in_a_pod(
    api: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[FakeApiServer, list[str]]]:
    """The command's environment, and its command line."""
    for name, value in api.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "etcd:2379")
    monkeypatch.setenv("PET_RDZV_ID", "job-1")
    monkeypatch.setattr(finish, "CREDENTIALS", api.credentials)
    yield api, ["finish", "--statefulset=workers"]


@pytest.mark.parametrize(
    ("lacks", "expected"),
    [("the right", "grant the pod's service account `patch`"), ("the set", "check --statefulset")],
)
def test_missing_permissions_are_reported_before_the_wait(
    in_a_pod: tuple[FakeApiServer, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    lacks: str,
    expected: str,
) -> None:
    api, command = in_a_pod
    if lacks == "the right":
        api.may = frozenset()
    else:
        api.scales.clear()

    def wait(endpoint: str, options: object, keys: Keys) -> Done:
        raise AssertionError("it would wait for weeks and then fail")

    monkeypatch.setattr(finish, "_wait", wait)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert main(command) == ClusterRefused.exit_code
    assert expected in capsys.readouterr().err


def test_permissions_are_checked_by_a_dry_run_before_the_wait(
    in_a_pod: tuple[FakeApiServer, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    api, command = in_a_pod
    seen: list[tuple[int, int]] = []

    def wait(endpoint: str, options: object, keys: Keys) -> Done:
        seen.append((api.dry_runs, api.scales[NAMESPACE, "workers"]))
        return ended()

    monkeypatch.setattr(finish, "_wait", wait)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert main(command) == 0
    assert seen == [(1, 3)]
    assert api.scales[NAMESPACE, "workers"] == 0


@pytest.mark.parametrize(
    ("done", "flags", "code", "replicas"),
    [
        (ended(), [], 0, 0),
        (ended(Outcome.FAILURE, 70, "the budget is spent"), [], 70, 0),
        (ended(Outcome.FAILURE, 65, "no checkpoint"), [], 65, 0),
        (ended(Outcome.FAILURE, 0, "it says nothing"), [], 1, 0),
        (ended(Outcome.FAILURE, 1, "it failed"), ["--keep-failed"], 1, 3),
        (ended(), ["--keep-failed"], 0, 0),
    ],
)
def test_the_exit_code_is_that_of_the_job(
    in_a_pod: tuple[FakeApiServer, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    done: Done,
    flags: list[str],
    code: int,
    replicas: int,
) -> None:
    api, command = in_a_pod
    monkeypatch.setattr(finish, "_wait", lambda endpoint, options, keys: done)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert main([*command, *flags]) == code
    assert api.scales[NAMESPACE, "workers"] == replicas
    output = capsys.readouterr().err
    assert done.reason in output
    assert (f"Failure timeline of {KEYS.root}" in output) is (code == 70)
