import socket

import pytest

from kforge_parallel import network
from kforge_parallel.world import World


def world(local_size, size=8, address="node0"):
    return World("slurm", 0, size, 0, local_size, address, 2345)


@pytest.fixture
def routes(monkeypatch):
    """A host with eth0 and lo, on which a name leads where the test says."""
    table = {"node0": "eth0", "127.0.0.1": "lo", "192.0.2.1": "eth0"}
    monkeypatch.setattr(network, "route_interface", lambda address: table.get(address))
    monkeypatch.setattr(network, "loopback", lambda: "lo")
    return table


def test_a_job_over_hosts_takes_the_interface_that_leads_to_the_master(routes):
    env = {}
    network.set_interfaces(world(4), env)
    assert env == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}


def test_a_host_that_calls_itself_a_loopback_takes_its_default_route(routes):
    routes["node0"] = "lo"  # 127.0.1.1 in /etc/hosts, on the master alone
    env = {}
    network.set_interfaces(world(4), env)
    assert env["GLOO_SOCKET_IFNAME"] == "eth0"
    routes["192.0.2.1"] = "lo"
    env = {}
    network.set_interfaces(world(4), env)
    assert env == {}


@pytest.mark.parametrize("address", ["127.0.0.1", "no-such-name"])
def test_one_host_without_a_network_takes_the_loopback(routes, address):
    env = {}
    network.set_interfaces(world(8, address=address), env)
    assert env == {"GLOO_SOCKET_IFNAME": "lo"}  # NCCL finds its way inside a host


def test_what_the_user_set_is_left(routes):
    theirs = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib"}
    env = dict(theirs)
    assert network.set_interfaces(world(4), env) == {}
    assert env == theirs
    env = {"NCCL_SOCKET_IFNAME": "ib"}
    assert network.set_interfaces(world(4), env) == {"GLOO_SOCKET_IFNAME": "eth0"}


def test_no_way_to_the_master_leaves_the_choice_to_the_libraries(routes):
    env = {}
    assert network.set_interfaces(world(4, address="no-such-name"), env) == env == {}


def test_the_loopback_of_this_host_is_found():
    name = network.route_interface("127.0.0.1")
    assert name == network.loopback()
    assert name in {known for _, known in socket.if_nameindex()}
    for own, interface in network.interface_addresses().items():
        assert interface in {known for _, known in socket.if_nameindex()}
        if ":" not in own:
            assert network.route_interface(own) in (interface, network.loopback())
    assert network.route_interface("no-such-name.invalid") is None


def test_the_flight_recorder_is_on_and_a_users_word_is_kept():
    env = {}
    network.record_flights(env)
    assert env == {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        env = {name: "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
        assert network.record_flights(env) == {}
        assert env[name] == env["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
