"""User and password: right, wrong, missing, and a token that stops being valid."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from etcd_fixtures import PATIENCE_S, Recorder

from elastic.errors import StoreRefused
from elastic.membership.keys import Keys
from elastic.node.run_secret import RunSecret
from elastic.store.embedded.etcd import EmbeddedEtcd
from elastic.store.etcd.compat import load_grpc, load_rpc
from elastic.store.etcd.store import EtcdStore

Connect = Callable[..., EtcdStore]


@pytest.fixture(scope="module")
def guarded() -> Iterator[EmbeddedEtcd]:
    """An etcd with auth on; users ``root``/``secret`` and ``worker``/``bee`` (only /mine/)."""
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


def test_the_right_password_works(connect: Connect, guarded: EmbeddedEtcd) -> None:
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
def test_a_wrong_login_is_refused(
    connect: Connect, guarded: EmbeddedEtcd, login: dict[str, str]
) -> None:
    with pytest.raises(StoreRefused) as caught:
        connect(guarded.endpoint, connect_timeout_s=PATIENCE_S, **login)
    assert "user" in caught.value.hint and "password" in caught.value.hint
    assert caught.value.exit_code == 69
    assert "wrong" not in str(caught.value)


def test_a_confined_user_works_where_it_may(connect: Connect, guarded: EmbeddedEtcd) -> None:
    store = connect(guarded.endpoint, user="worker", password="bee", connect_timeout_s=PATIENCE_S)
    recorder = Recorder()
    store.watch(["/mine/"], recorder, name="confined")
    recorder.wait_for(lambda r: r.resets)
    assert store.compare_and_swap("/mine/a", b"1", expected_revision=0) is not None
    recorder.wait_for(lambda r: r.changes)
    with pytest.raises(StoreRefused, match="permission denied"):
        store.put("/yours/a", b"1")


def test_a_role_for_the_jobs_prefix_is_enough_for_its_secret_and_for_no_others(
    connect: Connect, guarded: EmbeddedEtcd
) -> None:
    """docs/security.md: one user per job."""
    store = connect(guarded.endpoint, user="worker", password="bee", connect_timeout_s=PATIENCE_S)
    mine = Keys.of("/mine", "job")
    assert RunSecret.obtain(store, mine).key("x") == RunSecret.obtain(store, mine).key("x")
    with pytest.raises(StoreRefused, match="permission denied"):
        RunSecret.obtain(store, Keys.of("/mine-too", "job"))


def test_a_token_that_died_with_etcd_is_renewed(connect: Connect, guarded: EmbeddedEtcd) -> None:
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
    guarded.restart()  # tokens live in etcd's memory
    store.put("/token/a", b"1")
    recorder.wait_for(lambda r: r.changes)
    assert recorder.changes == [("/token/a", b"1")]


def test_a_token_that_expires_on_a_live_connection_is_renewed(
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
    # Changing anything about users makes every token given out before too old.
    with load_grpc().insecure_channel(guarded.endpoint) as channel:
        auth = rpc.AuthStub(channel)
        login = rpc.AuthenticateRequest(name="root", password="secret")
        token = (("token", auth.Authenticate(login).token),)
        auth.UserAdd(rpc.AuthUserAddRequest(name="late", password="x"), metadata=token)
    assert store.put("/token/b", b"2") > 0


def test_a_login_at_an_etcd_without_auth_is_harmless(
    connect: Connect, shared_etcd: EmbeddedEtcd, root: str
) -> None:
    store = connect(shared_etcd.endpoint, user="root", password="secret")
    assert store.put(f"{root}a", b"1") > 0
