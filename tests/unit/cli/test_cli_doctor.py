"""``elastic doctor``: its command line, its tables and its exit code."""

from __future__ import annotations

import json

import pytest
from kit.cpu_time import least_cpu_s

from elastic.cli import doctor
from elastic.cli.doctor import ExaminationPlan, Report
from elastic.cli.main import main
from elastic.doctor.checks import Finding, Status, failed, ok, skipped, warning
from elastic.testing.slowness import is_within

REPORT = Report(
    findings=(
        ok("etcd e:2379", "answers, version 3.5.9"),
        warning("open files limit", "1024", "ulimit -n 65536"),
        skipped("GPU", "no GPU"),
    ),
    speeds=({"backend": "gloo", "peer": 1, "size_bytes": 4096, "torch_ms": 0.05, "raw_ms": 0.01},),
    nodes=("a",),
)


def report_of(monkeypatch: pytest.MonkeyPatch, report: Report) -> list[ExaminationPlan]:
    """Make every examination return this report; return the requested plans."""
    plans: list[ExaminationPlan] = []

    def examine(plan: ExaminationPlan, say: object) -> Report:
        plans.append(plan)
        return report

    monkeypatch.setattr(doctor, "examine", examine)
    return plans


def test_json_is_one_document_and_warnings_exit_with_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report_of(monkeypatch, REPORT)
    assert main(["doctor", "-o", "json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["healthy"] is True and output["nodes"] == ["a"]
    assert output["findings"][1] == {
        "name": "open files limit",
        "status": "warning",
        "measured": "1024",
        "remedy": "ulimit -n 65536",
        "node": "",
    }
    assert output["speeds"][0]["size_bytes"] == 4096


def test_a_failure_exits_with_1_and_the_table_shows_its_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    bad = failed("etcd [1]", "refused [red]", "start it")
    report_of(monkeypatch, Report(findings=(*REPORT.findings, bad), speeds=REPORT.speeds))
    assert main(["doctor"]) == 1
    output = capsys.readouterr().out
    assert "etcd [1]" in output and "refused [red]" in output and "→ start it" in output
    assert "0.050 ms, 0.082 GB/s" in output
    assert "1 ok, 1 warning, 1 failed, 1 skipped: NOT healthy" in output


def test_equal_findings_of_several_nodes_share_a_row() -> None:
    def on(node: str, status: Status, measured: str = "1500") -> Finding:
        return Finding(name="MTU", status=status, measured=measured, remedy="r", node=node)

    rows = doctor.folded(
        [
            on("a", Status.OK),
            on("b", Status.WARNING),
            on("c", Status.OK, "9000"),
            on("d", Status.WARNING),
            on("e", Status.WARNING, "900"),
            ok("equal torch", "2"),
        ]
    )
    assert [(r.name, r.status, r.node) for r in rows] == [
        ("MTU", Status.OK, "a +1"),
        ("MTU", Status.WARNING, "b, d"),
        ("MTU", Status.WARNING, "e"),
        ("equal torch", Status.OK, ""),
    ]


def test_flags_and_environment_variables_define_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = report_of(monkeypatch, REPORT)
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "etcd:2379")
    monkeypatch.setenv("ELASTIC_PREFIX", "/mine")
    monkeypatch.setenv("ELASTIC_NODE_NAME", "node-7")
    main(
        [
            "doctor",
            "--nnodes=4",
            "--rdzv-id=j",
            "--ports=29500,1",
            "--rdzv-conf=user=u,password_file=p",
        ]
    )
    main(["doctor", "--nproc-per-node=3", "--local", "--checkpoints=/c", "--deadline=7"])
    several, one = plans
    assert (several.endpoint, several.run_id, several.nnodes, several.nproc) == (
        "etcd:2379", "j", 4, 1,
    )  # fmt: skip
    assert several.ports == (29500, 1) and several.name == "node-7"
    assert (several.options.user, several.options.prefix) == ("u", "/mine")
    assert (one.nproc, one.only_local, one.folder, one.deadline_s) == (3, True, "/c", 7.0)
    main(["doctor"])
    assert plans[-1].nproc == 2  # useful on a laptop


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--nnodes=2", "--rdzv-id=j"], "--rdzv-endpoint"),
        (["--nnodes=2", "--rdzv-endpoint=e:2379"], "--rdzv-id"),
        (["--nnodes=0"], "0 is less than 1"),
        (["--deadline=0"], "0 is not greater than zero"),
        (["--deadline=nan"], "nan is not greater than zero"),
        (["--ports=29500,x"], "'x' is not a valid port"),
        (["--ports=70000"], "'70000' is not a valid port"),
        (["--rdzv-conf=prefix"], "'prefix' is not KEY=VALUE"),
        (["--rdzv-conf=prefx=/a"], "prefix"),
        (["--rdzv-endpoint=:::"], "etcd endpoint"),
        (["--rdzv-conf=prefix=a"], "must start with '/'"),
        (["--nodes=2"], "unknown flag --nodes, did you mean '--nnodes'?"),
    ],
)
def test_invalid_arguments_are_usage_errors(
    flags: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PET_RDZV_ENDPOINT", raising=False)
    assert main(["doctor", *flags]) == 2
    out = capsys.readouterr()
    assert text in out.err and out.out == ""


def test_help_takes_less_than_0_3_s_and_imports_neither_torch_nor_grpc() -> None:
    code = (
        "import sys, time, elastic.cli.main as m\n"
        "try: m.main(['doctor', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'grpc', 'rich', 'numpy'} & set(sys.modules)\n"
        "print(sorted(heavy), time.process_time())\n"
    )
    took_s, heavy = least_cpu_s(code, enough_s=0.3)
    assert heavy == "[]"
    assert is_within(took_s, 0.3)
