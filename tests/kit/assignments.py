"""Worlds as a worker receives them from its agent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elastic.link.link import Assignment
from elastic.wire.handshake import SecretKey
from elastic.wire.messages import WorldState

KEY = SecretKey(bytes(range(32)))


def assignment(generation: int = 1, **changes: Any) -> Assignment:
    """A world of this worker alone, entered at once; ``changes`` are other values of its fields."""
    alone = Assignment(
        generation=generation,
        nonce=f"n{generation}",
        lineage=(),
        rank=0,
        size=1,
        local_rank=0,
        local_size=1,
        node_rank=0,
        nodes=1,
        store_host="127.0.0.1",
        store_port=1,
        store_key=KEY.text,
        switch_at_step=None,
        state=WorldState.ACTIVE,
        committed_step=None,
    )
    return replace(alone, **changes)
