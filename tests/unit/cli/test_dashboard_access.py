"""Access to the dashboard: hosts, tokens, cookies, and rejected configurations."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.cli.dashboard import AccessPolicy, AccessVerdict, checked_token, policy_of, read_token
from elastic.errors import ConfigError

TOKEN = "a-token-of-some-length"


def judge(
    policy: AccessPolicy, host: str = "localhost:8630", path: str = "/", **more: str
) -> AccessVerdict:
    credentials = {"authorization": "", "cookie": "", "query_token": "", **more}
    return policy.judge(host=host, path=path, **credentials)


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:80", "localhost.:1", "127.0.0.1:8630", "[::1]:8630"]
)
def test_loopback_names_need_no_token(host: str) -> None:
    assert judge(policy_of("127.0.0.1", 8630, None), host) is AccessVerdict.ALLOWED


@pytest.mark.parametrize(
    "host", ["", "evil.example", "localhost.evil.example", "127.0.0.1.nip.io:8630", "10.0.0.1"]
)
def test_other_host_names_are_rejected_on_loopback(host: str) -> None:
    """DNS rebinding: a site resolves its name to 127.0.0.1 after it has been loaded."""
    policy = policy_of("127.0.0.1", 8630, None)
    assert judge(policy, host) is AccessVerdict.WRONG_HOST
    assert judge(policy, host, path="/healthz") is AccessVerdict.WRONG_HOST


def test_a_proxys_name_can_be_allowed() -> None:
    policy = policy_of("127.0.0.1", 8630, None, ("Train.example",))
    assert judge(policy, "train.example:443") is AccessVerdict.ALLOWED
    assert judge(policy, "other.example") is AccessVerdict.WRONG_HOST


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "node-a", ""])
def test_a_network_address_without_a_token_is_rejected_with_a_hint(host: str) -> None:
    with pytest.raises(ConfigError) as refused:
        policy_of(host, 8630, None)
    assert "without a token" in refused.value.message
    assert "--token-file=token" in refused.value.hint


def test_a_token_is_accepted_as_bearer_cookie_or_in_the_first_url() -> None:
    policy = policy_of("0.0.0.0", 8630, TOKEN)
    assert judge(policy, "any.example") is AccessVerdict.NO_TOKEN
    assert judge(policy, authorization=f"Bearer {TOKEN}") is AccessVerdict.ALLOWED
    assert judge(policy, authorization=f"bearer {TOKEN}") is AccessVerdict.ALLOWED
    assert judge(policy, authorization=f"Basic {TOKEN}") is AccessVerdict.NO_TOKEN
    assert judge(policy, authorization=f"Bearer {TOKEN}x") is AccessVerdict.NO_TOKEN
    assert judge(policy, authorization="Bearer tök€n") is AccessVerdict.NO_TOKEN
    assert judge(policy, cookie=policy.cookie_value) is AccessVerdict.ALLOWED
    assert judge(policy, cookie=TOKEN) is AccessVerdict.NO_TOKEN
    assert judge(policy, query_token=TOKEN) is AccessVerdict.TOKEN_IN_QUERY
    assert judge(policy, path="/api/status", query_token=TOKEN) is AccessVerdict.NO_TOKEN
    assert judge(policy, path="/healthz") is AccessVerdict.ALLOWED
    assert TOKEN not in policy.cookie_value


def test_cookies_of_two_dashboards_on_one_host_do_not_collide() -> None:
    one, other = policy_of("0.0.0.0", 8630, TOKEN), policy_of("0.0.0.0", 8631, TOKEN + "2")
    assert one.cookie != other.cookie
    assert one.cookie_value != other.cookie_value


@pytest.mark.parametrize(
    "token", ["", "short", "x" * 15, "with a space in it", "ü" * 20, "x\x00" * 9]
)
def test_weak_or_unsendable_tokens_are_rejected(token: str) -> None:
    with pytest.raises(ConfigError, match="16 printable ASCII"):
        checked_token(token, "here")


def test_a_token_is_the_first_line_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\nmore\n")
    assert read_token(str(path)) == TOKEN
    path.write_bytes(b"\xff\xfe")
    for name in (path, tmp_path / "none"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_token(str(name))
