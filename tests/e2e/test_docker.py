"""What is special about Docker: the container's privileges, what an earlier run left, sharing.

The rest is in conformance.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import ipaddress
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web
from docker import from_env

from atropos.aio import cancel_and_wait
from atropos.errors import BackendUnavailable, ConfigError
from atropos.net.authority import Authority
from atropos.net.secrets import host_rule
from atropos.slots import EgressSecret, SlotPool
from atropos.slots.backends.docker.engine import DockerEngine
from atropos.slots.backends.docker.facts import EngineFacts
from atropos.slots.backends.loading import open_survey
from tests.e2e.docker_proxy import ENGINE, DockerProxy
from tests.engines import BACKENDS, ROOT, containers, leftovers, pool_config
from tests.settings import shows
from tests.waiting import until

pytestmark = [
    pytest.mark.docker,
    pytest.mark.skipif("docker" not in BACKENDS, reason="ATROPOS_BACKENDS has no docker: no engine in this run"),
]
CAPABILITIES = {"CHOWN": 0, "DAC_OVERRIDE": 1, "SETGID": 6, "SETUID": 7, "SETPCAP": 8, "SYS_ADMIN": 21}
"""What the root phase needs, with the numbers that the kernel gives them."""
USERS = (
    "import contextlib, glob, os\n"
    "for path in glob.glob('/proc/[0-9]*/status'):\n"
    "    with contextlib.suppress(OSError):\n"
    "        if path != f'/proc/{os.getpid()}/status':\n"
    "            print(next(line.split()[1] for line in open(path) if line.startswith('Uid:')))\n"
)
"""Prints the user of each process but its own."""
ENGINE_NAME = "(Docker|Podman)"
HEALTH_CHECK = ["python3", "-S", "-I", "/usr/lib/atropos/healthcheck.py"]
LEFT_BEHIND = (
    "import asyncio, os, signal, sys\n"
    "from atropos.slots import SlotPool, SlotPoolConfig\n"
    "async def main():\n"
    "    pool = SlotPool(SlotPoolConfig.model_validate_json(sys.argv[1]))\n"
    "    await pool.start()\n"
    "    await (await pool.acquire('t')).exec('echo left > behind')\n"
    "    os.kill(os.getpid(), signal.SIGKILL)\n"
    "asyncio.run(main())\n"
)


async def docker(*arguments: str, stdin: str | None = None) -> str:
    done = await asyncio.to_thread(
        subprocess.run, ["docker", *arguments], input=stdin, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


async def leave_behind(config) -> None:
    """A run of this pool that is killed with a lease in use."""
    command = [sys.executable, "-c", LEFT_BEHIND, config.model_dump_json()]
    ended = await asyncio.to_thread(subprocess.run, command, cwd=ROOT, timeout=120)
    assert ended.returncode == -9


async def test_least_privilege():
    async with SlotPool(pool_config("docker")) as pool, pool.lease("t") as slot:
        found = json.loads(await docker("inspect", slot.container))[0]
        host = found["HostConfig"]
        assert not host["Privileged"]
        status = await docker("exec", slot.container, "cat", "/proc/self/status")  # engines report CapDrop differently
        most = next(line.split()[1] for line in status.splitlines() if line.startswith("CapBnd:"))
        assert int(most, 16) == sum(1 << number for number in CAPABILITIES.values())
        with contextlib.closing(from_env()) as client:
            rootless = EngineFacts.read(client.version(), client.info()).rootless
        if not rootless:
            assert host["CgroupnsMode"] in {"private", ""}  # Podman 4 doesn't say
            assert host["PidsLimit"] > 0
            assert host["Memory"] > 0
        assert not [bind for bind in host["Binds"] or () if bind.startswith("/")]  # Podman lists the image's volume
        given = next(o.removeprefix("seccomp=") for o in host["SecurityOpt"] if o.startswith("seccomp="))
        profile = json.loads(given if given.startswith("{") else Path(given).read_text())  # Podman takes a path
        assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
        (container,) = (c for c in pool.backend.containers() if c.id == slot.container)
        assert container.token not in json.dumps(found)
        # nothing in the container is root of the host, and nothing holds a capability outside its own namespace
        users = (await docker("exec", slot.container, "python3", "-c", USERS)).split()
        assert users
        lowest = 1 if rootless else 100_000  # ids in a rootless engine's containers are none of the host's
        assert all(int(user) >= lowest for user in users), users


async def test_equal_leftovers_adopted():
    config = pool_config("docker", lease_ttl_s=10)
    await leave_behind(config)
    (before,) = containers(config.job_id)
    async with SlotPool(config) as pool:
        for n in range(3):
            async with pool.lease(f"t{n}") as slot:
                assert (await slot.exec("ls -A")).output == ""
        assert containers(config.job_id) == [before]
    assert leftovers("docker", config.job_id) == []


@shows("purge_job_on_start")
async def test_other_leftovers_removed():
    config = pool_config("docker", lease_ttl_s=2)
    await leave_behind(config)
    (before,) = containers(config.job_id)
    await docker("kill", before)  # and what ended is removed in any case
    async with SlotPool(pool_config("docker", job_id=config.job_id, slots_per_container=1)) as pool:
        async with pool.lease("t") as slot:
            assert (await slot.exec("echo ok")).output == "ok\n"
        assert before not in containers(config.job_id)
    assert leftovers("docker", config.job_id) == []


@shows("purge_job_on_shutdown")
async def test_purge_spares_others():
    config = pool_config("docker", max_containers=1)
    async with SlotPool(config) as two:
        async with SlotPool(config) as one, one.lease("a") as a, two.lease("b") as b:
            assert a.container == b.container
            assert a.name != b.name
        async with two.lease("c") as c:
            assert (await c.exec("echo still here")).output == "still here\n"
    assert leftovers("docker", config.job_id) == []


async def test_operators_see_starts():
    pool = f"test-{secrets.token_hex(4)}"
    name = (
        await docker("create", "--label", f"atropos.pool={pool}", "--entrypoint", "false", "atropos-sandbox:local")
    ).strip()
    try:
        async with await open_survey("docker", pool, address=None) as survey:
            (seen,), trouble = await survey.look()
            assert (seen.container.state, seen.status, trouble) == ("starting", None, "")
            await docker("start", name)
            await docker("wait", name)
            await until(lambda: containers(pool, "status=exited"), "a list without it")  # may follow a moment later
            seen, trouble = await survey.look()
            assert not seen
            assert "is exited: exit code 1" in trouble
    finally:
        await docker("rm", "--force", "--volumes", name)


@pytest.mark.skipif(not os.path.exists(ENGINE), reason="the engine is not on a unix socket of this machine")
async def test_broken_copy_costs_nothing():
    def broken_off(request: web.Request) -> web.Response | None:
        return web.Response(body=b"\0" * 100) if request.method == "GET" and "/archive" in request.path else None

    async with DockerProxy() as proxy:
        config = pool_config("docker", docker_host=proxy.url, slots_per_container=1)
        async with SlotPool(config) as pool, pool.lease("t") as slot:
            proxy.instead = broken_off
            async with SlotPool(config.model_copy(update={"docker_host": None})) as other, other.lease("u"):
                await until(lambda: "broke off" in pool.trouble(), "the other pool's container", 60)
            proxy.instead = lambda request: None
            async with pool.lease("v") as another:
                assert (await another.exec("echo ok")).output == "ok\n"
            await until(lambda: not pool.trouble(), "no trouble", 60)
            assert (await slot.exec("echo still here")).output == "still here\n"
    assert leftovers("docker", config.job_id) == []


@pytest.mark.skipif(not os.path.exists(ENGINE), reason="the engine is not on a unix socket of this machine")
async def test_a_removal_is_a_reason():
    def marked_for_removal(request: web.Request) -> web.Response | None:
        return web.json_response({"message": "marked for removal"}, status=409) if "/logs" in request.path else None

    async with DockerProxy() as proxy, SlotPool(pool_config("docker")) as pool:
        proxy.instead = marked_for_removal
        engine = DockerEngine(pool.config.job_id, proxy.url)
        await asyncio.to_thread(engine.connect)
        try:
            ending = await asyncio.to_thread(engine.ending, *pool.links)
        finally:
            engine.close()
        assert (ending.code, ending.reason) == (None, "removed by another process")


@pytest.mark.skipif(not os.path.exists(ENGINE), reason="the engine is not on a unix socket of this machine")
async def test_one_of_two_is_kept():
    made: list[str] = []

    def blind(request: web.Request) -> web.Response | None:
        """Until the second process has made its container, it doesn't see the first one's."""
        if request.path.endswith("/containers/create"):
            made.append(request.query["name"])
        return None if made or not request.path.endswith("/containers/json") else web.json_response([])

    async def work(pool: SlotPool) -> None:
        while True:
            async with pool.lease("t") as slot:
                await slot.exec("true")

    config = pool_config("docker", max_containers=1, slots_per_container=1)
    async with SlotPool(config) as first, DockerProxy() as proxy:
        proxy.instead = blind
        async with SlotPool(config.model_copy(update={"docker_host": proxy.url})) as second:
            assert len(made) == 1
            working = [asyncio.create_task(work(pool)) for pool in (first, second) for _ in range(6)]
            await until(lambda: len(containers(config.job_id)) == 1, "one container, though leases wait for more", 60)
            await cancel_and_wait(working)
            for pool in (first, second):
                async with pool.lease("t") as slot:
                    assert (await slot.exec("echo ok")).output == "ok\n"
    assert leftovers("docker", config.job_id) == []


@shows("sandbox_image")
async def test_missing_ones_are_named():
    with pytest.raises(ConfigError, match=rf"{ENGINE_NAME} has no image 'no-such-image:local'.*make image"):
        await SlotPool(pool_config("docker", image="no-such-image:local")).start()
    with pytest.raises(BackendUnavailable, match=r"no Docker engine answers at unix:///nowhere"):
        await SlotPool(pool_config("docker", docker_host="unix:///nowhere")).start()


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (404, "MANIFEST_UNKNOWN", ConfigError),
        (401, "UNAUTHORIZED", ConfigError),
        (403, "DENIED", ConfigError),
        (429, "TOOMANYREQUESTS", BackendUnavailable),
        (500, "UNKNOWN", BackendUnavailable),
    ],
)
async def test_only_no_image_is_config(status, code, error, caplog):
    podman = "Podman" in await docker("version", "--format", "{{json .Server.Components}}")
    if not podman and "rootless" in await docker("info", "--format", "{{.SecurityOptions}}"):
        pytest.skip("a rootless dockerd's 127.0.0.1 is its own, so that no registry of this test is there")

    async def answer(request: web.Request) -> web.Response:
        reason = {"errors": [{"code": code, "message": code}]}
        return web.json_response(reason, status=200 if request.path == "/v2/" else status)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    image = f"127.0.0.1:{runner.addresses[0][1]}/atropos-sandbox:1"
    caplog.set_level("INFO")
    try:
        with pytest.raises(error, match=rf"sandbox_image\): {ENGINE_NAME} .* '{image}'"):
            await SlotPool(pool_config("docker", image=image)).start()
    finally:
        await runner.cleanup()
    assert re.search(f"{ENGINE_NAME} has no image {image}: pulling it", caplog.text)


async def test_removed_image_found_again():
    image = f"atropos-removed-{secrets.token_hex(3)}:local"

    async def build(number: int) -> None:
        text = f"FROM atropos-sandbox:local\nLABEL atropos.test={number}\n".encode()
        command = ["docker", "build", "-q", "-t", image, "-"]
        await asyncio.to_thread(subprocess.run, command, input=text, check=True, capture_output=True)

    await build(1)
    config = pool_config("docker", image=image, min_containers=0, max_containers=1, idle_container_s=0.1)
    try:
        async with SlotPool(config) as pool:
            async with pool.lease("t"):
                pass
            await until(lambda: not containers(config.job_id), "no container", 60)
            await docker("rmi", "--force", image)
            waiting = asyncio.create_task(pool.acquire("u", timeout_s=60))
            await until(lambda: f"no image '{image}'" in pool.trouble(), "why it waits", 60)
            await build(2)
            assert (await (await waiting).exec("echo ok")).output == "ok\n"
            assert not pool.trouble()
    finally:
        await docker("rmi", "--force", image)
    assert leftovers("docker", config.job_id) == []


async def test_slow_server_has_its_time(monkeypatch):
    monkeypatch.setattr("atropos.slots.backends.docker.backend.READY_S", 0.5)
    image = f"atropos-slow-{secrets.token_hex(3)}:local"
    text = b'FROM atropos-sandbox:local\nENTRYPOINT ["sh", "-c", "sleep 3; exec python3 -S -I /usr/lib/atropos/entry.py"]\n'
    command = ["docker", "build", "-q", "-t", image, "-"]
    await asyncio.to_thread(subprocess.run, command, input=text, check=True, capture_output=True)
    try:
        async with SlotPool(pool_config("docker", image=image)) as pool, pool.lease("t") as slot:
            assert (await slot.exec("echo ok")).output == "ok\n"
    finally:
        await docker("rmi", "--force", image)


async def test_no_server_in_image_fails():
    image = "atropos-other:local"
    text = b'FROM atropos-sandbox:local\nENTRYPOINT ["true"]\n'
    await asyncio.to_thread(
        subprocess.run, ["docker", "build", "-q", "-t", image, "-"], input=text, check=True, capture_output=True
    )
    config = pool_config("docker", image=image)
    try:
        with pytest.raises(
            BackendUnavailable, match=r"exit code 0: it printed nothing; is sandbox_image one of `make image`"
        ):
            await SlotPool(config).start()
    finally:
        await asyncio.to_thread(subprocess.run, ["docker", "rmi", "-f", image], check=True, capture_output=True)
    assert leftovers("docker", config.job_id) == []


async def test_failed_isolation_ends_it():
    config = pool_config("docker", base="/no/such/folder")
    with pytest.raises((ConfigError, BackendUnavailable), match="/no/such/folder"):
        await SlotPool(config).start()
    assert leftovers("docker", config.job_id) == []


@contextlib.asynccontextmanager
async def over_tcp():
    """The engine's socket as `tcp://127.0.0.1:port`, as a remote engine is reached."""
    path = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://")

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        with contextlib.suppress(OSError):
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, downstream = await asyncio.open_unix_connection(path)
        await asyncio.gather(pump(reader, downstream), pump(upstream, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@shows("docker_host")
async def test_remote_publishes_ports():
    async with over_tcp() as host:
        config = pool_config("docker", docker_host=host, lease_ttl_s=3)
        await leave_behind(config)
        (before,) = containers(config.job_id)
        async with SlotPool(config) as pool, pool.lease("t") as slot:
            assert (await slot.exec("echo ok")).output == "ok\n"
            assert containers(config.job_id) == [before]
            found = json.loads(await docker("inspect", before))[0]
            port = found["NetworkSettings"]["Ports"]["8787/tcp"][0]["HostPort"]
            assert [each.url for each in pool.backend.containers()] == [f"http://127.0.0.1:{port}"]
    assert leftovers("docker", config.job_id) == []


async def test_image_labels_and_health():
    image = json.loads(await docker("image", "inspect", "atropos-sandbox:local"))[0]
    assert image["Config"]["Labels"]["org.opencontainers.image.title"] == "atropos-sandbox"
    assert image["Config"].get("Healthcheck", {}).get("Test", ["CMD", *HEALTH_CHECK]) == ["CMD", *HEALTH_CHECK]
    async with SlotPool(pool_config("docker")) as pool, pool.lease("t") as slot:
        labels = json.loads(await docker("inspect", slot.container))[0]["Config"]["Labels"]
        assert (labels["atropos.pool"], labels["atropos.index"]) == (pool.config.job_id, "0")
        assert f":{os.getpid()}:" in labels["atropos.owner"]
        assert (await docker("exec", slot.container, *HEALTH_CHECK)) == "ok\n"
        alone = ["docker", "exec", "-e", "ATROPOS_PORT=1", slot.container, *HEALTH_CHECK]
        none = await asyncio.to_thread(subprocess.run, alone, capture_output=True, text=True, check=False)
        assert (none.returncode, none.stdout[:24]) == (1, "no answer on 127.0.0.1:1")


class Asked(http.server.BaseHTTPRequestHandler):
    """Says what it was asked with."""

    def do_GET(self) -> None:
        said = self.headers.get("Authorization", "nothing").encode()
        self.server.seen.append(said)
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)


@contextlib.contextmanager
def secret_taker(address: str) -> Iterator[tuple[http.server.ThreadingHTTPServer, str]]:
    """A host that is asked by TLS, and the certificate of who vouches for it."""
    authority = Authority.make([host_rule(address, tls=True)])
    with http.server.ThreadingHTTPServer((address, 0), Asked) as server:
        server.seen = []
        server.socket = authority.context(address).wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server, authority.certificate
        server.shutdown()


async def test_secrets_by_tls():
    subnet = await docker("network", "inspect", "bridge", "-f", "{{(index .IPAM.Config 0).Subnet}}")
    gateway = str(ipaddress.ip_network(subnet.strip())[1])
    try:
        socket.create_server((gateway, 0)).close()
    except OSError:
        pytest.skip(f"the engine's gateway {gateway!r} is no address of this machine's, as of a rootless engine")
    with secret_taker(gateway) as (server, certificate):
        host = f"{gateway}:{server.server_port}"
        config = pool_config("docker", allow_network=True, egress_allow=[host], max_containers=1)
        async with SlotPool(config) as pool:
            (container,) = [each.container for each in pool.links.values()]
            add = "import sys; open('/etc/ssl/certs/ca-certificates.crt', 'a').write(sys.stdin.read())"
            await docker("exec", "-i", container.id, "python3", "-c", add, stdin=certificate)
            secret = EgressSecret(hosts=(host,), value="Bearer tok-4f9a1c77", tls=True)
            async with pool.lease("has", secrets=[secret]) as slot, pool.lease("not") as other:
                get = f"curl -sS -m 30 https://{host}/"
                told = (await slot.exec(get)).output
                assert server.seen == [b"Bearer tok-4f9a1c77"], told
                assert told.strip("*") in {"", "Bearer "}
                assert "certificate" in (await other.exec(get)).output
                assert (await other.exec(f"{get} -k")).output == "nothing"
