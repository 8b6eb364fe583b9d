"""The Docker backend on engines of three Debian releases: `engine_matrix.py [--only NAME,...] [PYTEST ARGUMENTS]`.

dockerd and Podman are Debian's packages, in a root of each release that is made once (debootstrap) and kept in
~/.cache/atropos. An engine runs in its root and in mount, PID and network namespaces of its own, as root or as an
ordinary user, on a store that is empty. `make image` builds the sandbox image in it, and pytest runs beside it on the
working tree. A table comes at the end; the exit status is 0 where every engine started and no test failed.

Needs root, and apt for debootstrap where that is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from debian import ALONE, CACHE, MIRROR, ROOT, made_once, quietly

PACKAGES = (
    "docker.io podman crun iptables iproute2 nftables uidmap slirp4netns fuse-overlayfs rootlesskit netavark "
    "aardvark-dns containernetworking-plugins catatonit procps ca-certificates"
)
NEWER_PACKAGES = f"{PACKAGES} docker-cli passt"
"""Since trixie the client is a package of its own, and passt connects a rootless Podman's network."""
TESTS = ("tests/conformance", "tests/e2e/test_docker.py", "tests/e2e/test_gpus.py")
USER, UID = "engine", 1000
CDI = "cdi"
"""A folder of a run, in which tests write specifications of devices, and dockerd reads them."""
START_S = 60.0
STARTED = time.monotonic()


@dataclass(frozen=True)
class Engine:
    """One engine, and how it is run."""

    program: str
    suite: str
    rootless: bool = False
    containerd_store: bool = False

    @property
    def name(self) -> str:
        """As `--only` names it."""
        return f"{self.program}-{self.suite}{'-containerd' * self.containerd_store}{'-rootless' * self.rootless}"


ENGINES = [
    Engine("docker", "bookworm"),
    Engine("docker", "trixie"),
    Engine("docker", "sid"),
    Engine("docker", "sid", containerd_store=True),
    Engine("podman", "bookworm"),
    Engine("podman", "trixie"),
    Engine("podman", "sid"),
    *(
        Engine(program, suite, rootless=True)
        for program in ("docker", "podman") for suite in ("bookworm", "trixie", "sid")
    ),
    Engine("docker", "sid", rootless=True, containerd_store=True),
]  # fmt: skip


@dataclass
class Result:
    """What came of one engine's run."""

    version: str = ""
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0
    trouble: str = ""


def say(text: str) -> None:
    print(f"engines {time.monotonic() - STARTED:6.1f} s: {text}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------- what is made once


def debian(suite: str) -> Path:
    """A root of a Debian release with its engines; made where there is none of this content yet."""
    packages = PACKAGES if suite == "bookworm" else NEWER_PACKAGES
    content = hashlib.sha256(f"{packages}{MAKE_ROOT}".encode()).hexdigest()[:12]
    target = CACHE / f"engines-{suite}-{content}"

    def make(root: Path) -> None:
        if not shutil.which("debootstrap"):
            quietly("bash", ROOT / "scripts/system.sh", env=os.environ | {"ATROPOS_SYSTEM_PACKAGES": "debootstrap"})
        say(f"making a root of Debian {suite} from {MIRROR} (minutes)")
        quietly(*ALONE, "sh", "-ec", MAKE_ROOT, "sh", suite, root, MIRROR, packages)

    made_once(target, make)
    return target


MAKE_ROOT = f"""
debootstrap --variant=minbase "$1" "$2" "$3"
mount -t proc proc "$2/proc"
printf '#!/bin/sh\\nexit 101\\n' >"$2/usr/sbin/policy-rc.d"; chmod +x "$2/usr/sbin/policy-rc.d"
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8
chroot "$2" apt-get -o Acquire::Check-Valid-Until=false update  # a mirror may be of a day, as snapshot.debian.org's are
chroot "$2" apt-get install --yes --no-install-recommends $4
chroot "$2" useradd --create-home --uid {UID} {USER}
echo {USER}:300000:165536 | tee "$2/etc/subuid" >"$2/etc/subgid"
rm -rf "$2"/var/cache/apt/* "$2"/var/lib/apt/lists/* "$2"/usr/share/doc/* "$2"/usr/share/man/* "$2"/usr/share/locale/*
"""


# ------------------------------------------------------------------------------------------------------------ a run


def outside(engine: Engine, tests: list[str]) -> Result:
    """Run one engine and its tests in namespaces of their own; they end with whatever ends this."""
    root = debian(engine.suite)
    with tempfile.TemporaryDirectory(prefix="atropos-engine.", dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        command = [sys.executable, __file__, "--inside", engine.name, "--root", root, "--folder", folder, *tests]
        alone = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        begun = time.monotonic()
        subprocess.run([*alone, *map(str, command)], cwd=ROOT, check=False)
        told = Path(folder, "result.json")
        result = (
            Result(**json.loads(told.read_text())) if told.exists() else Result(trouble="it ended without a result")
        )
        result.seconds = time.monotonic() - begun
        return result


def inside(engine: Engine, root: Path, folder: Path, tests: list[str]) -> int:
    """Start the engine, make its image, run the tests, and write the result."""
    result = Result()
    try:
        with daemon(engine, root, folder) as env:
            result.version = subprocess.run(
                ["docker", "version", "--format", "{{.Server.Version}}"],
                env=env, capture_output=True, text=True, check=True
            ).stdout.strip()  # fmt: skip
            say(f"{engine.name}: version {result.version}; making its image")
            subprocess.run(["bash", "docker/sandbox/build.sh"], cwd=ROOT, env=env, check=True)
            report = folder / "report.xml"
            subprocess.run(
                [sys.executable, "-m", "pytest", "-m", "docker", "-p", "no:cacheprovider",
                 f"--junitxml={report}", *tests],
                cwd=ROOT, env=env, check=False,
            )  # fmt: skip
            (suite,) = ET.parse(report).getroot()
            count = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
            result.skipped, result.failed = count["skipped"], count["failures"] + count["errors"]
            result.passed = count["tests"] - result.skipped - result.failed
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        result.trouble = str(error)[-1500:]
    (folder / "result.json").write_text(json.dumps(asdict(result)))
    return 0


@contextlib.contextmanager
def daemon(engine: Engine, kept: Path, folder: Path) -> Iterator[dict[str, str]]:
    """The engine at work; yields the environment of its clients."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    root = mounted(kept, folder)
    work = folder / "work"
    work.mkdir()
    configure(engine, root, work)
    if engine.rootless:
        os.chown(work, UID, UID)
    socket = work / "engine.sock"
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-ec", AS_ROOT, "sh", root, *command_of(engine, work)],
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    env = clients(engine, root, folder, socket)
    try:
        deadline = time.monotonic() + START_S
        while subprocess.run(["docker", "version"], env=env, capture_output=True, check=False).returncode:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"it did not start:\n{log.read_text(errors='replace')[-1500:]}")
            time.sleep(0.2)
        yield env
    finally:
        left = subprocess.run(
            ["docker", "ps", "-aq"], env=env, capture_output=True, text=True, check=False
        ).stdout.split()
        if left:
            subprocess.run(["docker", "rm", "-f", *left], env=env, capture_output=True, check=False)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
        shutil.copy(log, CACHE / f"engines-{engine.name}.log")


AS_ROOT = 'cd "$1"; shift; mkdir -p old; pivot_root . old; cd /; umount -l old; exec "$@"'
"""Runs a command in a root. In one that is only chroot'ed the kernel makes no user namespaces, so containers had
none."""


def mounted(kept: Path, folder: Path) -> Path:
    """A writable view of the kept root, with the kernel's file systems, the working tree and the run's folder."""
    root = folder / "root"
    for name in ("root", "upper", "scratch"):
        (folder / name).mkdir()
    options = f"lowerdir={kept},upperdir={folder}/upper,workdir={folder}/scratch"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, root], check=True)
    for name in ("proc", "sys", "dev"):
        subprocess.run(["mount", "--rbind", f"/{name}", root / name], check=True)
    os.mknod(folder / "tun", 0o666 | stat.S_IFCHR, os.makedev(10, 200))  # a rootless engine's network needs it
    (folder / "tun").chmod(0o666)
    subprocess.run(["mount", "--bind", folder / "tun", root / "dev/net/tun"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "run", root / "run"], check=True)
    for shared in (ROOT, folder):
        at = root / str(shared).lstrip("/")
        at.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "--bind", shared, at], check=True)
    (root / "run/user" / str(UID)).mkdir(parents=True)
    os.chown(root / "run/user" / str(UID), UID, UID)
    return root


def configure(engine: Engine, root: Path, work: Path) -> None:
    """What an engine needs without systemd and where root can't raise its limits, and plain HTTP on loopback."""
    features = {"containerd-snapshotter": True} if engine.containerd_store else {}
    settings: dict[str, object] = {"features": features}
    specifications = work.parent / CDI
    specifications.mkdir()
    if engine.suite != "bookworm":  # whose dockerd knows neither, and ends at the second
        features["cdi"] = True
        settings["cdi-spec-dirs"] = [str(specifications)]
    (work / "daemon.json").write_text(json.dumps(settings))
    etc = root / "etc/containers"
    files, processes = (resource.getrlimit(limit)[1] for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    (etc / "containers.conf").write_text(
        f'[containers]\ndefault_ulimits = ["nofile={files}:{files}", "nproc={processes}:{processes}"]\n'
        '[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\nruntime = "runc"\n'  # crun: no hybrid cgroups
    )
    (etc / "registries.conf.d/loopback.conf").write_text('[[registry]]\nlocation = "127.0.0.1"\ninsecure = true\n')


def command_of(engine: Engine, work: Path) -> list[str]:
    """Starts the engine in its root."""
    home = f"/home/{USER}" if engine.rootless else "/root"
    settings = [f"HOME={home}", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]
    if engine.rootless:
        settings += [f"XDG_RUNTIME_DIR=/run/user/{UID}", f"USER={USER}"]
    if engine.containerd_store:
        settings.append("DOCKER_MIN_API_VERSION=1.44")  # as Docker 29 has it
    user = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--init-groups"] if engine.rootless else []
    start = [*user, "env", "--ignore-environment", *settings]
    if engine.program == "podman":
        # a rootless 4.3 takes vfs by itself, which copies the whole image for each container
        stores = ["--root", f"{work}/storage", "--runroot", f"{work}/run", "--storage-driver=overlay"]
        return [*start, "podman", *stores, "system", "service", "--time", "0", f"unix://{work}/engine.sock"]
    program = "/usr/share/docker.io/contrib/dockerd-rootless.sh" if engine.rootless else "dockerd"
    return [
        *start, program, "-H", f"unix://{work}/engine.sock",
        "--data-root", f"{work}/data", "--exec-root", f"{work}/exec",
        "--pidfile", f"{work}/pid", "--config-file", f"{work}/daemon.json",
    ]  # fmt: skip


def clients(engine: Engine, root: Path, folder: Path, socket: Path) -> dict[str, str]:
    """The environment of clients: this Python, and the release's own `docker`, by its own loader."""
    programs = folder / "bin"
    programs.mkdir()
    (found,) = (root / "usr/lib").glob("*-linux-gnu/ld-linux-*.so.?")
    loader = f"{found} --library-path {found.parent} {root}/usr/bin/docker"
    (programs / "docker").write_text(f'#!/bin/sh\nexec {loader} "$@"\n')
    (programs / "docker").chmod(0o755)
    return os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "DOCKER_HOST": f"unix://{socket}",
        "ATROPOS_BACKENDS": "docker",
        "ATROPOS_ENGINE": engine.name,
        "ATROPOS_ENGINE_CDI": str(folder / CDI),
    }


def table(results: dict[str, Result]) -> str:
    """The results as Markdown."""
    lines = ["| engine | version | passed | failed | skipped | s |", "| --- | --- | --- | --- | --- | --- |"]
    for name, one in results.items():
        lines.append(
            f"| {name} | {one.version} | {one.passed} | {one.failed} | {one.skipped} | {one.seconds:.0f} |"
            + (f" {one.trouble.splitlines()[-1]}" if one.trouble else "")
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="the Docker backend's tests on engines of three Debian releases")
    parser.add_argument("--only", default=os.environ.get("ENGINES", ""), help="names of engines, with commas")
    parser.add_argument("--list", action="store_true", help="print the engines' names")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options, tests = parser.parse_known_args()
    by_name = {engine.name: engine for engine in ENGINES}
    if options.list:
        print("\n".join(by_name))
        return 0
    if not any(argument.startswith("tests") for argument in tests):
        tests = [*TESTS, *tests]
    if options.inside:
        return inside(by_name[options.inside], options.root, options.folder, tests)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda got, _: sys.exit(128 + got))
    if os.geteuid() != 0:
        sys.exit("engines: needs root (debootstrap, and an engine's own mounts and networks)")
    names = [name for name in options.only.split(",") if name] or list(by_name)
    if unknown := set(names) - by_name.keys():
        sys.exit(f"engines: no engine is called {', '.join(sorted(unknown))}; there are {', '.join(by_name)}")
    # the slow half of the image: an engine's own network reaches no packages
    ahead = os.environ | {"ATROPOS_BACKENDS": "docker"}
    subprocess.run([sys.executable, ROOT / "scripts/engines.py", "--ahead"], env=ahead, check=True)
    results: dict[str, Result] = {}
    for name in names:
        results[name] = outside(by_name[name], tests)
        if results[name].trouble:
            say(f"{name}: {results[name].trouble}")
    print(table(results))
    return int(any(one.failed or one.trouble for one in results.values()))


if __name__ == "__main__":
    sys.exit(main())
