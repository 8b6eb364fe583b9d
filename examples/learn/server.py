"""The policies behind vLLM's `/inference/v1/generate`, which tells the version of the weights."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any

from aiohttp import web

from examples.learn.policy import Grammar, Policy

_PUPIL = re.compile(r"Pupil (\w+):")


class Server:
    """Answers each prompt with the policy of the pupil that it addresses.

    Args:
        policies: by pupil; they may change between two answers.
        versions: of each policy's weights, which change with them.
        seed: of all draws.
    """

    def __init__(
        self, grammar: Grammar, policies: Mapping[str, Policy], versions: Mapping[str, int], seed: int
    ) -> None:
        self._grammar = grammar
        self._versions = versions
        self._policies = policies
        self._rng = random.Random(seed)
        self.sampled: dict[str, int] = {}
        """Tokens sampled for each pupil."""

    def text(self, tokens: list[int]) -> str:
        """A conversation as text."""
        return self._grammar.tokenizer.decode(tokens)

    def pupil(self, tokens: list[int]) -> str | None:
        """The pupil that a conversation addresses; None: none."""
        found = _PUPIL.search(self.text(tokens))
        return found[1] if found and found[1] in self._policies else None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Base URL, as `--openai.base_url` takes it."""
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_get("/health", self._health)
        app.router.add_post("/inference/v1/generate", self._generate)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        finally:
            await runner.cleanup()

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _generate(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        prompt, sampling = [int(token) for token in body["token_ids"]], body["sampling_params"]
        temperature = float(sampling["temperature"])
        pupil = self.pupil(prompt)
        if pupil is None:  # the probe before an env starts, to which it shows that logprobs follow the temperature
            version, (ids, logprobs, reason) = 0, ([self._grammar.end_id], [-1.0 / (temperature or 1)], "stop")
        else:
            version, policy = self._versions[pupil], self._policies[pupil]
            ids, logprobs, reason = policy.sample(prompt, self._rng, sampling.get("max_tokens"), temperature)
            self.sampled[pupil] += len(ids)
        content = [{"token_id": token, "logprob": logprob} for token, logprob in zip(ids, logprobs, strict=True)]
        choice = {"index": 0, "finish_reason": reason, "token_ids": ids, "logprobs": {"content": content}}
        choice["weight_versions"] = [{"version": str(version), "start": 0, "end": len(ids)}]
        return web.json_response({"prompt_token_ids": prompt, "choices": [choice]})
