"""Two commands of one environment at a time, of which the first waits for the second, as in each host's own Docker environments."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

POOL = {"backend": "local", "slots_per_container": 1, "max_containers": 1}
Run = Callable[[str], Awaitable[str]]


@asynccontextmanager
async def harbor() -> AsyncIterator[Run]:
    from harbor.models.task.config import EnvironmentConfig
    from harbor.models.trial.paths import TrialPaths

    from atropos.adapters.harbor import AtroposEnvironment

    (task := Path("task")).mkdir()
    paths = TrialPaths(Path("trial"))
    environment = AtroposEnvironment(
        task, "t", "s", paths, EnvironmentConfig(docker_image="atropos-base:default"), **POOL
    )
    await environment.start(force_build=False)
    try:
        yield lambda line: _stdout(environment.exec(line))
    finally:
        await environment.stop(delete=True)


@asynccontextmanager
async def inspect_ai() -> AsyncIterator[Run]:
    from atropos.adapters.inspect_ai import AtroposSandbox, AtroposSandboxConfig

    config = AtroposSandboxConfig(pool=POOL)
    await AtroposSandbox.task_init("t", config)
    environments = await AtroposSandbox.sample_init("t", config, {})
    try:
        yield lambda line: _stdout(environments["default"].exec(["sh", "-c", line]))
    finally:
        await AtroposSandbox.sample_cleanup("t", config, environments, interrupted=False)
        await AtroposSandbox.task_cleanup("t", config, cleanup=True)


@asynccontextmanager
async def mini_swe_agent() -> AsyncIterator[Run]:
    from atropos.adapters.mini_swe_agent import AtroposEnvironment

    environment = AtroposEnvironment(pool=POOL)

    async def run(line: str) -> str:
        return (await asyncio.to_thread(environment.execute, {"command": line}))["output"]

    yield run
    environment.cleanup()


@asynccontextmanager
async def nemo_gym() -> AsyncIterator[Run]:
    from nemo_gym.sandbox import AsyncSandbox, SandboxSpec

    async with AsyncSandbox({"atropos": {"pool": POOL}}, SandboxSpec()) as started:
        sandbox = await started.start()
        yield lambda line: _stdout(sandbox.exec(line))


@asynccontextmanager
async def swerex() -> AsyncIterator[Run]:
    from swerex.runtime.abstract import Command

    from atropos.adapters.swerex import AtroposDeployment

    deployment = AtroposDeployment(pool=POOL)
    await deployment.start()
    try:
        yield lambda line: _stdout(deployment.runtime.execute(Command(command=line, shell=True)))
    finally:
        await deployment.stop()


@asynccontextmanager
async def verifiers() -> AsyncIterator[Run]:
    import verifiers.v1 as vf

    from atropos.adapters.verifiers import AtroposRuntime

    async with AtroposRuntime(vf.Task(vf.TaskData(prompt="x")), pool=POOL) as runtime:
        await runtime.start()
        yield lambda line: _stdout(runtime.run(["sh", "-c", line], {}))


async def _stdout(result) -> str:
    return (await result).stdout


async def answer(host: Callable[[], AbstractAsyncContextManager[Run]]) -> str:
    """What the first command prints."""
    async with host() as run, asyncio.timeout(60):
        first = asyncio.create_task(run("until [ -s said ]; do sleep 0.05; done; cat said"))
        await asyncio.sleep(0.2)
        await run("echo $((6 * 7)) > said")
        return await first
