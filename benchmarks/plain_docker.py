"""Harbor's own Docker environment without the compose plugin: runs inside Harbor's environment (.peers), by `harbor`.

`harbor run --env benchmarks.plain_docker:PlainDocker`: every step is Harbor's, but where it calls `docker compose up`,
`exec`, `cp` and `down` for a project of one service, this calls `docker run`, `exec`, `cp` and `rm --force` for one
container. That is less work than compose does: no network of its own, no files to parse, no 10 s of grace for a PID 1
that ignores SIGTERM.
"""

from __future__ import annotations

import asyncio
from typing import Any, override

from harbor.constants import MAIN_SERVICE_NAME
from harbor.environments.base import ExecResult
from harbor.environments.docker.docker import DockerEnvironment


class PlainDocker(DockerEnvironment):
    """One `docker run` a trial."""

    @override
    async def _run_docker_compose_command(
        self,
        command: list[str],
        check: bool = True,
        timeout_sec: int | None = None,
        stdin_data: bytes | None = None,
        on_output: Any = None,
    ) -> ExecResult:
        assert on_output is None
        process = await asyncio.create_subprocess_exec(
            *("docker", *self._plain(command)),
            stdin=asyncio.subprocess.DEVNULL if stdin_data is None else asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        result = await self._collect_buffered_output(process, timeout_sec=timeout_sec, stdin_data=stdin_data)
        if check and result.return_code:
            raise RuntimeError(f"docker {command}: {result.return_code}: {result.stdout}")
        return result

    def _plain(self, command: list[str]) -> list[str]:
        """The words of a compose command, for the one container."""
        name = self.session_id.lower()
        match command:
            case ["up", *_]:
                mounts = [f"--volume={mount['source']}:{mount['target']}" for mount in self._mounts]
                image = self.task_env_config.docker_image
                return ["run", "--detach", "--name", name, *mounts, str(image), "sh", "-c", "sleep infinity"]
            case ["down", *_]:
                return ["rm", "--force", "--volumes", name]
            case ["exec", *words]:
                at = words.index(MAIN_SERVICE_NAME)
                options = ["--interactive" if word == "-T" else word for word in words[:at]]
                return ["exec", *options, name, *words[at + 1 :]]
            case ["cp", source, target]:
                mark = f"{MAIN_SERVICE_NAME}:"
                renamed = [
                    f"{name}:{path.removeprefix(mark)}" if path.startswith(mark) else path for path in (source, target)
                ]
                return ["cp", "--quiet", *renamed]
            case _:
                raise NotImplementedError(f"no plain docker command for compose {command}")
