"""Answers of any size and shape come out within their bounds, and working that out leaves the loop to others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from atropos.api.tool_host.answers import bounded, cut, weigh
from atropos.tools.base import ToolError
from atropos.tools.models import ToolResult

CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    "made",
    [
        lambda: "x" * 50_000_000,
        lambda: "é" * 10_000_000,
        lambda: "\ud800" * 1_000_000,
        lambda: {"text": "x" * 50_000_000},
        lambda: {"text": "é" * 5_000_000, "more": [1, 2]},
        lambda: [{"k": index} for index in range(300_000)],
        lambda: {str(index): None for index in range(300_000)},
        lambda: ToolResult(success=True, output="x" * 10_000_000, data={"a": "y" * 10_000_000}),
        lambda: ToolResult.failure("e" * 10_000_000),
    ],
    ids=["text", "wide text", "halves", "object", "wide object", "many", "many keys", "result", "error"],
)
async def test_a_huge_answer_is_cut_and_says_so(made: Callable[[], Any]):
    result = await bounded(made(), result_bytes=10_000, data_bytes=20_000)
    assert len(result.model_dump_json()) < 60_000
    assert result.data is None
    assert result.truncated or result.error


@pytest.mark.parametrize(
    "value", ["", "é", None, 3, [1, None], {"a": {"b": [True]}}, ToolResult(success=True, output="a")]
)
async def test_a_small_answer_passes_as_it_is(value: Any):
    result = await bounded(value, result_bytes=10_000, data_bytes=20_000)
    assert result.success
    assert not result.truncated
    if isinstance(value, dict):
        assert result.data == value
        assert json.loads(result.output) == value


@pytest.mark.parametrize("value", [CIRCLE, {(1, 2): 3}])
async def test_no_json_is_the_tools_error(value: Any):
    try:
        result = await bounded(value, result_bytes=1000, data_bytes=2000)
    except ToolError as error:
        assert "JSON" in str(error)
    else:
        assert result.truncated


async def test_a_cut_counts_exactly():
    text, dropped = await cut("é" * 3000, 1000)
    head, note, tail = text.split("\n")
    assert (len(head), len(tail), dropped) == (250, 250, 5000)
    assert "5,000 bytes left out" in note


async def test_weighing_holds_up_no_other():
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    assert (await weigh([[1]] * 100_000))[1] is False
    await cut("é" * 5_000_000, 1000)
    task.cancel()
    assert turns >= 20
