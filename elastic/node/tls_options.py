"""TLS between nodes, from an agent's options."""

from __future__ import annotations

import os

from elastic.errors import ConfigError
from elastic.secure_channel.errors import CertificateError
from elastic.secure_channel.tls import Tls, TlsFiles
from elastic.telemetry.log import get_logger
from elastic.tuning.agent_options import AgentOptions


def node_tls(options: AgentOptions) -> Tls | None:
    """The TLS of this node's connections to others; None if it is not configured.

    Raises ConfigError for files that cannot be used.
    """
    if not (options.node_cacert and options.node_cert and options.node_key):
        return None  # none of them: AgentOptions takes all or none
    given = options.node_cacert, options.node_cert, options.node_key
    # Workers may have another working directory. (Links are kept: Kubernetes changes files by
    # replacing their targets.)
    try:
        return Tls(TlsFiles(*map(os.path.abspath, given)), report=get_logger().warning)
    except CertificateError as error:
        raise ConfigError(error.message, hint=error.remedy) from None
