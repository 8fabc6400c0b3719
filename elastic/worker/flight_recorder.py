"""Sends this worker's recent collectives, from torch's flight recorder, at the agent's request.

It does so on a separate thread: the recorder queries the device for the state of each collective,
and a hung device may not respond. The link's thread must receive worlds in the meantime.
"""

from __future__ import annotations

from collections.abc import Callable

from elastic import torch_private
from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.errors import LinkError
from elastic.hangs.flight import parse
from elastic.link.protocol import FlightTrace
from elastic.telemetry.log import get_logger
from elastic.worker.single_call import SingleCall


class FlightRecorder:
    """One per process. Its owner calls ``close``."""

    def __init__(self, send: Callable[[FlightTrace], object], clock: Clock = SYSTEM_CLOCK) -> None:
        self._send = send
        self._clock = clock
        self._world = (0, 0)  # the generation, and its start (wall clock, ns)
        self._call = SingleCall("elastic-flight-recorder")

    def enter_generation(self, generation: int) -> None:
        """Ignore earlier records: they belong to another world, whose groups also count from 1."""
        self._world = generation, int(self._clock.wall() * 1e9)

    def dump(self) -> None:
        """Start to send the records, unless the previous response is still pending. Called on the
        link's thread only."""
        self._call.start(self._dump, *self._world)

    def close(self) -> None:
        """Wait for a pending response, but not for long: the device may hang."""
        self._call.close()

    def _dump(self, generation: int, since_ns: int) -> None:
        try:
            dumps = torch_private.flight_recorder_dumps()
            newest, began_ns = self._world  # maybe a later world, if this thread was slow
            entries = parse(dumps, since_ns, began_ns if newest != generation else None)
            self._send(FlightTrace(generation=generation, entries=entries))
        except (RuntimeError, LinkError) as error:  # a hang report without it is better than none
            get_logger().warning("the flight recorder's dump failed: %s", error)
