"""A real registry on loopback, filled by skopeo; and a proxy in front of it that spoils answers."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.images.making import entry, folder, layer, layout, link

MISSING = [name for name in ("skopeo", "docker-registry") if shutil.which(name) is None]
USER, PASSWORD = "ann", "secret"


@dataclass
class Registry:
    """`host` is what images' names begin with."""

    host: str
    folder: Path
    auth_file: str | None = None

    def push(self, layout: Path, name: str, *more: str) -> str:
        """Push an OCI layout's image; its digest. `more`: options of skopeo's."""
        login = ["--dest-creds", f"{USER}:{PASSWORD}"] if self.auth_file else []
        digest = self.folder.parent / "digest"
        subprocess.run(
            [
                "skopeo",
                "--insecure-policy",
                "copy",
                "-q",
                *more,
                *login,
                "--dest-tls-verify=false",
                "--digestfile",
                str(digest),
                f"oci:{layout}:image",
                f"docker://{self.host}/{name}",
            ],
            check=True,
            timeout=60,
        )
        return digest.read_text().strip()

    def blob(self, digest: str) -> Path:
        """The file that holds a blob."""
        hexadecimal = digest.removeprefix("sha256:")
        return self.folder / "docker/registry/v2/blobs/sha256" / hexadecimal[:2] / hexadecimal / "data"


@contextlib.contextmanager
def registry(at: Path, *, auth: str | None = None) -> Iterator[Registry]:
    """Run one; with `auth`, the line of an htpasswd file that opens it."""
    folder = at / "registry"
    folder.mkdir(parents=True)
    config = at / "registry.yml"
    text = f"version: 0.1\nlog: {{level: info, accesslog: {{disabled: true}}}}\nstorage: {{filesystem: {{rootdirectory: {folder}}}, delete: {{enabled: true}}}}\n"
    text += "http: {addr: '127.0.0.1:0'}\n"
    if auth is not None:
        (at / "htpasswd").write_text(auth + "\n")
        text += f"auth: {{htpasswd: {{realm: test, path: {at}/htpasswd}}}}\n"
    config.write_text(text)
    with (at / "registry.log").open("wb") as log:
        process = subprocess.Popen(["docker-registry", "serve", str(config)], stdout=log, stderr=log)
    try:
        found = Registry(_where(at / "registry.log", process), folder)
        if auth is not None:
            found.auth_file = str(at / "auth.json")
            subprocess.run(
                [
                    "skopeo",
                    "login",
                    "--authfile",
                    found.auth_file,
                    "--tls-verify=false",
                    "-u",
                    USER,
                    "-p",
                    PASSWORD,
                    found.host,
                ],
                check=True,
                stdout=subprocess.DEVNULL,
                timeout=30,
            )
            (at / "auth.json").chmod(0o644)
        yield found
    finally:
        process.terminate()
        process.wait(10)


def several(tmp_path: Path, images: Registry, name: str) -> list[str]:
    """Push two images of several kinds of layers that share the lowest; their names."""
    busybox = Path("/bin/busybox").read_bytes()
    base = layer(folder("bin"), entry("bin/busybox", busybox, mode=0o755), link("bin/sh", "busybox"), entry("a/x", "x"))
    for number in "12":
        own = (
            layer(entry("a/own", number), entry("large", os.urandom(2_000_000))),
            layer(entry("a/.wh.x"), folder(number)),
        )
        layout(tmp_path / f"layout-{number}", base, *own)
        images.push(tmp_path / f"layout-{number}", f"{name}:{number}")
    return [f"{name}:{number}" for number in "12"]


def _where(log: Path, process: subprocess.Popen) -> str:
    """Where it listens: it says that itself, as the kernel chose the port."""
    deadline = time.monotonic() + 60
    while not (found := re.search(r"listening on (127\.0\.0\.1:\d+)", log.read_text())):
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    return found[1]
