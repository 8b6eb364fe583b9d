"""TLS on the sandbox port: only the certificate that clients know opens it, and a handshake is bounded as a head is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest
from pydantic import SecretStr

from atropos.errors import BackendUnavailable, ConfigError
from atropos.net.admission import MAX_UNAUTHENTICATED
from atropos.net.tls import client_context, read_pair
from atropos.slots.client import SandboxClient
from atropos.wire import CommandResult, Exec, LeaseRequest
from tests.unit.server.fakes import TOKEN, serving
from tests.waiting import SLOWNESS, until

ROOT = Path(__file__).parents[3]


def pair(folder: Path, name: str = "server") -> tuple[str, str]:
    """A self-signed certificate and its key, as docs/cluster.md has them made."""
    certificate, key = str(folder / f"{name}.crt"), str(folder / f"{name}.key")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-days", "30", "-subj", f"/CN={name}", "-out", certificate, "-keyout", key),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


def certificate_of(files: tuple[str, str]) -> str:
    return Path(files[0]).read_text()


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[str, str]:
    return pair(tmp_path_factory.mktemp("tls"))


@pytest.fixture
async def server(files):
    async with serving(tls=SecretStr("".join(read_pair(*files) or ()))) as running:
        yield running


def still_open(opened: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> int:
    return sum(not (reader.at_eof() or reader.exception()) for reader, _ in opened)


def client_of(server, certificate: str | None, scheme: str = "https") -> SandboxClient:
    url = f"{scheme}://127.0.0.1:{server.server.port}"
    return SandboxClient(url, TOKEN, client_id="c", certificate=certificate)


async def test_calls_go_to_the_known(server, files):
    async with client_of(server, certificate_of(files)) as client:
        lease = await client.acquire(LeaseRequest(lease_id="lease-0001", client_id="c"))
        for _ in range(3):
            result = await client.call(lease, Exec(command="echo hi"))
            assert isinstance(result, CommandResult)
            assert result.output == b"hi"
        assert (await client.release(lease)).released


async def test_server_shows_its_own(files):
    pem = "".join(read_pair(*files) or ())
    config = {"token": TOKEN, "tls": pem, "volume": "disk", "slots": 1, "drain_s": 1, "die_with_parent": True}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "atropos.sandbox", "--config", "-", stdin=pipe, stdout=pipe, cwd=ROOT
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(config).encode())
    process.stdin.close()
    try:
        ready = json.loads(await asyncio.wait_for(process.stdout.readline(), 60 * SLOWNESS) or "{}")
        assert ready, f"it ended with {await process.wait()}"
        url, certificate = f"https://127.0.0.1:{ready['port']}", certificate_of(files)
        async with SandboxClient(url, TOKEN, client_id="c", certificate=certificate) as client:
            lease = await client.acquire(LeaseRequest(lease_id="lease-0001", client_id="c"))
            result = await client.call(lease, Exec(command="echo hi"))
            assert isinstance(result, CommandResult)
            assert result.output == b"hi\n"
            await client.release(lease)
        process.terminate()
        assert await process.wait() == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


async def test_others_are_refused(server, tmp_path):
    other = certificate_of(pair(tmp_path, "other"))
    for client in (client_of(server, other), client_of(server, None), client_of(server, None, "http")):
        with pytest.raises(BackendUnavailable):
            await client.connect()
        await client.close()


async def test_plain_get_no_answer(server, files):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.server.port)
    writer.write(b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"HTTP" not in await asyncio.wait_for(reader.read(), 20 * SLOWNESS)
    writer.close()
    tls = client_context(certificate_of(files))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls)) as session:
        url = f"https://127.0.0.1:{server.server.port}"
        async with session.get(f"{url}/v1/health") as answer:
            assert answer.status == 200
        for _ in range(3):
            async with session.get(f"{url}/v1/status") as answer:
                assert (answer.status, "unauthorized" in await answer.text()) == (401, True)


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01\x00"], ids=["nothing", "half a handshake"])
async def test_half_open_handshakes_are_bounded(server, files, sent):
    opened: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    try:
        for _ in range(MAX_UNAUTHENTICATED + 100):
            with contextlib.suppress(ConnectionError):
                opened.append(await asyncio.open_connection("127.0.0.1", server.server.port))
                opened[-1][1].write(sent)
        async with client_of(server, certificate_of(files)) as client:
            assert not (await client.status()).draining
        await until(lambda: still_open(opened) <= MAX_UNAUTHENTICATED, "the end of those above the bound")
    finally:
        for _, writer in opened:
            writer.close()


async def test_handshake_has_the_deadline(files):
    from atropos.net.admission import Admission, BearerToken
    from atropos.net.tls import server_context

    tls = server_context("".join(read_pair(*files) or ()))
    admission = Admission(BearerToken(TOKEN), (), b"{}", tls=tls, head_s=2 * SLOWNESS)  # time for the handshake
    loop = asyncio.get_running_loop()
    accepting = await loop.create_server(lambda: admission.connection(asyncio.Protocol), "127.0.0.1", 0)
    port = accepting.sockets[0].getsockname()[1]
    plain, one = await asyncio.open_connection("127.0.0.1", port)
    over_tls, two = await asyncio.open_connection("127.0.0.1", port, ssl=client_context(certificate_of(files)))
    two.write(b"GET / HTTP/1.1\r\n")
    async with asyncio.timeout(20 * SLOWNESS):
        for reader in (plain, over_tls):
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                assert await reader.read() == b""
    assert len(admission) == 0
    for writer in (one, two):
        writer.close()
    accepting.close()


def test_mismatched_is_refused(tmp_path, files):
    certificate, key = files
    (tmp_path / "text").write_text("no PEM")
    for given, names in (
        ((str(tmp_path / "none"), key), "tls_certificate: .*none"),
        ((certificate, str(tmp_path / "none")), "tls_key: .*none"),
        ((str(tmp_path / "text"), key), "tls_certificate: .*holds no certificate"),
        ((certificate, str(tmp_path / "text")), "tls_key: .*is not the unencrypted key"),
        ((certificate, pair(tmp_path, "other")[1]), "tls_key: .*is not the unencrypted key"),
    ):
        with pytest.raises(ConfigError, match=names):
            read_pair(*given)
