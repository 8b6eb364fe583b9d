"""What a slot's network device leads to: a namespace of its own, where the egress proxy accepts every address.

The slot has `eth0` and a default route. At the other end all addresses are local, so that sockets which are bound to
none accept each connection to their ports and know by `getsockname` which address was meant; the kernel refuses every
other port. Nothing leads on from there, and none of its ports is one that the slot's own programs listen on
(docs/decisions/0022).
"""

from __future__ import annotations

import _socket
import os
import struct

from atropos.sandbox.linux import syscalls
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
_LO_INDEX, _INDEX = 1, 2
DEVICE = "eth0"
_MAC, OWN_MAC = b"\x02atro\x01", b"\x02atro\x02"
MTU = 65_535
"""Packets never leave the machine; with smaller ones, 100 MB took twice as long."""

# <linux/rtnetlink.h> and the headers that it includes
_NEWLINK, _NEWADDR, _NEWROUTE, _NEWNEIGH = 16, 20, 24, 28
_REQUEST, _ACK, _CREATE = 0x1, 0x4, 0x400
_IFF_UP = 0x1
_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_MTU, _IFLA_LINKINFO, _IFLA_AF_SPEC, _IFLA_NET_NS_FD = 1, 3, 4, 18, 26, 28
_IFLA_INFO_KIND, _IFLA_INFO_DATA, _VETH_INFO_PEER = 1, 2, 1
_IFLA_INET6_ADDR_GEN_MODE, _ADDR_GEN_NONE = 8, b"\x01"
_IFA_ADDRESS, _IFA_LOCAL, _IFA_F_NODAD = 1, 2, 0x02
_NDA_DST, _NDA_LLADDR, _NUD_PERMANENT = 1, 2, 0x80
_RTA_OIF, _RTA_GATEWAY = 4, 5
_MAIN, _BOOT, _UNIVERSE, _HOST, _UNICAST, _LOCAL = 254, 3, 0, 254, 1, 2


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
    far, listeners = _Routes(), _listeners(family, ports)
    # otherwise every name would seem to exist
    tell_kernel("/proc/sys/net/ipv4/icmp_echo_ignore_all", "1")
    if family == _socket.AF_INET6:
        tell_kernel("/proc/sys/net/ipv6/icmp/echo_ignore_all", "1")
    there = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    syscalls.unshare(syscalls.CLONE_NEWNET)
    _Routes().change(_veth(there) + _BOTH_UP + b"".join(map(_own_end, families)))
    far.change(_BOTH_UP + b"".join(map(_far_end, families)))
    os.close(there)
    return [listener.detach() for listener in listeners]


def usable_family() -> int | None:
    """Which addresses gateways have here, as for `enter_network`; None: this machine can make none.

    It leaves the process in namespaces of its own.
    """
    try:
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
            sock.setsockopt(_socket.IPPROTO_IPV6, _socket.IPV6_V6ONLY, 0)
        sock.bind(("::" if family == _socket.AF_INET6 else "", port))
        if kind == _socket.SOCK_STREAM:
            sock.listen(64)
        sockets.append(sock)
    return sockets


class _Routes:
    """The devices, addresses and routes of this process's current network namespace, even after it enters another."""

    def __init__(self) -> None:
        self._sock = _socket.socket(_socket.AF_NETLINK, _socket.SOCK_RAW, 0)

    def change(self, messages: bytes) -> None:
        """Carry out requests, once.

        Raises:
            OSError: one was refused.
        """
        self._sock.send(messages + _LAST)
        error = -struct.unpack_from("=i", self._sock.recv(4096), 16)[0]
        self._sock.close()
        if error:
            raise OSError(error, f"the slot's network device: {os.strerror(error)}")


def _message(kind: int, *parts: bytes, flags: int = 0) -> bytes:
    body = b"".join(parts)
    return struct.pack("=IHHII", 16 + len(body), kind, _REQUEST | _CREATE | flags, 0, 0) + body


def _attribute(kind: int, data: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(data), kind) + data + bytes(-len(data) % 4)


def _link(index: int, *attributes: bytes, flags: int = 0) -> bytes:
    return struct.pack("=BxHiII", 0, 0, index, flags, flags) + b"".join(attributes)


def _veth(peers_namespace: int) -> bytes:
    """A device of the slot, whose other end is in another namespace."""
    both = _attribute(_IFLA_IFNAME, DEVICE.encode() + b"\0") + _attribute(_IFLA_MTU, struct.pack("=I", MTU))
    there = _attribute(_IFLA_NET_NS_FD, struct.pack("=i", peers_namespace))
    peer = _link(_INDEX, both, _attribute(_IFLA_ADDRESS, _MAC), there)
    data = _attribute(_IFLA_INFO_DATA, _attribute(_VETH_INFO_PEER, peer))
    info = _attribute(_IFLA_LINKINFO, _attribute(_IFLA_INFO_KIND, b"veth") + data)
    return _message(_NEWLINK, _link(_INDEX, both, _attribute(_IFLA_ADDRESS, OWN_MAC), info))


def _packed(family: int, address: str) -> bytes:
    four = _socket.inet_pton(_socket.AF_INET, address)
    return four if family == _socket.AF_INET else _socket.inet_pton(_socket.AF_INET6, PREFIX6)[:12] + four


def _end(family: int, own: str, other: str, others_mac: bytes) -> bytes:
    """Set one end's address, and a permanent entry for the other's: learned ones count towards a bound of the host."""
    bits = 30 if family == _socket.AF_INET else 126
    mine, theirs = _packed(family, own), _packed(family, other)
    address = struct.pack("=BBBBi", family, bits, _IFA_F_NODAD, _UNIVERSE, _INDEX)
    neighbour = struct.pack("=BxHiHBB", family, 0, _INDEX, _NUD_PERMANENT, 0, 0)
    return _message(_NEWADDR, address, _attribute(_IFA_LOCAL, mine), _attribute(_IFA_ADDRESS, mine)) + _message(
        _NEWNEIGH, neighbour, _attribute(_NDA_DST, theirs), _attribute(_NDA_LLADDR, others_mac)
    )


def _default_route(family: int, scope: int, kind: int, index: int, *attributes: bytes) -> bytes:
    route = struct.pack("=BBBBBBBBI", family, 0, 0, 0, _MAIN, _BOOT, scope, kind, 0)
    return _message(_NEWROUTE, route, *attributes, _attribute(_RTA_OIF, struct.pack("=i", index)))


def _own_end(family: int) -> bytes:
    via = _attribute(_RTA_GATEWAY, _packed(family, ADDRESS))
    return _end(family, OWN_ADDRESS, ADDRESS, _MAC) + _default_route(family, _UNIVERSE, _UNICAST, _INDEX, via)


def _far_end(family: int) -> bytes:
    return _end(family, ADDRESS, OWN_ADDRESS, OWN_MAC) + _default_route(family, _HOST, _LOCAL, _LO_INDEX)


_NO_LINK_LOCAL = _attribute(
    _IFLA_AF_SPEC, _attribute(_socket.AF_INET6, _attribute(_IFLA_INET6_ADDR_GEN_MODE, _ADDR_GEN_NONE))
)
"""Else a device looks for routers, and for others with its address, as soon as it is up."""
_BOTH_UP = _message(_NEWLINK, _link(_LO_INDEX, flags=_IFF_UP)) + _message(
    _NEWLINK, _link(_INDEX, _NO_LINK_LOCAL, flags=_IFF_UP)
)
_LAST = _message(_NEWLINK, _link(_INDEX), flags=_ACK)
"""Asks for nothing. The kernel answers a request that fails, and this one: the first answer says whether all were
carried out."""
