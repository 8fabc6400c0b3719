"""An S3 on loopback: moto's, with a switch for the failures that a real one has."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.request import Request, urlopen

from werkzeug.serving import WSGIRequestHandler, make_server

KEYS = {"key": "loopback", "secret": "loopback"}
_SLOW_DOWN = b"<Error><Code>InternalError</Code><Message>We failed. Try again.</Message></Error>"

StartResponse = Callable[[str, list[tuple[str, str]]], object]


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        pass


class S3Server:
    """Buckets are made by :meth:`bucket`; with ``fails`` set, requests for which it is true
    are answered with a 500. ``requests`` are methods and paths so far."""

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app  # a second

        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server(
            "127.0.0.1", 0, self._answer, threaded=True, request_handler=_Quiet
        )
        self._thread = threading.Thread(target=self._server.serve_forever, name="s3-server")
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.requests: list[str] = []
        self.fails: Callable[[int, str], bool] = lambda count, request: False

    def bucket(self, name: str) -> str:
        request = Request(f"{self.url}/{name}", method="PUT")
        request.add_header("Authorization", "AWS4-HMAC-SHA256 Credential=loopback/1/us-east-1/s3/x")
        with urlopen(request, timeout=120):
            return name

    @property
    def options(self) -> dict[str, str]:
        """What fsspec's driver has to be told."""
        return {"endpoint_url": self.url, **KEYS}

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, environ: dict[str, Any], start: StartResponse) -> Iterable[bytes]:
        request = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ['QUERY_STRING']}"
        self.requests.append(request)
        if self.fails(len(self.requests), request):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start("500 Internal Server Error", [("Content-Type", "application/xml")])
            return [_SLOW_DOWN]
        return self._app(environ, start)  # type: ignore[no-any-return]


@contextmanager
def s3_server() -> Iterator[S3Server]:
    server = S3Server()
    try:
        yield server
    finally:
        server.close()
