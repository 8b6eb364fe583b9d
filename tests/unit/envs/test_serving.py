"""What `serve` hands to the trajectory API arrives whole, or is counted and said to be lost."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web

from atropos.aio import cancel_and_wait
from atropos.envs import sandbox_env
from atropos.envs.reporting import run_api, watch
from atropos.envs.reporting.group_sink import GroupSink
from atropos.envs.reporting.run_api import TrajectoryApiLost, check_run_api
from atropos.envs.running import lifecycle
from atropos.envs.running.rollout import HookError
from atropos.errors import ConfigError, InferenceError
from tests.processes import files_end_at
from tests.silent_server import silent_server
from tests.unit.envs.support import ScriptEnv, make
from tests.waiting import until
from tests.web_app import serving

pytestmark = pytest.mark.waits


@contextlib.asynccontextmanager
async def trajectory_api(*statuses: int, batch_size: int = 8, delay_s: float = 0.0, latest: bool = True):
    """An API that answers what it is sent with these, one after the other, and then with 200.

    0 stands for a group that is taken and whose answer is lost, -1 for one that is lost; `latest`: whether it can be
    asked for the newest group.
    """
    answers, taken = list(statuses), []

    async def take(request):
        body = await request.read()
        if request.headers.get("Content-Encoding") == "gzip" and body[:2] == b"\x1f\x8b":
            body = gzip.decompress(body)
        await asyncio.sleep(delay_s)
        status = answers.pop(0) if answers else 200
        if status in {0, 200}:
            taken.append(json.loads(body))
        if status <= 0:
            request.transport.close()
        return web.json_response({"status": "received"}, status=status)

    async def info(_request):
        return web.json_response({"batch_size": batch_size, "max_token_len": 1000})

    app = web.Application()
    app.router.add_post("/scored_data", take)

    async def newest(_request):
        return web.json_response(taken[-1] if taken else {"tokens": []})

    if latest:
        app.router.add_get("/latest_example", newest)
    app.router.add_get("/info", info)
    async with serving(app) as url:
        yield url, taken


def env_at(api: str, **settings):
    return make(ScriptEnv, "http://127.0.0.1:9/v1", None, rollout_server_url=api, **settings)


def group():
    numbers = [[1, 2, 3]] * 3
    return {
        "tokens": numbers,
        "masks": numbers,
        "inference_logprobs": [[-0.5] * 3] * 3,
        "scores": [0.0, 1.0, 1.0],
        "messages": None,
        "group_overrides": {},
        "atropos": {"item": "x", "trajectories": []},
    }


@pytest.mark.parametrize(
    ("statuses", "unsent"), [((), {}), ((503,), {}), ((422,), {"refused": 1}), ((503, 502, 500), {"send_failed": 1})]
)
async def test_group_arrives_or_is_lost(statuses, unsent, caplog):
    async with trajectory_api(*statuses) as (api, taken):
        env = env_at(api)
        env.items_sent_this_step = 0
        await env.handle_send_to_api(group(), {"name": "x"})
    assert dict(env.metrics.unsent) == unsent
    assert len(taken) == (0 if unsent else 1)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("atropos.")]
    assert any("lost" in line for line in said) is bool(unsent)
    assert all("atropos" not in sent for sent in taken)


async def test_encoded_refusal_is_counted(caplog):
    async def refuse(_request):
        return web.Response(status=413, body="zu groß".encode("latin-1"), content_type="text/html")

    app = web.Application()
    app.router.add_post("/scored_data", refuse)
    async with serving(app) as api:
        env = env_at(api)
        await env.handle_send_to_api(group(), {"name": "x"})
    assert dict(env.metrics.unsent) == {"refused": 1}
    assert "did not take them (GroupRefused: 413: zu gro" in caplog.text


async def test_full_disk_keeps_none_back(caplog):
    with Path("/dev/full").open("w") as full:
        async with trajectory_api() as (api, taken):
            env = env_at(api)
            env.sink = GroupSink(env.config, env.metrics, "record", full)
            await env.handle_send_to_api(group(), {})
            assert [one["scores"] for one in taken] == [[0.0, 1.0, 1.0]]
            assert "lacks a group, which is sent: No space left on device" in caplog.text
            with pytest.raises(OSError, match="No space left"):
                await env.handle_send_to_api(group(), {}, do_send_to_api=False)


async def test_a_failed_write_leaves_no_half_line(tmp_path):
    record = tmp_path / "out.jsonl"
    env = env_at("http://127.0.0.1:9")
    env.config.data_path_to_save_groups = str(record)
    with record.open("w") as file:
        sink = GroupSink(env.config, env.metrics, "record", file)
        await sink.write(group(), sent=False)
        with files_end_at(record.stat().st_size * 3 // 2), pytest.raises(OSError, match=r"too large: .*out.jsonl"):
            await sink.write(group(), sent=False)
        await sink.write(group(), sent=True)
    lines = record.read_text().splitlines()
    assert [json.loads(line)["scores"] for line in lines] == [[0.0, 1.0, 1.0]] * 2


@pytest.mark.parametrize("answers", [(0,), (0, 0, 0)])
async def test_lost_answer_sends_once(answers, caplog):
    async with trajectory_api(*answers) as (api, taken):
        env = env_at(api)
        env.items_sent_this_step = 0
        await asyncio.gather(*(env.handle_send_to_api(group() | {"scores": [0.0, 1.0, n]}, {}) for n in range(4)))
    assert sorted(sent["scores"][2] for sent in taken) == [0, 1, 2, 3]
    assert env.metrics.maybe_sent_twice == 0
    assert not env.metrics.unsent
    assert not [record for record in caplog.records if record.name.startswith("atropos")]


async def test_unshown_group_is_sent(caplog):
    class Env(ScriptEnv):
        async def add_rollouts_for_wandb(self, scored_data, item=None):
            raise KeyError("mine")

    async with trajectory_api() as (api, taken):
        env = make(Env, "http://127.0.0.1:9/v1", None, rollout_server_url=api)
        env.items_sent_this_step = 0
        await env.handle_send_to_api(group(), {})
    assert len(taken) == 1
    assert env.metrics.hook_errors == {"add_rollouts_for_wandb": 1}
    assert "KeyError: 'mine'" in caplog.text


async def test_group_being_shown_is_sent():
    showing = asyncio.Event()

    class Env(ScriptEnv):
        async def add_rollouts_for_wandb(self, scored_data, item=None):
            showing.set()
            await asyncio.Event().wait()

    async with trajectory_api() as (api, taken):
        env = make(Env, "http://127.0.0.1:9/v1", None, rollout_server_url=api)
        env.items_sent_this_step = 0
        worker = asyncio.create_task(env.handle_send_to_api(group(), {}))
        await showing.wait()
        await cancel_and_wait([worker])
    assert worker.cancelled()
    assert len(taken) == 1


async def worked(env, api):
    """One group, as `serve` has it made."""
    await env.start_tool_backend()
    await env.get_server_info()
    env.status_dict = {"queue_size": 0, "self_queue_size": 0, "max_group_size": 1}
    env.max_num_workers, env.env_id, env.items_sent_this_step, env.max_token_len = 1, 0, 0, -1
    await env.add_train_workers()
    return next(iter(env.workers))


async def test_failed_postprocessing_is_counted(policy):
    class Env(ScriptEnv):
        async def postprocess_histories(self, trajectories):
            raise KeyError("mine")

    async with trajectory_api(batch_size=12) as (api, taken):
        env = make(Env, policy.url, None, rollout_server_url=api)
        await (await worked(env, api))
    assert env.metrics.unsent == {"postprocess_histories": 1}
    assert not taken


async def test_cancelled_hook_is_counted(policy):
    begun = asyncio.Event()

    class Env(ScriptEnv):
        async def postprocess_histories(self, trajectories):
            begun.set()
            await asyncio.Event().wait()

    async with trajectory_api(batch_size=12) as (api, _):
        env = make(Env, policy.url, None, rollout_server_url=api)
        worker = await worked(env, api)
        await begun.wait()
        await cancel_and_wait([worker])
    assert env.metrics.unsent == {"postprocess_histories": 1}


async def test_arrays_are_sent_once():
    computed = {"scores": np.array([0.0, 1.0, 0.5]), "masks": np.array([[-100, 2, 3]] * 3), "tokens": [(1, 2, 3)] * 3}
    async with trajectory_api(0) as (api, taken):
        env = env_at(api)
        env.items_sent_this_step = 0
        await env.handle_send_to_api(group() | computed, {})
    assert [(sent["scores"], sent["masks"]) for sent in taken] == [([0.0, 1.0, 0.5], [[-100, 2, 3]] * 3)]
    assert (env.metrics.maybe_sent_twice, dict(env.metrics.unsent)) == (0, {})


async def test_unanswered_are_counted(caplog):
    async with trajectory_api(0, 0, 0, latest=False) as (api, taken):
        env = env_at(api)
        env.items_sent_this_step = 0
        await env.handle_send_to_api(group(), {})
    assert len(taken) == 3
    assert (env.metrics.maybe_sent_twice, dict(env.metrics.unsent)) == (1, {"send_failed": 1})
    assert "answered none of 3 tries and may have them" in caplog.text


async def test_equals_are_both_sent():
    """The newest group that run-api has is then this one, to all appearances."""
    async with trajectory_api(200, -1) as (api, taken):
        env = env_at(api)
        env.items_sent_this_step = 0
        for _ in range(2):
            await env.handle_send_to_api(group(), {})
    assert len(taken) == 2
    assert env.metrics.maybe_sent_twice == 1


async def test_duplicates_are_counted(caplog):
    async with trajectory_api(0, latest=False) as (api, taken):
        env = env_at(api)
        env.items_sent_this_step = 0
        await env.handle_send_to_api(group(), {})
    assert len(taken) == 2
    assert env.metrics.as_dict()["env/groups_maybe_sent_twice"] == 1
    assert "may have reached the trajectory API twice" in caplog.text


async def test_a_finished_group_is_sent():
    async with trajectory_api(delay_s=0.3) as (api, taken):
        env = env_at(api)
        env.items_sent_this_step = 0
        worker = asyncio.create_task(env.handle_send_to_api(group(), {"name": "x"}))
        await asyncio.sleep(0.1)
        worker.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await worker
    assert len(taken) == 1


async def test_cancelling_loses_none(tmp_path):
    """A full queue cancels all workers; atroposlib hands out the items of running ones again, but not those of finished
    ones."""
    record, groups = tmp_path / "out.jsonl", 12
    async with trajectory_api() as (api, taken):
        env = make(ScriptEnv, "http://127.0.0.1:9/v1", record, rollout_server_url=api)
        env.items_sent_this_step = 0
        for steps in range(1, groups + 1):
            worker = asyncio.create_task(env.handle_send_to_api(group() | {"scores": [0.0, 1.0, steps]}, {"name": "x"}))
            for _ in range(steps):
                await asyncio.sleep(0)
            await cancel_and_wait([worker])
    assert [sent["scores"][2] for sent in taken] == [*range(1, groups + 1)]
    assert len(record.read_text().splitlines()) == groups


async def test_shutdown_waits_for_sends(caplog):
    async with trajectory_api(delay_s=60) as (api, _):
        env = env_at(api)
        env.items_sent_this_step = 0
        workers = [asyncio.create_task(env.handle_send_to_api(group(), {"name": "x"})) for _ in range(8)]
        await asyncio.sleep(0.1)
        env.sink.end_within(0.3)
        await cancel_and_wait(workers, seconds=20)
        assert all(worker.cancelled() for worker in workers)
    assert dict(env.metrics.unsent) == {"send_failed": 8}
    assert "had not answered when the run ended" in caplog.text


async def test_stuck_worker_frees_pool(monkeypatch, caplog):
    monkeypatch.setattr(sandbox_env, "WORKERS_S", 0.1)
    env, over = env_at("http://127.0.0.1:9"), asyncio.Event()
    await env.start_tool_backend()

    async def stubborn():
        while not over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await over.wait()

    env.workers.add(worker := asyncio.create_task(stubborn()))
    with pytest.raises(InferenceError):
        await env.process_manager()
    assert env.stand_in.closed
    assert not worker.done()
    assert "are abandoned" in caplog.text
    over.set()
    await worker


@pytest.mark.parametrize(("batch", "size"), [(4, 3), (2, 3)])
async def test_impossible_batch_sizes_are_refused(batch, size):
    async with trajectory_api(batch_size=batch) as (api, _):
        env = env_at(api, group_size=size)
        with pytest.raises(ConfigError, match=r"env\.group_size"):
            await env.get_server_info()


async def test_trainers_limit_bounds_all():
    async with trajectory_api(batch_size=9) as (api, _):
        env = env_at(api, max_token_length=4000)
        await env.get_server_info()
        assert env.context_tokens == 999


async def test_a_slow_group_is_counted(caplog):
    class Hangs(ScriptEnv):
        async def run_trajectory(self, item, trajectory_id, member):
            await asyncio.Event().wait()

    async with trajectory_api(batch_size=9) as (api, _):
        env = make(Hangs, "http://127.0.0.1:9/v1", None, rollout_server_url=api, worker_timeout=0.1)
        await env.start_tool_backend()
        await env.get_server_info()
        assert env.config.worker_timeout == -1, "atroposlib's bound, of which only a number would be told"
        assert await env.collect_trajectories({"name": "x"}) == (None, [])
    assert dict(env.metrics.dropped) == {"worker_timeout": 1}
    assert "group x dropped: it took longer than worker_timeout (0.1 s)" in caplog.text


async def test_gone_api_is_one_line():
    env = env_at("http://127.0.0.1:9")
    env.env_id = 0
    with pytest.raises(TrajectoryApiLost, match="rollout_server_url"):
        await env.get_status()


STATUS = {"queue_size": 0, "max_group_size": 3, "unallocated_fraction": 1.0}


def trainer_of(env):
    return watch.TrainerWatch(env.config)


def told(trainer, env, **status) -> None:
    env.status_dict = STATUS | status
    trainer.queue(env.status_dict, env.derived_batch_size)


async def test_idle_trainer_told_once(monkeypatch, caplog):
    caplog.set_level("INFO", "atropos")
    monkeypatch.setattr(watch, "WAITED_S", 0.0)
    env = env_at("http://127.0.0.1:9", batch_size=9, max_batches_offpolicy=2)
    trainer = trainer_of(env)
    full = 6  # groups of 3, two batches of 9
    for queued in (full - 1, full, full, full, full):
        told(trainer, env, queue_size=queued)
    assert caplog.text.count("no trainer has fetched a batch") == 1
    assert "18 trajectories wait at http://127.0.0.1:9" in caplog.text
    told(trainer, env, queue_size=full - 3)
    assert caplog.text.count("the trainer fetches batches again") == 1
    for _ in range(3):
        told(trainer, env, queue_size=full)
    assert caplog.text.count("no trainer has fetched a batch") == 2


@pytest.mark.parametrize(
    ("status", "settings", "says"),
    [
        ({"max_group_size": 8}, {}, "another env's 8, which is no multiple of 3"),
        ({"max_group_size": 6}, {}, ""),
        ({"max_group_size": 1}, {}, ""),
        ({"unallocated_fraction": 0.0}, {}, "other envs hold the whole batch"),
        ({"unallocated_fraction": 0.0}, {"min_batch_allocation": 0.5}, ""),
    ],
)
async def test_batchless_are_reported(status, settings, says, caplog):
    env = env_at("http://127.0.0.1:9", batch_size=9, **settings)
    trainer = trainer_of(env)
    for _ in range(3):
        told(trainer, env, **status)
    assert len(caplog.records) == bool(says)
    assert says in caplog.text


async def test_too_small_share_is_told(caplog):
    async with trajectory_api(batch_size=9) as (api, _):
        await env_at(api, min_batch_allocation=0.1).get_server_info()
    assert "0.1 of a batch of 9 is less than one trajectory" in caplog.text


async def test_missing_trainer_reported(monkeypatch, caplog):
    monkeypatch.setattr(watch, "TRAINER_S", 0.05)
    trainer = trainer_of(env_at("http://127.0.0.1:9"))
    with trainer.awaiting_trainer():
        pass
    await asyncio.sleep(0.1)
    assert not caplog.records
    for _ in range(2):
        with trainer.awaiting_trainer():
            await asyncio.sleep(0.1)
    assert caplog.text.count("no trainer has registered at http://127.0.0.1:9") == 1


async def test_wrong_server_is_named(policy):
    with pytest.raises(
        ConfigError,
        match=r"^env\.rollout_server_url: the server at .* is no trajectory API; run-api and many inference servers use port 8000",
    ):
        await check_run_api(policy.url.removesuffix("/v1"))


async def test_hanging_api_is_told(monkeypatch):
    monkeypatch.setattr(run_api, "CHECK_TIMEOUT_S", 0.1)
    async with silent_server() as silent:
        url = f"http://{silent}"
        with pytest.raises(ConfigError, match=rf"no trajectory API at {url} \(no answer within 0\.1 s, three times\)"):
            await check_run_api(url)


async def test_bad_weights_are_named():
    env = env_at("http://127.0.0.1:9", inference_weight=-1)
    env.env_id = 0
    with pytest.raises(TrajectoryApiLost, match=r"set env\.inference_weight"):
        await env.get_status()


async def test_groups_of_one_are_refused():
    env = env_at("http://127.0.0.1:9", group_size=1, ensure_scores_are_not_same=True)
    with pytest.raises(ConfigError, match=r"env\.group_size: a group of 1"):
        await env.env_manager()


async def test_end_of_items_told_once(caplog):
    env = env_at("http://127.0.0.1:9", batch_size=9)
    env.items, env.max_num_workers, env.status_dict = [], 2, STATUS | {"self_queue_size": 0}
    for _ in range(3):
        await env.add_train_workers()
    assert caplog.text.count("get_next_item() gave None") == 1
    env.items = iter(())  # no pop
    with pytest.raises(HookError, match="get_next_item raised"):
        await env.add_train_workers()


async def test_failed_evaluation_told(caplog):
    class Env(ScriptEnv):
        async def evaluate(self, *args, **kwargs):
            raise ZeroDivisionError("in evaluate")

    env = make(Env, "http://127.0.0.1:9/v1", None, steps_per_eval=5)
    env.curr_step, env.status_dict = 4, {"current_step": 5}
    await env.env_step_checks()
    await asyncio.gather(env.eval_runner, return_exceptions=True)
    await asyncio.sleep(0)
    assert "evaluate failed; training continues" in caplog.text
    assert "in evaluate" in caplog.text


async def test_inference_outages_are_logged_once(monkeypatch, caplog):
    caplog.set_level("INFO", "atropos")
    monkeypatch.setattr(watch, "HEALTH_S", 0.01)
    env = env_at("http://127.0.0.1:9")
    [server] = env.server.servers
    async with lifecycle.beside(watch.watch_inference(env.server, 20)):
        for healthy in (True, False, True):
            server.server_healthy = healthy
            await asyncio.sleep(0.1)
    assert caplog.text.count("http://127.0.0.1:9/v1 doesn't answer") == 1
    assert caplog.text.count("http://127.0.0.1:9/v1 answers again") == 1


async def test_evaluations_tell_outages(policy, caplog):
    class Env(ScriptEnv):
        async def evaluate(self, *_args, **_kwargs):
            self.server.servers[0].server_healthy = False
            await until(lambda: "doesn't answer; calls wait for it" in caplog.text, "the log says so")

    await make(Env, policy.url, None)._run_evaluate()


async def test_messages_on_request(policy, tmp_path):
    env = make(ScriptEnv, policy.url, tmp_path / "g.jsonl", use_wandb=True, include_messages=False)
    await env.setup()
    collected, _ = await env.collect_trajectories(env.items[0])
    await env.handle_send_to_api(collected, env.items[0], do_send_to_api=False)
    assert json.loads((tmp_path / "g.jsonl").read_text())["messages"] is None
    [[(text, score)]] = env.rollouts_for_wandb
    assert "[assistant]\ndone" in text
    assert score == 4.0
    await env._close()
