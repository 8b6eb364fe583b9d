"""Groups for trainers other than atroposlib's (TRL, verl, SkyRL, tinker), and for programs without an event loop.

A bridge takes groups as an env collects them, as run-api hands them out, or as the JSONL has them, one a line. It needs
none of these packages but tinker. See docs/trainers.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

from atropos.agent.transcript import MASKED, sampled_runs
from atropos.envs.running.lifecycle import task_group
from atropos.errors import ConfigError

if TYPE_CHECKING:
    from atropos.envs.sandbox_env import SandboxEnv

Group = Mapping[str, Any]


@dataclass(frozen=True)
class Sample:
    """One trajectory as trainers take it.

    Attributes:
        prompt_ids: all tokens before the first that was sampled.
        response_ids: the others: the model's turns, and what it was given between them.
        mask: 1 where a token of the response was sampled, else 0.
        logprobs: of each token of the response; 0.0 where it was not sampled.
        reward: the score.
        turns: number of the model's turns.
        stop_reason: `final`, or the bound that ended it.
        facts: its `overrides`: the stop reason, and versions of the weights.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    reward: float
    turns: int
    stop_reason: str
    facts: Mapping[str, object]


def samples(groups: Iterable[Group]) -> list[Sample]:
    """The trajectories of groups, in order.

    Raises:
        ConfigError: a group's tokens are placeholders, which teach nothing.
    """
    return [_sample(group, index) for group in groups for index in range(len(group["tokens"]))]


def _sample(group: Group, index: int) -> Sample:
    if (group.get("group_overrides") or {}).get("placeholder_tokens"):
        raise ConfigError("a group's tokens are placeholders: use an inference server of type vllm or sglang")
    tokens, masks, logprobs = (
        cast("list[Any]", group[key][index]) for key in ("tokens", "masks", "inference_logprobs")
    )
    facts = cast("Sequence[Mapping[str, object]]", group.get("overrides") or [{}] * (index + 1))[index]
    runs = list(sampled_runs(masks))
    # Of a trajectory from which nothing is learned, the last token is the response: trainers need one.
    begin = runs[0][0] if runs else len(tokens) - 1
    mask = [int(label != MASKED) for label in masks[begin:]]
    return Sample(
        tokens[:begin],
        tokens[begin:],
        mask,
        [value if sampled else 0.0 for value, sampled in zip(logprobs[begin:], mask, strict=True)],
        float(group["scores"][index]),
        len(runs),
        str(facts.get("stop_reason", "final")),
        facts,
    )


def trl(groups: Iterable[Group]) -> dict[str, list[Any]]:
    """What a `rollout_func` of TRL's GRPOTrainer returns; its reward function is `trl_reward`."""
    drawn = samples(groups)
    return {
        "prompt_ids": [one.prompt_ids for one in drawn],
        "completion_ids": [one.response_ids for one in drawn],
        "logprobs": [one.logprobs for one in drawn],
        "env_mask": [one.mask for one in drawn],
        "score": [one.reward for one in drawn],
        "stop_reason": [one.stop_reason for one in drawn],
    }


def trl_reward(*, score: list[float], **_: object) -> list[float]:
    """The scores that the env gave, as a reward function of TRL."""
    return score


def verl(groups: Iterable[Group]) -> list[dict[str, Any]]:
    """The fields of an `AgentLoopOutput` of verl for each trajectory."""
    return [
        {
            "prompt_ids": one.prompt_ids,
            "response_ids": one.response_ids,
            "response_mask": one.mask,
            "response_logprobs": one.logprobs,
            "reward_score": one.reward,
            "num_turns": 2 * one.turns,  # verl also counts messages to the model
            "metrics": {},
            "extra_fields": dict(one.facts),
        }
        for one in samples(groups)
    ]


def skyrl(groups: Iterable[Group]) -> dict[str, Any]:
    """A `GeneratorOutput` of SkyRL; what a bound cut has the stop reason `length`."""
    drawn = samples(groups)
    return {
        "prompt_token_ids": [one.prompt_ids for one in drawn],
        "response_ids": [one.response_ids for one in drawn],
        "rewards": [one.reward for one in drawn],
        "loss_masks": [one.mask for one in drawn],
        "stop_reasons": ["stop" if one.stop_reason == "final" else "length" for one in drawn],
        "rollout_metrics": None,
        "rollout_logprobs": [one.logprobs for one in drawn],
    }


def tinker(groups: Iterable[Group]) -> list[Any]:
    """A tinker `Datum` for each trajectory, for its loss `importance_sampling`; advantages are centred by group."""
    package = import_module("tinker")  # the caller's own
    datums: list[Any] = []
    for group in groups:
        mean = fmean(group["scores"])
        for one in samples([group]):
            tokens = [*one.prompt_ids, *one.response_ids]
            context = [0] * len(one.prompt_ids)
            advantages = [(one.reward - mean) * sampled for sampled in [*context, *one.mask]]
            datums.append(
                package.Datum(
                    model_input=package.ModelInput.from_ints(tokens[:-1]),
                    loss_fn_inputs={
                        "target_tokens": tokens[1:],
                        "logprobs": [*map(float, context), *one.logprobs][1:],
                        "advantages": advantages[1:],
                    },
                )
            )
    return datums


@contextlib.contextmanager
def collecting(env: SandboxEnv) -> Generator[Callable[[int], list[Group]]]:
    """Run an env in a thread, without run-api. In the body, a function waits for its next groups.

        with collecting(env) as next_groups:
            two = next_groups(2)

    The next item's group takes the place of one that is dropped. An exception in the body, as of Ctrl-C, ends the env.

    Raises:
        ConfigError, InferenceError, SandboxError: the env could not start.
        GroupsDropped: many groups in a row could not be completed.
        EOFError: there are no more items.
    """
    asked: queue.SimpleQueue[tuple[int, Future[list[Group]]] | None] = queue.SimpleQueue()
    started: Future[Callable[[], object]] = Future()
    failed: list[BaseException] = []

    async def answer() -> None:
        waiting: Future[Any] = started
        task = cast("asyncio.Task[None]", asyncio.current_task())
        try:
            async with env.running():
                waiting.set_result(partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel))
                while (request := await asyncio.to_thread(asked.get)) is not None:
                    count, waiting = request
                    waiting.set_result(await _next_groups(env, count))
        except BaseException as error:
            failed.append(error)
            if waiting.done():
                raise
            waiting.set_exception(error)

    def next_groups(count: int) -> list[Group]:
        if failed:
            raise RuntimeError("the env has ended: an earlier call raised") from failed[0]
        groups: Future[list[Group]] = Future()
        try:
            asked.put((count, groups))
            # A signal that comes just before a lock blocks is handled only when the wait ends: so no wait is long.
            while not groups.done():
                wait([groups], timeout=1.0)
            return groups.result()
        except BaseException as error:
            if not groups.done():  # Ctrl-C: nobody waits for them any more
                failed.append(error)
                with contextlib.suppress(RuntimeError):  # it has ended meanwhile
                    end()
            raise

    thread = threading.Thread(target=lambda: asyncio.run(answer()), name="atropos-env", daemon=True)
    thread.start()
    end = started.result()
    try:
        yield next_groups
    finally:
        asked.put(None)
        thread.join()


async def _next_groups(env: SandboxEnv, count: int) -> list[Group]:
    async def one() -> Group:
        while True:
            item = await env.hooks.call("get_next_item", env.get_next_item)
            if item is None:
                raise EOFError("get_next_item() gave None: the env has no more items")
            group = await env.process_group(item)
            if group is not None:
                return cast("Group", group)

    async with task_group() as tasks:
        collected = [tasks.create_task(one()) for _ in range(count)]
    return [task.result() for task in collected]
