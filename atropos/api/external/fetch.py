"""One page from the web, within bounds: redirects checked one by one, size and time limited."""

from __future__ import annotations

import contextlib
import zlib
from dataclasses import dataclass
from urllib.parse import urljoin

import httpx

from atropos.api.external.guard import Guard
from atropos.net.egress_policy import EgressRefused

_MAX_REDIRECTS = 8
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS
"""zlib detects which of the two it is."""


class FetchError(Exception):
    """The page could not be fetched; the message is for the model."""


@dataclass(frozen=True)
class Page:
    """A fetched page. `truncated`: it was longer than the bound, and `content` is its beginning."""

    url: str
    content_type: str
    charset: str | None
    content: bytes
    truncated: bool


async def fetch(client: httpx.AsyncClient, guard: Guard, url: str, *, max_bytes: int) -> Page:
    """GET an address, following redirects.

    Raises:
        FetchError: why there is no page, for the model to read.
    """
    seen = url.strip()
    cookies = httpx.Cookies()  # some sites redirect with one
    try:
        for _ in range(_MAX_REDIRECTS + 1):
            guard.check_url(seen)
            request = client.build_request("GET", seen)
            cookies.set_cookie_header(request)
            async with contextlib.aclosing(await client.send(request, stream=True)) as answer:
                cookies.extract_cookies(answer)
                if answer.has_redirect_location:
                    seen = urljoin(seen, answer.headers["location"])
                    continue
                if answer.status_code >= 400:
                    raise FetchError(f"the server answered {answer.status_code} {answer.reason_phrase}")
                return await _read(answer, seen, max_bytes)
    except EgressRefused as error:
        raise FetchError(str(error)) from None
    except httpx.TimeoutException:
        raise FetchError("the server did not answer in time") from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise FetchError(f"{type(error).__name__}: {str(error)[:300] or 'no connection'}") from None
    raise FetchError(f"more than {_MAX_REDIRECTS} redirects")


class _Unpacker:
    """Decompresses an answer's body, up to a limit.

    httpx decompresses without a limit: 64 kB of zstd, or of two layers of gzip, can expand to gigabytes. So one layer
    of gzip is requested, and anything else is refused.
    """

    def __init__(self, encoding: str) -> None:
        self._packed = encoding not in {"", "identity"}
        if self._packed and encoding not in {"gzip", "x-gzip", "deflate"}:
            raise FetchError(f"the page came compressed with {encoding[:60]!r}, which was not requested")
        self._inflate = zlib.decompressobj(_GZIP_OR_ZLIB)

    def unpack(self, data: bytes, most: int) -> bytes:
        """Up to `most` bytes of the next piece's content; the rest is dropped."""
        if not self._packed:
            return data[:most]
        content = bytearray()
        while data and len(content) < most:
            if self._inflate.eof:
                if not data.startswith(b"\x1f\x8b"):
                    break  # padding
                self._inflate = zlib.decompressobj(_GZIP_OR_ZLIB)  # gzip may have several members
            try:
                content += self._inflate.decompress(data, most - len(content))
            except zlib.error as error:
                raise FetchError(f"the page can't be unpacked: {error}") from None
            data = self._inflate.unused_data
        return bytes(content)


async def _read(answer: httpx.Response, url: str, max_bytes: int) -> Page:
    unpacker = _Unpacker(answer.headers.get("content-encoding", "").strip().lower())
    content = bytearray()
    async for chunk in answer.aiter_raw(65_536):
        content += unpacker.unpack(chunk, max_bytes + 1 - len(content))
        if len(content) > max_bytes:
            break
    kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
    return Page(url, kind, answer.charset_encoding, bytes(content[:max_bytes]), len(content) > max_bytes)
