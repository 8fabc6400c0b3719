"""An agent's certificates: their options, and how the workers get them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from etcd_certificates import Authority

from checkpoints.memory import MemoryHost, Neighbours, PeerAddress, PeerStorage, memory_roots
from elastic.agent.node import node_tls
from elastic.errors import ConfigError
from elastic.tuning.options import AgentOptions, read_options
from elastic.wire.handshake import Credentials, SecretKey

KEY = SecretKey.generate()


@pytest.fixture
def options(tmp_path: Path) -> AgentOptions:
    return read_options(Authority(tmp_path, "nodes").node_settings("node"), {})


def test_tls_is_off_without_options() -> None:
    assert node_tls(AgentOptions()) is None


def test_paths_are_made_absolute(options: AgentOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    assert options.node_cert is not None
    monkeypatch.chdir(Path(options.node_cert).parent)
    names = (options.node_cacert, options.node_cert, options.node_key)
    cacert, cert, key = (os.path.basename(str(name)) for name in names)
    tls = node_tls(AgentOptions(node_cacert=cacert, node_cert=cert, node_key=key))
    assert tls is not None
    assert (tls.files.cacert, tls.files.cert, tls.files.key) == names


def test_an_unusable_certificate_is_rejected(options: AgentOptions, tmp_path: Path) -> None:
    late = Authority(tmp_path, "nodes").issue("late", hours=(-2, -1))
    with pytest.raises(ConfigError, match="certificate") as caught:
        node_tls(
            AgentOptions(node_cacert=options.node_cacert, node_cert=late.cert, node_key=late.key)
        )
    assert late.cert in caught.value.message and caught.value.hint


def test_workers_reach_memory_hosts_with_their_agents_certificates(
    options: AgentOptions, tmp_path: Path
) -> None:
    tls = node_tls(options)
    other = MemoryHost(
        tmp_path / "b",
        host="127.0.0.1",
        credentials=Credentials(key=lambda: KEY, identity="b", tls=tls),
    )
    address = PeerAddress("b", "127.0.0.1", other.port, "b")
    mine = MemoryHost(
        tmp_path / "a",
        host="127.0.0.1",
        credentials=Credentials(key=lambda: KEY, identity="a", tls=tls),
        neighbours=lambda: Neighbours((address,), None),
    )
    mine.refresh()
    peer = memory_roots(mine.folder)[-1]
    assert isinstance(peer, PeerStorage)
    assert peer.list("") == []
    plain = PeerStorage(address, key=lambda: KEY)
    with pytest.raises(OSError, match="it speaks TLS, and this node does not"):
        plain.list("")
    for end in (peer, plain, mine, other):
        end.close()
