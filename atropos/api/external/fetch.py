"""One page from the web, within bounds: redirects checked one by one, size and time limited."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urljoin

import httpx

from atropos.api.external.guard import Forbidden, Guard

_MAX_REDIRECTS = 8


class FetchError(Exception):
    """The page could not be had; the message is for the model."""


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
    try:
        for _ in range(_MAX_REDIRECTS + 1):
            guard.check_url(seen)
            async with client.stream("GET", seen) as answer:
                if answer.is_redirect:
                    seen = urljoin(seen, answer.headers.get("location", ""))
                    continue
                if answer.status_code >= 400:
                    raise FetchError(f"the server answered {answer.status_code} {answer.reason_phrase}")
                return await _read(answer, seen, max_bytes)
    except Forbidden as error:
        raise FetchError(str(error)) from None
    except httpx.TimeoutException:
        raise FetchError("the server did not answer in time") from None
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError, ValueError) as error:
        raise FetchError(f"{type(error).__name__}: {str(error)[:300] or 'no connection'}") from None
    finally:
        client.cookies.clear()
    raise FetchError(f"more than {_MAX_REDIRECTS} redirects")


async def _read(answer: httpx.Response, url: str, max_bytes: int) -> Page:
    chunks: list[bytes] = []
    size = 0
    truncated = False
    async for chunk in answer.aiter_bytes(65_536):
        chunks.append(chunk[: max_bytes - size])
        size += len(chunk)
        if size >= max_bytes:
            truncated = size > max_bytes
            break
    kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
    return Page(url, kind, answer.charset_encoding, b"".join(chunks), truncated)
