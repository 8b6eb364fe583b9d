"""Bounds a tool's answer, in small steps: an answer of 50 MB delays no other call.

A long answer is cut before it is copied, encoded or validated, and a long text is measured piece by piece.
"""

from __future__ import annotations

import asyncio
import json
from typing import cast

from pydantic import BaseModel

from atropos.tools.base import ToolError, as_result
from atropos.tools.models import ToolResult

_PIECE = 262_144
"""Characters measured between two yields to the event loop."""
_NODES_A_TURN = 5_000
"""Values measured between two yields."""
_MAX_NODES = 200_000
"""Most values in a structured answer."""


async def bounded(value: object, *, result_bytes: int, data_bytes: int) -> ToolResult:
    """A tool's return value as a result within bounds.

    Args:
        value: a `ToolResult`, text, or anything that JSON can represent.
        result_bytes: longest output; of a longer one, head and tail are kept.
        data_bytes: longest structured answer; a longer one is dropped, and the beginning of its text is kept.

    Raises:
        ToolError: it can't be written as JSON.
    """
    if isinstance(value, ToolResult):
        result = value
    elif isinstance(value, str):
        text, dropped = await cut(value, result_bytes)
        return ToolResult(success=True, output=text, truncated=bool(dropped), dropped_bytes=dropped)
    else:
        if isinstance(value, BaseModel):
            value = value.model_dump(mode="json")
        weight, whole = await weigh(value)
        if not whole or weight > data_bytes:
            return _beginning(value, weight, result_bytes)
        result = as_result(value)
    update: dict[str, object] = {}
    output, dropped = await cut(result.output, result_bytes)
    if dropped:
        update |= {"output": output, "truncated": True, "dropped_bytes": result.dropped_bytes + dropped}
    if result.error is not None and len(result.error) > result_bytes:
        update["error"] = result.error[:result_bytes]
    if result.data is not None:
        weight, whole = await weigh(result.data)
        if not whole or weight > data_bytes:
            update["data"] = None
    return result.model_copy(update=update) if update else result


async def cut(text: str, most: int) -> tuple[str, int]:
    """Head and tail of a text in `most` bytes of UTF-8, and how many bytes were left out."""
    length = len(text)
    if not text.isascii():
        length = 0
        for at in range(0, len(text), _PIECE):
            length += len(text[at : at + _PIECE].encode("utf-8", "replace"))
            await asyncio.sleep(0)
    if length <= most:
        return text, 0
    half = most // 2
    head = text[:half].encode("utf-8", "replace")[:half].decode("utf-8", "ignore")
    tail = text[-(most - half) :].encode("utf-8", "replace")[-(most - half) :].decode("utf-8", "ignore")
    dropped = length - most
    return f"{head}\n[... {dropped:,} bytes left out ...]\n{tail}", dropped


async def weigh(value: object) -> tuple[int, bool]:
    """The approximate length of a value as JSON, in characters, and whether all of it was measured."""
    weight = nodes = 0
    stack = [value]
    while stack:
        one = stack.pop()
        nodes += 1
        if isinstance(one, dict):
            pairs = cast("dict[object, object]", one)
            weight += 2 + sum(len(key) + 4 for key in pairs if isinstance(key, str))
            stack += pairs.values()
        elif isinstance(one, list | tuple):
            items = cast("list[object]", one)
            weight += 2 + len(items)
            stack += items
        else:
            weight += len(one) + 2 if isinstance(one, str | bytes) else 8
        if nodes % _NODES_A_TURN == 0:
            await asyncio.sleep(0)
        if nodes + len(stack) > _MAX_NODES:
            return weight + len(stack), False
    return weight, True


def _beginning(value: object, weight: int, most: int) -> ToolResult:
    """The beginning of an answer that is too long."""
    try:
        text = json.dumps(_pruned(value, [most], 0), ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolError(f"the tool's answer can't be written as JSON: {error}") from None
    head = text.encode("utf-8", "replace")[:most].decode("utf-8", "ignore")
    dropped = max(weight - len(head), 1)
    note = f"[... about {dropped:,} bytes left out: the answer is too long ...]"
    return ToolResult(success=True, output=f"{head}\n{note}", truncated=True, dropped_bytes=dropped)


def _pruned(value: object, budget: list[int], depth: int) -> object:
    """As much of a value as `budget` characters hold."""
    if depth > 100:
        return "..."
    budget[0] -= 2
    if isinstance(value, str):
        text = value[: max(budget[0], 0)]
        budget[0] -= len(text)
        return text
    if isinstance(value, dict):
        shown: dict[str, object] = {}
        for key, one in cast("dict[object, object]", value).items():
            if budget[0] <= 0:
                break
            budget[0] -= len(str(key))
            shown[str(key)] = _pruned(one, budget, depth + 1)
        return shown
    if isinstance(value, list | tuple):
        items: list[object] = []
        for one in cast("list[object]", value):
            if budget[0] <= 0:
                break
            items.append(_pruned(one, budget, depth + 1))
        return items
    return value
