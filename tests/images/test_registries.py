"""What registries ask of who pulls: tokens, helpers' credentials, redirects, certificates.

On a stand-in: Debian's registry has neither a token server nor layers elsewhere.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import ssl
import subprocess
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from atropos.config import ImageStoreSettings
from atropos.errors import ImageUnavailable
from atropos.images.reference import ImageSource
from atropos.images.store import ImageStore
from tests import privileges
from tests.images.making import entry, layer, layout
from tests.needs import require

pytestmark = privileges.owners
ANN = f"Basic {base64.b64encode(b'ann:secret').decode()}"


class Asked(list):
    """Requests as they came: what was asked for, and the Authorization."""

    def of(self, part: str) -> list[str | None]:
        return [authorization for path, authorization in self if part in path]


@contextlib.asynccontextmanager
async def standing_in(at: Path, *, opened_by=lambda _: True, tls: ssl.SSLContext | None = None):
    """A registry with the layout's image whose layers are on another host, and what each of both was asked.

    `opened_by` says of a token request's Authorization, or a form, whether it gets a token.
    """
    blobs = at / "blobs/sha256"
    registry, elsewhere = Asked(), Asked()

    async def far(request: web.Request) -> web.Response:
        elsewhere.append((request.path, request.headers.get("Authorization")))
        return web.Response(body=(blobs / request.path.rpartition("/")[2]).read_bytes())

    async def token(request: web.Request) -> web.Response:
        said = request.headers.get("Authorization") or dict(await request.post())
        registry.append((request.path_qs, said))
        if not opened_by(said):
            return web.json_response({"errors": [{"message": "wrong password"}]}, status=401)
        return web.json_response({"token": "opens"})

    async def answer(request: web.Request) -> web.StreamResponse:
        registry.append((request.path, request.headers.get("Authorization")))
        if request.headers.get("Authorization") != "Bearer opens":
            realm = f'Bearer realm="{request.scheme}://{request.host}/token",service="here"'
            return web.Response(status=401, headers={"WWW-Authenticate": realm})
        last = request.path.rpartition("/")[2].removeprefix("sha256:")
        if last == "1":
            last = json.loads((at / "index.json").read_text())["manifests"][0]["digest"].removeprefix("sha256:")
        if "/manifests/" in request.path:
            return web.Response(body=(blobs / last).read_bytes())
        return web.Response(status=307, headers={"Location": f"http://127.0.0.1:{other.port}/{last}"})

    app, far_app = web.Application(), web.Application()
    app.router.add_route("*", "/token", token)
    app.router.add_get("/{path:.*}", answer)
    far_app.router.add_get("/{path:.*}", far)
    server = TestServer(app, host="localhost")
    async with TestServer(far_app) as other:
        await server.start_server(ssl=tls)
        try:
            yield f"localhost:{server.port}", registry, elsewhere
        finally:
            await server.close()


async def prepared(tmp_path: Path, host: str, **settings):
    root = tmp_path / "store"
    root.mkdir(exist_ok=True)
    store = ImageStore(ImageStoreSettings(folder=str(root), **settings), str(root), 65_536)
    try:
        return await store.prepare(ImageSource.parse(f"{host}/image:1"), lambda *_: None)
    finally:
        await store.aclose()


async def test_a_token_is_for_one_host(tmp_path):
    image_id = layout(tmp_path / "layout", layer(entry("a", "a")), layer(entry("b", "b")))
    async with standing_in(tmp_path / "layout") as (host, asked, elsewhere):
        assert (await prepared(tmp_path, host, insecure_registries=(host,))).id == image_id
    (query,) = [path for path, _ in asked if path.startswith("/token")]
    assert "scope=repository%3Aimage%3Apull" in query
    assert "service=here" in query
    assert len(elsewhere) == 3
    assert elsewhere.of("/") == [None] * 3


def helper(folder: Path, answer: dict) -> str:
    """A credential helper of that answer; PATH with it."""
    folder.mkdir()
    program = folder / "docker-credential-pocket"
    program.write_text(f"#!/bin/sh\ncat > {folder}/asked\ncat <<'E'\n{json.dumps(answer)}\nE\n")
    program.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.parametrize("kept", ["auths", "auths of the repository", "helper", "identity token"])
async def test_a_logins_credentials_are_found(tmp_path, monkeypatch, kept):
    image_id = layout(tmp_path / "layout", layer(entry("a", "a")))
    token = {"grant_type": "refresh_token", "refresh_token": "long", "client_id": "atropos", "service": "here"}
    wanted = token | {"scope": "repository:image:pull"} if kept == "identity token" else ANN
    async with standing_in(tmp_path / "layout", opened_by=lambda said: said == wanted) as (host, _, _):
        name = f"{host}/image" if "repository" in kept else host
        files = {
            "helper": {"credHelpers": {name: "pocket"}},
            "identity token": {"auths": {name: {"identitytoken": "long"}}},
        }
        plain = {"auths": {name: {"auth": ANN.removeprefix("Basic ")}}}
        monkeypatch.setenv("PATH", helper(tmp_path / "bin", {"Username": "ann", "Secret": "secret"}))
        (tmp_path / "auth.json").write_text(json.dumps(files.get(kept, plain)))
        settings = {"insecure_registries": (host,), "auth_file": str(tmp_path / "auth.json")}
        assert (await prepared(tmp_path, host, **settings)).id == image_id


@pytest.mark.parametrize(
    ("auth", "words"),
    [
        ("{}", "gave no access: wrong password .HTTP status 401"),
        ("[", "gave no access: .*auth.json: no JSON"),
        (None, "auth_file: .*auth.json: No such file"),
    ],
    ids=["no credentials", "no JSON", "no file"],
)
async def test_a_closed_registry_says_why(tmp_path, auth, words):
    layout(tmp_path / "layout", layer(entry("a", "a")))
    if auth is not None:
        (tmp_path / "auth.json").write_text(auth)
    async with standing_in(tmp_path / "layout", opened_by=lambda said: said == ANN) as (host, _, _):
        with pytest.raises(ImageUnavailable, match=f"pulling: .*{words}") as caught:
            await prepared(tmp_path, host, insecure_registries=(host,), auth_file=str(tmp_path / "auth.json"))
    assert "\n" not in str(caught.value)


@pytest.fixture
def certificate(tmp_path) -> Path:
    """One of localhost that nobody trusts yet, with its key beside it."""
    require("openssl")
    made = tmp_path / "server.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", f"{made}.key", "-out", str(made)]
    subprocess.run(command, check=True, capture_output=True)
    return made


@pytest.mark.parametrize("trusted", [True, False], ids=["trusted", "unknown"])
async def test_a_hosts_certificate_counts(tmp_path, certificate, trusted):
    image_id = layout(tmp_path / "layout", layer(entry("a", "a")))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, f"{certificate}.key")
    async with standing_in(tmp_path / "layout", tls=context) as (host, _, _):
        folder = Path("/etc/containers/certs.d", host)
        with contextlib.ExitStack() as undone:
            if trusted:
                folder.mkdir(parents=True)
                undone.callback(lambda: [path.unlink() for path in folder.iterdir()] and folder.rmdir())
                (folder / "ca.crt").write_bytes(certificate.read_bytes())
                assert (await prepared(tmp_path, host)).id == image_id
            else:
                with pytest.raises(ImageUnavailable, match="certificate verify failed"):
                    await prepared(tmp_path, host)
