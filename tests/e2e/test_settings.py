"""What an env's settings change on real slots; and that no setting of any env is without a test of its effect."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from pathlib import Path

import pytest
from aiohttp.http_websocket import WebSocketWriter

from atropos.envs import AgentEnvConfig, HermesAgentEnvConfig
from atropos.envs.adapter import BaseEnvConfig
from atropos.envs.humaneval_env import HumanEvalEnvConfig
from atropos.envs.humaneval_problems import HumanEvalProblem, judge
from atropos.envs.task_settings import TaskEnvConfig
from atropos.errors import AcquireTimeout, ConfigError, ToolServerUnavailable
from atropos.tools import ToolCall
from tests import privileges
from tests.settings import shown, shows
from tests.unit.envs.support import ScriptEnv as StandInEnv
from tests.unit.envs.support import make
from tests.unit.sandbox.conftest import tiny_base


class ScriptEnv(StandInEnv):
    """With the real tool backend."""

    start_tool_backend = StandInEnv.__mro__[1].start_tool_backend


@contextlib.asynccontextmanager
async def started(**settings):
    """An env's tool backend on real local slots; no inference server is asked."""
    settings = {"slots_per_container": 1, "max_containers": 1, "allow_network": False, **settings}
    env = make(ScriptEnv, "http://127.0.0.1:9/v1", None, **settings)
    try:
        await env.start_tool_backend()
        yield env
    finally:
        await env.shutdown_tool_backend()


async def sh(env, command, trajectory="t"):
    """A command's result as the model gets it."""
    return await env.execute_tool(trajectory, ToolCall(name="terminal", arguments={"command": command}))


def cgroup_values(*names: str) -> set[str]:
    """What the files of these names say in this process's slots' cgroups, v1 or v2."""
    found = set()
    for folder, _, files in os.walk("/sys/fs/cgroup"):
        if "atropos" in folder:
            for name in set(names) & set(files):
                with contextlib.suppress(OSError):
                    found.add(Path(folder, name).read_text().strip())
    return found


@privileges.cgroups
@shows(
    "slot_memory_mib", "slot_pids", "slot_cpu_weight", "slot_cpu_quota", "slot_disk_mib", "slot_inodes",
    "slot_output_bytes", "slot_wall_s",
)  # fmt: skip
async def test_limits_hold_and_are_named():
    limits = {
        "slot_memory_mib": 96,
        "slot_pids": 20,
        "slot_cpu_weight": 37,
        "slot_cpu_quota": 0.75,
        "slot_disk_mib": 16,
        "slot_inodes": 1500,
        "slot_output_bytes": 2000,
        "slot_wall_s": 6,
    }
    async with started(**limits) as env:
        assert (await sh(env, "echo ready")).output == "ready\n"
        shares = cgroup_values("cpu.shares", "cpu.weight")
        assert shares & {"37", str(37 * 1024 // 100), str(round(37 * 1024 / 100))}, shares
        assert cgroup_values("cpu.cfs_quota_us", "cpu.max") & {"7500", "7500 10000"}
        result = await sh(env, "python3 -c 'x = bytearray(200 << 20)'; echo still")
        assert result.limit == "memory"
        result = await sh(env, "python3 -c 'import os,time\nwhile os.fork(): pass\ntime.sleep(1)'")
        assert result.limit == "pids"
        await env.executor.release_trajectory("t")  # its processes with it
        result = await sh(env, "head -c 30000000 /dev/zero > big")
        assert result.limit == "disk"
        assert int((await sh(env, "stat -c %s big")).output) <= 16 << 20
        await sh(env, "rm big")
        result = await sh(
            env, "mkdir d; for i in $(seq 2000); do echo > d/$i || break; done 2>/dev/null; ls d | wc -l; rm -r d"
        )
        assert 1400 < int(result.output) < 1600, "and what the skeleton has"
        result = await sh(env, "seq 100000")
        assert len(result.output) < 3000
        assert result.limit == "output"
        result = await sh(env, "sleep 600")
        assert not result.success
        assert (await sh(env, "echo usable")).output == "usable\n"


@shows("slots_per_container", "min_containers", "max_containers", "acquire_timeout_s")
async def test_containers_hold_and_grow():
    settings = {"slots_per_container": 1, "min_containers": 1, "max_containers": 2, "acquire_timeout_s": 0.5}
    async with started(**settings) as env:
        assert (env.pool.stats().containers, env.config.capacity) == (1, 2)
        env.pool.config = env.pool.config.model_copy(update={"acquire_timeout_s": 30})  # a container starts within
        await asyncio.gather(sh(env, "true", "a"), sh(env, "true", "b"))
        assert (env.pool.stats().containers, env.pool.stats().leased) == (2, 2)
        env.pool.config = env.pool.config.model_copy(update={"acquire_timeout_s": 0.5})
        with pytest.raises(AcquireTimeout, match=r"0\.5 s"):
            await sh(env, "true", "c")


@shows("allow_network", "egress_allow")
async def test_egress_allow_decides():
    ask = "curl -sS -m 60 http://other.example/ 2>&1"
    async with started() as env:
        assert (
            await sh(env, "echo $http_proxy; tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '")
        ).output == "\nlo\n"
        assert "not resolve" in (await sh(env, ask)).output
    async with started(allow_network=True, egress_allow="named.example") as env:
        assert "http://" in (await sh(env, "echo $http_proxy")).output
        refused, allowed = [(await sh(env, ask.replace("other", name))).output for name in ("other", "named")]
        assert "other.example:80 is not on the list of allowed hosts" in refused, "the rule"
        assert "named.example" in allowed, "past the rule, and there is no such host"
        assert "not on the list" not in allowed


@shows("tool_max_batch_size", "tool_batch_window_ms")
async def test_frames_hold_what_is_told(monkeypatch):
    sizes: list[int] = []
    send = WebSocketWriter.send_frame

    async def counting(self, message, *rest):
        with contextlib.suppress(ValueError, TypeError):
            sizes.append(sum("call_id" in one for one in json.loads(message)))
        await send(self, message, *rest)

    monkeypatch.setattr(WebSocketWriter, "send_frame", counting)
    most = {}
    for size in (1, 200):
        async with started(tool_max_batch_size=size, tool_batch_window_ms=10_000, slots_per_container=8) as env:
            await asyncio.gather(*(env.executor.slot(f"t{n}") for n in range(8)))
            began = time.monotonic()
            await sh(env, "true", "t0")
            assert time.monotonic() - began < 9, "the window is a most, not a delay"
            sizes.clear()
            await asyncio.gather(*(sh(env, "true", f"t{n}") for n in range(8) for _ in range(4)))
            most[size] = max(sizes)
    assert most[1] == 1 < most[200]


@shows("lease_ttl_s")
async def test_leases_live_as_configured():
    async with started(lease_ttl_s=7) as env:
        slot = await env.executor.slot("t")
        assert slot.lease.ttl_s == 7


@privileges.owners
@shows("sandbox_base")
async def test_slots_start_from_the_base(tmp_path_factory):
    folder = tiny_base(tmp_path_factory.mktemp("base") / "root", os.geteuid())
    for parent in (folder.parent, folder.parent.parent, folder.parent.parent.parent):
        parent.chmod(0o755)
    async with started(sandbox_base=str(folder)) as env:
        assert (await sh(env, "cat /old/file; ls /usr/share 2>/dev/null")).output == "old\n"
    empty = folder.parent / "empty"
    empty.mkdir()
    for wrong, says in (
        ("/no/such", "is not a folder that the server can read$"),
        (str(empty), "has no /bin/sh: it is no root file system$"),
        ("/", "holds the server's own folder .*; give a root file system in a folder of its own$"),
    ):
        with pytest.raises(ConfigError, match=rf"^env\.sandbox_base: {wrong} {says}"):
            async with started(sandbox_base=wrong):
                pass


@shows("tool_server_url", "tool_server_token")
async def test_tool_server_needs_its_token():
    async with started(enabled_toolsets=["terminal", "web"], tool_server_url="inprocess", min_containers=0) as env:
        assert "web_extract" in env.executor.tools
        assert "terminal" in env.executor.tools
    with pytest.raises(ConfigError, match="tool_server_url"):
        async with started(enabled_toolsets=["web"], min_containers=0):
            pass
    with pytest.raises(ToolServerUnavailable):
        async with started(enabled_toolsets=["web"], tool_server_url="http://127.0.0.1:9", min_containers=0):
            pass
    assert "s3cret" not in repr(AgentEnvConfig(tool_server_url="http://h:1", tool_server_token="s3cret"))


@shows("verify_timeout_s")
async def test_problem_tests_have_a_limit():
    problem = HumanEvalProblem("p", "def f():\n", "f", "    return 1\n", "def check(f):\n    assert f() == 1\n")
    async with started() as env:
        endless = problem.prompt + "    while True: pass\n"
        assert await judge(await env.executor.slot("t"), problem, endless, timeout_s=1) == (
            False,
            "stopped by a limit: time",
        )


def test_every_setting_has_a_test():
    configs = (AgentEnvConfig, HermesAgentEnvConfig, TaskEnvConfig, HumanEvalEnvConfig)
    fields = {name for config in configs for name in config.model_fields}
    assert shown() - fields == set()
    assert fields - {*BaseEnvConfig.model_fields} - shown() == set()
