"""Renders each snapshot once, for all clients, and wakes them.

``publish`` may be called on any thread; everything else runs on the event loop. A slow client
skips intermediate states and always gets the newest one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic.cli.dashboard.feed.snapshot import JobEvent, JobSnapshot
from elastic.cli.dashboard.page import PageTemplate, lasting, sections_of
from elastic.cli.dashboard.status_api import event_document, status_document
from elastic.tuning.agent_intervals import DASHBOARD_PING_S, DASHBOARD_RETRY_S

MAX_STREAMS = 512
_PING = b": ping\n\n"


@dataclass(frozen=True)
class Rendering:
    """Every response that a client may request, as bytes."""

    number: int = 0
    snapshot: JobSnapshot | None = None
    page: bytes = b""
    status: bytes = b"{}"  # the JSON document
    sections: Mapping[str, str] = field(default_factory=dict)
    # The number of the rendering in which each section last changed.
    changed: Mapping[str, int] = field(default_factory=dict)
    events: tuple[JobEvent, ...] = ()


Following = Callable[[Rendering, Rendering], bytes]


class Publisher:
    """The publisher. ``server`` identifies this start of the server to pages that outlive it."""

    def __init__(self, server: str, template: PageTemplate | None = None) -> None:
        self.template = template or PageTemplate()
        self._server = server
        self._newest = Rendering()  # owned by the publishing thread
        self._loop: asyncio.AbstractEventLoop | None = None
        self._shown = Rendering()  # owned by the event loop
        self._changed = asyncio.Event()
        self._updates: dict[tuple[Following, int, int], bytes] = {}
        self._is_closed = False
        self.streams = 0

    @property
    def shown(self) -> Rendering:
        """The newest rendering."""
        return self._shown

    # -- on any thread ------------------------------------------------------------------------

    def publish(self, snapshot: JobSnapshot) -> None:
        """Render, and pass to the event loop if it runs. Not reentrant."""
        self._newest = render(snapshot, self._newest, self.template)
        loop = self._loop
        if loop is None:  # no clients yet
            self._shown = self._newest
        elif not loop.is_closed():
            loop.call_soon_threadsafe(self._show)

    # -- on the event loop --------------------------------------------------------------------

    def attach(self) -> None:
        """Start serving on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._show()

    def close(self) -> None:
        """End every stream. Idempotent."""
        self._is_closed = True
        self._wake()

    def _show(self) -> None:
        self._shown = self._newest
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def stream(self, following: Following) -> AsyncIterator[bytes]:
        """Server-sent events: ``following(before, now)`` for each new rendering."""
        self.streams += 1
        try:
            yield self._hello()
            before = Rendering()
            while not self._is_closed:
                changed, now = self._changed, self._shown
                if now.number > before.number:
                    if data := self._following(following, before, now):
                        yield data
                    before = now
                    continue
                try:
                    await asyncio.wait_for(changed.wait(), DASHBOARD_PING_S)
                except (asyncio.TimeoutError, TimeoutError):
                    yield _PING
        finally:
            self.streams -= 1

    def _following(self, following: Following, before: Rendering, now: Rendering) -> bytes:
        """The update from a rendering, computed once: most clients have the same one."""
        key = (following, before.number, now.number)
        if key not in self._updates:
            self._updates = {k: v for k, v in self._updates.items() if k[2] == now.number}
            self._updates[key] = following(before, now)
        return self._updates[key]

    def _hello(self) -> bytes:
        snapshot = self._shown.snapshot
        hello = {
            "page": self.template.digest,
            "server": self._server,
            "time": snapshot.at_s if snapshot is not None else 0.0,
        }
        retry_ms = int(DASHBOARD_RETRY_S * 1000)
        return f"retry: {retry_ms}\n".encode() + message("hello", hello)


def render(snapshot: JobSnapshot, before: Rendering, template: PageTemplate) -> Rendering:
    """Render everything; parts that changed only in ages keep the number of their last change."""
    number = before.number + 1
    sections = sections_of(snapshot)
    changed = {
        name: before.changed[name]
        if name in before.sections and lasting(before.sections[name]) == lasting(section)
        else number
        for name, section in sections.items()
    }
    status = json.dumps(status_document(snapshot)).encode()
    return Rendering(
        number=number,
        snapshot=snapshot,
        page=template.render(snapshot, sections).encode(),
        status=status,
        sections=sections,
        changed=changed,
        events=snapshot.events,
    )


# What streams send -------------------------------------------------------------------------------


def page_changes(before: Rendering, now: Rendering) -> bytes:
    """The sections that a page does not have yet: at first all of them."""
    changed = {name: now.sections[name] for name, at in now.changed.items() if at > before.number}
    return message("sections", changed) if changed else b""


def api_changes(before: Rendering, now: Rendering) -> bytes:
    """The status and the events not yet sent."""
    last = before.events[-1].number if before.events else 0
    events = b"".join(
        message("event", event_document(event), event.number)
        for event in now.events
        if event.number > last
    )
    status = b"event: status\ndata: " + now.status + b"\n\n"
    return events + status


def message(kind: str, data: Any, number: int | None = None) -> bytes:
    """One server-sent event. The JSON contains no line breaks."""
    identity = f"id: {number}\n" if number is not None else ""
    return f"event: {kind}\n{identity}data: {json.dumps(data)}\n\n".encode()
