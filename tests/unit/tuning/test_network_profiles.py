"""Network profiles: chosen by hardware, rejected if unsupported, and overridden by the user."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st

from elastic.errors import ConfigError
from elastic.tuning import environment as profiles
from elastic.tuning.environment import (
    DEAD_NAMES,
    NAMES,
    TUNED,
    Given,
    Route,
    WorkerEnvironment,
    choose_route,
    effective,
    given_settings,
)
from elastic.tuning.network import (
    ETHERNET,
    INFINIBAND,
    Interface,
    Network,
    RdmaDevice,
    interface_towards,
    local_addresses,
    read_network,
    source_address,
)
from elastic.tuning.options import AgentOptions, read_options

LO = Interface(name="lo", addresses=("127.0.0.1",))
MANAGEMENT = Interface(name="eth0", addresses=("10.1.0.5",), speed_mbps=1000, driver="igb")
FAST = Interface(name="eth1", addresses=("10.2.0.5",), speed_mbps=100_000, driver="mlx5_core")
PLAIN = Network(interfaces=(MANAGEMENT, FAST, LO))
IB = replace(PLAIN, rdma=(RdmaDevice(name="mlx5_0", link_layer=INFINIBAND),))
ROCE = replace(PLAIN, rdma=(RdmaDevice(name="mlx5_0", link_layer=ETHERNET),))
SOURCES = {"10.1.0.9": "10.1.0.5", "10.2.0.9": "10.2.0.5"}


def found(
    network: Network,
    given: dict[str, str] | None = None,
    *,
    profile: str | None = None,
    is_in_process: bool = False,
    max_nodes: int = 2,
    route: Route | None = None,
) -> WorkerEnvironment:
    return effective(
        {name: Given(value, "environment") for name, value in (given or {}).items()},
        network,
        profile=profile,
        is_in_process=is_in_process,
        max_nodes=max_nodes,
        route=route,
    )


# Facts ----------------------------------------------------------------------------------------


def machine(
    root: Path, *, link_layer: str, may_open: bool = True, state: str = "4: ACTIVE"
) -> Path:
    port = root / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    (port / "link_layer").write_text(f"{link_layer}\n")
    net = root / "sys/class/net/eth1"
    net.mkdir(parents=True)
    (net / "speed").write_text("200000\n")
    driver = root / "sys/bus/pci/drivers/mlx5_core"
    driver.mkdir(parents=True)
    (net / "device").mkdir()
    (net / "device" / "driver").symlink_to(driver)
    (root / "dev/infiniband").mkdir(parents=True)
    if may_open:
        (root / "dev/infiniband/uverbs0").touch()
    return root


@pytest.mark.parametrize("link_layer", [INFINIBAND, ETHERNET])
def test_devices_are_read_from_the_kernels_files(tmp_path: Path, link_layer: str) -> None:
    root = machine(tmp_path, link_layer=link_layer)
    network = read_network(root, {"eth1": ("10.2.0.5",)})
    assert network.rdma == (RdmaDevice(name="mlx5_0", link_layer=link_layer),)
    assert network.interfaces == (
        Interface(name="eth1", addresses=("10.2.0.5",), speed_mbps=200_000, driver="mlx5_core"),
    )
    expected = {INFINIBAND: "infiniband", ETHERNET: "roce"}[link_layer]
    assert profiles.choose(network, max_nodes=2).name == expected


def test_inaccessible_devices_are_named_and_not_used(tmp_path: Path) -> None:
    network = read_network(machine(tmp_path, link_layer=INFINIBAND, may_open=False), {})
    choice = profiles.choose(network, max_nodes=2)
    assert choice.name == "ethernet" and "mlx5_0" in choice.reason


def test_a_port_that_is_down_is_ignored(tmp_path: Path) -> None:
    root = machine(tmp_path, link_layer=INFINIBAND, state="1: DOWN")
    assert profiles.choose(read_network(root, {}), max_nodes=2).name == "ethernet"


@pytest.mark.parametrize(
    ("file", "text"),
    [("sys_vendor", "Amazon EC2"), ("product_name", "Google Compute Engine")],
)
def test_a_cloud_is_recognised_by_its_firmware(tmp_path: Path, file: str, text: str) -> None:
    folder = tmp_path / "sys/class/dmi/id"
    folder.mkdir(parents=True)
    (folder / file).write_text(text + "\n")
    assert profiles.choose(read_network(tmp_path, {}), max_nodes=2).name == "cloud"


def test_the_loopback_interface_of_this_machine_is_found() -> None:
    network = read_network()
    assert "127.0.0.1" in local_addresses()["lo"]
    towards = interface_towards(network, "127.0.0.1")
    assert towards is not None and towards.name == "lo"
    names = {name for _, name in socket.if_nameindex()}
    assert {interface.name for interface in network.interfaces} <= names


def test_an_address_without_a_route_has_no_interface() -> None:
    assert source_address("no-such-host.invalid") is None
    assert interface_towards(PLAIN, "x", lambda towards: None) is None


@pytest.mark.parametrize("spelled", ["FD00:0::2", "fd00::2%eth0", "10.1.0.5"])
def test_an_address_is_found_in_any_notation(spelled: str) -> None:
    both = Interface(name="eth0", addresses=("10.1.0.5", "fd00::2"))
    assert Network(interfaces=(LO, both)).with_address(spelled) == both


def test_the_reason_names_the_node_that_the_route_leads_to() -> None:
    to_leader = route(peers=["10.2.0.9", "10.1.0.9"])
    to_another = route(peers=["10.9.9.9", "10.2.0.9"])
    assert to_leader is not None and to_leader.reason.endswith("the leader, 10.2.0.9")
    assert to_another is not None and to_another.reason.endswith("another node, 10.2.0.9")


# Profiles -------------------------------------------------------------------------------------


def test_one_node_needs_no_network() -> None:
    assert profiles.choose(IB, max_nodes=1).name == "single-node"


def test_every_profile_has_a_reason_and_a_source() -> None:
    networks = {"infiniband": IB, "roce": ROCE}
    for name in NAMES:
        for setting in profiles.settings(name, networks.get(name, PLAIN), Route("eth1", "given")):
            assert len(setting.reason) > 10 and setting.source, setting.name


def test_an_unknown_profile_is_rejected_with_the_known_ones() -> None:
    with pytest.raises(ConfigError) as refused:
        read_options({"profile": "infinband"}, {})
    assert "infinband" in refused.value.message
    assert all(name in refused.value.message for name in NAMES)


@pytest.mark.parametrize(
    ("profile", "network", "max_nodes", "said"),
    [
        ("infiniband", ROCE, 2, "link layer InfiniBand"),
        ("roce", PLAIN, 2, "link layer Ethernet"),
        ("single-node", PLAIN, 3, "--nnodes up to 3"),
    ],
)
def test_a_profile_without_its_hardware_is_rejected(
    profile: str, network: Network, max_nodes: int, said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        found(network, profile=profile, max_nodes=max_nodes)
    assert said in refused.value.message


def test_the_command_line_overrides_the_environment() -> None:
    environ = {"ELASTIC_PROFILE": "cloud"}
    assert read_options({"profile": "ethernet"}, environ).profile == "ethernet"
    assert read_options({}, environ).profile == "cloud"
    assert AgentOptions().profile is None


def test_only_fast_links_get_more_sockets() -> None:
    fast = found(PLAIN, route=Route("eth1", "given")).variables()
    slow = found(PLAIN, route=Route("eth0", "given")).variables()
    assert fast["NCCL_SOCKET_NTHREADS"] == fast["NCCL_NSOCKS_PERTHREAD"] == "4"
    assert "NCCL_SOCKET_NTHREADS" not in slow


def test_the_sockets_profile_is_used_despite_rdma_devices() -> None:
    assert found(IB, profile="ethernet").variables()["NCCL_IB_DISABLE"] == "1"
    assert "NCCL_IB_DISABLE" not in found(IB).variables()


def test_roce_waits_longer_than_infiniband() -> None:
    assert found(ROCE).variables()["NCCL_IB_TIMEOUT"] == "22"
    assert "NCCL_IB_TIMEOUT" not in found(IB).variables()  # NCCL's own


# The interface --------------------------------------------------------------------------------


def route(**changes: object) -> Route | None:
    settings: dict[str, object] = {
        "max_nodes": 2,
        "own_address": "10.1.0.5",
        "is_configured": False,
        "peers": [],
        "source": SOURCES.get,
        **changes,
    }
    return choose_route(PLAIN, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "interface"),
    [
        ({"peers": ["10.2.0.9", "10.1.0.9"]}, "eth1"),  # the route to the leader, not to etcd
        ({"peers": ["10.9.9.9", "10.2.0.9"]}, "eth1"),  # no route to the first
        ({"peers": ["10.2.0.9"], "is_configured": True}, "eth0"),  # --local-addr
        ({}, "eth0"),  # no peer is known yet
        ({"max_nodes": 1}, "lo"),
    ],
)
def test_the_interface_is_that_of_the_route_to_the_leader(
    changes: dict[str, object], interface: str
) -> None:
    chosen = route(**changes)
    assert chosen is not None and chosen.interface == interface
    variables = found(PLAIN, route=chosen).variables()
    assert variables["NCCL_SOCKET_IFNAME"] == f"={interface}"  # not eth10 as well
    assert variables["GLOO_SOCKET_IFNAME"] == interface


def test_a_faster_interface_is_named_with_the_variable_to_set() -> None:
    """It is not chosen, since its speed does not show whether other nodes can reach it."""
    route = choose_route(
        PLAIN,
        max_nodes=2,
        own_address="",
        is_configured=False,
        peers=["10.1.0.9"],
        source=SOURCES.get,
    )
    assert route is not None and route.interface == "eth0"
    warnings = found(PLAIN, route=route).warnings
    assert len(warnings) == 1
    assert "eth0 has 1000 Mbit/s and eth1 100000" in warnings[0]
    assert "--local-addr=10.2.0.5" in warnings[0]
    on_fast = choose_route(
        PLAIN,
        max_nodes=2,
        own_address="",
        is_configured=False,
        peers=["10.2.0.9"],
        source=SOURCES.get,
    )
    assert on_fast is not None and found(PLAIN, route=on_fast).warnings == ()


def test_the_reason_names_the_configured_network() -> None:
    chosen = route(own_address="10.2.0.5", is_configured=True, own_network="10.2.0.0/24")
    assert chosen is not None and chosen.interface == "eth1"
    assert chosen.reason == "it has 10.2.0.5, this node's address in network=10.2.0.0/24"


def test_a_faster_interface_is_named_by_its_network_if_known() -> None:
    fast = replace(FAST, networks=("10.2.0.0/24",))
    chosen = choose_route(
        Network(interfaces=(MANAGEMENT, fast, LO)),
        max_nodes=2,
        own_address="",
        is_configured=False,
        peers=["10.1.0.9"],
        source=SOURCES.get,
    )
    assert chosen is not None and "--rdzv-conf network=10.2.0.0/24" in chosen.hint


def test_the_networks_of_this_machine_contain_its_addresses() -> None:
    loopback = read_network().interface("lo")
    assert loopback is not None and "127.0.0.0/8" in loopback.networks


def test_an_address_behind_nat_leaves_the_choice_to_the_libraries() -> None:
    assert route(own_address="203.0.113.1", is_configured=True) is None
    assert "GLOO_SOCKET_IFNAME" not in found(PLAIN).variables()


def test_an_unknown_interface_is_rejected_with_the_existing_ones() -> None:
    with pytest.raises(ConfigError, match="GLOO_SOCKET_IFNAME") as refused:
        found(PLAIN, {"GLOO_SOCKET_IFNAME": "eth1,eth7"})
    assert "eth7" in refused.value.message and "eth1 (10.2.0.5)" in refused.value.hint


@pytest.mark.parametrize(
    ("value", "is_there"),
    [
        ("eth", True),
        ("=eth", False),
        ("=eth0,eth1", True),
        ("ib,eth1", True),
        ("^docker", True),
        ("^eth,lo", False),
        ("^=eth0", True),
        ("ib0", False),
    ],
)
def test_a_list_of_interfaces_is_parsed_like_nccl(value: str, is_there: bool) -> None:
    on_gpus = replace(PLAIN, has_nvidia=True)
    if is_there:
        found(on_gpus, {"NCCL_SOCKET_IFNAME": value})
    else:
        with pytest.raises(ConfigError, match="NCCL_SOCKET_IFNAME"):
            found(on_gpus, {"NCCL_SOCKET_IFNAME": value})
    found(PLAIN, {"NCCL_SOCKET_IFNAME": value})  # it has no effect without GPUs


# The user's settings --------------------------------------------------------------------------


def test_the_users_value_takes_precedence_and_names_what_it_replaces() -> None:
    environment = found(PLAIN, {"TORCH_INCLUDE_STACK_TRACE": "1"}, route=Route("eth1", "given"))
    (variable,) = (e for e in environment.entries if e.name == "TORCH_INCLUDE_STACK_TRACE")
    assert (variable.value, variable.origin) == ("1", "environment")
    assert "the profile is 0" in variable.reason
    assert variable.name not in environment.variables()
    assert any("TORCH_INCLUDE_STACK_TRACE=1" in warning for warning in environment.warnings)


@pytest.mark.parametrize("name", DEAD_NAMES)
def test_obsolete_variables_cause_a_warning(name: str) -> None:
    (warning,) = found(PLAIN, {name: "1"}).warnings
    assert warning.startswith(f"{name}=1: ")


@pytest.mark.parametrize(
    ("name", "unsafe", "safe"),
    [
        ("NCCL_IB_RETRY_CNT", "10", "7"),
        ("NCCL_IB_TIMEOUT", "32", "23"),
        ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "10", "600"),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "0", "20000"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", "0"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "true", "0"),
        ("TORCH_DISTRIBUTED_DEBUG", "detail", "INFO"),
    ],
)
def test_unsafe_values_cause_a_warning(name: str, unsafe: str, safe: str) -> None:
    (warning,) = found(IB, {name: unsafe}, is_in_process=True).warnings
    assert f"{name}={unsafe}" in warning
    assert found(IB, {name: safe}, is_in_process=True).warnings == ()


def test_two_incompatible_values_are_both_named() -> None:
    (warning,) = found(PLAIN, {"NCCL_SOCKET_NTHREADS": "16", "NCCL_NSOCKS_PERTHREAD": "8"}).warnings
    assert "NCCL_SOCKET_NTHREADS=16" in warning and "NCCL_NSOCKS_PERTHREAD=8" in warning


def test_nccls_configuration_files_count_as_user_settings(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nccl.conf").write_text("# all\nNCCL_SOCKET_IFNAME==eth0\nNCCL_DEBUG=WARN\n")
    own = tmp_path / "own.conf"
    own.write_text("NCCL_DEBUG = INFO\nnonsense\n")
    environ = {"NCCL_CONF_FILE": str(own), "HOME": str(tmp_path), "NCCL_IB_TC": "106"}
    given = given_settings(environ, tmp_path)
    assert given["NCCL_SOCKET_IFNAME"] == Given("=eth0", str(tmp_path / "etc/nccl.conf"))
    assert given["NCCL_DEBUG"] == Given("INFO", str(own))
    assert given["NCCL_IB_TC"] == Given("106", "environment")
    environment = effective(
        given,
        PLAIN,
        profile=None,
        is_in_process=True,
        max_nodes=2,
        route=Route("eth1", "given"),
    )
    assert "NCCL_SOCKET_IFNAME" not in environment.variables()


def test_variables_set_by_an_agent_are_no_user_settings(tmp_path: Path) -> None:
    outer = found(PLAIN, route=Route("eth0", "given")).variables()
    environ = {name: value for name, value in outer.items() if value is not None}
    assert given_settings({**environ, "HOME": str(tmp_path)}, tmp_path) == {}
    assert "GLOO_SOCKET_IFNAME" in environ[TUNED].split(",")


@for_all(
    given=st.dictionaries(
        st.sampled_from(
            [
                *DEAD_NAMES,
                "NCCL_IB_TIMEOUT",
                "NCCL_SOCKET_NTHREADS",
                "NCCL_NSOCKS_PERTHREAD",
                "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
                "TORCH_INCLUDE_STACK_TRACE",
            ]
        ),
        st.text(max_size=4),
    ),
    network=st.sampled_from([PLAIN, IB, ROCE]),
    is_in_process=st.booleans(),
)
def test_user_settings_are_never_replaced_or_lost(
    given: dict[str, str], network: Network, is_in_process: bool
) -> None:
    environment = found(network, given, is_in_process=is_in_process, route=Route("eth1", "given"))
    assert not set(environment.variables()) & set(given)
    shown = {e.name: e.value for e in environment.entries if e.origin == "environment"}
    assert shown == given
