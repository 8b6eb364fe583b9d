"""What a slot's network device leads to: a namespace of its own, where the egress proxy accepts every address.

The slot has `eth0` and a default route. At the other end all addresses are local, so that sockets which are bound to
none accept each connection to their ports and know by `getsockname` which address was meant; the kernel refuses every
other port. Nothing leads on from there, and none of its ports is one that the slot's own programs listen on
(docs/decisions/0022).
"""

from __future__ import annotations

import _socket
import os

from atropos.sandbox.linux import netlink, syscalls
from atropos.sandbox.linux.sysctl import tell_kernel

HOSTNAME = "atropos"
"""Name of a slot's machine."""
ADDRESS, OWN_ADDRESS = "198.18.0.1", "198.18.0.2"
"""Of the gateway, where names are asked for, and of the slot: in the range for tests of networks (RFC 2544), which
nobody routes."""
PREFIX6 = "fd61:7472:6f70:6f73::"
"""The same in IPv6: this prefix (RFC 4193) and the IPv4 address."""
DNS_PORT = 53
SOCKETS = 67
"""Most that a slot has in the egress proxy: the proxy's own, two for names, and one for each of 64 ports
(`egress_policy.MOST_PORTS`)."""
_INDEX = 2
DEVICE = "eth0"
_MAC, OWN_MAC = b"\x02atro\x01", b"\x02atro\x02"


def enter_network(family: int, ports: list[int]) -> list[int]:
    """Enter a new network namespace that has a gateway.

    Args:
        family: AF_INET6 for both kinds of addresses, AF_INET where the machine has no IPv6.
        ports: those that connections are accepted on.

    Returns:
        Descriptors of the gateway's sockets: for names by UDP, for names by TCP, and one a port.

    Raises:
        OSError: it could not be made.
    """
    families = {_socket.AF_INET, family}
    syscalls.unshare(syscalls.CLONE_NEWNET)
    # Made here, in the far namespace; both stay there when this process goes on to the slot's.
    far, listeners = netlink.LinkRequests(), _listeners(family, ports)
    # otherwise every name would seem to exist
    tell_kernel("/proc/sys/net/ipv4/icmp_echo_ignore_all", "1")
    if family == _socket.AF_INET6:
        tell_kernel("/proc/sys/net/ipv6/icmp/echo_ignore_all", "1")
    there = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    syscalls.unshare(syscalls.CLONE_NEWNET)
    device = netlink.veth(_INDEX, DEVICE, OWN_MAC, (_INDEX, DEVICE, _MAC), there)
    both_up = netlink.up(netlink.LOOPBACK) + netlink.up(_INDEX)
    netlink.LinkRequests().change(device + both_up + b"".join(map(_own_end, families)))
    # Second: the far end exists once the slot's end was made.
    far.change(both_up + b"".join(map(_far_end, families)))
    os.close(there)
    return [listener.detach() for listener in listeners]


def usable_family() -> int | None:
    """Which addresses gateways have here, as for `enter_network`; None: this machine can make none.

    It leaves the process in namespaces of its own.
    """
    try:
        # A slot makes its gateway in a user namespace as well, where the kernel may refuse a kind of device.
        syscalls.unshare(syscalls.CLONE_NEWUSER)
    except OSError:
        return None
    for each in (_socket.AF_INET6, _socket.AF_INET):
        try:
            enter_network(each, [])
        except OSError:
            continue
        return each
    return None


def _listeners(family: int, ports: list[int]) -> list[_socket.socket]:
    """The sockets of the gateway of the namespace that this process is in, each for every address."""
    sockets: list[_socket.socket] = []
    for kind, port in ((_socket.SOCK_DGRAM, DNS_PORT), *((_socket.SOCK_STREAM, port) for port in (DNS_PORT, *ports))):
        sock = _socket.socket(family, kind)
        if family == _socket.AF_INET6:
            # One socket for both kinds of addresses; the host may have net.ipv6.bindv6only set.
            sock.setsockopt(_socket.IPPROTO_IPV6, _socket.IPV6_V6ONLY, 0)
        sock.bind(("::" if family == _socket.AF_INET6 else "", port))
        if kind == _socket.SOCK_STREAM:
            sock.listen(64)
        sockets.append(sock)
    return sockets


def _packed(family: int, address: str) -> bytes:
    four = _socket.inet_pton(_socket.AF_INET, address)
    return four if family == _socket.AF_INET else _socket.inet_pton(_socket.AF_INET6, PREFIX6)[:12] + four


def _end(family: int, own: str, other: str, others_mac: bytes) -> bytes:
    """Set one end's address, and an entry for the other's."""
    # The smallest network that holds both ends.
    bits = 30 if family == _socket.AF_INET else 126
    mine, theirs = _packed(family, own), _packed(family, other)
    return netlink.address(_INDEX, family, mine, bits) + netlink.neighbour(_INDEX, family, theirs, others_mac)


def _own_end(family: int) -> bytes:
    way = netlink.route(_INDEX, family, via=_packed(family, ADDRESS))
    return _end(family, OWN_ADDRESS, ADDRESS, _MAC) + way


def _far_end(family: int) -> bytes:
    # A local route for every address: packets to any of them are for this host's sockets (AnyIP).
    everything = netlink.route(netlink.LOOPBACK, family, scope=netlink.HOST, kind=netlink.LOCAL)
    return _end(family, ADDRESS, OWN_ADDRESS, OWN_MAC) + everything
