"""An API server that knows one thing, the scale of StatefulSets: TLS, tokens, and faults to order.

What it checks and answers is what kube-apiserver 1.36 does with the same request.
"""

from __future__ import annotations

import json
import re
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType

from etcd_certificates import Authority

TOKEN = "eyJhbGciOiJSUzI1NiJ9.the-finisher.s"
NAMESPACE = "training"
DROP = 0  # as a fault: the connection ends without an answer
_SCALE = re.compile(r"/apis/apps/v1/namespaces/([^/?]+)/statefulsets/([^/?]+)/scale(\?dryRun=All)?")


@dataclass
class FakeApiServer:
    """``with FakeApiServer(folder) as api``: then ``api.environ`` and ``api.credentials`` are what
    a pod's own are. ``scales`` holds the replicas of what exists; ``faults`` are answered first,
    one each; ``on_scale`` hears of every change. ``dry_runs`` counts what was only tried."""

    folder: Path
    scales: dict[tuple[str, str], int] = field(default_factory=dict)
    faults: list[int] = field(default_factory=list)
    may: frozenset[str] = frozenset({"workers"})  # by name, as a Role's resourceNames
    on_scale: Callable[[str, int], None] = lambda name, replicas: None
    token: str = TOKEN
    requests: int = 0
    dry_runs: int = 0

    def __post_init__(self) -> None:
        authority = Authority(self.folder, "cluster")
        pair = authority.issue("kube-apiserver")
        self.credentials = self.folder / "serviceaccount"
        self.credentials.mkdir()
        (self.credentials / "ca.crt").write_bytes(Path(authority.cacert).read_bytes())
        (self.credentials / "token").write_text(self.token + "\n")
        (self.credentials / "namespace").write_text(NAMESPACE)
        fake = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 10

            def do_PATCH(self) -> None:
                fake.patch(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pair.cert, pair.key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        # A handshake that the client breaks off is one of the tests.
        self._server.handle_error = lambda request, client_address: None  # type: ignore[method-assign]
        self._thread = threading.Thread(
            target=lambda: self._server.serve_forever(poll_interval=0.02), name="fake-api-server"
        )

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def environ(self) -> dict[str, str]:
        """Of a pod in this cluster."""
        return {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(self.port)}

    def __enter__(self) -> FakeApiServer:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def patch(self, request: BaseHTTPRequestHandler) -> None:
        self.requests += 1
        body = request.rfile.read(int(request.headers.get("Content-Length", "0")))
        if self.faults:
            fault = self.faults.pop(0)
            if fault != DROP:
                _answer(request, fault, {"message": f"told to answer {fault}"})
            return
        status, answer = self._scale(request, body)
        _answer(request, status, answer)

    def _scale(self, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, dict[str, object]]:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return 401, {"message": "Unauthorized"}
        if request.headers.get("Content-Type") != "application/merge-patch+json":
            return 415, {"message": "the body of the request was in an unknown format"}
        match = _SCALE.fullmatch(request.path)
        if match is None:
            return 404, {"message": "the server could not find the requested resource"}
        namespace, name, dry_run = match.groups()
        if namespace != NAMESPACE or name not in self.may:
            return 403, {"message": f'statefulsets.apps "{name}" is forbidden'}
        if (namespace, name) not in self.scales:
            return 404, {"message": f'statefulsets.apps "{name}" not found'}
        replicas = json.loads(body)["spec"]["replicas"]
        if dry_run:
            self.dry_runs += 1
        else:
            self.scales[namespace, name] = replicas
            self.on_scale(name, replicas)
        return 200, {"kind": "Scale", "spec": {"replicas": replicas}}


def _answer(request: BaseHTTPRequestHandler, status: int, answer: dict[str, object]) -> None:
    body = json.dumps(answer).encode()
    request.send_response(status)
    request.send_header("Content-Type", "application/json")
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    request.wfile.write(body)
