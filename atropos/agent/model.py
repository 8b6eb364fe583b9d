"""Calls to an inference server: one deadline, one retry rule, one error type.

The server is duck-typed: a `ServerManager`, one of its servers, or a stand-in with
`tokens_and_logprobs_completion(**kwargs)` and `chat_completion(**kwargs)`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import math
import re
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from aiohttp import ContentTypeError
from aiohttp.http_exceptions import HttpProcessingError

from atropos.agent.fairness import started_in_turn
from atropos.agent.transcript import Message, WeightSpan, numbers
from atropos.aio import Allowance, backoff_s, retry_after_s
from atropos.errors import InferenceError
from atropos.tools import ToolCall
from atropos.tools.arguments import replace_surrogates, too_deep
from atropos.tools.models import call_with_id

EXACT = frozenset({"vllm", "sglang"})
"""Server types that report the tokens they sampled."""

ENDINGS = frozenset({"stop", "length"})
"""Finish reasons of a complete turn, and of one cut off at `max_tokens`."""
CHAT_ENDINGS = ENDINGS | {"tool_calls", "function_call"}
"""The same for OpenAI's chat completions."""
ABORTED = "abort"
"""Finish reason of a generation that the server broke off, as at an update of its weights."""

_UNREADABLE_CALL = re.compile(
    r"\b500\b.*(?:pars|decod|malformed|invalid)\w*\W(?:\w+\W+){0,3}(?:tool|function)[ _]?calls?\b"  # Ollama
    r"|\b500\b.*Failed to parse input at pos"  # llama.cpp
    r"|\btool_use_failed\b",  # Groq, with 400
    re.IGNORECASE | re.DOTALL,
)
"""Failures by which servers report that the model wrote a call that is none: its mistake, which it is to read."""

Answer = TypeVar("Answer")
_Sampled = tuple[Sequence[int], Sequence[Sequence[object]], Sequence[Sequence[float]], Sequence[object]]
"""The prompt's ids; then the sampled ids, their logprobs and the finish reason of each completion. A fifth part, where
there is one, has the `WeightSpan`s of each."""

asking: contextvars.ContextVar[Model | None] = contextvars.ContextVar("asking", default=None)
"""Whose call the current one is; it wants failures as `ModelFailure` values."""


@dataclass(frozen=True)
class ModelFailure:
    """A server's exception carried as a value past atroposlib's own retries (up to 27 requests for one 503)."""

    error: BaseException


class _Aborted(InferenceError):
    """The server broke the generation off; it is healthy, so the call is repeated however often that happens."""


@dataclass(frozen=True)
class Generation:
    """What a server sampled.

    Attributes:
        weights: versions of the weights that sampled the ids, in order; empty where the server doesn't say.
    """

    ids: list[int]
    logprobs: list[float]
    finish_reason: str
    weights: tuple[WeightSpan, ...] = ()

    def followed_by(self, later: Generation) -> Generation:
        """One generation of this one, which was broken off, and what continued it."""
        done = len(self.ids)
        weights = (WeightSpan(done + begin, done + end, version) for begin, end, version in later.weights)
        return Generation(
            self.ids + later.ids, self.logprobs + later.logprobs, later.finish_reason, (*self.weights, *weights)
        )


@dataclass(frozen=True)
class ChatAnswer:
    """The answer of an OpenAI-compatible server; `unreadable`: why it could not parse the model's call, if so."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    unreadable: str = ""


def _each_server(server: object) -> Sequence[object]:
    """The servers of a manager; a single server is its own."""
    return getattr(server, "servers", None) or [server]


def server_type(server: object) -> str:
    """The kind of a manager's servers: `vllm`, `sglang`, `openai` or `trl`.

    A stand-in without a config counts as exact if it gives tokens.
    """
    first = _each_server(server)[0]
    kind = getattr(getattr(first, "config", None), "server_type", None)
    if kind is None:
        return "vllm" if hasattr(server, "tokens_and_logprobs_completion") else "openai"
    return str(kind)


class Model:
    """Asks a server, with a deadline and bounded retries.

    Args:
        server: see the module.
        timeout_s: deadline of one request, its retries included.
        retries: further tries after a transient failure.
    """

    def __init__(self, server: object, *, timeout_s: float = 300.0, retries: int = 2) -> None:
        self._server = server
        self._timeout_s = timeout_s
        self._retries = retries
        self.lost_s = 0.0
        """Seconds that are no time of the model's: of requests that failed and until the next try, and those in which
        the server was away, paused or asleep."""
        self.asked_at = 0.0
        """When the current request was handed over, by `time.perf_counter`."""
        self.name = str(getattr(getattr(_each_server(server)[0], "config", None), "model_name", ""))
        """What the server calls its model; empty of a stand-in without a config."""
        kind = server_type(server)
        self.exact = kind in EXACT
        """Whether the server reports the tokens it samples."""
        self.raw_logprobs = any(
            getattr(getattr(one, "inference", None), "raw_logprobs", False) for one in _each_server(server)
        )
        """Whether a server's logprobs are those of temperature 1, whatever it samples with; its probe tells."""
        self.seed_name = "sampling_seed" if kind == "sglang" else "seed"
        """What the server calls a request's seed; SGLang refuses names that it doesn't know."""

    async def generate(self, ids: Sequence[int], **sampling: object) -> Generation:
        """Continue a prompt of token ids.

        What the server had sampled when it broke a generation off is kept, and continued.

        Args:
            ids: the prompt.
            sampling: temperature, max_tokens, seed and the like, as the server's API names them.

        Raises:
            InferenceError: no usable answer within the deadline.
        """
        prompt = numbers(ids)
        sampled = Generation([], [], ABORTED)

        async def once() -> Generation:
            nonlocal sampled
            numbered = numbers([*prompt, *sampled.ids])
            # What was sampled before is part of the prompt now.
            room = self._left(sampling, len(sampled.ids))
            answer = await self._ask("tokens_and_logprobs_completion", input_ids=numbered, n=1, **room)
            sampled = sampled.followed_by(_generation(numbered, answer))
            # Raised, so that `_bounded` pauses and counts the time as lost.
            if sampled.finish_reason == ABORTED:
                raise _Aborted(f"the inference server broke the generation off after {len(sampled.ids)} tokens")
            return sampled

        async def short() -> object:
            return await self._ask(
                "tokens_and_logprobs_completion", input_ids=numbers(prompt[:1]), n=1, **sampling | {"max_tokens": 1}
            )

        why = "it can't take this prompt, maybe for its length (env.max_token_length)"
        return await self._answered(once, short, f"a prompt of {len(prompt)} tokens, and answers a short one: {why}")

    def _left(self, sampling: Mapping[str, Any], done: int) -> Mapping[str, Any]:
        """How to continue after this many tokens. With the same seed, the first tokens would be drawn again."""
        changes = {"max_tokens": -done, self.seed_name: done} if done else {}
        return {**sampling, **{name: sampling[name] + by for name, by in changes.items() if name in sampling}}

    async def chat(self, messages: Sequence[Message], **options: object) -> ChatAnswer:
        """Ask for the next message of a conversation.

        Raises:
            InferenceError: no usable answer within the deadline.
        """

        async def once() -> ChatAnswer:
            try:
                answer = await self._ask(
                    "chat_completion", messages=[replace_surrogates(dict(m)) for m in messages], n=1, **options
                )
            except Exception as error:
                # The model's own mistake: a retry would hide it, and train on luck.
                if _UNREADABLE_CALL.search(why := str(describe(error))):
                    return ChatAnswer("", "", (), "stop", unreadable=why)
                raise
            return _chat_answer(answer)

        why = "it can't take this one, or can't read the call that its model wrote; its own log says why"
        return await self._answered(
            once, self._greet, f"a conversation of {len(messages)} messages, and answers a short one: {why}"
        )

    async def probe_chat(self, **options: object) -> None:
        """Ask for one token of a conversation. Any well-formed answer passes: a reasoning model has no message yet.

        Args:
            options: of every request, such as `tools`, which some servers don't take.

        Raises:
            InferenceError: as for `chat`.
        """
        await self._bounded(partial(self._greet, **options))

    async def _greet(self, **options: object) -> None:
        request: dict[str, object] = {**options, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        answer: Any = await self._ask("chat_completion", **request)
        _ = answer.choices[0].message.content

    async def _ask(self, method: str, **request: object) -> object:
        asking.set(self)  # until this call's own task ends (`started_in_turn`)
        self.asked_at = time.perf_counter()
        answer: object = await getattr(self._server, method)(**request)
        # As a value, since atroposlib would repeat a request that raises.
        if isinstance(answer, ModelFailure):
            raise describe(answer.error) from answer.error
        return answer

    async def _answered(
        self,
        once: Callable[[], Coroutine[object, object, Answer]],
        short: Callable[[], Coroutine[object, object, object]],
        what: str,
    ) -> Answer:
        """What `once` gives, with retries. A server that answers it with 500 each time, but not `short`, is let be."""
        try:
            return await self._bounded(once)
        except InferenceError as error:
            # 500 may be this request's doing (a prompt that crashes the server's code) or the server's state.
            if error.status != 500:
                raise
        # It fails where the server itself is broken, and then its error is the one that counts.
        await self._bounded(short)
        try:
            return await self._bounded(once, retries=0)
        except InferenceError as error:
            text = f"{error}, each time, to {what}"
            raise InferenceError(text, status=error.status, retryable=error.status != 500) from error

    async def _bounded(
        self, once: Callable[[], Coroutine[object, object, Answer]], *, retries: int | None = None
    ) -> Answer:
        retries = self._retries if retries is None else retries
        attempt = failures = 0
        last: InferenceError | None = None
        allowance = Allowance(self._timeout_s)
        try:
            async with allowance.once():
                while True:
                    began, lost_s = time.perf_counter(), self.lost_s
                    try:
                        return await started_in_turn(once)
                    except Exception as error:
                        last = describe(error)
                    attempt += 1
                    # Not counted: with weights that are updated every minute, a long turn is broken off again and
                    # again.
                    failures += not isinstance(last, _Aborted)
                    if not last.retryable or failures > retries or allowance.left_s <= 0:
                        raise last
                    # A wait beyond the deadline would be a failure for certain.
                    asked = last.retry_after_s if last.retry_after_s < allowance.left_s else 0.0
                    await asyncio.sleep(max(asked, backoff_s(attempt, first_s=0.2, longest_s=5.0)))
                    self.lost_s = lost_s + time.perf_counter() - began
        except TimeoutError as error:
            why = f"; before that: {last}" if last else ""
            raise InferenceError(f"the inference server gave no answer within {self._timeout_s:g} s{why}") from error


def innermost(error: BaseException) -> BaseException:
    """The cause behind tenacity's RetryErrors, which atroposlib nests twice."""
    while (attempt := getattr(error, "last_attempt", None)) is not None and (cause := attempt.exception()) is not None:
        error = cause
    return error


def describe(error: BaseException) -> InferenceError:
    """Any client library's exception as an `InferenceError`, 4xx marked as not worth repeating (408, 429 are)."""
    if isinstance(error, InferenceError):
        return error
    inner = innermost(error)
    if isinstance(inner, InferenceError):
        return inner
    # A broken connection must not look like a refusal, which is never repeated.
    if isinstance(inner.__cause__, HttpProcessingError):  # aiohttp reports an answer that is no HTTP as status 400
        inner = inner.__cause__
    status = getattr(inner, "status_code", None) or getattr(inner, "status", None)
    status = status if isinstance(status, int) else None
    text = f"{type(inner).__name__}: {str(inner) or 'no detail'}"[:500]
    if isinstance(inner, KeyError):
        text = f"the inference server's answer has no {inner}"
    elif (status is None or status < 400) and isinstance(
        inner, TypeError | IndexError | AttributeError | ValueError | ContentTypeError | HttpProcessingError
    ):
        text = f"the inference server sent an invalid answer ({text})"
    elif status is not None:
        text = f"the inference server answered {status} ({text})"
    else:
        text = f"the inference server failed ({text})"
    refused = status is not None and 400 <= status < 500 and status not in {408, 429}
    headers: object = getattr(getattr(inner, "response", inner), "headers", None)
    asked = cast("Mapping[str, str]", headers).get("Retry-After") if isinstance(headers, Mapping) else None
    return InferenceError(text, status=status, retryable=not refused, retry_after_s=retry_after_s(asked))


def _generation(prompt: list[int], answer: object) -> Generation:
    try:
        returned, outputs, logprobs, reasons, *more = cast("_Sampled", answer)
        ids = [_token(token) for token in outputs[0]]
        values = [float(value) for value in logprobs[0]]
        reason = reasons[0]
        weights = cast("Sequence[Sequence[WeightSpan]]", more[0])[0] if more else ()
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise InferenceError(f"the inference server sent an invalid answer ({error!r})") from error
    # Logprobs of another context would be trained on.
    if list(returned) != prompt:
        raise InferenceError(
            "the inference server changed the prompt's tokens (a doubled BOS token?); it must use them as they are",
            retryable=False,
        )
    ending = _ending(reason, ENDINGS | {ABORTED} if ids else ENDINGS)
    if not ids:
        raise InferenceError(f"the inference server sampled no token (finish reason {reason!r:.80})")
    if len(ids) != len(values) or not all(math.isfinite(value) for value in values):
        raise InferenceError(f"{len(ids)} tokens came with {len(values)} logprobs, or infinite ones")
    return Generation(ids, values, ending, tuple(weights))


def _ending(reason: object, endings: frozenset[str]) -> str:
    """The finish reason; SGLang's is a dict with a `type`.

    Raises:
        InferenceError: the server broke the generation off (`abort` at a weight update, `error`, no reason at all), so
            what it sampled is not the model's turn.
    """
    kind = cast("dict[str, object]", reason).get("type") if isinstance(reason, dict) else reason
    if isinstance(kind, str) and kind in endings:
        return kind
    failure = _Aborted if kind == ABORTED else InferenceError
    raise failure(f"the inference server stopped the generation early (finish reason {reason!r:.200})")


def _token(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 32:  # as tokenizers have them
        raise ValueError(f"{value!r} is no token id")
    return value


def _chat_answer(answer: Any) -> ChatAnswer:
    try:
        choice = answer.choices[0]
        ending = _ending(choice.finish_reason, CHAT_ENDINGS)
        message = choice.message
        content = message.content
        calls = tuple(_tool_call(call) for call in (getattr(message, "tool_calls", None) or []))
    except (AttributeError, IndexError, TypeError) as error:
        raise InferenceError(f"the inference server sent an invalid answer ({error!r})") from error
    if content is not None and not isinstance(content, str):
        raise InferenceError(f"the inference server's message is no text but {type(content).__name__}")
    reasoning = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None) or ""
    if not content and not calls and not reasoning:
        raise InferenceError("the inference server answered without a message")
    return ChatAnswer(replace_surrogates(content or ""), replace_surrogates(str(reasoning)), calls, ending)


def _tool_call(call: Any) -> ToolCall:
    """A call as a server reports it. OpenAI's API says that `arguments` are text; some send objects, or null for none.

    What is no JSON object, or a deep one, stays text.
    """
    parsed = sent = replace_surrogates(call.function.arguments)
    if isinstance(sent, str):
        with contextlib.suppress(ValueError, RecursionError):
            parsed = json.loads(sent)
    plain = isinstance(parsed, dict) and not too_deep(parsed)
    arguments = cast("dict[str, object]", parsed) if plain else str(sent or "")
    return call_with_id(str(call.id or ""), replace_surrogates(str(call.function.name)), arguments)
