"""The flags that name a job and its etcd: the same in every command, with torchrun's defaults."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

import pytest

from elastic.cli import doctor, env, finish
from elastic.cli.arguments import add_job_arguments, endpoint_of, options_of, run_id_of
from elastic.cli.main import main
from elastic.errors import ConfigError

ENVIRON = {
    "PET_RDZV_ENDPOINT": "etcd:2379",
    "PET_RDZV_ID": "job-1",
    "PET_RDZV_CONF": "prefix=/ours,mode=restart",
}
ParserOf = Callable[[Mapping[str, str]], argparse.ArgumentParser]


def parsed(*flags: str, environ: Mapping[str, str] = ENVIRON) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_job_arguments(parser, environ)
    return parser.parse_args(flags)


def test_the_defaults_are_torchruns_variables() -> None:
    args = parsed()
    assert (endpoint_of(args), run_id_of(args)) == ("etcd:2379", "job-1")
    options = options_of(args, {})
    assert (options.prefix, options.mode) == ("/ours", "restart")


def test_a_flag_takes_precedence_over_its_variable() -> None:
    args = parsed("--endpoint=other:1", "--run-id=j", "--conf= user = u , password_file=p,")
    assert (endpoint_of(args), run_id_of(args)) == ("other:1", "j")
    assert options_of(args, {"ELASTIC_PREFIX": "/theirs"}).prefix == "/theirs"
    assert options_of(args, {}).user == "u"


def test_missing_and_malformed_values_name_the_flag_and_the_variable() -> None:
    nothing = parsed(environ={})
    with pytest.raises(ConfigError, match="neither --rdzv-endpoint nor PET_RDZV_ENDPOINT"):
        endpoint_of(nothing)
    with pytest.raises(ConfigError, match="neither --rdzv-id nor PET_RDZV_ID"):
        run_id_of(nothing)
    assert options_of(nothing, {}).prefix == options_of(parsed("--rdzv-conf=,"), {}).prefix
    for text in ("prefix", "prefix=", "=/ours"):
        with pytest.raises(ConfigError, match="is not KEY=VALUE"):
            options_of(parsed(f"--rdzv-conf={text}"), {})


@pytest.mark.parametrize(
    ("parser", "flags"),
    [(doctor.parser, []), (finish.parser, ["--statefulset=workers"]), (env.parser, [])],
)
def test_every_command_reads_the_same_variables(parser: ParserOf, flags: list[str]) -> None:
    args = parser(ENVIRON).parse_args(flags)
    assert options_of(args, {}).prefix == "/ours"
    if parser is not env.parser:
        assert (endpoint_of(args), run_id_of(args)) == ("etcd:2379", "job-1")


def test_elastic_env_uses_the_options_of_its_pod(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PET_RDZV_CONF", "profile=infinband")
    assert main(["env"]) == 2
    assert "infiniband" in capsys.readouterr().err
