"""The client of the trajectory API (atroposlib's run-api): check that it is there, send groups, leave."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import aiohttp
from tenacity import RetryError

from atropos.aio import backoff_s
from atropos.errors import ConfigError
from atropos.tools.arguments import replace_surrogates

API_FAILURES = (RetryError, aiohttp.ClientError, KeyError)
"""What atroposlib raises when the trajectory API is gone, or is another one."""
SEND_TRIES, SEND_TIMEOUT_S = 3, 30.0
"""Tries of sending a group, and the timeout of one try."""
CHECK_TIMEOUT_S = 5.0
"""Timeout of one look before the start."""
ASK_TIMEOUT_S = 10.0
"""Timeout of asking for the newest group."""
NOT_TAKEN = (aiohttp.ClientConnectorError,)
"""Failures after which the group has not arrived for certain."""


async def check_run_api(url: str) -> None:
    """Check that the trajectory API answers, before anything is started for it.

    Raises:
        ConfigError: it doesn't.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"env.rollout_server_url: {url!r} is no URL; write http://host:port")
    last: Exception | None = None
    for attempt in range(3):
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CHECK_TIMEOUT_S)) as session,
                session.get(f"{url.rstrip('/')}/status") as answer,
            ):
                if answer.status == 404:
                    raise ConfigError(
                        f"env.rollout_server_url: the server at {url} is no trajectory API; run-api and many inference "
                        "servers use port 8000 by default: start `run-api --port 8001` and set "
                        "--env.rollout_server_url http://localhost:8001"
                    )
                return
        except (aiohttp.ClientError, TimeoutError) as error:
            last = error
        await asyncio.sleep(0.3 * (attempt + 1))
    why = str(last) or f"no answer within {CHECK_TIMEOUT_S:g} s, three times"
    raise ConfigError(
        f"env.rollout_server_url: no trajectory API at {url} ({why}); start it with `run-api`, and give its "
        "address in --env.rollout_server_url"
    ) from last


class TrajectoryApiLost(Exception):
    """The trajectory API is gone, or was restarted and doesn't know this env."""


class GroupRefused(Exception):
    """The trajectory API refuses a group; sending it again would not help."""


class GroupInDoubt(Exception):
    """The trajectory API did not answer when it was sent a group, so that it may have it.

    Attributes:
        tries: number of tries, each of which may have arrived.
    """

    def __init__(self, message: str, tries: int) -> None:
        super().__init__(message)
        self.tries = tries


def json_of(group: Mapping[str, object]) -> str:
    """A group as JSON, encoded member by member: the encoder holds the GIL for the whole of one value.

    Lone surrogates are replaced: run-api accepts them, and then can't encode them for the trainer.
    """
    parts: list[str] = []
    for key, value in group.items():
        members = cast("list[object]", value) if isinstance(value, list) else [value]
        texts = [_text(member) for member in members]
        text = f"[{', '.join(texts)}]" if isinstance(value, list) else texts[0]
        parts.append(f"{json.dumps(key)}: {text}")
    return f"{{{', '.join(parts)}}}"


def _text(value: object) -> str:
    text = json.dumps(value, default=_listed)
    # A surrogate is written as \udxxx, also one of a pair: whether it is alone is looked at where there is any.
    return json.dumps(replace_surrogates(value)) if "\\ud" in text else text


def _listed(value: Any) -> object:
    """An array, or a number of its type, as scores and advantages are computed with."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"a group can't be written as JSON: it holds {type(value).__name__}")
    return value.tolist()


def _packed(groups: Sequence[Mapping[str, object]], listed: bool) -> bytes:
    texts = [json_of(group) for group in groups]
    return gzip.compress((f"[{', '.join(texts)}]" if listed else texts[0]).encode(), 1)


class TrajectoryApi:
    """Sends groups to the trajectory API, one request at a time.

    run-api queues whatever it is sent, so a group whose answer was lost and that is sent again would be trained on
    twice. It has an endpoint for the newest group that it took: if that is the group in question, it arrived. This env
    sends one request at a time, so that only another env's group can have come in between. If the group before was the
    same (one item, seeded), the answer proves nothing, and the group is sent again.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._turn = asyncio.Lock()
        self._newest: Mapping[str, object] | None = None
        """The last group that arrived."""

    async def send(self, groups: Sequence[Mapping[str, object]], *, listed: bool) -> bool:
        """Send groups, as a list or each alone; the JSON is encoded and compressed in a thread.

        Returns:
            Whether they may have arrived more than once.

        Raises:
            GroupRefused: a 4xx.
            GroupInDoubt: it was not answered.
            aiohttp.ClientError: `SEND_TRIES` times it could not be reached.
        """
        body = await asyncio.to_thread(_packed, groups, listed)
        path = "scored_data_list" if listed else "scored_data"
        async with self._turn, aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SEND_TIMEOUT_S)) as session:
            unanswered = 0
            for attempt in range(SEND_TRIES):
                try:
                    await self._post(session, path, body)
                except (aiohttp.ClientError, TimeoutError) as error:
                    if not isinstance(error, NOT_TAKEN):
                        unanswered += 1
                        if await self._took(session, groups[-1]):
                            self._newest = groups[-1]
                            return unanswered > 1
                    if attempt == SEND_TRIES - 1:
                        if unanswered:
                            raise GroupInDoubt(f"{type(error).__name__}: {error}", unanswered) from error
                        raise
                else:
                    self._newest = groups[-1]
                    return unanswered > 0
                await asyncio.sleep(backoff_s(attempt, first_s=0.5, longest_s=8.0))
        raise AssertionError("unreachable")

    async def _post(self, session: aiohttp.ClientSession, path: str, body: bytes) -> None:
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        async with session.post(f"{self._url}/{path}", data=body, headers=headers) as answer:
            if 400 <= answer.status < 500:
                why = await answer.text(errors="replace")
                raise GroupRefused(f"{answer.status}: {why[:300]}")
            answer.raise_for_status()

    async def _took(self, session: aiohttp.ClientSession, group: Mapping[str, object]) -> bool:
        """Whether the newest group that the API took is this one; False where it can't be asked, or can't know."""
        if self._newest is not None and await asyncio.to_thread(_same, self._newest, group):
            return False
        try:
            async with session.get(
                f"{self._url}/latest_example", timeout=aiohttp.ClientTimeout(total=ASK_TIMEOUT_S)
            ) as answer:
                answer.raise_for_status()
                latest: object = await asyncio.to_thread(json.loads, await answer.text())
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return False
        return isinstance(latest, dict) and await asyncio.to_thread(_same, cast("dict[str, object]", latest), group)


def _same(one: Mapping[str, object], other: Mapping[str, object]) -> bool:
    """Whether two groups are indistinguishable once they are JSON, where an array is a list."""
    told_by = ("tokens", "scores", "inference_logprobs", "env_id")
    return all(json.loads(_text(one.get(key))) == json.loads(_text(other.get(key))) for key in told_by)


async def leave_run_api(url: str, env_id: int | None) -> None:
    """Disconnect this env from the trajectory API, so that batches are made without it. Best effort."""
    if env_id is None:
        return
    with contextlib.suppress(aiohttp.ClientError, TimeoutError, asyncio.CancelledError):
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1)) as session,
            session.post(f"{url.rstrip('/')}/disconnect-env", json={"env_id": env_id}),
        ):
            pass
