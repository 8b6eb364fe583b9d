"""What hosts that are reached by ssh add to a pool: their keys, their ways to refuse, and connections that break."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
from pathlib import Path

import pytest

from atropos.envs import HermesAgentEnvConfig
from atropos.errors import BackendUnavailable, ConfigError, SandboxError
from atropos.slots import SlotPool, SlotPoolConfig
from tests.engines import SMALL
from tests.processes import adopt_orphans, descendants, gone_within, running
from tests.settings import shows
from tests.silent_server import silent_server
from tests.sshd import SSHD, Sshd, make_key, sshd
from tests.waiting import until

pytestmark = pytest.mark.skipif(SSHD is None, reason="openssh-server is not installed")

NOISY = 'ForceCommand sh -c \'echo "Welcome! {1}"; echo careful >&2; exec sh -c "$SSH_ORIGINAL_COMMAND"\''
"""As hosts whose start-up files print something."""


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    adopt_orphans()
    with sshd(tmp_path_factory.mktemp("sshd"), NOISY) as host:
        yield host


def settings(host: Sshd, **changes) -> SlotPoolConfig:
    return SlotPoolConfig(**(host.settings() | {"slots_per_container": 2, "limits": SMALL} | changes))


async def refusal(host: Sshd, **changes) -> str:
    """What the start of a pool says."""
    pool = SlotPool(settings(host, **changes))
    with pytest.raises(ConfigError) as caught:
        await pool.start()
    assert await gone_within(20, host.pid) == []
    return str(caught.value)


def edited(host: Sshd, folder: Path, **lines: str) -> dict[str, str]:
    """The host's client configuration with other values."""
    text = host.config.read_text().splitlines()
    changed = [f"  {word} {lines[word]}" if (word := line.split()[0]) in lines else line for line in text]
    (folder / "config").write_text("\n".join(changed) + "\n")
    return {"ssh_config": str(folder / "config")}


@shows("ssh_config")
@pytest.mark.parametrize("known", ["nothing", "another key", "none"])
async def test_unknown_host_key_refused(host, tmp_path, known):
    file = tmp_path / "known_hosts"
    if known == "another key":
        file.write_text(f"[127.0.0.1]:{host.port} {make_key(tmp_path / 'other')}")
    else:
        file.write_text("")
    config = edited(host, tmp_path, UserKnownHostsFile="none" if known == "none" else str(file))
    said = await refusal(host, **config)
    assert said.startswith("ssh_hosts: the key that sandboxes shows is not known")
    assert "known_hosts" in said


@shows("ssh_python")
async def test_failed_starts_are_named(host, tmp_path):
    make_key(tmp_path / "stranger")
    config = edited(host, tmp_path, IdentityFile=str(tmp_path / "stranger"))
    assert (await refusal(host, **config)).startswith("ssh_hosts: sandboxes refuses the login")
    assert "ssh_python: '/nowhere/python' on sandboxes" in await refusal(host, ssh_python="/nowhere/python")
    assert "sandboxes: base: " in await refusal(host, base="/nowhere")
    assert "ssh_config: [Errno 2]" in await refusal(host, ssh_config="/nowhere/config")


async def test_no_forwarding_is_named(tmp_path):
    with sshd(tmp_path, "AllowTcpForwarding no") as strict:
        assert "AllowTcpForwarding" in await refusal(strict)


async def test_a_silent_host_is_named(host):
    async with silent_server() as silent:
        with pytest.raises(BackendUnavailable, match=silent):
            await SlotPool(settings(host, ssh_hosts=[silent], start_timeout_s=1)).start()


@shows("ssh_hosts")
async def test_each_host_is_a_container(host):
    assert settings(host, ssh_hosts="a,b,c").max_containers == 3
    assert "1 for max_containers 2" in await refusal(host, max_containers=2)
    for name in ("a b", "a:65536"):
        assert "[user@]host[:port]" in await refusal(host, ssh_hosts=[name])
    with pytest.raises(BackendUnavailable, match=r"a\.\.b can't be reached by ssh: .*label empty"):
        await SlotPool(settings(host, ssh_hosts=["a..b"])).start()
    assert "0 for max_containers" in await refusal(host, ssh_hosts=[], min_containers=0)


async def test_hermes_terminal_backend(host):
    config = HermesAgentEnvConfig(
        terminal_backend="ssh",
        slots_per_container=2,
        ssh_hosts=[f"127.0.0.1:{host.port}"],
        ssh_config=str(host.config),
        ssh_python=sys.executable,
    )
    async with SlotPool(config.pool_config()) as pool, pool.lease("t") as slot:
        assert (await slot.exec("echo ok")).output == "ok\n"
    assert await gone_within(20, host.pid) == []


async def test_cut_connection_returns(host):
    async with SlotPool(settings(host, acquire_timeout_s=60)) as pool:
        slot = await pool.acquire("t")
        call = asyncio.create_task(slot.exec("sleep 600"))
        await until(lambda: running("sleep 600", host.pid), "the call's program")
        (connection,) = (pid for pid, line in descendants(host.pid).items() if "far_end" not in line and "@" in line)
        before = set(descendants(host.pid))
        os.kill(connection, signal.SIGKILL)
        with pytest.raises(SandboxError, match=f"container {slot.container} is lost|can't be reached"):
            await call
        await slot.release()
        async with pool.lease("u") as again:
            assert (await again.exec("echo ok")).output == "ok\n"
        await until(lambda: not before & set(descendants()), "the end of all that the connection held")
    assert await gone_within(20, host.pid) == []


async def test_killed_owner_is_tidy(host):
    program = f"""
        import asyncio
        from atropos.slots import SlotPool, SlotPoolConfig
        async def main():
            async with SlotPool(SlotPoolConfig.model_validate_json({settings(host).model_dump_json()!r})) as pool:
                async with pool.lease("t") as slot:
                    await slot.exec("sleep 600 & echo")
                    print("running", flush=True)
                    await asyncio.sleep(600)
        asyncio.run(main())
    """
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(program), stdout=asyncio.subprocess.PIPE
    )
    assert owner.stdout is not None
    assert await owner.stdout.readline() == b"running\n"
    assert any("sleep 600" in line for line in descendants(host.pid).values())
    owner.kill()
    await owner.wait()
    assert await gone_within(20, host.pid) == []
