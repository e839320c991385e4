"""Over which network interface gloo and NCCL meet, and what NCCL remembers for the day it hangs.

Both libraries read environment variables. What the user has set is never changed, and NVLink multicast
(``NCCL_NVLS_ENABLE``) is left as it is: whether it works is a property of the machine.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import struct
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kforge_parallel.world import World

_log = logging.getLogger("kforge_parallel")

_ANYWHERE = "192.0.2.1"  # reserved for documentation (RFC 5737): the route to it is the default route
_SIOCGIFCONF = 0x8912
_ENTRY_BYTES = 40  # struct ifreq on 64-bit Linux: 16 of name, then a sockaddr_in


def route_interface(address: str) -> str | None:
    """The interface over which this host reaches ``address`` (a name or a number); None where that is not known.

    A UDP socket is connected, which sends nothing, and the address that the kernel chose for it is looked up among
    those of the interfaces. Knows IPv4 and IPv6 on Linux, and the loopback anywhere.
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            own = probe.getsockname()[0].partition("%")[0]
    except OSError:  # no such name, no route
        return None
    if ipaddress.ip_address(own).is_loopback:
        return loopback()
    return interface_addresses().get(own)


def loopback() -> str | None:
    """Name of the loopback interface."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)


def interface_addresses() -> dict[str, str]:
    """Own address -> name of its interface, as Linux tells; empty elsewhere."""
    found: dict[str, str] = {}
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as lines:
            for line in lines:
                digits, *_, name = line.split()
                found[str(ipaddress.IPv6Address(int(digits, 16)))] = name
    except OSError:
        pass
    try:
        import array
        import fcntl

        room = array.array("B", bytes(_ENTRY_BYTES * 256))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            asked = struct.pack("iL", len(room), room.buffer_info()[0])
            filled = struct.unpack("iL", fcntl.ioctl(any_socket.fileno(), _SIOCGIFCONF, asked))[0]
        raw = room.tobytes()
        for start in range(0, filled, _ENTRY_BYTES):
            # An address beside the first carries a label, as in eth0:1; the interface is what is before it.
            name = raw[start : start + 16].partition(b"\0")[0].decode().partition(":")[0]
            found[socket.inet_ntoa(raw[start + 20 : start + 24])] = name
    except (ImportError, OSError):
        pass
    return found


def choose_interface(world: World) -> str | None:
    """The interface to meet the other processes on; None leaves the choice to the libraries.

    The loopback where the master's address is one, or where one host has all processes and its name leads nowhere (a
    laptop without a network). Else the interface that leads to the master. Where hosts name themselves 127.0.1.1, as
    Debian does, that would be the loopback on the master alone: there the default route is taken.
    """
    spans_hosts = world.local_size < world.size
    found = route_interface(world.address)
    if not spans_hosts:
        return found or loopback()
    if found is not None and found == loopback():
        found = route_interface(_ANYWHERE)
        if found == loopback():
            return None
    return found


def set_interfaces(world: World, env: MutableMapping[str, str] | None = None) -> dict[str, str]:
    """Tell gloo, and NCCL where the job spans hosts, which interface to use. Returns the variables that were set."""
    env = os.environ if env is None else env
    names = {"GLOO_SOCKET_IFNAME": "{}"}
    if world.local_size < world.size:
        names["NCCL_SOCKET_IFNAME"] = "={}"  # NCCL takes a bare name for a prefix
    unset = {name: form for name, form in names.items() if name not in env}
    if not unset:
        return {}
    chosen = choose_interface(world)
    if chosen is None:
        if world.local_size < world.size:
            _log.info(
                "no interface leads to %s; %s left unset, so the libraries choose. Set them if processes do not meet",
                world.address,
                " and ".join(unset),
            )
        return {}
    values = {name: form.format(chosen) for name, form in unset.items()}
    env.update(values)
    level = logging.INFO if world.local_size < world.size and world.local_rank == 0 else logging.DEBUG
    _log.log(level, "interface %s leads to %s; set %s", chosen, world.address, ", ".join(values))
    return values


def record_flights(env: MutableMapping[str, str] | None = None) -> dict[str, str]:
    """Have NCCL keep its last collectives and write them to a file a rank when one runs out of time.

    Files: ``~/.cache/torch/comm_lib_trace_rank_<rank>``, elsewhere by TORCH_FR_DUMP_TEMP_FILE. The size of the ring
    has an old name, TORCH_NCCL_TRACE_BUFFER_SIZE, of which torch warns: a user who set either has decided. Returns
    what was set.
    """
    env = os.environ if env is None else env
    values = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    decided = {"TORCH_FR_BUFFER_SIZE"} if "TORCH_NCCL_TRACE_BUFFER_SIZE" in env else set()
    values = {name: value for name, value in values.items() if name not in env and name not in decided}
    env.update(values)
    return values


def network_settings(env: Mapping[str, str] | None = None) -> str:
    """The variables that choose an interface, as they are now: what an error about a network should show."""
    env = os.environ if env is None else env
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return ", ".join(f"{name}={env[name]}" for name in names if name in env) or "no interface set"
