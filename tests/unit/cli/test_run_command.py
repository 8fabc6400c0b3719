"""``elastic run``: its command line, and local nodes without orphaned processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kit.manual_clock import ManualClock

from elastic.cli import bound_to_parent, run
from elastic.cli.main import main
from elastic.cli.run import LocalNodes, stop_on_signals
from elastic.errors import ConfigError, ElasticError
from elastic.telemetry.output import BAR_S, OutputLines
from elastic.testing.waiting import eventually
from elastic.tuning.options import signals_to_handle


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A training script in the working directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.touch()
    return path


def test_defaults_differ_from_torchruns() -> None:
    args = run.parse(["--embedded-etcd", "--nodes-local=3", "train.py"])
    assert args.rdzv_backend == "etcd-v3"
    assert args.nnodes == "1:3"
    assert args.max_restarts >= 1000
    assert args.local_addr == "127.0.0.1"
    assert args.rdzv_id_generated and args.rdzv_id
    assert run.parse(["--embedded-etcd", "train.py"]).rdzv_id != args.rdzv_id


def test_torchruns_flags_and_spellings_pass_through() -> None:
    args = run.parse(
        [
            "--nnodes",
            "2:4",
            "--nproc_per_node",
            "2",
            "--rdzv_backend",
            "etcd",
            "--rdzv-endpoint",
            "h:1",
            "--rdzv_id",
            "mine",
            "--max-restarts",
            "5",
            "--tee",
            "3",
            "train.py",
            "--lr",
            "0.1",
            "--nodes-local",
            "9",
        ]
    )
    assert (args.nnodes, args.nproc_per_node, args.rdzv_backend) == ("2:4", "2", "etcd")
    assert (args.rdzv_id, args.rdzv_id_generated, args.max_restarts) == ("mine", False, 5)
    assert args.training_script_args == ["--lr", "0.1", "--nodes-local", "9"]
    assert args.nodes_local is None


@pytest.mark.parametrize("words", [["--n", "480"], ["--no", "x"], ["--nnodes=9"], ["--zzz"]])
def test_the_scripts_own_arguments_are_not_read_as_flags(words: list[str]) -> None:
    args = run.parse(["--nnodes=2", "--embedded-etcd", "train.py", "--lr", "3e-4", *words])
    assert args.training_script_args == ["--lr", "3e-4", *words]
    assert args.nnodes == "2"


def test_an_abbreviation_is_accepted_if_it_fits_one_flag() -> None:
    assert run.parse(["--nproc-per=2", "--embedded", "train.py"]).nproc_per_node == "2"


def test_torchruns_environment_variables_count_as_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("PET_NNODES", "2:5"),
        ("PET_RDZV_ENDPOINT", "h:2379"),
        ("PET_MAX_RESTARTS", "7"),
        ("PET_RDZV_ID", "from-env"),
    ):
        monkeypatch.setenv(name, value)
    args = run.parse(["train.py"])
    assert (args.nnodes, args.rdzv_endpoint) == ("2:5", "h:2379")
    assert (args.max_restarts, args.rdzv_id) == (7, "from-env")


def test_another_backend_keeps_torchruns_count_of_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run.parse(["--rdzv-backend=c10d", "train.py"]).max_restarts == 0
    monkeypatch.setenv("ELASTIC_STOCK_ETCD", "1")
    assert run.parse(["--rdzv-backend=etcd", "--rdzv-endpoint=h:1", "train.py"]).max_restarts == 0


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--nnodez 3 train.py", ["--nnodez", "'--nnodes'"]),
        ("--nnodes 3:2 --embedded-etcd train.py", ["--nnodes=3:2", "MIN <= MAX"]),
        ("--nnodes two --embedded-etcd train.py", ["--nnodes=two", "MIN:MAX"]),
        ("train.py", ["--rdzv-endpoint", "--embedded-etcd"]),
        ("--embedded-etcd nope.py", ["'nope.py'"]),
        ("--embedded-etcd --no-python nope", ["'nope'", "executable"]),
        ("--embedded-etcd", ["no training script"]),
        ("--rdzv-backend etcdv3 train.py", ["--rdzv-backend=etcdv3", "'etcd-v3'"]),
        ("--max-restarts x --embedded-etcd train.py", ["--max-restarts", "'x'"]),
        ("--max-restarts -1 --embedded-etcd train.py", ["--max-restarts=-1"]),
        ("--nodes-local 0 --embedded-etcd train.py", ["--nodes-local", "0"]),
        ("--nodes-local 3 --nnodes 2 --embedded-etcd train.py", ["--nodes-local=3", "--nnodes=2"]),
        ("--nodes-local 2 --nnodes 3 --embedded-etcd train.py", ["--nnodes=3", "2"]),
        ("--nodes-local 2 --standalone train.py", ["--standalone"]),
        ("--nodes-local 2 --rdzv-backend static train.py", ["static"]),
        ("--embedded-etcd --rdzv-endpoint h:1 train.py", ["h:1"]),
        ("--etcd-data /x --rdzv-endpoint h:1 train.py", ["--etcd-data=/x"]),
        ("--embedded-etcd --rdzv-backend c10d train.py", ["c10d"]),
        ("--embedded-etcd --nproc-per-node 0 train.py", ["--nproc-per-node=0"]),
        ("--embedded-etcd --nproc-per-node -1 train.py", ["--nproc-per-node=-1"]),
        ("--embedded-etcd --nproc-per-node 1.5 train.py", ["--nproc-per-node=1.5"]),
        ("--embedded-etcd --monitor-interval -1 train.py", ["--monitor-interval=-1"]),
        ("--embedded-etcd --nodes-local 1000000 train.py", ["memory of this machine"]),
        (
            "--embedded-etcd --signals-to-handle SIGTERM,SIGUSR train.py",
            ["--signals-to-handle=SIGTERM,SIGUSR", "'SIGUSR'", "SIGUSR1"],
        ),
        ("--embedded-etcd --signals-to-handle SIGKILL train.py", ["'SIGKILL' is not a signal"]),
        ("--embedded-etcd --rdzv-conf lease=3 train.py", ["lease", "lease_s"]),
        ("--embedded-etcd --rdzv-conf lease_s=1e9 train.py", ["lease_s"]),
        ("--embedded-etcd --rdzv-conf lease_s train.py", ["--rdzv-conf=lease_s", "KEY=VALUE"]),
        ("--embedded-etcd --rdzv-conf profile=x train.py", ["profile"]),
        ("--embedded-etcd --rdzv-id a/b train.py", ["'a/b'"]),
        (f"--embedded-etcd --rdzv-id {'a' * 300} train.py", ["longer than 246 bytes"]),
        ("--rdzv-endpoint h:x train.py", ["h:x"]),
    ],
)
def test_usage_errors_name_the_value_and_the_remedy(line: str, named: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        run.parse(line.split())
    assert all(part in str(error.value) for part in named), str(error.value)
    assert error.value.hint


def test_a_usage_error_exits_with_2_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "train.py"]) == 2
    error_output = capsys.readouterr().err
    assert error_output.startswith("elastic: no etcd") and "Traceback" not in error_output


def test_the_most_local_nodes_follow_from_the_memory() -> None:
    args = run.parse(["--embedded-etcd", "--nproc-per-node", "3", "train.py"])
    assert run.most_local_nodes(args, memory_bytes=4 << 30) == 5
    assert run.most_local_nodes(args, memory_bytes=1) == 1


def test_a_wrong_variable_is_not_blamed_on_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "two")
    monkeypatch.setenv("PET_MONITOR_INTERVAL", "soon")
    with pytest.raises(ConfigError, match="PET_MONITOR_INTERVAL=soon in the environment"):
        run.parse(["--embedded-etcd", "train.py"])
    with pytest.raises(ConfigError, match="PET_NNODES=two in the environment"):
        run.parse(["--embedded-etcd", "--monitor_interval=1", "train.py"])
    with pytest.raises(ConfigError) as given:
        run.parse(["--embedded-etcd", "--monitor-interval=1", "--nnodes=three", "train.py"])
    assert "PET_NNODES" not in str(given.value)


@pytest.mark.parametrize("flag", ["--redirects=5", "--logs-specs=nope"])
def test_a_value_that_torch_refuses_is_a_usage_error(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--rdzv-endpoint=127.0.0.1:1", flag, "train.py"]) == 2
    written = capsys.readouterr().err
    assert "torchrun refuses the value of a flag" in written and "Traceback" not in written


def test_a_handler_of_events_that_torch_does_not_have_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["run", "--rdzv-endpoint=127.0.0.1:1", "train.py"]
    assert main([*command[:1], "--event-log-handler=zz", *command[1:]]) == 2
    assert "\nelastic: --event-log-handler=zz names no handler" in capsys.readouterr().err
    monkeypatch.setenv("PET_EVENT_LOG_HANDLER", "zz")
    assert main(command) == 2
    written = capsys.readouterr().err
    assert "\nelastic: PET_EVENT_LOG_HANDLER=zz names no handler" in written
    assert "Traceback" not in written


def test_signals_to_handle_stop_local_nodes_too() -> None:
    args = run.parse(["--embedded-etcd", "--signals-to-handle= SIGUSR1,,SIGTERM", __file__])
    assert signals_to_handle(args.signals_to_handle) == {signal.SIGUSR1, signal.SIGTERM}


def test_a_variable_that_torch_refuses_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "many")
    assert main(["run", "--rdzv-endpoint=127.0.0.1:1", "train.py"]) == 2
    assert "the environment has PET_NPROC_PER_NODE=many" in capsys.readouterr().err


# Local nodes ------------------------------------------------------------------------------------

# Starts a child in a session of its own, as torchrun does, and prints its process ID.
PARENT_WITH_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-IS", "-c", "import time; time.sleep(600)"],
                         start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


class Lines:
    """Collects the output of nodes."""

    def __init__(self) -> None:
        self.all: list[tuple[str, str, str]] = []

    def __call__(self, node: str, stream: str, line: str) -> None:
        self.all.append((node, stream, line))


def pump_until(nodes: LocalNodes, condition: Callable[[], bool]) -> None:
    def holds() -> bool:
        nodes.pump(0.05)
        return condition()

    eventually(holds)


def is_alive(pid: int) -> bool:
    return bool(run.tree(pid))


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
def nodes(lines: Lines) -> Iterator[LocalNodes]:
    with LocalNodes(lines) as nodes:
        yield nodes


def python(code: str) -> list[str]:
    return [sys.executable, "-IS", "-c", code]


def test_complete_lines_arrive_with_node_and_stream(nodes: LocalNodes, lines: Lines) -> None:
    code = "import sys; print('out'); print('no end', end='', file=sys.stderr)"
    nodes.start("a", python(code), os.environ)
    code = "import os; print('b1\\n' + os.environ['MARK'])"
    nodes.start("b", python(code), {**os.environ, "MARK": "b2"})
    pump_until(nodes, lambda: not nodes.running)
    nodes.drain()
    assert sorted(lines.all) == [
        ("a", "stderr", "no end"),
        ("a", "stdout", "out"),
        ("b", "stdout", "b1"),
        ("b", "stdout", "b2"),
    ]
    assert [node.exit_code for node in nodes.nodes] == [0, 0]


def test_a_progress_bar_is_printed_now_and_then_and_at_its_end() -> None:
    lines = OutputLines()
    assert lines.feed(b"\r 1%", 0) == []
    assert lines.feed(b"\r 2%\r 3%", 0.1) == [" 2%"]
    assert lines.feed(b"\r 4%\r 5%", BAR_S) == []
    assert lines.feed(b"\r 6%\r", 0.1 + BAR_S) == [" 5%"]
    assert lines.feed(b"100%\r", 0.2 + BAR_S) == []
    assert lines.feed(b"\nnext\r\n", 0.2 + BAR_S) == ["100%", "next"]
    assert lines.feed(b"no \xff end", 100) == [] and lines.end() == ["no \ufffd end"]
    assert lines.end() == []


def test_output_that_a_terminal_cannot_show_ends_no_node() -> None:
    script = (
        "from elastic.cli import main; from elastic.cli.run import _print_line as show; "
        "main.main(['completion', 'bash']); show('local-0', 'stdout', 'bar: \u2588')"
    )
    for encoding in ("ascii", "latin-1"):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONIOENCODING": encoding},
            capture_output=True,
            check=True,
        )
        assert done.stdout.splitlines()[-1] == b"[local-0] bar: \\u2588"


def test_killing_a_node_ends_its_workers_in_their_own_sessions(
    nodes: LocalNodes, lines: Lines
) -> None:
    node = nodes.start("a", python(PARENT_WITH_CHILD), os.environ)
    pump_until(nodes, lambda: bool(lines.all))
    child = int(lines.all[0][2])
    assert is_alive(child)
    nodes.kill(node)
    assert node.exit_code == -signal.SIGKILL
    eventually(lambda: not is_alive(child))


def test_leaving_the_block_kills_running_nodes(lines: Lines) -> None:
    with LocalNodes(lines) as nodes:
        node = nodes.start("a", python("import time; time.sleep(600)"), os.environ)
        assert node.exit_code is None
    assert node.exit_code == -signal.SIGKILL


def test_a_signal_reaches_every_running_agent(nodes: LocalNodes) -> None:
    for name in ("a", "b"):
        nodes.start(name, python("import time; time.sleep(600)"), os.environ)
    nodes.signal(signal.SIGTERM)
    pump_until(nodes, lambda: not nodes.running)
    assert {node.exit_code for node in nodes.nodes} == {-signal.SIGTERM}


def test_a_node_ends_when_its_launcher_is_killed(tmp_path: Path) -> None:
    launcher = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-IS",
                          {str(bound_to_parent.__file__)!r}, str(os.getpid()),
                          sys.executable, "-IS", "-c",
                          "import os, time; print(os.getpid(), flush=True); time.sleep(600)"])
time.sleep(600)
"""
    parent = subprocess.Popen(python(launcher), stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        child = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        eventually(lambda: not is_alive(child))


def test_a_command_bound_to_a_dead_parent_does_not_start() -> None:
    dead_pid = 2**22  # above every pid_max
    done = subprocess.run(
        [sys.executable, "-IS", str(bound_to_parent.__file__), str(dead_pid), "echo", "started"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and done.stdout == ""


def test_a_signal_requests_a_stop_and_a_second_one_is_urgent() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored under nohup
    try:
        with stop_on_signals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)  # as under nohup
            seen = [(stop.signum, stop.urgent)]
            for signum in (signal.SIGTERM, signal.SIGINT):
                os.kill(os.getpid(), signum)
                seen.append((stop.signum, stop.urgent))
        assert seen == [(None, False), (signal.SIGTERM, False), (signal.SIGTERM, True)]
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
        signal.signal(signal.SIGINT, interrupt)


def test_silence_at_the_start_is_explained_once_for_agents_and_once_for_workers() -> None:
    clock = ManualClock()
    start = run.SlowStart(clock)
    log = "2026-01-31T12:00:00.123Z INFO    [local-0 g1]"
    said: list[str] = []

    def wait(seconds: float) -> None:
        clock.sleep(seconds)
        said.append(start.late().partition(":")[0])

    wait(run.CLI_SLOW_START_S - 1)
    wait(2)
    wait(100)
    start.on_line("local-0", f"{log} world-entered generation=1")
    wait(run.CLI_SLOW_START_S)
    start.on_line("local-0", f"{log} node-arrived")  # no worker has written yet
    wait(100)
    assert said == [
        "",
        "the agents have printed nothing for 16 s",
        "",
        "the workers have printed nothing for 15 s",
        "",
    ]


def test_silence_of_a_script_that_runs_is_not_explained() -> None:
    clock = ManualClock()
    start = run.SlowStart(clock)
    start.on_line("local-0", "2026-01-31T12:00:00Z INFO [local-0] world-entered generation=1")
    start.on_line("local-0", "epoch 1")
    clock.sleep(1000)
    assert start.late() == ""


def test_the_error_that_ends_all_nodes_is_said_once(tmp_path: Path) -> None:
    errors = run.LastErrors(tmp_path)
    for node in ("a", "b"):
        page = f"the job has failed\n(this page is /tmp/{node}.txt)"
        errors.record(node, ElasticError(page))
    errors.record("c", ElasticError("the node is unfit"))
    assert errors.of("b") == "the job has failed\n(this page is /tmp/b.txt)"
    assert errors.of("a") == "the same as b"
    assert errors.of("c") == "the node is unfit"
    assert errors.of("killed") == ""


def test_the_remedy_is_the_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = run.LastErrors(tmp_path)
    errors.record("a", ElasticError("the job has failed", hint="call run.track"))
    assert errors.of("a") == "the job has failed\n  call run.track"
    monkeypatch.setattr(run, "run_local", lambda _: (1, errors.remedy))
    monkeypatch.setattr(run, "is_known", lambda _: True)
    assert run.main(["--nodes-local=1", "--rdzv-endpoint=127.0.0.1:1", __file__]) == 1
    *_, end, last = capsys.readouterr().err.splitlines()
    assert end.startswith("elastic: exit code 1; what it wrote: ")
    assert last == "elastic: call run.track"


def test_the_end_of_the_last_node_is_said_although_nothing_runs_any_more(
    nodes: LocalNodes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = run.LastErrors(tmp_path)
    errors.record("a", ElasticError("the job has failed"))
    nodes.start("a", python("raise SystemExit(1)"), os.environ)
    pump_until(nodes, lambda: not nodes.running)
    run.follow(nodes, run.StopRequest(), 0, run.SlowStart(ManualClock()), errors)
    assert "a ended with exit code 1: the job has failed" in capsys.readouterr().err


def test_no_more_nodes_start_after_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def start(nodes: LocalNodes, name: str, *_: object) -> None:
        started.append(name)
        if len(started) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(LocalNodes, "start", start)
    args = ["--embedded-etcd", "--nodes-local", "8", "--nnodes", "1:8", __file__]
    run.run_local(run.parse(args))
    assert started == ["local-0", "local-1"]


def test_the_tree_of_a_dead_process_is_empty() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert run.tree(process.pid) == ()
