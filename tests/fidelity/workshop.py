"""A Debian with the compilers, servers, debuggers and browsers that developers use: an image, made once from packages.

Kept in ~/.cache/atropos as an archive that slots and `docker load` take. It has Debian's packages, .NET's runtime from a package of PyPI, and
this machine's authorities, so that package registries can be reached from it as from here.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from atropos.images.manifests import MACHINE
from tests.debian import KEPT, base

RELEASE = "trixie"
PACKAGES = """
autoconf automake bazel-bootstrap bind9-host build-essential bundler ca-certificates ca-certificates-java cargo chromium cmake composer
cpanminus cron curl default-jdk-headless expect gdb gdbserver git golang-go gradle hwloc-nox iproute2 iputils-ping libopenmpi-dev libtool
linux-perf lsof ltrace maven memcached meson mono-mcs mono-runtime nginx-light ninja-build nodejs npm openmpi-bin
openssh-client openssh-server php-cli pipx postgresql procps psmisc python3-dev python3-pip python3-poetry python3-venv r-base-core
redis-server rsync ruby rustc scons screen sqlite3 strace subversion sudo supervisor tmux unzip valgrind vim-tiny xz-utils yarnpkg zip
""".split()  # noqa: SIM905
MAKE = """
mount -t proc proc "$1/proc"
mount --bind "$2" "$1/var/cache/apt/archives"
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8
printf '#!/bin/sh\\nexit 101\\n' >"$1/usr/sbin/policy-rc.d"; chmod +x "$1/usr/sbin/policy-rc.d"
mkdir -p "$1/etc/postgresql-common"; echo create_main_cluster=false >"$1/etc/postgresql-common/createcluster.conf"
root=$1
shift 2
chroot "$root" apt-get -qq -o Acquire::Check-Valid-Until=false update
chroot "$root" apt-get -qq -y -o Dpkg::Options::=--force-unsafe-io install --no-install-recommends "$@"
chroot "$root" update-ca-certificates
chroot "$root" sh -euc '
  pip download -q --no-deps -d /tmp dotnetcore2==3.1.23
  unzip -q /tmp/dotnetcore2-*.whl "dotnetcore2/bin/*" -d /tmp
  mv /tmp/dotnetcore2/bin /opt/dotnet; chmod +x /opt/dotnet/dotnet; rm -r /tmp/*'
umount "$root/var/cache/apt/archives"
rm -rf "$root/usr/sbin/policy-rc.d" "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/archives/*.deb
: >"$root/etc/resolv.conf"; : >"$root/etc/hosts"; : >"$root/etc/hostname"
"""
CONFIG = {
    "Cmd": ["bash"],
    "Env": [
        "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt",
    ],
}
NAME = "atropos-workshop:kept"
CONTENT = hashlib.sha256(json.dumps([PACKAGES, MAKE, CONFIG]).encode()).hexdigest()[:12]


def archive() -> Path:
    """The image's archive; made where there is none of this content, which takes minutes and 5 GB."""
    target = KEPT.parent / f"workshop-{CONTENT}.tar"
    if not target.exists():
        for old in target.parent.glob("workshop-*.tar"):
            old.unlink()
        with tempfile.TemporaryDirectory(prefix="workshop-", dir=target.parent) as name:
            root, part = Path(name, "root"), Path(name, "archive")
            _make(root)
            _pack(root, part)
            part.rename(target)
    return target


def _make(root: Path) -> None:
    with base(RELEASE) as kept:
        subprocess.run(["cp", "-a", kept / "root", root], check=True)
        for name in ("etc/resolv.conf", "etc/hosts"):
            shutil.copy(f"/{name}", root / name)
        authorities = Path("/usr/local/share/ca-certificates")
        shutil.copytree(authorities, root / authorities.relative_to("/"), dirs_exist_ok=True)
        # in namespaces of their own, what it mounts and starts ends with it
        alone = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private"]
        command = [*alone, "sh", "-euc", MAKE, "sh", root, kept / "archives", *PACKAGES]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def _pack(root: Path, file: Path) -> None:
    """Write a root file system as an image of one layer (Docker image specification 1.2, combined archive)."""
    with tempfile.TemporaryFile(dir=file.parent) as layer, tarfile.open(file, "w") as tar:
        subprocess.run(["tar", "-C", root, "--xattrs", "--one-file-system", "-c", "."], stdout=layer, check=True)
        size = layer.tell()
        layer.seek(0)
        diffs = [f"sha256:{hashlib.file_digest(layer, 'sha256').hexdigest()}"]
        layer.seek(0)
        image = {
            "architecture": MACHINE,
            "os": "linux",
            "config": CONFIG,
            "rootfs": {"type": "layers", "diff_ids": diffs},
        }
        listed = [{"Config": "config.json", "RepoTags": [NAME], "Layers": ["layer.tar"]}]
        for name, data in (("config.json", image), ("manifest.json", listed)):
            text = json.dumps(data).encode()
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text))
        info = tarfile.TarInfo("layer.tar")
        info.size = size
        tar.addfile(info, layer)
