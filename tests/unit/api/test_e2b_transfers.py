"""Bodies of uploads over the E2B API."""

from __future__ import annotations

import gzip
import os
from collections.abc import AsyncIterator

import pytest

from atropos.api.e2b.connect import RpcError
from atropos.api.e2b.transfers import unzipped

PACKED = gzip.compress(b"x", mtime=0)


async def unpacked(data: bytes, piece: int) -> bytes:
    async def body() -> AsyncIterator[bytes]:
        for start in range(0, len(data), piece):
            yield data[start : start + piece]

    return b"".join([part async for part in unzipped(body())])


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
async def test_gzip_members_are_unpacked(piece: int) -> None:
    first, second = os.urandom(300), b"x" * 3_000_000
    packed = b"".join(gzip.compress(each, mtime=0) for each in (first, b"", second))
    assert await unpacked(packed, piece) == first + second


@pytest.mark.parametrize("broken", [b"", b"plain", PACKED[:-1], PACKED + b"garbage"])
async def test_a_body_that_is_no_gzip_is_refused(broken: bytes) -> None:
    with pytest.raises(RpcError, match="gzip"):
        await unpacked(broken, 1 << 20)
