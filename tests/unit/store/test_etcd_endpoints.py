"""Parsing of endpoints, and rejection of invalid ones."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.errors import ConfigError
from elastic.store.client import Endpoint, EtcdConfig, parse_endpoints


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h1", [("h1", 2379)]),
        ("h1:1234", [("h1", 1234)]),
        ("h1:2379,h2:2380", [("h1", 2379), ("h2", 2380)]),
        (" h1 , h2 ,", [("h1", 2379), ("h2", 2379)]),
        ("h1,h1:2379", [("h1", 2379)]),
        ("[::1]:2380", [("::1", 2380)]),
        ("[fe80::1%eth0]", [("fe80::1%eth0", 2379)]),
        ("https://h1,https://[::1]:9/", [("h1", 2379), ("::1", 9)]),
        ("etcd-0.etcd.svc.cluster.local", [("etcd-0.etcd.svc.cluster.local", 2379)]),
    ],
)
def test_endpoints_are_parsed(text: str, expected: list[tuple[str, int]]) -> None:
    assert [(e.host, e.port) for e in parse_endpoints(text)] == expected


@pytest.mark.parametrize(
    "text",
    ["", " , ", "h1:", "h1:port", "h1:0", "h1:65536", "::1", "ftp://h1", "h1/path", "a b", "u@h1"],
)
def test_an_invalid_endpoint_is_named(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_endpoints(text)
    assert repr(text.strip() if "," not in text else text) in caught.value.message
    assert caught.value.hint


def test_one_invalid_endpoint_among_valid_ones_is_named() -> None:
    with pytest.raises(ConfigError, match="'h2:x'"):
        parse_endpoints("h1,h2:x,h3")


def test_a_missing_endpoint_names_its_option() -> None:
    with pytest.raises(ConfigError, match="no etcd endpoint in --rdzv-endpoint=''"):
        parse_endpoints("")


def test_an_endpoint_is_printed_as_it_is_written() -> None:
    assert str(Endpoint("::1", 1)) == "[::1]:1"
    assert str(Endpoint("h1")) == "h1:2379"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"endpoints": ()}, "no etcd endpoint"),
        ({"cert": "c.pem"}, "cert is given without key"),
        ({"key": "k.pem"}, "key is given without cert"),
        ({"user": "u"}, "user is given without password"),
        ({"password": "p"}, "password is given without user"),
        ({"endpoints": parse_endpoints("http://a,https://b")}, "mixed"),
        ({"endpoints": parse_endpoints("http://a"), "cacert": "ca.pem"}, "ca.pem"),
        ({"connect_timeout_s": 0}, "connect_timeout_s is 0"),
        ({"request_timeout_s": float("nan")}, "request_timeout_s is nan"),
    ],
)
def test_contradictory_settings_are_rejected(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EtcdConfig(**{"endpoints": parse_endpoints("h1"), **settings})


def test_tls_follows_from_scheme_or_certificates() -> None:
    assert EtcdConfig(endpoints=parse_endpoints("https://h1")).tls
    assert EtcdConfig(endpoints=parse_endpoints("h1"), cacert="ca.pem").tls
    assert not EtcdConfig(endpoints=parse_endpoints("h1")).tls


def test_the_password_is_not_shown() -> None:
    config = EtcdConfig(endpoints=parse_endpoints("h1"), user="u", password="hunter2")
    assert "hunter2" not in repr(config)
