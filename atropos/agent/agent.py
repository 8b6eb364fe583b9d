"""The agent loop: model turn, tool calls in order, results, and again, within bounds."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from atropos.agent.config import AgentConfig, AgentResult, AgentStep, PromptTooLong, StopReason
from atropos.agent.fairness import gate, gate_for
from atropos.agent.model import Generation, Model
from atropos.agent.prompt import results_text, schemas_of, system_text
from atropos.agent.template import TurnRenderer
from atropos.agent.transcript import Transcript
from atropos.tools import ToolCall, ToolResult
from atropos.tools.parsers import parser_for

MIN_TURN_TOKENS = 16
"""Room that a turn needs to be worth beginning."""

ExecuteTool = Callable[[ToolCall], Awaitable[ToolResult]]

_ENDINGS: dict[StopReason, str] = {
    "max_steps": "the agent used all its steps",
    "max_time": "the agent used all its time",
    "context_length": "the context is full",
    "max_tokens": "a turn reached its limit of tokens",
}


class AtroposAgent:
    """Runs one task at a time against an inference server; knows nothing of slots.

    Messages are system, user, the assistant's text, then a turn's results as XML in one user message. With a vLLM or
    SGLang server the transcript holds exactly the tokens that the server was given and sampled, appended and never
    rewritten; with others the tokens are placeholders.

    Args:
        server: atroposlib's server manager, or anything of its shape.
        tokenizer: the model's, with a chat template.
        tools: a registry, tools or OpenAI schemas.
        config: bounds and sampling.
        execute_tool: runs one call; a raised `SandboxError` ends the trajectory.
    """

    def __init__(
        self,
        server: Any,
        tokenizer: Any,
        tools: Any = None,
        config: AgentConfig | None = None,
        execute_tool: ExecuteTool | None = None,
        *,
        renderer: TurnRenderer | None = None,
    ) -> None:
        self.config = config or AgentConfig()
        self.schemas = schemas_of(tools)
        self._execute = execute_tool
        self._model = Model(server, timeout_s=self.config.model_timeout_s, retries=self.config.model_retries)
        self._renderer = renderer or TurnRenderer(tokenizer)
        self._parser = parser_for(self.config.tool_call_parser, tokenizer, self.schemas)

    async def run(self, task: str) -> AgentResult:
        """Work on a task until the model answers without a call, or a bound is reached.

        Args:
            task: the user's message.

        Raises:
            InferenceError: the server gave no usable answer.
            SandboxError: a tool's infrastructure failed.
            PromptTooLong: the prompt alone doesn't fit the context.
        """
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": system_text(self.config.system_prompt, self.schemas)},
            {"role": "user", "content": task},
        ]
        transcript = Transcript(messages=messages, placeholder=not self._model.exact)
        async with gate():
            transcript.add_context(self._renderer.prompt(messages))
        if len(transcript) + MIN_TURN_TOKENS > self.config.context_tokens:
            raise PromptTooLong(
                f"the prompt has {len(transcript)} tokens and the context {self.config.context_tokens}: "
                "raise max_token_length or shorten the task"
            )
        steps: list[AgentStep] = []
        reason = await self._loop(transcript, steps)
        transcript.check()
        return AgentResult(
            success=reason == "final",
            error=_ENDINGS.get(reason),
            final_response=steps[-1].content if steps else "",
            steps=steps,
            trajectory_data=transcript,
            total_tool_calls=sum(len(step.calls) for step in steps),
            stop_reason=reason,
        )

    async def _loop(self, transcript: Transcript, steps: list[AgentStep]) -> StopReason:
        started = time.monotonic()
        while True:
            step, ids, ended = await self._turn(transcript, len(steps))
            steps.append(step)
            if ended is not None:
                return ended
            if not step.calls and not step.unread:
                return "final"
            if len(steps) >= self.config.max_steps:
                return "max_steps"
            if self.config.timeout_s is not None and time.monotonic() - started >= self.config.timeout_s:
                return "max_time"
            await self._run_calls(step)
            async with gate():
                answer = {"role": "user", "content": results_text(step.results, self.config.max_result_chars)}
                context = self._renderer.following([answer], ids)
            if len(transcript) + len(context) + MIN_TURN_TOKENS > self.config.context_tokens:
                return "context_length"
            transcript.messages.append(answer)
            transcript.add_context(context)

    async def _turn(self, transcript: Transcript, number: int) -> tuple[AgentStep, list[int], StopReason | None]:
        """One generation, appended; its ids; and the bound that cut it off, if one did."""
        room = self.config.context_tokens - len(transcript)
        limit = room if self.config.max_tokens is None else min(room, self.config.max_tokens)
        started = time.perf_counter()
        generation, text = await self._generate(transcript, limit)
        model_s = time.perf_counter() - started
        ids = generation.ids[:limit]
        async with gate_for(len(ids)):
            text = self._renderer.text(ids) if text is None else text
            parsed = self._parser.parse(text)
        transcript.add_sampled(ids, generation.logprobs[:limit])
        transcript.messages.append({"role": "assistant", "content": text})
        step = AgentStep(
            number, text, parsed.content, tokens=len(ids), finish_reason=generation.finish_reason, model_s=model_s
        )
        if generation.finish_reason == "length" or len(generation.ids) > limit:
            return step, ids, "context_length" if limit == room else "max_tokens"
        step.calls = list(parsed.calls)
        step.unread = [(error.position, error.message) for error in parsed.errors]
        return step, ids, None

    async def _generate(self, transcript: Transcript, limit: int) -> tuple[Generation, str | None]:
        """What the server gave, and the text where it gave text and no tokens."""
        sampling: dict[str, Any] = {"temperature": self.config.temperature}
        if self.config.seed is not None:
            sampling["seed"] = self.config.seed
        if self._model.exact:
            return await self._model.generate(transcript.tokens, max_tokens=limit, **sampling), None
        if self.config.max_tokens is not None:
            sampling["max_tokens"] = limit
        answer = await self._model.chat(transcript.messages, **sampling)
        text = answer.content.removesuffix(self._renderer.end_text)  # trl's server leaves it there
        if answer.tool_calls:
            text = "\n".join([*([text] if text else []), *(self._render(call) for call in answer.tool_calls)])
        ids = [*self._renderer.encode_text(text), self._renderer.end_id]
        return Generation(ids, [0.0] * len(ids), answer.finish_reason), text

    def _render(self, call: dict[str, Any]) -> str:
        try:
            arguments = json.loads(call["arguments"])
        except (TypeError, ValueError):
            arguments = call["arguments"]
        return self._parser.render(ToolCall(name=call["name"], arguments=arguments))

    async def _run_calls(self, step: AgentStep) -> None:
        """The turn's calls one after the other; what could not be read is answered in its place."""
        started = time.perf_counter()
        for index in range(len(step.calls) + 1):
            step.results += [ToolResult.failure(message) for position, message in step.unread if position == index]
            if index < len(step.calls):
                step.results.append(await self._run_call(step.calls[index], index))
        step.tools_s = time.perf_counter() - started

    async def _run_call(self, call: ToolCall, index: int) -> ToolResult:
        most = self.config.max_calls_per_turn
        if index >= most:
            return ToolResult.failure(f"not run: more than {most} calls in one turn; make it again in the next")
        if self._execute is None:
            return ToolResult.failure("no tool can be run here")
        result = await self._execute(call)
        if self.config.tool_delay_s:
            await asyncio.sleep(self.config.tool_delay_s)
        return result


def seed_for(seed: int, *parts: Any) -> int:
    """A 31-bit seed that follows from a base seed and names, the same in every process."""
    digest = hashlib.sha256(json.dumps([seed, *map(str, parts)]).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
