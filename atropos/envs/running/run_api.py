"""The trajectory API (atroposlib's run-api), as an env meets it: is it there, take these groups, this env is leaving."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from typing import Any, cast

import aiohttp
from tenacity import RetryError

from atropos.aio import backoff_s
from atropos.errors import ConfigError
from atropos.tools.parsers.base import whole_text

API_FAILURES = (RetryError, aiohttp.ClientError, KeyError)
"""What atroposlib raises when the trajectory API is gone, or is another one."""
SEND_TRIES, SEND_TIMEOUT_S = 3, 30.0
"""How often a group is handed to the trajectory API, and how long one try may take."""


async def check_run_api(url: str) -> None:
    """Whether the trajectory API is there, before anything is started for it.

    Raises:
        ConfigError: it isn't.
    """
    last: Exception | None = None
    for attempt in range(3):
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session,
                session.get(f"{url.rstrip('/')}/"),
            ):
                return
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            last = error
        await asyncio.sleep(0.3 * (attempt + 1))
    raise ConfigError(f"env.rollout_server_url: no trajectory API at {url} ({last}); start it with `run-api`") from last


class TrajectoryApiLost(Exception):
    """The trajectory API is gone, or another one stands in its place that doesn't know this env."""


class GroupRefused(Exception):
    """The trajectory API would not have a group, however often it is sent."""


def json_of(group: dict[str, Any]) -> str:
    """A group as JSON, made member by member: the encoder keeps the interpreter to itself while it is at one value.

    Halves of characters are replaced: run-api takes them, and then can't say them to the trainer.
    """
    parts: list[str] = []
    for key, value in group.items():
        members = cast("list[Any]", value) if isinstance(value, list) else [value]
        texts = [_text(member) for member in members]
        text = f"[{', '.join(texts)}]" if isinstance(value, list) else texts[0]
        parts.append(f"{json.dumps(key)}: {text}")
    return f"{{{', '.join(parts)}}}"


def _text(value: Any) -> str:
    text = json.dumps(value)
    return json.dumps(_whole(value)) if "\\ud" in text else text


def _whole(value: Any) -> Any:
    if isinstance(value, str):
        return whole_text(value)
    if isinstance(value, list):
        return [_whole(one) for one in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {_whole(key): _whole(one) for key, one in cast("dict[Any, Any]", value).items()}
    return value


def _packed(groups: list[dict[str, Any]], listed: bool) -> bytes:
    texts = [json_of(group) for group in groups]
    return gzip.compress((f"[{', '.join(texts)}]" if listed else texts[0]).encode(), 1)


async def send_groups(url: str, groups: list[dict[str, Any]], *, listed: bool) -> None:
    """Hand groups to the trajectory API, as atroposlib does; the JSON and its compression are made in a thread.

    Args:
        url: of run-api.
        groups: plain data.
        listed: whether they go out as a list.

    Raises:
        GroupRefused: a 4xx.
        aiohttp.ClientError, TimeoutError: `SEND_TRIES` times nothing came of it.
    """
    body = await asyncio.to_thread(_packed, groups, listed)
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    path = "scored_data_list" if listed else "scored_data"
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SEND_TIMEOUT_S)) as session:
        for attempt in range(SEND_TRIES):
            try:
                async with session.post(f"{url.rstrip('/')}/{path}", data=body, headers=headers) as answer:
                    if 400 <= answer.status < 500:
                        raise GroupRefused(f"{answer.status}: {(await answer.text())[:300]}")
                    answer.raise_for_status()
                    return
            except (aiohttp.ClientError, TimeoutError):
                if attempt == SEND_TRIES - 1:
                    raise
            await asyncio.sleep(backoff_s(attempt, first_s=0.5, longest_s=8.0))


async def leave_run_api(url: str, env_id: int | None) -> None:
    """Tell the trajectory API that this env sends no more, so that it is counted out of batches; best effort."""
    if env_id is None:
        return
    with contextlib.suppress(aiohttp.ClientError, TimeoutError, asyncio.CancelledError):
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1)) as session,
            session.post(f"{url.rstrip('/')}/disconnect-env", json={"env_id": env_id}),
        ):
            pass
