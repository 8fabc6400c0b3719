"""User and password: correct, wrong, missing, and a token that becomes invalid."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from etcd_fixtures import PATIENCE_S, Recorder

from elastic.agent.node import RunSecret
from elastic.errors import StoreRefused
from elastic.membership.records import Keys
from elastic.store.client import load_grpc, load_rpc
from elastic.store.embedded import EmbeddedEtcd
from elastic.store.etcd import EtcdStore

Connect = Callable[..., EtcdStore]


@pytest.fixture(scope="module")
def guarded() -> Iterator[EmbeddedEtcd]:
    """An etcd with auth enabled; users ``root``/``secret`` and ``worker``/``bee`` (/mine/ only)."""
    with EmbeddedEtcd(name="guarded") as etcd:
        rpc = load_rpc()
        with load_grpc().insecure_channel(etcd.endpoint) as channel:
            auth = rpc.AuthStub(channel)
            auth.UserAdd(rpc.AuthUserAddRequest(name="root", password="secret"))
            auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user="root", role="root"))
            auth.RoleAdd(rpc.AuthRoleAddRequest(name="mine"))
            grant = rpc.AuthRoleGrantPermissionRequest(name="mine")
            grant.perm.permType = 2  # READWRITE of authpb.Permission.Type
            grant.perm.key, grant.perm.range_end = b"/mine/", b"/mine0"
            auth.RoleGrantPermission(grant)
            auth.UserAdd(rpc.AuthUserAddRequest(name="worker", password="bee"))
            auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user="worker", role="mine"))
            auth.AuthEnable(rpc.AuthEnableRequest())
        yield etcd


def test_a_correct_password_is_accepted(connect: Connect, guarded: EmbeddedEtcd) -> None:
    store = connect(guarded.endpoint, user="root", password="secret", connect_timeout_s=PATIENCE_S)
    recorder = Recorder()
    store.watch(["/any/"], recorder, name="auth")
    recorder.wait_for(lambda r: r.resets)
    store.put("/any/where", b"1", lease=store.lease(5))
    recorder.wait_for(lambda r: r.changes)
    assert recorder.changes == [("/any/where", b"1")]


@pytest.mark.parametrize(
    "login", [{"user": "root", "password": "wrong"}, {"user": "nobody", "password": "x"}, {}]
)
def test_an_invalid_login_is_refused(
    connect: Connect, guarded: EmbeddedEtcd, login: dict[str, str]
) -> None:
    with pytest.raises(StoreRefused) as caught:
        connect(guarded.endpoint, connect_timeout_s=PATIENCE_S, **login)
    assert "user" in caught.value.hint and "password" in caught.value.hint
    assert caught.value.exit_code == 69
    assert "wrong" not in str(caught.value)


def test_a_restricted_user_has_access_to_its_prefix_only(
    connect: Connect, guarded: EmbeddedEtcd
) -> None:
    store = connect(guarded.endpoint, user="worker", password="bee", connect_timeout_s=PATIENCE_S)
    recorder = Recorder()
    store.watch(["/mine/"], recorder, name="confined")
    recorder.wait_for(lambda r: r.resets)
    assert store.compare_and_swap("/mine/a", b"1", expected_revision=0) is not None
    recorder.wait_for(lambda r: r.changes)
    with pytest.raises(StoreRefused, match="permission denied"):
        store.put("/yours/a", b"1")


def test_a_role_for_the_prefix_of_a_job_grants_the_secret_of_that_job_only(
    connect: Connect, guarded: EmbeddedEtcd
) -> None:
    """docs/security.md: one user per job."""
    store = connect(guarded.endpoint, user="worker", password="bee", connect_timeout_s=PATIENCE_S)
    mine = Keys.of("/mine", "job")
    assert RunSecret.obtain(store, mine).key("x") == RunSecret.obtain(store, mine).key("x")
    with pytest.raises(StoreRefused, match="permission denied"):
        RunSecret.obtain(store, Keys.of("/mine-too", "job"))


def test_a_token_is_renewed_after_a_restart_of_etcd(
    connect: Connect, guarded: EmbeddedEtcd
) -> None:
    store = connect(
        guarded.endpoint,
        user="root",
        password="secret",
        connect_timeout_s=PATIENCE_S,
        request_timeout_s=PATIENCE_S,
    )
    recorder = Recorder()
    store.watch(["/token/"], recorder, name="token")
    recorder.wait_for(lambda r: r.resets)
    guarded.restart()  # etcd keeps tokens in memory
    store.put("/token/a", b"1")
    recorder.wait_for(lambda r: r.changes)
    assert recorder.changes == [("/token/a", b"1")]


def test_a_token_that_expires_on_an_open_connection_is_renewed(
    connect: Connect, guarded: EmbeddedEtcd
) -> None:
    store = connect(
        guarded.endpoint,
        user="root",
        password="secret",
        connect_timeout_s=PATIENCE_S,
        request_timeout_s=PATIENCE_S,
    )
    rpc = load_rpc()
    # Any change to users invalidates all tokens issued before.
    with load_grpc().insecure_channel(guarded.endpoint) as channel:
        auth = rpc.AuthStub(channel)
        login = rpc.AuthenticateRequest(name="root", password="secret")
        token = (("token", auth.Authenticate(login).token),)
        auth.UserAdd(rpc.AuthUserAddRequest(name="late", password="x"), metadata=token)
    assert store.put("/token/b", b"2") > 0


def test_credentials_are_ignored_by_an_etcd_without_auth(
    connect: Connect, shared_etcd: EmbeddedEtcd, root: str
) -> None:
    store = connect(shared_etcd.endpoint, user="root", password="secret")
    assert store.put(f"{root}a", b"1") > 0
