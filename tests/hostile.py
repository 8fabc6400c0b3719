"""What hostile peers send, from a seed: the same seed is the same attack."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import ssl
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raw_peer import prove

from elastic.wire.handshake import MAGIC, ClientHandshake, SecretKey, frame

PATIENCE_S = 10.0
_RESET = struct.pack(
    "ii", 1, 0
)  # SO_LINGER: close with a reset, so that no port waits for a minute

# Fragments of requests of all protocols in here, and what has ended parsers before.
_NUMBERS = ["0", "-1", "1e999", "Infinity", "NaN", "9" * 5000, "true", "null", "1.5", "1e-400"]
_TEXTS = ['""', '"a"', '"../../etc/passwd"', '"\\ud800"', '"\\u0000"', '"' + "x" * 4000 + '"']
_NESTED = ["[" * 5000, "[" * 50 + "]" * 50, '{"a":' * 40 + "1" + "}" * 40, "[]", "{}", "[{}]"]
_FIELDS = {
    "link": [
        "type", "version", "pid", "local_rank", "library", "generation", "step", "phase",
        "step_time_s", "error", "missing", "clean", "until_s", "leaving", "store_key",
    ],
    "liveness": ["hello", "probe", "node_id", "world", "generation", "members"],
    "store": ["id", "op", "key", "keys", "value", "by", "expected", "nonce"],
    "memory": ["do", "path", "begin", "count", "size"],
}  # fmt: skip
_VALUES = {
    "link": [
        '"ClientHandshakeRequest"',
        '"Heartbeat"',
        '"Ready"',
        '"CollectiveFailure"',
        '"Exiting"',
        '"Assignment"',
        '"Leave"',
        '"Permit"',
    ],
    "liveness": ['"leader"'],
    "store": ['"set"', '"get"', '"add"', '"wait"', '"check"', '"compare"', '"delete"', '"count"'],
    "memory": ['"list"', '"stat"', '"read"', '"put"', '".tmp-step-000000003.g0.aa"', '""'],
}


@dataclass(frozen=True)
class Port:
    """One listener, as an attacker sees it. ``kind`` is a key of the tables above, or another."""

    kind: str
    connect: Callable[[], socket.socket]
    key: SecretKey | None = None  # of one who has got it: a worker that was taken over
    identity: str = ""
    # With TLS, ``connect`` is one's who has a certificate; this is everybody else's.
    connect_as_stranger: Callable[[], socket.socket] | None = None

    def stranger(self) -> socket.socket:
        """A connection of somebody who has nothing of this job."""
        return (self.connect_as_stranger or self.connect)()


class Attacker:
    """Makes its choices with a generator of its own."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.sent = 0  # hostile frames that a listener took

    def from_stranger(self) -> bytes:
        """What somebody sends who does not know the secret, in one go."""
        pick = self.random
        hello = ClientHandshake(SecretKey(pick.randbytes(32)), "x" * pick.choice([0, 1, 128])).hello
        frames: list[Callable[[], bytes]] = [
            lambda: pick.randbytes(pick.randrange(300)),
            lambda: pick.randbytes(pick.randrange(1, 5)),
            lambda: struct.pack("!I", pick.getrandbits(32)) + pick.randbytes(20),
            lambda: frame(b""),
            lambda: frame(self.json("store")),
            lambda: b'{"hello": "anyone"}\n',
            lambda: b"GET /livez HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * pick.randrange(2000),
            lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + pick.randbytes(200),
            lambda: client_hello(),
            lambda: self.flipped(client_hello()),
            lambda: client_hello() + pick.randbytes(pick.randrange(200)),
            lambda: client_hello()[: pick.randrange(1, 100)],
            lambda: frame(hello),
            lambda: frame(self.flipped(hello)),
            lambda: frame(hello[: pick.randrange(len(hello))]),
            lambda: frame(hello + b"\xff" * pick.randrange(200)),
            lambda: frame(hello) + frame(pick.randbytes(32)),
            lambda: frame(hello) + frame(pick.randbytes(pick.randrange(200))),
            lambda: frame(hello) + frame(hello),
            lambda: frame(MAGIC + pick.randbytes(32) + b"\xff\xfe"),
            lambda: frame(hello)[: pick.randrange(1, 20)],
        ]
        return pick.choice(frames)()

    def json(self, kind: str) -> bytes:
        """What somebody sends who knows the secret: almost a request."""
        pick = self.random
        names = _FIELDS.get(kind, ["a"])
        values = [
            *_VALUES.get(kind, ["1"]) * 3,
            *_NUMBERS,
            *_TEXTS,
            *_NESTED,
            str(pick.getrandbits(8)),
        ]
        if pick.random() < 0.1:
            return pick.choice([pick.randbytes(50), pick.choice(_NESTED).encode(), b""])
        fields = [
            f"{json.dumps(name)}:{pick.choice(values)}"
            for name in pick.sample(names, pick.randrange(len(names) + 1))
        ]
        if fields and pick.random() < 0.1:
            fields.append(fields[0])
        text = "{" + ",".join(fields) + "}"
        if pick.random() < 0.1:
            text = text[: pick.randrange(len(text))]
        return text.encode(errors="surrogatepass")

    def flipped(self, data: bytes) -> bytes:
        """With some bits changed."""
        changed = bytearray(data)
        for _ in range(self.random.randrange(1, 4)):
            changed[self.random.randrange(len(changed))] ^= 1 << self.random.randrange(8)
        return bytes(changed)

    def attack(self, port: Port) -> None:
        """One connection with one hostile frame, and perhaps a wait for what that does."""
        pick = self.random
        proves = port.key is not None and pick.random() < 0.5
        has_certificate = proves or pick.random() < 0.3
        connect = port.connect if has_certificate else port.stranger
        with contextlib.suppress(OSError), connect() as sock:
            sock.settimeout(PATIENCE_S)
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            if proves and port.key is not None:
                prove(sock, port.key, port.identity)
                sock.sendall(frame(self.json(port.kind)))
            else:
                sock.sendall(self.from_stranger())
            self.sent += 1
            if pick.random() < 0.6:  # the others are gone before they are read
                socket.socket.shutdown(sock, socket.SHUT_WR)  # not TLS' own, which forgets its keys
                while sock.recv(1 << 16):
                    pass


def client_hello() -> bytes:
    """What a client of TLS 1.3 begins with."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    sent = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent).do_handshake()
    return sent.read()


def from_many_addresses(port: int, pick: random.Random) -> socket.socket:
    """A connection to a port of 127.0.0.1, from some address of this machine."""
    source = f"127.0.0.{pick.randrange(1, 250)}"
    return socket.create_connection(("127.0.0.1", port), PATIENCE_S, source_address=(source, 0))


def unix(path: str) -> socket.socket:
    """A connection to a Unix socket."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(path)  # without a timeout: it waits where the queue is full
        sock.settimeout(PATIENCE_S)
    except BaseException:
        sock.close()
        raise
    return sock


def anything(value: Any) -> None:
    """For callbacks whose calls do not matter."""
