"""The policy over HTTP: OpenAI chat completions, vLLM's completions of token ids, /generate of atroposlib and SGLang.

Stateless: an answer follows from its prompt and seed. The tokens are *sampled*: the text is cut into tokens in one of
many valid ways, with made-up logprobs, so that a client that tokenizes the text again gets other tokens, and a test
sees it. `--log` writes every answer's tokens, the truth to compare a training batch with.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from aiohttp import web
from tokenizers import Tokenizer

from examples.policy.play import Policy, Turn
from examples.policy.tokenizer import FOLDER, IM_END, IM_START

BROKEN_OFF: dict[str, str | None] = {"abort": "abort", "error": "error", "unfinished": None}
"""Faults that answer half of a generation, and the finish reason that comes with it."""
FAULTS = ("none", "503", "400", "nonsense", "slow", "reset", *BROKEN_OFF)
MODEL = "scripted-policy"
SPLIT = 0.1
"""Part of the tokens that are split into smaller ones."""
_BROKEN_OFF = web.RequestKey("broken_off", str)


@dataclass(frozen=True)
class Settings:
    """How the server behaves.

    Attributes:
        fault: what goes wrong, one of `FAULTS`.
        fault_rate: how often, 0 to 1. Health and model listing are never hit.
        delay_s: time that an answer takes.
        delay_spread: part of it by which answers differ: 0.5 means from half of it to one and a half.
    """

    fault: str = "none"
    fault_rate: float = 1.0
    delay_s: float = 0.0
    delay_spread: float = 0.0


class PolicyServer:
    """The aiohttp application and what it needs."""

    def __init__(self, policy: Policy, settings: Settings | None = None, log: Path | None = None) -> None:
        self.policy = policy
        self.settings = settings or Settings()
        self.tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
        self._plain = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
        self._plain.encode_special_tokens = True  # a model that writes `<|im_end|>` in a command spells it
        self.start_id = self.tokenizer.token_to_id(IM_START)
        self.end_id = self.tokenizer.token_to_id(IM_END)
        self._log: TextIO | None = log.open("a") if log else None
        self._faults, self._delays = random.Random(7), random.Random(8)

    def application(self) -> web.Application:
        """Routes; the vLLM class strips `/v1` from the base URL for /generate and /health."""
        app = web.Application(client_max_size=64 * 1024 * 1024, middlewares=[self._middleware])
        app.router.add_get("/health", self._health)
        for prefix in ("", "/v1"):
            app.router.add_get(f"{prefix}/models", self._models)
            app.router.add_post(f"{prefix}/chat/completions", self._chat)
            app.router.add_post(f"{prefix}/completions", self._completions)
        app.router.add_post("/generate", self._generate)
        for prefix in ("", "/v1"):
            app.router.add_post(f"{prefix}/generate/", self._generate_trl)
        app.on_cleanup.append(self._close)
        return app

    async def _close(self, _app: web.Application) -> None:
        if self._log is not None:
            self._log.close()

    # ------------------------------------------------------------------------------------------------------- faults

    @web.middleware
    async def _middleware(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.method == "GET":
            return await handler(request)
        settings = self.settings
        if settings.delay_s:
            spread = self._delays.uniform(-settings.delay_spread, settings.delay_spread)
            await asyncio.sleep(settings.delay_s * (1 + spread))
        if settings.fault == "none" or self._faults.random() >= settings.fault_rate:
            try:
                return await handler(request)
            except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                return web.json_response({"error": {"message": f"bad request: {error!r}"}}, status=400)
        if settings.fault in BROKEN_OFF:
            request[_BROKEN_OFF] = settings.fault
            return await handler(request)
        if settings.fault in {"503", "400"}:
            return web.json_response({"error": {"message": "asked to fail"}}, status=int(settings.fault))
        if settings.fault == "nonsense":
            return web.json_response({"hello": "world"})
        if settings.fault == "slow":
            await asyncio.sleep(3600)
        if request.transport is not None:
            request.transport.abort()
        return web.Response()

    # ------------------------------------------------------------------------------------------------------- answers

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "atropos"}]})

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        messages: list[dict[str, Any]] = body["messages"]
        turn = self.policy.answer(messages, body.get("seed"))
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        structured = bool(body.get("tools")) and bool(turn.calls)
        text = turn.text if structured else turn.render()
        ids = self.tokenizer.encode(text).ids
        reason: str | None = "tool_calls" if structured else "stop"
        if limit is not None and len(ids) > limit:
            ids, reason, structured = ids[:limit], "length", False
            text = self.tokenizer.decode(ids, skip_special_tokens=False)
        elif _BROKEN_OFF in request:
            reason, structured, text = BROKEN_OFF[request[_BROKEN_OFF]], False, text[: len(text) // 2] or "I"
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if structured:
            message["tool_calls"] = _openai_calls(turn)
        prompt_tokens = sum(len(str(m.get("content") or "")) for m in messages) // 4
        return web.json_response(
            {
                "id": f"chatcmpl-{uuid.uuid4().hex}",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": MODEL,
                "choices": [
                    {"index": i, "message": message, "finish_reason": reason} for i in range(int(body.get("n") or 1))
                ],
                "usage": {
                    "prompt_tokens": prompt_tokens,
                    "completion_tokens": len(ids),
                    "total_tokens": prompt_tokens + len(ids),
                },
            }
        )

    async def _completions(self, request: web.Request) -> web.Response:
        """As vLLM: a prompt of token ids, or a text; with `return_token_ids` and `logprobs` what was sampled."""
        body = await request.json()
        prompt = body["prompt"]
        ids = prompt if isinstance(prompt, list) else self.tokenizer.encode(prompt).ids
        answers = self._answers(request, body, [int(token) for token in ids])
        choices: list[dict[str, Any]] = []
        for index, (out, logprobs, reason) in enumerate(answers):
            pieces = [self.tokenizer.id_to_token(token) for token in out]
            choice: dict[str, Any] = {"index": index, "text": self.tokenizer.decode(out), "finish_reason": reason}
            choice |= {"logprobs": None, "stop_reason": None, "token_ids": None, "prompt_token_ids": None}
            if body.get("logprobs") is not None:
                tops = [{piece: logprob} for piece, logprob in zip(pieces, logprobs, strict=True)]
                choice["logprobs"] = {"tokens": pieces, "token_logprobs": logprobs, "top_logprobs": tops}
            if body.get("return_token_ids"):
                choice |= {"token_ids": out, "prompt_token_ids": ids}
            choices.append(choice)
        sampled = sum(len(out) for out, _, _ in answers)
        usage = {"prompt_tokens": len(ids), "completion_tokens": sampled, "total_tokens": len(ids) + sampled}
        head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        return web.json_response({**head, "model": MODEL, "choices": choices, "usage": usage})

    def _answers(
        self, request: web.Request, body: dict[str, Any], prompt: list[int]
    ) -> list[tuple[list[int], list[float], str | None]]:
        """The `n` answers that a body with vLLM's sampling fields asks for."""
        return [
            self.sample(
                prompt,
                body.get("seed"),
                body.get("max_tokens"),
                body.get("temperature"),
                index,
                stop=body.get("stop_token_ids") or (),
                broken_off=request.get(_BROKEN_OFF),
            )
            for index in range(int(body.get("n") or 1))
        ]

    async def _generate(self, request: web.Request) -> web.Response:
        """The vLLM form has `prompt: {prompt_token_ids}`, SGLang's has `input_ids` and `sampling_params`."""
        body = await request.json()
        if "input_ids" in body:
            params = body.get("sampling_params") or {}
            if "seed" in params:
                raise TypeError("Unexpected keyword argument 'seed'")  # as SGLang does
            prompt = [int(token) for token in body["input_ids"]]
            limit = params.get("max_new_tokens")
            ids, logprobs, reason = self.sample(
                prompt,
                params.get("sampling_seed"),
                limit,
                params.get("temperature"),
                stop=params.get("stop_token_ids") or (),
                broken_off=request.get(_BROKEN_OFF),
            )
            meta = {
                "output_token_logprobs": [[lp, token, None] for token, lp in zip(ids, logprobs, strict=True)],
                "finish_reason": {"type": reason} if reason else None,
            }
            return web.json_response({"text": self.tokenizer.decode(ids), "meta_info": meta})
        prompt = [int(token) for token in body["prompt"]["prompt_token_ids"]]
        answers = self._answers(request, body, prompt)
        return web.json_response(
            {
                "text": [self.tokenizer.decode(ids) for ids, _, _ in answers],
                "logprobs": [
                    [[{str(token): lp}] for token, lp in zip(ids, lps, strict=True)] for ids, lps, _ in answers
                ],
                "finish_reasons": [reason for _, _, reason in answers],
            }
        )

    async def _generate_trl(self, request: web.Request) -> web.Response:
        """As trl's server: texts in, token ids out."""
        body = await request.json()
        prompts = [self.tokenizer.encode(str(prompt), add_special_tokens=False).ids for prompt in body["prompts"]]
        answers = [self.sample(prompt, None, body.get("max_tokens"), body.get("temperature")) for prompt in prompts]
        return web.json_response({"completion_ids": [ids for ids, _, _ in answers]})

    def sample(
        self,
        prompt: list[int],
        seed: int | None,
        limit: int | None,
        temperature: float | None,
        index: int = 0,
        *,
        stop: Sequence[int] = (),
        broken_off: str | None = None,
    ) -> tuple[list[int], list[float], str | None]:
        """Token ids up to the first in `stop`, their logprobs and the finish reason; half where it is broken off.

        A prompt that ends within a turn is continued.
        """
        text = self.policy.answer(self.messages(prompt), seed).render()
        said = self._said(prompt)
        key = hashlib.sha256(json.dumps([prompt, seed, index, temperature]).encode()).digest()
        rng = random.Random(key)
        ids = [*self._cut(text[len(said) :] if text.startswith(said) else "", rng), self.end_id]
        ids = ids[: next((index for index, token in enumerate(ids, 1) if token in stop), None)]
        reason: str | None = "stop"
        if limit is not None and len(ids) > limit:
            ids, reason = ids[:limit], "length"
        elif broken_off and len(ids) > 1:
            ids, reason = ids[: len(ids) // 2], BROKEN_OFF[broken_off]
        logprobs = [-round(rng.expovariate(2.0), 6) for _ in ids]
        if self._log and reason in {"stop", "length", "abort"}:
            self._log.write(json.dumps({"prompt": prompt, "ids": ids, "logprobs": logprobs, "finish": reason}) + "\n")
            self._log.flush()
        return ids, logprobs, reason

    def _cut(self, text: str, rng: random.Random) -> list[int]:
        """The text as tokens, some of them split in two: a model doesn't always sample the shortest tokenization."""
        ids: list[int] = []
        for token in self._plain.encode(text, add_special_tokens=False).ids:
            piece = self.tokenizer.id_to_token(token)
            if len(piece) > 1 and token not in (self.start_id, self.end_id) and rng.random() < SPLIT:
                cut = rng.randrange(1, len(piece))
                parts = [self.tokenizer.token_to_id(piece[:cut]), self.tokenizer.token_to_id(piece[cut:])]
                if None not in parts:
                    ids.extend(parts)
                    continue
            ids.append(token)
        return ids

    def _said(self, prompt: list[int]) -> str:
        """What the last turn of a prompt says already."""
        begin = len(prompt) - prompt[::-1].index(self.start_id) if self.start_id in prompt else len(prompt)
        text = self.tokenizer.decode(prompt[begin:], skip_special_tokens=False)
        return text.removeprefix("assistant\n") if text.startswith("assistant\n") else ""

    def messages(self, prompt: list[int]) -> list[dict[str, Any]]:
        """The conversation of ChatML token ids, parsed by special token ids and never by text."""
        messages: list[dict[str, Any]] = []
        block: list[int] | None = None
        for token in prompt:
            if token == self.start_id:
                block = []
            elif token == self.end_id and block is not None:
                role, _, content = self.tokenizer.decode(block, skip_special_tokens=False).partition("\n")
                messages.append({"role": role, "content": content})
                block = None
            elif block is not None:
                block.append(token)
        return messages


def _openai_calls(turn: Turn) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call_{uuid.uuid4().hex[:12]}",
            "type": "function",
            "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
        }
        for call in turn.calls
    ]
