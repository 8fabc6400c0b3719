"""The scale of one StatefulSet, through the API server, from inside a pod.

Uses the standard library and tenacity, not a Kubernetes client: it is one PATCH, and the client
on PyPI has thirty dependencies. A pod's credentials are documented at kubernetes.io ("Accessing the
Kubernetes API from a Pod"): two variables, a rotated token, and the CA's certificate.
"""

from __future__ import annotations

import http.client
import json
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import tenacity

from elastic.errors import SYSTEM_CLOCK, Clock, ClusterRefused, ClusterUnreachable, ConfigError
from elastic.tuning.intervals import (
    CLUSTER_BACKOFF_CAP_S,
    CLUSTER_FIRST_BACKOFF_S,
)

# One call to Kubernetes' API server.
CLUSTER_CALL_S = 10.0
# How long requests to the API server are retried: longer than its unavailability during an upgrade
# of the control plane.
CLUSTER_PATIENCE_S = 600.0

CREDENTIALS = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# The token was rotated; a conflicting change; too many requests; temporarily unavailable.
_RETRYABLE = {401, 409, 429, 500, 502, 503, 504}
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class ApiServer:
    """The API server's address, and this pod's credentials."""

    host: str
    port: int
    credentials: Path = CREDENTIALS

    @staticmethod
    def of_pod(environ: Mapping[str, str], credentials: Path = CREDENTIALS) -> ApiServer:
        """Read a pod's environment. Raises ConfigError outside of a pod or without a token."""
        host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
        if not host or not port or not port.isdecimal():
            raise ConfigError(
                f"KUBERNETES_SERVICE_HOST={host or ''} and KUBERNETES_SERVICE_PORT={port or ''} "
                "name no API server",
                hint="run this in a pod of the cluster",
            )
        for name in ("token", "ca.crt"):
            if not (credentials / name).is_file():
                raise ConfigError(
                    f"{credentials / name} does not exist",
                    hint="give the pod a service account, and automountServiceAccountToken: true",
                )
        return ApiServer(host=host, port=int(port), credentials=credentials)

    def own_namespace(self) -> str:
        """The pod's namespace. Raises ConfigError if its file cannot be read."""
        file = self.credentials / "namespace"
        try:
            return file.read_text().strip()
        except OSError as error:
            raise ConfigError(
                f"{file} cannot be read: {error.strerror}", hint="give --namespace"
            ) from None


class _TryAgain(Exception):
    """A failure that may succeed when retried."""


def scale_statefulset(
    server: ApiServer,
    *,
    namespace: str,
    name: str,
    replicas: int,
    say: Callable[[str], None],
    clock: Clock = SYSTEM_CLOCK,
    dry_run: bool = False,
) -> None:
    """Set the replicas of one StatefulSet; retries for up to ten minutes where that may help.

    With ``dry_run`` the API server does everything except store the result: authentication,
    authorization, admission, and a check that the StatefulSet exists (kubernetes.io, API Concepts,
    Dry-run: it needs the same permissions as the request itself).

    Raises:
        ConfigError: not a valid Kubernetes name.
        ClusterRefused: the API server denied the request.
        ClusterUnreachable: the request did not succeed within ten minutes.
    """
    for what, given in (("namespace", namespace), ("statefulset", name)):
        if not _NAME.fullmatch(given):
            raise ConfigError(
                f"{what} {given!r} is not a valid Kubernetes name",
                hint="use lower case letters, digits, '-' and '.'",
            )
    path = f"/apis/apps/v1/namespaces/{namespace}/statefulsets/{name}/scale"
    if dry_run:
        path += "?dryRun=All"
    body = json.dumps({"spec": {"replicas": replicas}}).encode()
    began_s = clock.monotonic()

    def report_retry(state: tenacity.RetryCallState) -> None:
        assert state.outcome is not None
        say(f"{state.outcome.exception()}; trying again in {state.upcoming_sleep:.1f} s")

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(_TryAgain),
        stop=lambda state: clock.monotonic() - began_s > CLUSTER_PATIENCE_S,
        wait=tenacity.wait_random_exponential(
            multiplier=CLUSTER_FIRST_BACKOFF_S, max=CLUSTER_BACKOFF_CAP_S
        ),
        before_sleep=report_retry,
        sleep=clock.sleep,
        reraise=True,
    )
    try:
        retrying(_patch, server, path, body)
    except _TryAgain as error:
        hint = f"kubectl scale statefulset/{name} -n {namespace} --replicas={replicas}"
        if dry_run:
            hint = "check the network policies: this pod must reach the API server"
        raise ClusterUnreachable(
            f"the API server did not set {path} within {CLUSTER_PATIENCE_S:g} s: {error}", hint=hint
        ) from error


def _patch(server: ApiServer, path: str, body: bytes) -> None:
    status, answer = _send(server, path, body)
    where = f"https://{server.host}:{server.port}{path}"
    problem = f"{status} {_message(answer)}"
    if status == 200:
        return
    if status in _RETRYABLE:
        raise _TryAgain(f"{where}: {problem}")
    hints = {
        403: "grant the pod's service account `patch` on statefulsets/scale of that name",
        404: "check --statefulset and --namespace; it may already have been deleted",
    }
    raise ClusterRefused(f"{where}: {problem}", hint=hints.get(status, ""))


def _send(server: ApiServer, path: str, body: bytes) -> tuple[int, bytes]:
    # Read again for each attempt: the kubelet replaces both files while the pod runs.
    try:
        token = (server.credentials / "token").read_text().strip()
        context = ssl.create_default_context(cafile=str(server.credentials / "ca.crt"))
        # Enabled from Python 3.13, and many clusters' CAs lack an extension that it requires
        # (kubernetes-client/python#2394).
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    except (OSError, ssl.SSLError) as error:
        raise _TryAgain(f"{server.credentials}: {error}") from error
    connection = http.client.HTTPSConnection(
        server.host, server.port, timeout=CLUSTER_CALL_S, context=context
    )
    headers = {
        "Authorization": f"Bearer {token}",
        "Content-Type": "application/merge-patch+json",
        "Accept": "application/json",
        "User-Agent": "elastic-finish",
    }
    try:
        connection.request("PATCH", path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read(65536)
    except ssl.SSLCertVerificationError as error:
        raise ClusterRefused(
            f"the certificate of https://{server.host}:{server.port} cannot be verified with "
            f"{server.credentials / 'ca.crt'}: {error.verify_message}",
            hint="check KUBERNETES_SERVICE_HOST, and the mounted service account",
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise _TryAgain(
            f"https://{server.host}:{server.port}: {error or type(error).__name__}"
        ) from error
    finally:
        connection.close()


def _message(answer: bytes) -> str:
    """The message of a Status object, else the raw body."""
    try:
        status = json.loads(answer)
    except ValueError:
        status = None
    text = status.get("message", "") if isinstance(status, dict) else ""
    return str(text) or answer[:200].decode(errors="replace")
