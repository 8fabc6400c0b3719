"""The dashboard over HTTP: access, routes, headers, streams, outages of etcd, and the command."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from dashboard_kit import KEYS, DashboardUnderTest, FakeJob
from kit.made_up_run import write_run

from elastic.agent.identity import is_loopback
from elastic.cli import dashboard as command
from elastic.cli import dashboard_server as server
from elastic.cli.dashboard_feed import (
    DASHBOARD_ETCD_S,
    DASHBOARD_JOURNALS_S,
    EventLog,
    JobFeed,
)
from elastic.cli.dashboard_server import (
    DASHBOARD_PAGE_S,
    AccessPolicy,
    AccessVerdict,
    checked_token,
    policy_of,
    read_token,
)
from elastic.cli.main import main
from elastic.errors import ConfigError, StoreUnreachable
from elastic.report import render
from elastic.store.keyvalue import KeyValue
from elastic.telemetry.events import Waiting
from elastic.telemetry.journal import Journal
from elastic.testing.waiting import PATIENCE_S, eventually

TOKEN = "a-token-of-some-length"
REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def job() -> FakeJob:
    fake_job = FakeJob()
    fake_job.train()
    return fake_job


class AppClient:
    """Calls the application without a server; keeps cookies."""

    def __init__(self, dashboard: DashboardUnderTest, host: str = "127.0.0.1") -> None:
        self._app: Any = dashboard.app(host)
        self.cookies = httpx.Cookies()

    def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(app=self._app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost:8630", cookies=self.cookies
            ) as client:
                answer = await client.request(method, path, **more)
                self.cookies.update(client.cookies)
                return answer

        return asyncio.run(ask())

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.request("GET", path, **more)


# Access -----------------------------------------------------------------------------------------


def judge(
    policy: AccessPolicy, host: str = "localhost:8630", path: str = "/", **more: str
) -> AccessVerdict:
    credentials = {"authorization": "", "cookie": "", "query_token": "", **more}
    return policy.judge(host=host, path=path, **credentials)


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:80", "localhost.:1", "127.0.0.1:8630", "[::1]:8630"]
)
def test_loopback_names_need_no_token(host: str) -> None:
    assert judge(policy_of("127.0.0.1", 8630, None), host) is AccessVerdict.ALLOWED


@pytest.mark.parametrize(
    "host", ["", "evil.example", "localhost.evil.example", "127.0.0.1.nip.io:8630", "10.0.0.1"]
)
def test_other_host_names_are_rejected_on_loopback(host: str) -> None:
    """DNS rebinding: a site resolves its name to 127.0.0.1 after it has been loaded."""
    policy = policy_of("127.0.0.1", 8630, None)
    assert judge(policy, host) is AccessVerdict.WRONG_HOST
    assert judge(policy, host, path="/healthz") is AccessVerdict.WRONG_HOST


def test_a_proxys_name_can_be_allowed() -> None:
    policy = policy_of("127.0.0.1", 8630, None, ("Train.example",))
    assert judge(policy, "train.example:443") is AccessVerdict.ALLOWED
    assert judge(policy, "other.example") is AccessVerdict.WRONG_HOST


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "node-a", ""])
def test_a_network_address_without_a_token_is_rejected_with_a_hint(host: str) -> None:
    with pytest.raises(ConfigError) as refused:
        policy_of(host, 8630, None)
    assert "without a token" in refused.value.message
    assert "--token-file=token" in refused.value.hint


def test_a_token_is_accepted_as_bearer_cookie_or_in_the_first_url() -> None:
    policy = policy_of("0.0.0.0", 8630, TOKEN)
    assert judge(policy, "any.example") is AccessVerdict.NO_TOKEN
    assert judge(policy, authorization=f"Bearer {TOKEN}") is AccessVerdict.ALLOWED
    assert judge(policy, authorization=f"bearer {TOKEN}") is AccessVerdict.ALLOWED
    assert judge(policy, authorization=f"Basic {TOKEN}") is AccessVerdict.NO_TOKEN
    assert judge(policy, authorization=f"Bearer {TOKEN}x") is AccessVerdict.NO_TOKEN
    assert judge(policy, authorization="Bearer tök€n") is AccessVerdict.NO_TOKEN
    assert judge(policy, cookie=policy.cookie_value) is AccessVerdict.ALLOWED
    assert judge(policy, cookie=TOKEN) is AccessVerdict.NO_TOKEN
    assert judge(policy, query_token=TOKEN) is AccessVerdict.TOKEN_IN_QUERY
    assert judge(policy, path="/api/status", query_token=TOKEN) is AccessVerdict.NO_TOKEN
    assert judge(policy, path="/healthz") is AccessVerdict.ALLOWED
    assert TOKEN not in policy.cookie_value


def test_cookies_of_two_dashboards_on_one_host_do_not_collide() -> None:
    one, other = policy_of("0.0.0.0", 8630, TOKEN), policy_of("0.0.0.0", 8631, TOKEN + "2")
    assert one.cookie != other.cookie
    assert one.cookie_value != other.cookie_value


@pytest.mark.parametrize(
    "token", ["", "short", "x" * 15, "with a space in it", "ü" * 20, "x\x00" * 9]
)
def test_weak_or_unsendable_tokens_are_rejected(token: str) -> None:
    with pytest.raises(ConfigError, match="16 printable ASCII"):
        checked_token(token, "here")


def test_a_token_is_the_first_line_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\nmore\n")
    assert read_token(str(path)) == TOKEN
    path.write_bytes(b"\xff\xfe")
    for name in (path, tmp_path / "none"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_token(str(name))


# Routes ------------------------------------------------------------------------------------------


def test_every_response_has_restrictive_headers(job: FakeJob) -> None:
    client = AppClient(DashboardUnderTest(job))
    for path in ("/", "/api/status", "/api/events", "/healthz", "/metrics", "/none"):
        headers = client.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'none'; "), path
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in headers
    assert client.get("/none").status_code == 404
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"):
        assert client.request(method, "/").status_code == 405
    assert client.request("HEAD", "/").status_code == 200
    assert client.get("/?" + "x" * 5000).status_code == 414
    assert client.get("/", headers={"host": "evil.example"}).status_code == 421


def test_a_token_in_the_url_is_exchanged_for_a_cookie(job: FakeJob) -> None:
    client = AppClient(DashboardUnderTest(job, token=TOKEN), "0.0.0.0")
    refused = client.get("/")
    assert refused.status_code == 401 and "llama" not in refused.text
    assert refused.headers["www-authenticate"].startswith("Bearer")
    for path in ("/api/status", "/api/events", "/metrics", f"/api/status?token={TOKEN}"):
        assert client.get(path).status_code == 401, path
    assert client.get("/healthz").json()["ok"] is False, "no token is needed; no feed is running"
    assert client.get("/?token=wrong").status_code == 401
    answer = client.get(f"/?token={TOKEN}")
    assert (answer.status_code, answer.headers["location"]) == (303, ".")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=lax" in cookie and TOKEN not in cookie
    assert client.get("/").status_code == 200
    client.cookies.clear()
    bearer = {"authorization": f"Bearer {TOKEN}"}
    assert client.get("/api/status", headers=bearer).status_code == 200


def test_metrics_are_gauges_of_the_job(job: FakeJob) -> None:
    dashboard = DashboardUnderTest(job)
    with dashboard.served() as port:
        eventually(lambda: dashboard.feed.snapshot.view, "etcd is read")
        job.store.server.disconnect()
        eventually(lambda: dashboard.feed.snapshot.outage, "etcd is away")
        found = httpx.get(f"http://127.0.0.1:{port}/metrics")
    assert found.headers["content-type"].startswith("text/plain")
    for line in (
        'elastic_job_state{run_id="llama-7",state="training"} 1.0',
        'elastic_job_state{run_id="llama-7",state="paused"} 0.0',
        'elastic_job_step{run_id="llama-7"} 52.0',
        'elastic_job_nodes{run_id="llama-7",state="ready"} 4.0',
        'elastic_job_etcd_up{run_id="llama-7"} 0.0',
    ):
        assert f"{line}\n" in found.text
    page = (REPOSITORY / "docs" / "how-to" / "observe.md").read_text()
    names = {line.split()[2] for line in found.text.splitlines() if line.startswith("# TYPE")}
    assert all(f"`{name}`" in page for name in names), names


def test_the_documented_fields_match_the_json_documents(job: FakeJob, tmp_path: Path) -> None:
    job.kill("n2")
    job.finish()
    write_run(tmp_path, run_id="llama-7")
    dashboard = DashboardUnderTest(job, tmp_path)
    with dashboard.served() as port:
        eventually(lambda: dashboard.feed.snapshot.view, "etcd is read")
        eventually(lambda: dashboard.feed.snapshot.events, "the journals are read")
        job.store.server.disconnect()
        eventually(lambda: dashboard.feed.snapshot.outage, "etcd is away")
        status = httpx.get(f"http://127.0.0.1:{port}/api/status").json()
        events = httpx.get(f"http://127.0.0.1:{port}/api/events").json()
        last = events["events"][-1]["number"]
        rest = httpx.get(f"http://127.0.0.1:{port}/api/events?since={last - 1}").json()
        assert [event["number"] for event in rest["events"]] == [last]
        wrong = httpx.get(f"http://127.0.0.1:{port}/api/events?since=-1")
        assert wrong.status_code == 400
    page = (REPOSITORY / "docs" / "reference" / "status.md").read_text().partition("## Describe")[0]
    documented = {line.split("`")[1] for line in page.splitlines() if line.startswith("| `")}
    found = set(fields(status)) | {f"events[].{name}" for name in events["events"][0]}
    assert found == documented


def fields(document: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in document.items():
        if isinstance(value, dict):
            yield from fields(value, f"{prefix}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield from fields(value[0], f"{prefix}{name}[].")
        else:
            yield f"{prefix}{name}"


# Refreshing --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_hundred_pages_see_a_kill_through_one_reader_of_etcd(
    job: FakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    dashboard = DashboardUnderTest(job)
    reads, views = Mock(wraps=job.store.list), Mock(wraps=dashboard.feed._take)
    monkeypatch.setattr(job.store, "list", reads)
    monkeypatch.setattr(dashboard.feed, "_take", views)

    async def watch(port: int) -> None:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(limits=limits, timeout=PATIENCE_S) as client:

            async def sees(text: str) -> None:
                while text not in (await client.get(f"http://127.0.0.1:{port}/")).text:
                    await asyncio.sleep(DASHBOARD_PAGE_S)

            await asyncio.gather(*(sees("with 4 of 4 nodes") for _ in range(200)))
            job.kill("n2")
            await asyncio.gather(*(sees("n2 was lost") for _ in range(200)))

    with dashboard.served() as port:
        asyncio.run(watch(port))
    assert views.call_count <= reads.call_count <= views.call_count + 1, "pages read nothing"


def test_poll_intervals_show_a_loss_within_two_seconds() -> None:
    script = render.script()
    assert "setTimeout(resolve, 1000)" in script
    assert DASHBOARD_ETCD_S <= 1.0 and DASHBOARD_JOURNALS_S <= 1.0


def test_a_page_that_has_only_aged_is_not_sent_again(job: FakeJob) -> None:
    dashboard = DashboardUnderTest(job)
    with dashboard.served() as port:
        eventually(lambda: dashboard.feed.snapshot.view, "etcd is read")

        def ask(etag: str) -> httpx.Response:
            return httpx.get(f"http://127.0.0.1:{port}/", headers={"if-none-match": etag})

        # A page may have been rendered before etcd was read.
        eventually(lambda: "generation 7" in ask("").text, "the job")
        first = ask("").headers["etag"]
        began_s = dashboard.feed.current().at_s
        eventually(lambda: dashboard.feed.current().at_s > began_s + 1.1, "a second later")
        same = ask(first)
        assert (same.status_code, same.content) == (304, b"")
        job.progress(60)
        eventually(lambda: ask(first).status_code == 200, "the step")


def test_the_server_stops_while_pages_are_open(job: FakeJob) -> None:
    with (
        DashboardUnderTest(job).served() as port,
        httpx.Client() as page,
    ):
        assert page.get(f"http://127.0.0.1:{port}/").status_code == 200
    eventually(
        lambda: not [t.name for t in threading.enumerate() if "dashboard" in t.name],
        "the end of all threads",
    )


def test_the_server_does_not_wait_for_a_connection_attempt() -> None:
    """Ctrl-C would otherwise take as long as connect_timeout_s, 10 s."""
    is_connecting, may_end = threading.Event(), threading.Event()

    @contextmanager
    def silent_etcd() -> Iterator[KeyValue]:
        is_connecting.set()
        if may_end.wait():
            raise StoreUnreachable("etcd does not answer")
        yield Mock()

    feed = JobFeed(KEYS, silent_etcd, None, EventLog(), on_error=Mock())
    feed.start()
    assert is_connecting.wait(PATIENCE_S)
    feed.close()
    assert feed.is_alive, "closed before the attempt has ended"
    may_end.set()
    eventually(lambda: not feed.is_alive, "the end of its thread")


def test_a_slow_etcd_is_reported_once_on_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attempts: list[bool] = []

    def connect(args: object, *, reports_delay: bool) -> None:
        attempts.append(reports_delay)

    monkeypatch.setattr(command, "job_store", connect)
    open_store = command.StoreOpener(command.parser({}).parse_args([]))
    for _ in range(3):
        open_store()
    assert attempts == [True, False, False]


# What the feed survives --------------------------------------------------------------------------


def test_outages_of_etcd_at_the_start_and_later_are_shown(tmp_path: Path) -> None:
    job = FakeJob()
    job.is_away = True
    journal = Journal(folder=tmp_path, identity={"node": "n1"}, run_id="llama-7")
    journal.locate(lambda: {"generation": 7, "step": 52})
    journal.emit(Waiting(reason="x"))
    dashboard = DashboardUnderTest(job, tmp_path, run_id="llama-7")

    def shown() -> str:
        return httpx.get(f"http://127.0.0.1:{port}/").text

    with dashboard.served() as port:
        eventually(lambda: "last known: step 52 in generation 7" in shown(), "the journals' state")
        assert "etcd at 127.0.0.1:2379 does not answer" in shown()
        job.train()
        job.is_away = False
        eventually(lambda: "training in generation 7 with 4 of 4 nodes" in shown(), "it is back")
        assert "<strong>etcd does not answer" not in shown()
        job.server.disconnect()
        eventually(lambda: "<strong>etcd does not answer" in shown(), "it is away")
        assert "training in generation 7" in shown(), "with the last known state"
        journal.locate(lambda: {"generation": 7, "step": 99})
        journal.emit(Waiting(reason="y"))
        eventually(lambda: "last known: step 99 in generation 7" in shown(), "newer journals")
        healthy = httpx.get(f"http://127.0.0.1:{port}/healthz")
        assert healthy.status_code == 200, "the server is healthy without etcd"
        job.server.reconnect()
        eventually(lambda: "<strong>etcd does not answer" not in shown(), "it is back again")


def test_journals_alone_are_sufficient(tmp_path: Path) -> None:
    write_run(tmp_path, run_id="of-yesterday")
    dashboard = DashboardUnderTest(None, tmp_path)
    with dashboard.served() as port:
        eventually(lambda: dashboard.feed.snapshot.report, "the report")
        eventually(lambda: "<svg" in httpx.get(f"http://127.0.0.1:{port}/").text, "they are shown")
        page = httpx.get(f"http://127.0.0.1:{port}/").text
        assert "of-yesterday" in page and "from the journals only" in page
        status = httpx.get(f"http://127.0.0.1:{port}/api/status").json()
    assert status["state"] == "unknown" and not status["source"]["asks_etcd"]
    assert len(page.encode()) <= 250_000


# The command -------------------------------------------------------------------------------------


def test_invalid_settings_are_rejected_before_the_server_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ELASTIC_JOURNAL", raising=False)
    for name in ("PET_RDZV_ENDPOINT", "PET_RDZV_ID"):
        monkeypatch.delenv(name, raising=False)
    assert main(["dashboard"]) == 2
    assert "neither --rdzv-endpoint nor --journal is given" in capsys.readouterr().err
    assert main(["dashboard", "--journal", str(tmp_path), "--host=0.0.0.0"]) == 2
    assert "without a token" in capsys.readouterr().err
    assert main(["dashboard", "--journal", str(tmp_path / "none")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main(["dashboard", "--rdzv-endpoint=e:1"]) == 2
    assert (
        "neither --rdzv-id nor PET_RDZV_ID is given, and no job has run on this machine"
        in capsys.readouterr().err
    )
    nowhere = ["--host=192.0.2.1", *token(tmp_path)]
    assert main(["dashboard", "--journal", str(tmp_path), *nowhere]) == 2
    assert "could not be bound" in capsys.readouterr().err


def token(folder: Path) -> list[str]:
    path = folder / "token"
    path.write_text(TOKEN)
    return [f"--token-file={path}"]


def test_a_missing_extra_is_reported_with_the_install_command(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules['uvicorn'] = None\n"
        "from elastic.cli.main import main\n"
        "sys.exit(main(['dashboard', '--journal', sys.argv[1]]))"
    )
    argv = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "the dashboard needs the package uvicorn, which is not installed" in done.stderr
    assert "pip install 'torch-elastic-harness[dashboard]'" in done.stderr


def test_the_token_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    parsed = command.parser({}).parse_args(token(tmp_path))
    assert command.token_of(parsed, {}) == TOKEN
    without = command.parser({}).parse_args([])
    assert command.token_of(without, {command.TOKEN_VARIABLE: TOKEN + "2"}) == TOKEN + "2"
    assert command.token_of(without, {}) is None
    with pytest.raises(ConfigError):
        command.token_of(without, {command.TOKEN_VARIABLE: ""})
    assert is_loopback(without.host)


def test_the_command_serves_until_it_is_interrupted_and_imports_no_torch(tmp_path: Path) -> None:
    write_run(tmp_path, run_id="of-yesterday")
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & ignores it\n"
        "from elastic.cli.main import main\n"
        "code = main(sys.argv[1:])\n"
        "assert 'torch' not in sys.modules\n"
        "sys.exit(code)"
    )
    argv = ["dashboard", "--port=0", f"--journal={tmp_path}", *token(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    output = process.stdout.readline()
    assert output.startswith("elastic dashboard: http://127.0.0.1:") and "?token=TOKEN" in output
    url = output.split()[2].partition("?")[0]
    assert httpx.get(url).status_code == 401
    answer = httpx.get(url, headers={"authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == 200 and "<h1>" in answer.text
    process.send_signal(2)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors and KEYS.run_id not in errors


def test_requests_that_are_never_completed_do_not_block_others(
    job: FakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_MOST_UNFINISHED", 8)
    with DashboardUnderTest(job).served() as port, contextlib.ExitStack() as opened:
        strangers = [
            opened.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(40)
        ]
        for stranger in strangers:
            with contextlib.suppress(OSError):  # closed already
                stranger.sendall(b"GET / HTTP/1.1\r\nHost: lo")
        assert httpx.get(f"http://127.0.0.1:{port}/", timeout=PATIENCE_S).status_code == 200
        strangers[0].settimeout(PATIENCE_S)
        with contextlib.suppress(ConnectionError):
            assert strangers[0].recv(1) == b"", "the oldest are closed"


def test_a_request_that_is_never_completed_is_closed_in_time(
    job: FakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "DASHBOARD_REQUEST_S", 0.2)
    with (
        DashboardUnderTest(job).served() as port,
        socket.create_connection(("127.0.0.1", port)) as stranger,
    ):
        stranger.settimeout(PATIENCE_S)
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: lo")
        assert stranger.recv(1) == b""
