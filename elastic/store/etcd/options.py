"""The etcd configuration in an agent's options: certificates, user, password file."""

from __future__ import annotations

from pathlib import Path

from elastic.errors import ConfigError
from elastic.store.etcd.endpoints import EtcdConfig, parse_endpoints
from elastic.tuning.agent_options import AgentOptions


def etcd_config(endpoint: str, options: AgentOptions) -> EtcdConfig:
    """The configuration of the store. ``endpoint`` is torchrun's: ``HOST:PORT`` or several.

    Raises:
        ConfigError: an endpoint is invalid, or the password file cannot be read.
    """
    return EtcdConfig(
        endpoints=parse_endpoints(endpoint),
        cacert=options.cacert,
        cert=options.cert,
        key=options.key,
        user=options.user,
        password=_password(options),
        connect_timeout_s=options.connect_timeout_s,
    )


def _password(options: AgentOptions) -> str | None:
    if options.password_file is None:
        return None
    try:
        return Path(options.password_file).read_text().rstrip("\r\n")
    except OSError as error:
        raise ConfigError(
            f"password_file={options.password_file} cannot be read: {error.strerror}",
            hint="name a file that holds the password and nothing else",
        ) from None
