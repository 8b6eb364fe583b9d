"""The DNS messages that a slot's resolver reads and writes (RFC 1035): one question, and one address as its answer."""

from __future__ import annotations

import struct
from dataclasses import dataclass

A, AAAA = 1, 28
NO_ERROR, FAILED, NO_SUCH_NAME, NOT_IMPLEMENTED = 0, 2, 3, 4
MESSAGE_BYTES = 4096
"""More than a question has; an answer is shorter than the 512 bytes that every client takes."""
_INTERNET = 1
_RESPONSE, _OPERATION, _RECURSION_WANTED, _RECURSION = 0x8000, 0x7800, 0x0100, 0x0080
_HEADER = struct.Struct(">HHHHHH")


@dataclass(frozen=True)
class Question:
    """What a client asks.

    Attributes:
        name: without the dot at its end.
        kind: the type of record that is asked for; 0: nothing that exists.
    """

    ident: int
    flags: int
    name: str
    kind: int
    section: bytes
    """As it was sent; the answer repeats it."""

    @classmethod
    def parse(cls, message: bytes) -> Question:
        """Read a message.

        Raises:
            ValueError: it is no question that can be answered.
        """
        try:
            ident, flags, questions = _HEADER.unpack_from(message)[:3]
            if flags & _RESPONSE or questions != 1:
                raise ValueError("not one question")
            labels, at = list[str](), _HEADER.size
            while size := message[at]:
                if size > 63:  # a pointer to an earlier name: there is none
                    raise ValueError("a name that can't be read")
                # Any byte has a character, so that odd names are refused by the policy and not by an error here.
                labels.append(message[at + 1 : at + 1 + size].decode("latin-1"))
                at += 1 + size
            kind, network = struct.unpack_from(">HH", message, at + 1)
        except (struct.error, IndexError):
            raise ValueError("a message that is cut off") from None
        known = network == _INTERNET and not flags & _OPERATION
        return cls(ident, flags, ".".join(labels), kind if known else 0, message[_HEADER.size : at + 5])

    def answer(self, code: int, address: bytes = b"", ttl_s: int = 0) -> bytes:
        """The message that answers it, with an address or without."""
        flags = _RESPONSE | self.flags & (_OPERATION | _RECURSION_WANTED) | _RECURSION | code
        # 0xC00C: a pointer to the name in the question, 12 bytes from the start (RFC 1035, 4.1.4).
        record = struct.pack(">HHHIH", 0xC00C, self.kind, _INTERNET, ttl_s, len(address)) if address else b""
        return _HEADER.pack(self.ident, flags, 1, bool(address), 0, 0) + self.section + record + address
