"""A process that turns pages into text. Parsers of hostile input live here: it may crash, hang or be killed.

Speaks on stdin and stdout: a JSON line {"kind", "charset", "url", "bytes": N} and N bytes in; a JSON line
{"title", "text"} or {"error"} out.
"""

from __future__ import annotations

import io
import json
import logging
import os
import resource
import sys
from collections.abc import Mapping
from typing import BinaryIO, cast

MEMORY_BYTES = 1_500_000_000
"""Address space of the worker: a decompression bomb ends the worker, not the server."""
MAX_TEXT = 2_000_000
"""Longest text handed back, in characters."""
MAX_TITLE = 300
"""Longest title, in characters."""
_MAX_PDF_PAGES = 300


def pdf(content: bytes) -> dict[str, str]:
    """The text of a PDF, page by page."""
    from pypdf import PdfReader

    reader = PdfReader(io.BytesIO(content))
    if reader.is_encrypted and not reader.decrypt(""):
        return {"error": "the PDF is protected by a password"}
    parts: list[str] = []
    size = 0
    for number, page in enumerate(reader.pages):
        if number >= _MAX_PDF_PAGES or size > MAX_TEXT:
            parts.append(f"[... the rest of {len(reader.pages)} pages is left out ...]")
            break
        text = page.extract_text()
        parts.append(text)
        size += len(text)
    title = str((reader.metadata.title if reader.metadata else None) or "")
    return {"title": title, "text": "\n\n".join(parts).strip()}


def decoded(content: bytes, charset: str) -> str | None:
    """A page's text; None: there is no such charset, as servers send `binary` or `utf8mb4`."""
    try:
        return content.decode(charset, "replace")
    except (LookupError, UnicodeError):
        return None


def html(content: bytes, charset: str | None, url: str) -> dict[str, str]:
    """The main text of a page as Markdown; the whole page's text where no main part is found."""
    import trafilatura
    from trafilatura.metadata import extract_metadata

    page = (charset and decoded(content, charset)) or content
    text = trafilatura.extract(
        page, url=url, output_format="markdown", include_links=True, include_tables=True, favor_recall=True
    )
    if not text:
        text = trafilatura.html2txt(page)
    try:
        metadata = extract_metadata(cast("str", page))  # bytes are fine, which its annotation leaves out
        title = str(metadata.title or "") if metadata else ""
    except Exception:
        title = ""
    return {"title": title, "text": text or ""}


def extract(order: Mapping[str, str | int | None], content: bytes) -> dict[str, str]:
    """One page."""
    kind, charset = str(order["kind"]), cast("str | None", order.get("charset"))
    if kind == "application/pdf" or content[:5] == b"%PDF-":
        return pdf(content)
    if "html" in kind or kind in {"", "application/xml", "text/xml"} or content[:200].lstrip()[:1] == b"<":
        return html(content, charset, str(order["url"]))
    if kind.startswith("text/") or kind.endswith(("json", "xml", "yaml", "javascript")):
        return {"title": "", "text": decoded(content, charset or "utf-8") or content.decode("utf-8", "replace")}
    return {"error": f"{kind or 'this'} is neither a page, text nor PDF ({len(content):,} bytes)"}


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer orders until stdin ends."""
    while line := source.readline():
        order = json.loads(line)
        content = source.read(order["bytes"])
        try:
            answer = extract(order, content)
        except MemoryError:
            answer = {"error": "the page is too complex to be read"}
        except Exception as error:
            answer = {"error": f"the page can't be read: {type(error).__name__}: {str(error)[:200]}"}
        if "title" in answer:
            answer["title"] = answer["title"][:MAX_TITLE]
        if len(answer.get("text", "")) > MAX_TEXT:
            answer["text"] = answer["text"][:MAX_TEXT] + "\n[... the rest is left out ...]"
        sink.write(json.dumps(answer).encode() + b"\n")
        sink.flush()


def main() -> None:
    """Run as `python -m atropos.api.external.extract_worker`."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a parser's output must not mix with the answers
    serve(sys.stdin.buffer, sink)


if __name__ == "__main__":
    main()
