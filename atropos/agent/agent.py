"""The agent loop: model turn, tool calls in order, results, and again, within bounds."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from atropos import tracing
from atropos.agent.config import AgentConfig, AgentResult, AgentStep, Outcome, PromptTooLong, StopReason
from atropos.agent.dialect import Dialect, Turn, XmlDialect
from atropos.agent.fairness import gate, gate_for
from atropos.agent.fitting import MIN_TURN_TOKENS, Written, fitting
from atropos.agent.model import Generation, Model
from atropos.agent.prompt import Tools, schemas_of
from atropos.agent.template import Tokenizer, TurnRenderer
from atropos.agent.transcript import Message, Transcript
from atropos.aio import Allowance
from atropos.errors import InferenceError
from atropos.tools import ToolCall, ToolResult
from atropos.tools.parsers import ParseError, parser_for

ExecuteTool = Callable[[ToolCall], Awaitable[ToolResult]]

_ENDINGS: dict[StopReason, str] = {
    "max_steps": "the agent used all its steps",
    "max_time": "the agent used all its time",
    "context_length": "the context is full",
    "max_tokens": "a turn reached its limit of tokens",
}


class AtroposAgent:
    """Runs one task at a time against an inference server; knows nothing of slots.

    With a vLLM or SGLang server the transcript holds exactly the tokens that the server was given and sampled, appended
    and never rewritten; with others the tokens are placeholders.

    Args:
        server: atroposlib's server manager, or anything of its shape.
        tokenizer: the model's, with a chat template.
        tools: a registry, tools or OpenAI schemas.
        config: bounds and sampling.
        execute_tool: runs one call; a raised `SandboxError` ends the trajectory.
        renderer: of this tokenizer, where agents share it.
        dialect: how messages are written; by default a turn's results as XML in one user message.
    """

    def __init__(
        self,
        server: object,
        tokenizer: Tokenizer,
        tools: Tools | None = None,
        config: AgentConfig | None = None,
        execute_tool: ExecuteTool | None = None,
        *,
        renderer: TurnRenderer | None = None,
        dialect: Dialect | None = None,
    ) -> None:
        self.config = config or AgentConfig()
        self.schemas = schemas_of(tools)
        self._execute = execute_tool
        self._limit_refused = False
        self._model = Model(server, timeout_s=self.config.model_timeout_s, retries=self.config.model_retries)
        self._dialect = dialect or XmlDialect(
            renderer or TurnRenderer(tokenizer),
            parser_for(self.config.tool_call_parser, tokenizer, self.schemas),
            self.schemas,
        )

    async def run(self, task: str, *, after: AgentResult | None = None) -> AgentResult:
        """Work on a task until the model answers without a call, or a bound is reached.

        Args:
            task: the user's message.
            after: an earlier run, whose conversation and transcript continue with the task as the next message, after
                the results of a last turn whose bound kept the model from reading them. The bounds on steps and time
                start again. If the context has no room for the message, the run ends there.

        Raises:
            InferenceError: the server gave no usable answer.
            SandboxError: a tool's infrastructure failed.
            PromptTooLong: the prompt alone doesn't fit the context.
        """
        if after is None:
            steps, transcript, room = list[AgentStep](), await self._opened(task), True
        else:
            steps, transcript = after.steps, after.trajectory_data
            room = await self._continue(transcript, steps[-1], task)
        with Allowance(self.config.timeout_s) as allowance:
            reason = await self._turns(transcript, steps, allowance) if room else "context_length"
        return AgentResult(
            success=reason == "final",
            error=_ENDINGS.get(reason),
            final_response=steps[-1].content,
            steps=steps,
            trajectory_data=transcript,
            total_tool_calls=sum(len(step.calls) for step in steps),
            stop_reason=reason,
        )

    async def _opened(self, task: str) -> Transcript:
        messages = self._dialect.opening(task, self.config, exact=self._model.exact)
        transcript = Transcript(
            messages=messages,
            placeholder=not self._model.exact,
            temperature=self.config.temperature,
            # A greedy policy's own logprobs would be 0 and minus infinity.
            raw_logprobs=self._model.raw_logprobs or self.config.temperature == 0,
            model=self._model.name,
        )
        async with gate():
            transcript.add_context(self._dialect.prompt(messages))
        if self._room(transcript) < MIN_TURN_TOKENS:
            raise PromptTooLong(
                f"the prompt has {len(transcript)} tokens and the context {self.config.context_tokens}: "
                "raise max_token_length or shorten the task"
            )
        return transcript

    def _room(self, transcript: Transcript) -> int:
        """Tokens that the context has left."""
        return self.config.context_tokens - len(transcript)

    async def _continue(self, transcript: Transcript, last: AgentStep, task: str | None = None) -> bool:
        """Append what the model reads after its turn, if there is room: the calls' results and a further task."""
        # By them the renderer knows whether the turn is closed already.
        sampled = transcript.tokens[len(transcript) - last.tokens :]

        def write(outcomes: Sequence[Outcome]) -> Written:
            messages = self._dialect.results(outcomes, self.config) if outcomes else []
            if task is not None:
                messages = _with_task(messages, task)
            return messages, self._dialect.following(messages, sampled)

        async with gate():
            written = fitting(last.answers(), write, room=self._room(transcript), most=self.config.max_result_chars)
        if written is None:
            return False
        messages, context = written
        transcript.messages.extend(messages)
        transcript.add_context(context)
        return True

    async def _turns(self, transcript: Transcript, steps: list[AgentStep], allowance: Allowance) -> StopReason:
        earlier = len(steps)
        while True:
            lost_s = self._model.lost_s
            with tracing.span("chat", "client", gen_ai__operation__name="chat") as span:
                step, ended = await self._turn(transcript, len(steps))
                span.set(
                    gen_ai__usage__output_tokens=step.tokens, gen_ai__usage__input_tokens=len(transcript) - step.tokens
                )
            # After the turn, outside of any `limit`.
            allowance.extend(self._model.lost_s - lost_s)
            steps.append(step)
            if ended is not None:
                return ended
            # A call that can't be read is an attempt, which the model is to repeat.
            if not step.calls and not step.unread:
                return "final"
            await self._run_calls(step, allowance)
            if allowance.left_s <= 0:
                return "max_time"
            if len(steps) - earlier >= self.config.max_steps:
                return "max_steps"
            if not await self._continue(transcript, step):
                return "context_length"

    async def _turn(self, transcript: Transcript, number: int) -> tuple[AgentStep, StopReason | None]:
        """Generate a turn and append it: the step, and the bound that cut it off, if one did."""
        room = self._room(transcript)
        limit = room if self.config.max_tokens is None else min(room, self.config.max_tokens)
        started, started_at = time.perf_counter(), time.time()
        ask = self._sample if self._model.exact else self._chat
        turn, sampled = await ask(transcript, limit)
        transcript.add_sampled(turn.ids, sampled.logprobs, sampled.weights)
        transcript.messages.append(turn.message)
        step = AgentStep(
            number,
            turn.text,
            turn.answer,
            calls=list(turn.calls),
            unread=list(turn.unread),
            reasoning=turn.reasoning,
            tokens=len(turn.ids),
            finish_reason=sampled.finish_reason,
            model_s=time.perf_counter() - started,
            started_at=started_at,
        )
        if sampled.finish_reason == "length":
            return step, "context_length" if limit == room else "max_tokens"
        return step, None

    async def _sample(self, transcript: Transcript, limit: int) -> tuple[Turn, Generation]:
        """A turn from a server that reports token ids. Ids after the end of the turn are dropped."""
        stop = self._dialect.stop_ids
        sampling = {**self._sampling(), **({"stop_token_ids": sorted(stop)} if stop else {})}
        sampled = await self._model.generate(transcript.tokens, max_tokens=limit, **sampling)
        # A server may have sampled more than it was asked for.
        ids = sampled.ids[:limit]
        end = next((index for index, token in enumerate(ids, 1) if token in stop), None)
        cut_off = end is None and (sampled.finish_reason == "length" or len(sampled.ids) > limit)
        ids = ids[:end]
        async with gate_for(len(ids)):
            turn = self._dialect.read(ids, cut_off=cut_off)
        ending = "length" if cut_off else "stop"
        return turn, replace(sampled, ids=ids, logprobs=sampled.logprobs[: len(ids)], finish_reason=ending)

    async def _chat(self, transcript: Transcript, limit: int) -> tuple[Turn, Generation]:
        """A turn from a server that reports text, with placeholder ids; it is cut off at the limit.

        A server whose context is shorter than the env's, or that has another name for the limit, refuses it by its
        name, and is asked without.
        """
        options = {**self._sampling(), **self._dialect.chat_options(self.config, limit)}
        if self._limit_refused:
            options.pop("max_tokens", None)
        try:
            answer = await self._model.chat(transcript.messages, **options)
        except InferenceError as error:
            if error.status != 400 or "max_tokens" not in str(error) or options.pop("max_tokens", None) is None:
                raise
            self._limit_refused = True
            answer = await self._model.chat(transcript.messages, **options)
        turn = self._dialect.read_answer(answer, cut_off=answer.finish_reason == "length")
        if answer.unreadable:
            turn = replace(turn, unread=(ParseError(f"the tool call can't be read: {answer.unreadable}", "", 0),))
        # Counted here with the env's own tokenizer; the server has counted by its own, or not at all.
        if len(turn.ids) > limit:
            turn = replace(turn, ids=turn.ids[:limit], calls=(), unread=())
            answer = replace(answer, finish_reason="length")
        return turn, Generation(turn.ids, [0.0] * len(turn.ids), answer.finish_reason)

    def _sampling(self) -> dict[str, object]:
        seed: dict[str, object] = {} if self.config.seed is None else {self._model.seed_name: self.config.seed}
        return {"temperature": self.config.temperature, **seed}

    async def _run_calls(self, step: AgentStep, allowance: Allowance) -> None:
        """Run the turn's calls in order, while there is time; a call that could not be parsed gets an error instead."""
        started = time.perf_counter()
        for index, call in enumerate([*step.calls, None]):  # errors may stand after the last call too
            if allowance.left_s <= 0:
                break
            step.outcomes += [
                Outcome(None, ToolResult.failure(error.message)) for error in step.unread if error.position == index
            ]
            if call is not None:
                step.outcomes.append(Outcome(call, await self._run_call(call, index, allowance)))
        step.tools_s = time.perf_counter() - started

    async def _run_call(self, call: ToolCall, index: int, allowance: Allowance) -> ToolResult:
        most = self.config.max_calls_per_turn
        if index >= most:
            return ToolResult.failure(f"not run: more than {most} calls in one turn; make it again in the next")
        if self._execute is None:
            return ToolResult.failure("no tool can be run here")
        try:
            async with allowance.limit():
                result = await self._execute(call)
        except TimeoutError:
            if not allowance.expired:
                raise
            return ToolResult.failure("ended: the agent used all its time", timed_out=True)
        if self.config.tool_delay_s:
            await asyncio.sleep(self.config.tool_delay_s)
        return result


def _with_task(messages: list[Message], task: str) -> list[Message]:
    """Messages and a task, in one where they end with the user's: many templates refuse two of them in a row."""
    if messages and messages[-1]["role"] == "user":
        return [*messages[:-1], {"role": "user", "content": f"{messages[-1]['content']}\n\n{task}"}]
    return [*messages, {"role": "user", "content": task}]


def seed_for(seed: int, *parts: object) -> int:
    """A 31-bit seed that follows from a base seed and names, the same in every process."""
    digest = hashlib.sha256(json.dumps([seed, *map(str, parts)]).encode()).digest()
    # 31 bits: servers take a seed as a signed number of 32 or 64 bits.
    return int.from_bytes(digest[:4], "big") >> 1
