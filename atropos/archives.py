"""Tar archives that are read to their end. Standard library only: programs that run without site-packages import it."""

from __future__ import annotations

import tarfile
from tarfile import HeaderError, ReadError
from typing import ClassVar, Self

# typeshed doesn't know them
IN_ZEROS: type[HeaderError] = getattr(tarfile, "EOFHeaderError")  # noqa: B009
JUST_SO: type[HeaderError] = getattr(tarfile, "EmptyHeaderError")  # noqa: B009
XATTR = "SCHILY.xattr."
"""Begins the keyword of an extended attribute's record, as in the archives of every other program."""


class WholeTar(tarfile.TarInfo):
    """A member of an archive that is read to its end: the tar module takes a damaged or cut off header for the end.

    `tarfile.open(…, tarinfo=WholeTar)` is how every archive of another's is opened here.

    Attributes:
        ends: how an archive may end: in zeros; as Docker reads them, just so as well.
        damaged: what a header that is damaged or cut off raises.
    """

    ends: ClassVar[tuple[type[HeaderError], ...]] = (IN_ZEROS, JUST_SO)
    damaged: ClassVar[type[Exception]] = ReadError

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> Self:
        """The next member.

        Raises:
            HeaderError: there is none.
            Exception: of the class `damaged`: its header is damaged or cut off.
        """
        try:
            member = super().fromtarfile(tarfile)
        except cls.ends:
            raise
        except HeaderError as error:
            raise cls.damaged(f"it is cut off or damaged: {error}") from None
        if member.size < 0:  # an extended header may say so, and would lead back
            raise cls.damaged(f"it is damaged: a member of {member.size} bytes")
        return member
