"""One inference server over HTTP: what it serves, which API it speaks, and completions in it."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import aiohttp

from atropos.aio import backoff_s
from atropos.envs.inference.apis import APIS, Completion, TokenApi
from atropos.envs.inference.pending import PendingCalls
from atropos.errors import ConfigError, InferenceError

KEEP_S = 2.0
"""How long an idle connection is kept; uvicorn closes one after 5 s, and a request on it would fail."""
TEMPERATURES = (1.0, 2.0)
"""Of the two tokens by which a server shows whether its logprobs follow the temperature. vLLM takes none above 2."""
SAME, LEAST = 0.1, 1e-6
"""Logprobs of the likeliest token that differ by less, as a part of the first and in nats, are of one distribution.
Twice the temperature takes the square root of the odds against that token; bfloat16 moves a logprob by a hundredth."""
NAMES_CHECKED = frozenset({"vllm", "sglang"})
"""Servers, by what they write as their models' owner, that refuse a model's name that they don't know."""
TOP = 2
"""Likeliest tokens asked for with them: vLLM's `/inference/v1/generate` counts the sampled one among them."""
TRIES = 3
"""Of each request at the start: one that fails now and then would hardly ever pass all of them."""
ABSENT = frozenset({403, 404, 405})
ELSEWHERE = ABSENT | {400, 415, 422, 501}
"""Statuses with which a server may answer a request in an API that it doesn't speak, or (`ABSENT`) that it doesn't
have."""
HALTS = ("/is_paused", "/is_sleeping")
"""Where vLLM tells that it takes requests and answers none, by its development endpoints: 0.32 says both of a server
that is paused. Its /health says 200 meanwhile."""
HALT_TIMEOUT = aiohttp.ClientTimeout(total=5)
_MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError)


class Refused(Exception):
    """A server's answer with an error status; `agent.model.describe` reads its attributes."""

    def __init__(self, path: str, status: int, headers: Mapping[str, str], content: bytes) -> None:
        super().__init__(f"{path}: {reason(content)}")
        self.status = status
        self.headers = headers


class _NoToken(InferenceError):
    """The server speaks the API and sampled nothing: its requests were aborted."""


class InferenceServer:
    """What is known of a server, found out at its first use.

    Args:
        url: as atroposlib's config has it, with `/v1`.
        kind: atroposlib's server type.

    Attributes:
        model: the name to send, once `read_models` has run.
        context_tokens: most tokens of prompt and answer together; None: the server doesn't say.
        raw_logprobs: whether its logprobs are of temperature 1, whatever it samples with.
        api: what it speaks; None: not found out yet.
        halted: whether it says that it is paused or asleep.
        pending: calls that it has not answered yet.
    """

    def __init__(self, url: str, kind: str, model: str, api_key: str, timeout_s: float) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.kind = kind
        self.model = model
        self.context_tokens: int | None = None
        self.raw_logprobs = False
        self.api: TokenApi | None = None
        self.halted = False
        self.pending = PendingCalls()
        self._halts = [*HALTS]
        self._halted_s, self._halted_at = 0.0, 0.0
        self._finding = asyncio.Lock()
        self._session: aiohttp.ClientSession | None = None
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def read_models(self) -> None:
        """Ask for its models, which many servers list. `default` means the first of them.

        Raises:
            ConfigError: it doesn't serve the model that is asked for.
        """
        try:
            listed = (await self._answer("GET", "/v1/models"))["data"]
            cards = {str(card["id"]): cast("Mapping[str, Any]", card) for card in listed}
        except (Refused, InferenceError, aiohttp.ClientError, *_MALFORMED):
            return  # what is wrong shows at the first request
        if not cards:
            return
        # atroposlib's own default for a name that nobody has set.
        if self.model in {"", "default"}:
            self.model = next(iter(cards))
        elif self.model not in cards and any(card.get("owned_by") in NAMES_CHECKED for card in cards.values()):
            raise ConfigError(
                f"openai.model_name: the server has no model {self.model!r}; it serves {', '.join(cards)}: "
                "name one, or leave the setting out"
            )
        card = cards.get(self.model) or next(iter(cards.values()))
        if (base := cards.get(str(card.get("parent")))) is not None:  # the card of an adapter has no length
            if self.kind == "sglang":
                raise ConfigError(
                    f"openai.model_name: {self.model!r} is an adapter, and SGLang's /generate is asked for the model "
                    "itself: merge it into the model, or serve it with vLLM"
                )
            card = base
        # vLLM's and SGLang's name; llama.cpp's.
        length = card.get("max_model_len") or (card.get("meta") or {}).get("n_ctx")
        self.context_tokens = int(length) if length else None

    @property
    def halted_s(self) -> float:
        """For how many seconds it was paused or asleep, in all, as far as it was looked at."""
        return self._halted_s + (time.monotonic() - self._halted_at if self.halted else 0.0)

    async def look(self, since_s: float) -> None:
        """Ask whether it is paused or asleep.

        What it says holds for the last `since_s` seconds, and until the next look.
        """
        # A pause is noticed at the first look within it; it began somewhere since the look before.
        began, halted = time.monotonic() - since_s, False
        # A copy, as the loop removes those that the server doesn't have.
        for path in [*self._halts]:
            try:
                halted |= (await self._answer("GET", path, timeout=HALT_TIMEOUT))[path[1:]] is True
            except (Refused, aiohttp.ClientError, TimeoutError) as error:
                # A server that is busy or away says nothing: what it last said stays.
                if getattr(error, "status", None) not in ABSENT:
                    return
                self._halts.remove(path)  # it doesn't tell
            except (InferenceError, *_MALFORMED):
                self._halts.remove(path)
        if self.halted and not halted:
            self._halted_s = self.halted_s
        elif halted and not self.halted:
            self._halted_at = began
        self.halted = halted

    async def find(self, prompt: Sequence[int]) -> None:
        """Find the API and whose logprobs it gives, with a token or two.

        Raises:
            Refused, InferenceError, aiohttp.ClientError: it speaks none of those that report token ids, or fails.
        """
        failures: list[Refused | InferenceError] = []
        for api in APIS[self.kind]:
            try:
                first = await self._top_logprob(api, prompt, TEMPERATURES[0])
                break
            except (Refused, InferenceError) as error:
                # It speaks this API, and fails: another one would fail as well, or hide the reason.
                if isinstance(error, _NoToken) or (error.status is not None and error.status not in ELSEWHERE):
                    raise
                failures.append(error)
        else:
            # A refusal (400, 422) says more of what is wrong than "not found".
            raise next((error for error in failures if error.status not in ABSENT), failures[0])
        # Asked of each server: vLLM's `--logprobs-mode` decides it, and no API tells which one is set.
        second = await self._top_logprob(api, prompt, TEMPERATURES[1])
        self.raw_logprobs = abs(first - second) <= SAME * abs(first) + LEAST
        # Last, as it is what `complete` goes by.
        self.api = api

    async def _top_logprob(self, api: TokenApi, prompt: Sequence[int], temperature: float) -> float:
        sampling = {"n": 1, "max_tokens": 1, "temperature": temperature}
        attempt = 0
        while True:
            try:
                [completion] = await self._complete(api, prompt, sampling, top=TOP)
                if not completion.logprobs:
                    raise _NoToken(
                        f"the inference server sampled no token (finish reason {completion.finish_reason!r})"
                    )
            except (Refused, InferenceError, aiohttp.ClientError) as error:
                attempt += 1
                # No try would change what the server doesn't speak.
                if getattr(error, "status", None) in ELSEWHERE or attempt == TRIES:
                    raise
                await asyncio.sleep(backoff_s(attempt, first_s=0.2, longest_s=5.0))
            else:
                top = completion.top_logprob
                return completion.logprobs[0] if math.isnan(top) else top

    async def complete(self, prompt: Sequence[int], sampling: Mapping[str, object]) -> list[Completion]:
        """`n` completions of token ids.

        Raises:
            Refused, InferenceError, aiohttp.ClientError: no usable answer.
        """
        # No lock on the way that nearly all calls take.
        if self.api is None:
            # A group's members all begin at once; one of them finds out, the others wait.
            async with self._finding:
                if self.api is None:
                    await self.find(prompt)
        assert self.api is not None
        return await self._complete(self.api, prompt, sampling, top=0)

    async def _complete(
        self, api: TokenApi, prompt: Sequence[int], sampling: Mapping[str, object], *, top: int
    ) -> list[Completion]:
        answer = await self._answer("POST", api.path, api.body(self.model, prompt, sampling, top=top))
        try:
            echoed = api.prompt(answer)
            completions = api.read(answer)
        except _MALFORMED as error:
            what = f"has no {error}" if isinstance(error, KeyError) else f"is invalid ({type(error).__name__}: {error})"
            raise InferenceError(f"the inference server's answer {what}"[:300]) from error
        # The logprobs would be of another context than the one that is trained on.
        if echoed is not None and list(echoed) != list(prompt):
            raise InferenceError(
                "the inference server changed the prompt's tokens (a doubled BOS token?); it must use them as they are",
                retryable=False,
            )
        return completions

    async def _answer(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        timeout: aiohttp.ClientTimeout | None = None,
    ) -> Any:
        if self._session is None:
            # At most `capacity` trajectories call at once already; aiohttp's limit of 100 would let the others wait
            # unseen.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_S)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, timeout=self._timeout)
        limit = timeout or self._timeout
        async with self._session.request(method, f"{self.url}{path}", json=body, timeout=limit) as response:
            content = await response.read()
            if response.status >= 400:
                raise Refused(path, response.status, response.headers, content)
        try:
            return json.loads(content)
        except ValueError as error:
            kind = response.headers.get("Content-Type", "no content type")
            raise InferenceError(
                f"the inference server sent an invalid answer ({path}: {kind}, {len(content)} bytes)"
            ) from error

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()


def reason(content: bytes) -> str:
    """Why a server refused, as its answer says: one line."""
    text = content.decode("utf-8", "replace")
    try:
        value: Any = json.loads(text)
    except ValueError:
        value = text
    for name in ("error", "detail", "message"):
        if isinstance(value, dict) and name in value:
            value = cast("dict[str, Any]", value)[name]
    return " ".join(str(value).split())[:300] or "no detail"
