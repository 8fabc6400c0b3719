"""An OpenTelemetry collector on loopback: it takes metrics by OTLP over HTTP, and keeps them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)


class OtlpRequest(NamedTuple):
    """One that an agent has sent."""

    path: str
    key: str  # the header x-key
    metrics: ExportMetricsServiceRequest


class OtlpCollector:
    """Answers every request with ``status``."""

    def __init__(self) -> None:
        self.requests: queue.Queue[OtlpRequest] = queue.Queue()
        self.status = 200
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                request = ExportMetricsServiceRequest.FromString(body)
                key = self.headers.get("x-key", "")
                collector.requests.put(OtlpRequest(self.path, key, request))
                self.send_response(collector.status)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="collector")
        self._thread.start()

    def taken(self) -> list[OtlpRequest]:
        """What has come since the last call."""
        found = []
        while not self.requests.empty():
            found.append(self.requests.get())
        return found

    def close(self) -> None:
        """End the server. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def attributes_of(pairs: Iterable[Any]) -> dict[str, str]:
    """Of a resource, or of a point."""
    return {pair.key: pair.value.string_value for pair in pairs}


def families_of(request: ExportMetricsServiceRequest) -> dict[str, Any]:
    """The metrics of a request, by name."""
    (resource,) = request.resource_metrics
    (scope,) = resource.scope_metrics
    return {metric.name: metric for metric in scope.metrics}
