"""Network devices, addresses and routes: requests to the kernel (rtnetlink), by the programs that slots start with.

Constants are those of <linux/rtnetlink.h> and the headers that it includes.
"""

from __future__ import annotations

import _socket
import os
import struct

LOOPBACK = 1
"""The index of the loopback device of every namespace."""
MTU = 65_535
"""Packets never leave the machine; with smaller ones, 100 MB took twice as long."""
MAIN, UNIVERSE, LINK, HOST, UNICAST, LOCAL = 254, 0, 253, 254, 1, 2
_NEWLINK, _NEWADDR, _NEWROUTE, _NEWNEIGH, _NEWRULE = 16, 20, 24, 28, 32
_REQUEST, _ACK, _CREATE = 0x1, 0x4, 0x400
_IFF_UP = 0x1
_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_MTU, _IFLA_LINKINFO, _IFLA_AF_SPEC, _IFLA_NET_NS_FD = 1, 3, 4, 18, 26, 28
_IFLA_INFO_KIND, _IFLA_INFO_DATA, _VETH_INFO_PEER = 1, 2, 1
_IFLA_INET6_ADDR_GEN_MODE, _ADDR_GEN_NONE = 8, b"\x01"
_IFA_ADDRESS, _IFA_LOCAL, _IFA_F_NODAD = 1, 2, 0x02
_NDA_DST, _NDA_LLADDR, _NUD_PERMANENT = 1, 2, 0x80
_RTA_DST, _RTA_OIF, _RTA_GATEWAY, _BOOT = 1, 4, 5, 3
_FRA_DST, _FRA_IIFNAME, _FR_ACT_PROHIBIT = 1, 3, 8


class LinkRequests:
    """The devices, addresses and routes of this thread's current network namespace, even after it enters another."""

    def __init__(self) -> None:
        self._sock = _socket.socket(_socket.AF_NETLINK, _socket.SOCK_RAW, 0)

    def change(self, messages: bytes) -> None:
        """Carry out requests, once.

        Raises:
            OSError: one was refused.
        """
        self._sock.send(messages + _LAST)
        # nlmsgerr comes after the header of 16 bytes: 0, or a negative errno.
        error = -struct.unpack_from("=i", self._sock.recv(4096), 16)[0]
        self._sock.close()
        if error:
            raise OSError(error, f"the slot's network device: {os.strerror(error)}")


def _message(kind: int, *parts: bytes, flags: int = 0) -> bytes:
    body = b"".join(parts)
    return struct.pack("=IHHII", 16 + len(body), kind, _REQUEST | _CREATE | flags, 0, 0) + body


def _attribute(kind: int, data: bytes) -> bytes:
    # The length is without the padding to 4 bytes (rtnetlink(7)).
    return struct.pack("=HH", 4 + len(data), kind) + data + bytes(-len(data) % 4)


def _link(index: int, *attributes: bytes, flags: int = 0) -> bytes:
    return struct.pack("=BxHiII", 0, 0, index, flags, flags) + b"".join(attributes)


def _end_of_veth(name: str, mac: bytes) -> bytes:
    named = _attribute(_IFLA_IFNAME, name.encode() + b"\0") + _attribute(_IFLA_MTU, struct.pack("=I", MTU))
    return named + _attribute(_IFLA_ADDRESS, mac)


def veth(index: int, name: str, mac: bytes, peer: tuple[int, str, bytes], namespace: int) -> bytes:
    """A device whose other end, with its own index, name and address, is in another namespace."""
    peers_index, peers_name, peers_mac = peer
    there = _attribute(_IFLA_NET_NS_FD, struct.pack("=i", namespace))
    far = _link(peers_index, _end_of_veth(peers_name, peers_mac), there)
    data = _attribute(_IFLA_INFO_DATA, _attribute(_VETH_INFO_PEER, far))
    info = _attribute(_IFLA_LINKINFO, _attribute(_IFLA_INFO_KIND, b"veth") + data)
    return _message(_NEWLINK, _link(index, _end_of_veth(name, mac), info))


def up(index: int) -> bytes:
    """Set a device up."""
    return _message(_NEWLINK, _link(index, b"" if index == LOOPBACK else _NO_LINK_LOCAL, flags=_IFF_UP))


def address(index: int, family: int, own: bytes, bits: int) -> bytes:
    """Give a device an address."""
    # NODAD: an IPv6 address could not be used for a second while the kernel looks for a duplicate.
    head = struct.pack("=BBBBi", family, bits, _IFA_F_NODAD, UNIVERSE, index)
    return _message(_NEWADDR, head, _attribute(_IFA_LOCAL, own), _attribute(_IFA_ADDRESS, own))


def neighbour(index: int, family: int, other: bytes, mac: bytes) -> bytes:
    """A permanent entry for the other end of a device: learned ones count towards a bound of the host."""
    head = struct.pack("=BxHiHBB", family, 0, index, _NUD_PERMANENT, 0, 0)
    return _message(_NEWNEIGH, head, _attribute(_NDA_DST, other), _attribute(_NDA_LLADDR, mac))


def route(
    index: int,
    family: int,
    to: bytes = b"",
    bits: int = 0,
    via: bytes = b"",
    *,
    scope: int = UNIVERSE,
    kind: int = UNICAST,
) -> bytes:
    """Send what is meant for a network (all: the rest) through a device."""
    head = struct.pack("=BBBBBBBBI", family, bits, 0, 0, MAIN, _BOOT, scope, kind, 0)
    where = _attribute(_RTA_DST, to) if to else b""
    through = _attribute(_RTA_GATEWAY, via) if via else b""
    return _message(_NEWROUTE, head, where, through, _attribute(_RTA_OIF, struct.pack("=i", index)))


def prohibit(family: int, device: str, to: bytes, bits: int) -> bytes:
    """Refuse to pass packets on that come in by a device, whatever their source says, to an address."""
    head = struct.pack("=BBBBBBBBI", family, bits, 0, 0, 0, 0, 0, _FR_ACT_PROHIBIT, 0)
    return _message(_NEWRULE, head, _attribute(_FRA_DST, to), _attribute(_FRA_IIFNAME, f"{device}\0".encode()))


_NO_LINK_LOCAL = _attribute(
    _IFLA_AF_SPEC, _attribute(_socket.AF_INET6, _attribute(_IFLA_INET6_ADDR_GEN_MODE, _ADDR_GEN_NONE))
)
"""Else a device looks for routers, and for others with its address, as soon as it is up."""
_LAST = _message(_NEWLINK, _link(LOOPBACK), flags=_ACK)
"""Asks for nothing. The kernel answers a request that fails, and this one: the first answer says whether all were
carried out."""
