"""``elastic run``'s command line: accepted flags, defaults and usage errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.cli import run
from elastic.cli.main import main
from elastic.errors import ConfigError


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


def test_generated_run_ids_are_unique() -> None:
    ids = {run.parse(["--embedded-etcd", "train.py"]).rdzv_id for _ in range(2)}
    assert len(ids) == 2


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
        ("--embedded-etcd --monitor-interval -1 train.py", ["--monitor-interval=-1"]),
        ("--embedded-etcd --nodes-local 1000000 train.py", ["memory of this machine"]),
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


@pytest.mark.parametrize("flag", ["--redirects=5", "--logs-specs=nope", "--rdzv-conf=lease_s"])
def test_a_value_that_torch_refuses_is_a_usage_error(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--rdzv-endpoint=127.0.0.1:1", flag, "train.py"]) == 2
    written = capsys.readouterr().err
    assert "torchrun refuses the value of a flag" in written and "Traceback" not in written


def test_a_variable_that_torch_refuses_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "many")
    assert main(["run", "--rdzv-endpoint=127.0.0.1:1", "train.py"]) == 2
    assert "the environment has PET_NPROC_PER_NODE=many" in capsys.readouterr().err
