"""Tar archives that are read to their end. Standard library only: programs that run without site-packages import it."""

from __future__ import annotations

import tarfile
from tarfile import HeaderError, ReadError
from typing import ClassVar, Self

# typeshed doesn't know them
IN_ZEROS: type[HeaderError] = getattr(tarfile, "EOFHeaderError")  # noqa: B009
JUST_SO: type[HeaderError] = getattr(tarfile, "EmptyHeaderError")  # noqa: B009


class WholeTar(tarfile.TarInfo):
    """A member of an archive that is read to its end: the tar module takes a damaged or cut off header for the end.

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
            return super().fromtarfile(tarfile)
        except cls.ends:
            raise
        except HeaderError as error:
            raise cls.damaged(f"it is cut off or damaged: {error}") from None
