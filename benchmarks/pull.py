"""Images from a registry on loopback to slots on them, beside skopeo with umoci and a Docker engine, taken in turn."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from pathlib import Path
from typing import Any

from atropos.config import ImageStoreSettings
from atropos.slots import SlotPool, SlotPoolConfig

from .context import Context
from .stats import Row, row

LAYERS, LAYER_MIB = 4, 256
"""Of the one image."""
MANY, SHARED_MIB, OWN_MIB = 20, 80, 20
"""Images that share a layer, and have one each."""
AT_ONCE = 3
"""Images that a subject pulls at once, as many as a sandbox server does; an engine decides for itself."""
PROGRAMS = ("skopeo", "umoci", "docker-registry")
Subject = Callable[[list[str], Path], Awaitable[tuple[float, int]]]
"""Has images ready for use, below an empty folder where it can; the seconds that it took, and MiB of disk."""


async def pull(ctx: Context) -> AsyncIterator[Row]:
    """One image, then twenty that share most of their bytes; every subject starts with nothing in each round."""
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        ctx.problems.append(f"pull: {', '.join(missing)} missing (apt-get install {' '.join(PROGRAMS)})")
        return
    with tempfile.TemporaryDirectory(prefix="atropos-bench-pull-") as folder, registry(Path(folder)) as host:
        images = Images(Path(folder), host)

        def mib(full: int) -> int:
            return max(1, int(full * ctx.scale))

        ctx.say("making images")
        sets = {f"{LAYERS * mib(LAYER_MIB)} MiB": [images.push([images.layer(mib(LAYER_MIB)) for _ in range(LAYERS)])]}
        shared = images.layer(mib(SHARED_MIB))
        name = f"{MANY} images of {mib(SHARED_MIB) + mib(OWN_MIB)} MiB, {mib(SHARED_MIB)} shared"
        sets[name] = [images.push([shared, images.layer(mib(OWN_MIB))]) for _ in range(MANY)]
        subjects: dict[str, Subject] = {"atropos": _ours}
        if not ctx.skip_peers:
            subjects["skopeo + umoci"] = _umoci
            if _engine():
                subjects["docker pull"] = _docker
        for case, sources in sets.items():
            out = Path(folder) / "out"
            async for made in _in_turn(ctx, case, sources, subjects, out):
                yield made
            shutil.rmtree(out)


async def _in_turn(
    ctx: Context, case: str, sources: list[str], subjects: dict[str, Subject], out: Path
) -> AsyncIterator[Row]:
    """Files of all rounds stay until the last: ext4 without a journal looks at each inode that was removed within the
    last half minute before it gives out another one, which may take longer than all else."""
    times: dict[str, list[float]] = {subject: [] for subject in subjects}
    sizes: dict[str, int] = {}
    for number in range(ctx.n(3, least=2)):
        for subject, fetch in subjects.items():
            ctx.say(f"pull, {case}, round {number + 1}: {subject}")
            target = out / f"{subject}-{number}"
            target.mkdir(parents=True)
            seconds, sizes[subject] = await fetch(sources, target)
            times[subject].append(seconds)
    for subject, taken in times.items():
        note = f"{sizes[subject]} MiB on disk"
        yield row(f"pull, {case}", subject, taken, "s", base=subject == "atropos", note=note)


# ------------------------------------------------------------------------------------------------------------ subjects


async def _ours(sources: list[str], out: Path) -> tuple[float, int]:
    """Until a slot on each was leased once, by a pool that is up."""
    host = sources[0].partition("/")[0]
    store = ImageStoreSettings(folder=str(out), insecure_registries=(host,))
    config = SlotPoolConfig(backend="local", slots_per_container=4, max_containers=1, image_store=store)
    async with SlotPool(config) as pool:
        async with pool.lease("bench"):  # it is up
            pass
        started = time.perf_counter()

        async def lease(source: str) -> None:
            async with pool.lease("bench", image=source, timeout_s=600):
                pass

        await asyncio.gather(*map(lease, sources))
        return time.perf_counter() - started, _mib(out)


async def _umoci(sources: list[str], out: Path) -> tuple[float, int]:
    """Into one layout, which keeps each blob once, and from there into a bundle for each image."""
    turn = asyncio.Semaphore(AT_ONCE)
    started = time.perf_counter()

    async def unpacked(number: int, source: str) -> None:
        # a layout each: two writers of one index would lose each other's images. The blobs are shared, as they can be.
        layout = f"{out}/layout-{number}"
        copy = ["skopeo", "--insecure-policy", "copy", "-q", "--src-tls-verify=false"]
        copy += [f"--dest-shared-blob-dir={out}/blobs", f"docker://{source}", f"oci:{layout}:image"]
        async with turn:
            await asyncio.to_thread(_run, *copy)
            blobs = Path(layout, "blobs")
            blobs.rmdir()
            blobs.symlink_to(out / "blobs")
            await asyncio.to_thread(_run, "umoci", "unpack", "--image", f"{layout}:image", f"{out}/bundle-{number}")

    await asyncio.gather(*(unpacked(*each) for each in enumerate(sources)))
    return time.perf_counter() - started, _mib(out)


async def _docker(sources: list[str], _: Path) -> tuple[float, int]:
    root = Path(_run("docker", "info", "--format", "{{.DockerRootDir}}").strip())
    before = _mib(root)
    started = time.perf_counter()
    await asyncio.gather(*(asyncio.to_thread(_run, "docker", "pull", "-q", source) for source in sources))
    seconds = time.perf_counter() - started
    mib = _mib(root) - before
    await asyncio.to_thread(_run, "docker", "image", "rm", "-f", *sources)
    return seconds, mib


def _mib(folder: Path) -> int:
    return int(_run("du", "-s", "--block-size=1M", str(folder)).split()[0])


def _engine() -> bool:
    with contextlib.suppress(OSError, RuntimeError):
        return bool(_run("docker", "version", "--format", "{{.Server.Version}}"))
    return False


def _run(*command: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:3])}: {done.stderr.strip()[-300:]}")
    return done.stdout


# -------------------------------------------------------------------------------------------------------------- images


class Images:
    """Images made of this machine's own files, which are as large and as compressible as images' are."""

    def __init__(self, work: Path, host: str) -> None:
        self._work = work
        self._host = host
        self._files = _files()
        self._number = 0

    def layer(self, mib: int) -> dict[str, Any]:
        """The next so many MiB of files, as a blob: its descriptor, and its diff id."""
        self._number += 1
        names, left = list[str](), mib << 20
        while left > 0:
            name, size = next(self._files)
            names.append(name)
            left -= size
        listed, path = self._work / "listed", self._work / f"layer-{self._number}"
        listed.write_text("\n".join(names))
        diff_id, digest, packer = hashlib.sha256(), hashlib.sha256(), zlib.compressobj(6, wbits=31)
        tar = ["tar", "--create", "--absolute-names", f"--transform=s,^,{self._number}/,", f"--files-from={listed}"]
        with subprocess.Popen(tar, stdout=subprocess.PIPE) as process, path.open("wb") as file:
            assert process.stdout is not None
            while data := process.stdout.read(1 << 20):
                diff_id.update(data)
                packed = packer.compress(data)
                digest.update(packed)
                file.write(packed)
            packed = packer.flush()
            digest.update(packed)
            file.write(packed)
        blob = {"digest": f"sha256:{digest.hexdigest()}", "size": path.stat().st_size}
        media = "application/vnd.oci.image.layer.v1.tar+gzip"
        return {"path": path, "diff_id": f"sha256:{diff_id.hexdigest()}", "blob": {"mediaType": media, **blob}}

    def push(self, layers: list[dict[str, Any]]) -> str:
        """The name of an image of these layers."""
        self._number += 1
        layout = self._work / f"image-{self._number}"
        blobs = layout / "blobs/sha256"
        blobs.mkdir(parents=True)
        for layer in layers:
            os.link(layer["path"], blobs / layer["blob"]["digest"].removeprefix("sha256:"))

        def put(data: dict[str, Any], kind: str) -> dict[str, Any]:
            text = json.dumps(data).encode()
            digest = hashlib.sha256(text).hexdigest()
            (blobs / digest).write_bytes(text)
            media = f"application/vnd.oci.image.{kind}.v1+json"
            return {"mediaType": media, "digest": f"sha256:{digest}", "size": len(text)}

        rootfs = {"type": "layers", "diff_ids": [layer["diff_id"] for layer in layers]}
        config = put({"architecture": _architecture(), "os": "linux", "config": {}, "rootfs": rootfs}, "config")
        manifest = {"schemaVersion": 2, "config": config, "layers": [layer["blob"] for layer in layers]}
        entry = put(manifest, "manifest") | {"annotations": {"org.opencontainers.image.ref.name": "image"}}
        (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
        (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        source = f"{self._host}/bench:{self._number}"
        options = ("--insecure-policy", "copy", "-q", "--dest-tls-verify=false")
        _run("skopeo", *options, f"oci:{layout}:image", f"docker://{source}")
        shutil.rmtree(layout)
        return source


def _files() -> Generator[tuple[str, int]]:
    """Files of this machine, again and again."""
    while True:
        for top in ("/usr/lib", "/usr/share", "/usr/local"):
            for folder, _, names in os.walk(top):
                for name in sorted(names):
                    path = os.path.join(folder, name)
                    if os.path.isfile(path) and not os.path.islink(path) and "\n" not in path:
                        yield path, os.path.getsize(path)


def _architecture() -> str:
    return {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]


@contextlib.contextmanager
def registry(work: Path) -> Generator[str]:
    """A registry on loopback; its host and port."""
    config, log = work / "registry.yml", work / "registry.log"
    config.write_text(
        f"version: 0.1\nlog: {{accesslog: {{disabled: true}}}}\nhttp: {{addr: '127.0.0.1:0'}}\n"
        f"storage: {{filesystem: {{rootdirectory: {work}/registry}}}}\n"
    )
    with log.open("wb") as file:
        process = subprocess.Popen(["docker-registry", "serve", str(config)], stdout=file, stderr=file)
    try:
        end = time.monotonic() + 30
        while not (found := re.search(r"listening on (127\.0\.0\.1:\d+)", log.read_text())):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"docker-registry did not start: {log.read_text()[-300:]}")
            time.sleep(0.05)
        yield found[1]
    finally:
        process.kill()
        process.wait()
