"""The arguments that name a job and its etcd, for every command that needs them.

They are torchrun's (``--rdzv-endpoint``, ``--rdzv-id``, ``--rdzv-conf``), with torchrun's defaults
(``PET_RDZV_*``), which are already set inside a pod of the job.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping

from elastic.errors import ConfigError
from elastic.tuning.agent_options import AgentOptions
from elastic.tuning.option_sources import read_options


def add_job_arguments(
    parser: argparse.ArgumentParser, environ: Mapping[str, str] = os.environ
) -> None:
    """``--rdzv-endpoint``, ``--rdzv-id`` and ``--rdzv-conf``."""
    parser.add_argument(
        "--rdzv-endpoint",
        "--endpoint",
        default=environ.get("PET_RDZV_ENDPOINT"),
        metavar="HOST:PORT",
        help="etcd's endpoint, in torchrun's format (default: PET_RDZV_ENDPOINT)",
    )
    parser.add_argument(
        "--rdzv-id",
        "--run-id",
        default=environ.get("PET_RDZV_ID"),
        metavar="NAME",
        help="the job's run id (default: PET_RDZV_ID)",
    )
    add_options_argument(parser, environ)


def add_options_argument(
    parser: argparse.ArgumentParser, environ: Mapping[str, str] = os.environ
) -> None:
    """Add only ``--rdzv-conf``, for a command that does not connect to etcd."""
    parser.add_argument(
        "--rdzv-conf",
        "--conf",
        default=environ.get("PET_RDZV_CONF", ""),
        metavar="KEY=VALUE,...",
        help="the agents' options, in torchrun's format: prefix, user, cacert, profile, mode, ... "
        "(default: PET_RDZV_CONF)",
    )


def options_of(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> AgentOptions:
    """The options of the job's agents: ``--rdzv-conf``, else ``ELASTIC_*``. Raises ConfigError."""
    return read_options(_pairs(args.rdzv_conf), environ)


def endpoint_of(args: argparse.Namespace) -> str:
    """etcd's endpoint. Raises ConfigError if none is given."""
    return _required(args.rdzv_endpoint, "--rdzv-endpoint", "PET_RDZV_ENDPOINT")


def run_id_of(args: argparse.Namespace) -> str:
    """The job's run id. Raises ConfigError if none is given."""
    return _required(args.rdzv_id, "--rdzv-id", "PET_RDZV_ID")


def _required(value: str | None, flag: str, variable: str) -> str:
    if not value:
        raise ConfigError(f"neither {flag} nor {variable} is given", hint=f"pass {flag}")
    return value


def _pairs(text: str) -> dict[str, str]:
    """torchrun's ``key=value,key=value``."""
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    for key, equals, value in pairs:
        if not (key.strip() and equals and value.strip()):
            raise ConfigError(
                f"--rdzv-conf={text}: {key!r} is not KEY=VALUE",
                hint="for example --rdzv-conf=prefix=/elastic,mode=restart",
            )
    return {key.strip(): value.strip() for key, _, value in pairs}
