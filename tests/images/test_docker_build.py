"""What a Dockerfile makes here is what `docker build` makes of it: path by path, and what commands on it start with."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import posixpath
import shutil
import tarfile
from pathlib import Path
from typing import BinaryIO

import pytest

from atropos.errors import ConfigError
from atropos.tasks.folder import load_task
from atropos.tasks.prepare import TaskImages
from atropos.wire import HealthConfig
from tests import engines, privileges
from tests.images.dockerfiles import DOCKERFILES, IGNORED_BY, REFUSED, WITH_BUILDKIT, make_context
from tests.images.making import entry, folder, layer, layout, link
from tests.images.test_leases import BUSYBOX, pool_for

pytestmark = [
    pytest.mark.docker,
    pytest.mark.skipif("docker" not in engines.BACKENDS, reason="needs a Docker engine"),
    privileges.owners,
]
AT_ONCE = 4
KNOWN = {
    "copy-all: /all/Dockerfile": "names the base",
    "ignored-parents: /all/Dockerfile": "names the base",
    "copy-to-root: /Dockerfile": "names the base",
    "scratch: /etc": "the engine makes it for its own files",
    "add-scratch: /etc": "the engine makes it for its own files",
    "stage-whole: /whole/usr": "a folder that every slot has",
    "stage-whole: /whole/workspace": "a folder that every slot has",
    **{
        f"stage-whole: /whole/etc/{name}": "a file that every slot has, as every container of the engine"
        for name in ("hosts", "hostname", "resolv.conf", "mtab")
    },
    "stage-of-stage: /w": "a WORKDIR is its USER's, as with BuildKit; the classic builder's is root's",
    "stages: /glob/made": "the classic builder drops set-user-id with --chown, BuildKit keeps it",
    "volume: /made": "the engine makes it with the container's volume",
    "chmod: /d": "newer ones than 20.10's BuildKit give the mode of --chmod to folders that they make, too",
    "mounts: /all": "newer ones than 20.10's BuildKit remove what they made for a mount",
    "mounts: /c": "newer ones than 20.10's BuildKit remove what they made for a mount",
}
"""Paths that differ, and why."""
TAR = """
cd /; for top in $(busybox ls -A | busybox tr '\\n' /); do case $top in proc|sys|dev|bin) ;; *) set -- "$@" "$top" ;; esac; done
busybox tar -cf /dev/shm/tree "$@"
"""
"""Everything of a slot that a build can have made."""


def base_image(at: Path) -> None:
    """Busybox with all its tools, two users, a folder of one of them, and an environment."""
    if not Path(BUSYBOX).exists():
        pytest.skip("not installed: busybox-static")
    people = "root:x:0:0::/root:/bin/sh\napp:x:1000:1000::/srv/app:/bin/sh\n"
    groups = "root:x:0:\nstaff:x:50:\napp:x:1000:\n"
    tools = "sh ls cat id pwd env stat mkdir rmdir echo rm mv chmod chown ln mkfifo find readlink sha256sum cut touch grep sort true false tar gzip gunzip cp head"
    layout(
        at,
        layer(
            folder("bin"),
            entry("bin/busybox", Path(BUSYBOX).read_bytes(), mode=0o755),
            *(link(f"bin/{name}", "busybox") for name in tools.split()),
            entry("etc/passwd", people),
            entry("etc/group", groups),
            entry("etc/motd", "welcome"),
            folder("tmp", mode=0o1777),
            folder("root", mode=0o700),
            folder("srv/app", owner=(1000, 1000)),
            entry("srv/app/text", "hello", owner=(1000, 1000)),
        ),
        config={"Env": ["PATH=/tools:/bin", "GREETING=hi"]},
    )


async def ran(*argv: str, **more: str) -> str:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*argv, stdout=pipe, stderr=pipe, env=os.environ | more)
    out, errors = await process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(argv[:3])}: {errors.decode()[-600:]}")
    return out.decode().strip()


class Docker:
    """What the engine makes of a Dockerfile."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.images: list[str] = []

    async def load(self, at: Path, name: str) -> str:
        archive = self.work / "base.tar"
        await ran("skopeo", "copy", f"oci:{at}:image", f"docker-archive:{archive}:{name}")
        await ran("docker", "load", "-i", str(archive))
        archive.unlink()
        self.images.append(name)
        return name

    async def build(self, name: str, dockerfile: Path, *, cli: str = "docker", buildkit: bool = False) -> str:
        tag = f"atropos-compared-{name}"
        where = ["--network", "none", "-t", tag, "-f", str(dockerfile), str(dockerfile.parent)]
        await ran(cli, "build", "-q", *where, DOCKER_BUILDKIT="1" if buildkit else "0")
        self.images.append(tag)
        return tag

    async def with_buildkit(self, nothing: Path) -> str:
        """A command line that builds with BuildKit; skips where there is none."""
        (nothing / "Dockerfile").write_text("FROM scratch\nENV A=1")
        for cli in ("docker", "/usr/bin/docker"):  # Debian's has it within, others need a plug-in
            with contextlib.suppress(RuntimeError, FileNotFoundError):
                await self.build("nothing", nothing / "Dockerfile", cli=cli, buildkit=True)
                return cli
        pytest.skip("no docker command line that builds with BuildKit")

    async def tree(self, tag: str) -> dict[str, str]:
        container = await ran("docker", "create", tag, "none")
        archive = self.work / f"{container}.tar"
        try:
            await ran("docker", "export", "-o", str(archive), container)
        finally:
            await ran("docker", "rm", "-v", container)
        try:
            with archive.open("rb") as file:
                return await asyncio.to_thread(listed, file)
        finally:
            archive.unlink()

    async def settings(self, tag: str) -> dict:
        return json.loads(await ran("docker", "image", "inspect", tag))[0]["Config"]

    async def aclose(self) -> None:
        if self.images:
            await ran("docker", "image", "rm", "-f", *self.images)


def listed(archive: BinaryIO) -> dict[str, str]:
    """What an archive holds, by path: kind, owner, mode and content."""
    found: dict[str, str] = {}
    with tarfile.open(fileobj=archive) as tar:
        for info in tar:
            path = "/" + info.name.strip("/")
            if path.split("/")[1] in {"proc", "sys", "dev", "bin", ".dockerenv", ""}:
                continue
            if path in {"/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/etc/mtab"}:
                continue
            owner, mode = f"{info.uid}:{info.gid}", f"{info.mode & 0o7777:o}"
            if info.issym():
                found[path] = f"link|{owner}||{info.linkname}"
            elif info.isdir():
                found[path] = f"dir|{owner}|{mode}|"
            elif info.isreg() or info.islnk():
                content = tar.extractfile(info)
                assert content is not None
                found[path] = f"file|{owner}|{mode}|{hashlib.sha256(content.read()).hexdigest()}"
            else:
                found[path] = f"other|{owner}|{mode}|"
    return found


def changes(tree: dict[str, str], base: dict[str, str]) -> dict[str, str]:
    """What a build added, changed and removed."""
    gone = {path: "gone" for path in base if path not in tree}
    return gone | {path: text for path, text in tree.items() if base.get(path) != text}


def as_docker(check: HealthConfig | None) -> dict | None:
    """A health check as Docker's configurations have it."""
    if check is None:
        return None
    times = {
        "Interval": check.interval_s,
        "Timeout": check.timeout_s,
        "StartPeriod": check.start_period_s,
        "StartInterval": check.start_interval_s,
    }
    numbers = {name: round(time * 1e9) for name, time in times.items()} | {"Retries": check.retries}
    return {"Test": list(check.test), **{name: number for name, number in numbers.items() if number}}


class Ours:
    """What slots make of a Dockerfile."""

    def __init__(self, pool) -> None:
        self.pool, self.images = pool, TaskImages(pool, ())

    async def tree(self, image: str) -> dict[str, str]:
        async with self.pool.lease("tree", image=image) as slot:
            # an image without programs is listed by a busybox that is put in
            await slot.write_file("/bin/busybox", Path(BUSYBOX).read_bytes(), 0o755)
            done = await slot.exec(["/bin/busybox", "sh", "-c", f"PATH=/bin IFS=/{TAR}"], user="0", workdir="/")
            assert done.exit_code == 0, done.output[-500:]
            archive = await slot.read_file("/dev/shm/tree")
        return await asyncio.to_thread(listed, io.BytesIO(archive))

    async def made(self, name: str, dockerfile: Path):
        prepared = await self.images.prepare(load_task(dockerfile))
        return await self.tree(prepared.image), prepared.task.recipe


async def differences(tmp_path: Path, dockerfiles: dict[str, str], *, buildkit: bool = False) -> list[str]:
    """What our builds of Dockerfiles make otherwise than the engine's."""
    base_image(tmp_path / "base")
    engine = Docker(tmp_path)
    turn = asyncio.Semaphore(AT_ONCE)
    wrong: list[str] = []
    here, nothing = f"oci:{tmp_path}/base:image", f"dir:{tmp_path}/nothing"
    (tmp_path / "nothing").mkdir()
    (tmp_path / "empty").mkdir()
    try:
        cli = await engine.with_buildkit(tmp_path / "empty") if buildkit else "docker"
        source = await engine.load(tmp_path / "base", "atropos-compared-base:1")
        async with pool_for(tmp_path) as pool:
            ours = Ours(pool)
            base, before, empty = await engine.tree(source), await ours.tree(here), await ours.tree(nothing)

            async def compared(name: str, text: str) -> None:
                sides = []
                for where, image in (("docker", source), ("here", here)):
                    at = tmp_path / where / name
                    await asyncio.to_thread(make_context, at)
                    if name in IGNORED_BY:
                        (at / ".dockerignore").write_text(IGNORED_BY[name])
                    (at / "Dockerfile").write_text(text.replace("@BASE@", image).replace("@BUSYBOX@", image))
                    sides.append(at / "Dockerfile")
                async with turn:
                    try:
                        theirs_built = engine.build(name, sides[0], cli=cli, buildkit=buildkit)
                        tag, (found, recipe) = await asyncio.gather(theirs_built, ours.made(name, sides[1]))
                        wanted, settings = await engine.tree(tag), await engine.settings(tag)
                    except Exception as error:
                        wrong.append(f"{name}: {type(error).__name__}: {error}")
                        return
                scratch = text.rpartition("FROM")[2].split()[0] == "scratch"
                theirs = changes(wanted, {} if scratch else base)
                mine = changes(found, empty if scratch else before)
                paths = [path for path in sorted(theirs.keys() | mine.keys()) if theirs.get(path) != mine.get(path)]
                paths = [path for path in paths if f"{name}: {path}" not in KNOWN]
                wrong.extend(f"{name}: {path}: docker {theirs.get(path)}, here {mine.get(path)}" for path in paths)
                env = dict(one.split("=", 1) for one in settings["Env"] or ())
                if scratch:
                    env.pop("PATH", None)
                for what, theirs, mine in (
                    ("env", env, dict(recipe.settings.env)),
                    ("workdir", posixpath.normpath(settings["WorkingDir"] or "/"), recipe.settings.workdir),
                    ("user", None if settings["User"] in {"", "root"} else settings["User"], recipe.settings.user),
                    ("entrypoint", tuple(settings["Entrypoint"] or ()), recipe.settings.entrypoint),
                    ("cmd", tuple(settings["Cmd"] or ()), recipe.settings.cmd),
                    ("health", settings.get("Healthcheck"), as_docker(recipe.settings.healthcheck)),
                ):
                    if theirs != mine:
                        wrong.append(f"{name}: {what}: docker {theirs}, here {mine}")

            await asyncio.gather(*(compared(name, text) for name, text in dockerfiles.items()))
    finally:
        await engine.aclose()
    return wrong


async def test_trees_are_those_of_docker_build(tmp_path):
    wrong = await differences(tmp_path, DOCKERFILES)
    assert not wrong, "\n".join(wrong)


async def test_mounts_are_those_of_buildkit(tmp_path):
    wrong = await differences(tmp_path, WITH_BUILDKIT, buildkit=True)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", REFUSED)
async def test_refusals_are_those_of_docker_build(name, tmp_path):
    text, said = REFUSED[name]
    make_context(tmp_path / "context")
    (tmp_path / "context/Dockerfile").write_text(text.replace("@BASE@", "busybox"))
    with pytest.raises(ConfigError) as refusal:
        load_task(tmp_path / "context/Dockerfile")
    assert said in str(refusal.value)


async def test_a_lease_on_an_engines_image(tmp_path):
    base_image(tmp_path / "base")
    engine = Docker(tmp_path)
    name = await engine.load(tmp_path / "base", "atropos-of-the-engine:1")
    try:
        async with pool_for(tmp_path) as pool:
            await pool.prepare(f"docker-daemon:{name}")
            shutil.rmtree(next((tmp_path / "store/layers").iterdir()))  # as if removed for others: it is sent again
            async with pool.lease("one", image=f"docker-daemon:{name}") as slot:
                assert (await slot.exec("id -u app; pwd")).output.startswith("1000\n")
            with pytest.raises(ConfigError, match=r"image: docker-daemon:absent:1: .*No such image"):
                await pool.acquire("two", image="docker-daemon:absent:1")
    finally:
        await engine.aclose()
