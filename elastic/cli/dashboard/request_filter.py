"""Filters requests before the application: methods, hosts and tokens of requests, and response
headers."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from elastic.cli.dashboard.access import AccessPolicy, AccessVerdict

_METHODS = ("GET", "HEAD")
_LONGEST_QUERY = 2048


class RequestFilter:
    """ASGI middleware. ``content_policy``: the Content-Security-Policy of every answer."""

    def __init__(self, app: ASGIApp, policy: AccessPolicy, content_policy: str) -> None:
        self._app = app
        self._policy = policy
        self._headers: Mapping[str, str] = {
            "Content-Security-Policy": content_policy,
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cache-Control": "no-store",
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # "lifespan"; there are no web sockets
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self._headers.items():
                    headers[name] = value
            await send(message)

        answer = self._refusal(Request(scope))
        await (answer or self._app)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        """The response that replaces the application's, or None."""
        if request.method not in _METHODS:
            return PlainTextResponse(
                "this page is read-only: GET and HEAD only\n",
                status_code=405,
                headers={"Allow": ", ".join(_METHODS)},
            )
        if len(request.scope["query_string"]) > _LONGEST_QUERY:
            return PlainTextResponse("the query is too long\n", status_code=414)
        return self._answer(self._verdict(request))

    def _verdict(self, request: Request) -> AccessVerdict:
        headers: Headers = request.headers
        return self._policy.judge(
            host=headers.get("host", ""),
            path=request.url.path,
            authorization=headers.get("authorization", ""),
            cookie=request.cookies.get(self._policy.cookie, ""),
            query_token=request.query_params.get("token", ""),
        )

    def _answer(self, verdict: AccessVerdict) -> Response | None:
        match verdict:
            case AccessVerdict.ALLOWED:
                return None
            case AccessVerdict.WRONG_HOST:
                return PlainTextResponse(
                    "the dashboard does not serve this host name: use localhost, or start it with "
                    "--allowed-host NAME\n",
                    status_code=421,
                )
            case AccessVerdict.TOKEN_IN_QUERY:
                answer = RedirectResponse(".", status_code=303)
                answer.set_cookie(
                    self._policy.cookie, self._policy.cookie_value, httponly=True, samesite="lax"
                )
                return answer
            case AccessVerdict.NO_TOKEN:
                return PlainTextResponse(
                    "the dashboard requires its token: open /?token=TOKEN once in this browser, or "
                    "send Authorization: Bearer TOKEN\n",
                    status_code=401,
                    headers={"WWW-Authenticate": 'Bearer realm="elastic dashboard"'},
                )
