"""Run a command with the engines that it needs: `engines.py BACKENDS COMMAND...`, BACKENDS like `local,docker,nomad`.

What already runs is used (DOCKER_HOST or the default socket, NOMAD_ADDR or localhost:4646). What doesn't is started in
a folder of its own, with the sandbox image in it, and is stopped and removed when the command has ended, whatever ended
it: by the process ids started here, nothing else. The command finds the engines in DOCKER_HOST and NOMAD_ADDR, and in
ATROPOS_BACKENDS the backends that there are. One that can't be had is left out with its reason printed; with
ATROPOS_REQUIRE_BACKENDS=1, or where none is left, the command isn't run. What the command has started and left, daemons
of its own too, ends before the engines do.

`engines.py --ahead` starts nothing that stays: it makes what a fresh machine lacks and what takes minutes, Nomad's
binary and the slow half of the image, both kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "dockerd": "docker.io",
    "docker": "docker.io",
    "iptables": "iptables",
    "ip": "iproute2",
    "debootstrap": "debootstrap",
}
SPLIT_OFF = {"docker": "docker-cli"}
"""Where they are in newer releases (Debian 13), whose package of old doesn't hold them."""
PR_SET_PDEATHSIG = 1
MARK = "ATROPOS_ENGINES"
"""In the environment of the command, and so of all that it starts, with the folder of this run."""
GRACE_S = 20.0
"""Until what the command left is killed. execnet has a worker of pytest clean up for 15 s after its controller has
gone."""
STARTED = time.monotonic()


class Unavailable(Exception):
    """Why an engine can't be had."""


def say(text: str) -> None:
    print(f"engines {time.monotonic() - STARTED:5.1f} s: {text}", file=sys.stderr, flush=True)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return answer.status == 200 and bool(answer.read())
    except (OSError, ValueError):
        return False


def ask(url: str, method: str = "GET") -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=10) as answer:
        return json.loads(answer.read())


def output_of(*argv: str, env: dict[str, str] | None = None) -> str:
    """What a command prints; nothing where it can't be run or fails."""
    with contextlib.suppress(OSError):
        return subprocess.run(argv, env=env, capture_output=True, text=True, check=False).stdout
    return ""


def wait_until(
    what: str, unready: Callable[[], str], process: subprocess.Popen[bytes], log: Path, seconds: float
) -> None:
    """Wait until `unready` has no reason left."""
    deadline = time.monotonic() + seconds
    while (reason := unready()) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    if reason:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        state = "did not start" if process.poll() is None else f"ended with {process.returncode}"
        raise Unavailable(f"{what} {state}: {reason}; its log ends with:\n{tail}")


class Engines:
    """What was started, and how to end it."""

    def __init__(self) -> None:
        self.folder = Path(
            tempfile.mkdtemp(prefix="atropos-engines.", dir=os.environ.get("ATROPOS_ENGINES_DIR", "/var/tmp"))
        )
        self.env = dict(os.environ)
        self.dockerd: subprocess.Popen[bytes] | None = None
        self.nomad: subprocess.Popen[bytes] | None = None
        self.building: subprocess.Popen[bytes] | None = None
        self.had_bridge = Path("/sys/class/net/docker0").exists()

    def spawn(self, argv: list[str], log: Path) -> subprocess.Popen[bytes]:
        """Start a daemon that ends with this process."""
        libc = ctypes.CDLL(None)
        return subprocess.Popen(
            argv,
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),  # noqa: PLW1509 (no threads)
        )

    # ------------------------------------------------------------------------------------------------------- docker

    def docker_fails(self) -> str:
        """Why the Docker client gets no answer; empty if it does."""
        command = ["docker", "version", "--format", "{{.Server.Version}}"]
        try:
            done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        return "" if done.returncode == 0 else done.stderr.strip() or f"docker ended with {done.returncode}"

    def start_docker(self) -> None:
        # Programs in Go. The engines start more than a thousand helpers, which spend a third of their CPU collecting
        # garbage while they load.
        self.env.setdefault("GOGC", "400")
        if reason := self.docker_fails():
            if os.geteuid() != 0:
                raise Unavailable(
                    f"no Docker engine answers ({reason}), and starting one needs root; start dockerd or set "
                    "DOCKER_HOST"
                )
            if self.env.get("DOCKER_HOST"):
                say(f"no Docker engine answers at DOCKER_HOST={self.env['DOCKER_HOST']} ({reason}): another is started")
            self.install()
            self.mount_cgroups()
            socket = self.folder / "docker.sock"
            log = self.folder / "dockerd.log"
            base = self.folder / "docker"
            self.env["DOCKER_HOST"] = f"unix://{socket}"
            say("starting dockerd")
            self.dockerd = self.spawn(
                ["dockerd", "-H", f"unix://{socket}", "--data-root", f"{base}/data", "--exec-root", f"{base}/exec",
                 "--pidfile", f"{base}.pid"],
                log,
            )  # fmt: skip
            wait_until("dockerd", self.docker_fails, self.dockerd, log, 60)
        self.run_script("docker/sandbox/build.sh")

    def install(self) -> None:
        for packages in (PACKAGES, SPLIT_OFF):
            missing = sorted({package for program, package in packages.items() if not shutil.which(program)})
            if not missing:
                continue
            say(f"installing {' '.join(missing)}")
            # RUNLEVEL=1: packages don't start their own services
            env = self.env | {"ATROPOS_SYSTEM_PACKAGES": " ".join(missing), "RUNLEVEL": "1"}
            done = subprocess.run(
                ["bash", f"{ROOT}/scripts/system.sh"], env=env, stderr=subprocess.PIPE, text=True, check=False
            )
            if done.returncode:
                raise Unavailable(done.stderr.strip()[-500:])
        absent = [program for program in PACKAGES if not shutil.which(program)]
        if absent:
            raise Unavailable(
                f"not on PATH, though the packages that should bring it are installed: {', '.join(absent)}"
            )

    @staticmethod
    def mount_cgroups() -> None:
        """Docker needs cgroups; an init that mounts none leaves it to us (as the package cgroupfs-mount would)."""
        top = Path("/sys/fs/cgroup")
        if (top / "cgroup.controllers").exists() or (top / "devices").exists():
            return
        if not os.path.ismount(top):
            subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "cgroup", str(top)], check=True)
        for line in Path("/proc/cgroups").read_text().splitlines()[1:]:
            name, _, _, enabled = line.split()
            if enabled == "1":
                (top / name).mkdir(exist_ok=True)
                subprocess.run(["mount", "-t", "cgroup", "-o", name, "cgroup", str(top / name)], check=False)

    def run_script(self, *argv: str) -> str:
        done = subprocess.run(["bash", *argv], cwd=ROOT, env=self.env, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise Unavailable(f"{argv[0]} failed (see above)")
        for line in done.stdout.splitlines():
            say(line)
        return done.stdout.strip()

    # -------------------------------------------------------------------------------------------------------- nomad

    def build_nomad_meanwhile(self) -> None:
        """Begin to build the binary where there is none: it takes minutes, as the sandbox image does beside it."""
        if not self.env.get("NOMAD_ADDR") and os.geteuid() == 0:
            self.building = self.spawn(["bash", f"{ROOT}/scripts/nomad.sh"], self.folder / "nomad-build.log")

    def end_build(self) -> None:
        if self.building is not None and self.building.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.building.pid, signal.SIGTERM)
            self.building.wait()

    def start_nomad(self) -> None:
        address = self.env.get("NOMAD_ADDR", "http://127.0.0.1:4646")
        if not answers(f"{address}/v1/status/leader"):
            if self.env.get("NOMAD_ADDR"):
                raise Unavailable(f"no Nomad agent answers at NOMAD_ADDR={address}")
            if os.geteuid() != 0:
                raise Unavailable("no Nomad agent answers, and starting one needs root; set NOMAD_ADDR")
            if self.building is not None:
                self.building.wait()  # what it couldn't do is tried, and told, by the next line
            binary = self.run_script("scripts/nomad.sh").splitlines()[-1]
            log = self.folder / "nomad.log"
            say("starting a Nomad development agent")
            (self.folder / "nomad").mkdir()
            settings = ["-config", f"{ROOT}/nomad/dev-agent.hcl", "-data-dir", f"{self.folder}/nomad"]
            self.nomad = self.spawn([binary, "agent", "-dev", *settings], log)

            def unready() -> str:
                try:
                    nodes = ask(f"{address}/v1/nodes?resources=false")
                    healthy = any(n["Status"] == "ready" and n["Drivers"]["docker"]["Healthy"] for n in nodes)
                except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                    return f"{address} doesn't answer as an agent does: {error!r}"
                return "" if healthy else "no node is ready with a healthy Docker driver"

            wait_until("the Nomad agent", unready, self.nomad, log, 90)
        self.env["NOMAD_ADDR"] = address

    # ------------------------------------------------------------------------------------------------------- ending

    def stop(self) -> None:
        self.end_build()
        if self.nomad is not None:
            self.stop_nomad(self.nomad)
        if self.dockerd is not None:
            self.stop_docker(self.dockerd)
        for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
            where = line.split()[1]
            if where.startswith(f"{self.folder}/"):
                output_of("umount", "-l", where)
        shutil.rmtree(self.folder, ignore_errors=True)

    def stop_nomad(self, nomad: subprocess.Popen[bytes]) -> None:
        """End the agent's jobs, so that their containers end, then the agent."""
        address = self.env.get("NOMAD_ADDR", "http://127.0.0.1:4646")
        with contextlib.suppress(OSError, ValueError, TypeError):
            for job in ask(f"{address}/v1/jobs?namespace=*"):
                say(f"job {job['ID']} was left: purging it")
                ask(f"{address}/v1/job/{job['ID']}?purge=true&namespace={job['Namespace']}", "DELETE")
                time.sleep(1)
        self.end(nomad, signal.SIGINT)

    def stop_docker(self, dockerd: subprocess.Popen[bytes]) -> None:
        left = output_of("docker", "ps", "-aq", env=self.env).split()
        if left:
            output_of("docker", "rm", "-f", *left, env=self.env)
        self.end(dockerd, signal.SIGTERM)
        if not self.had_bridge:
            output_of("ip", "link", "delete", "docker0")

    @staticmethod
    def end(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
        if process.poll() is None:
            process.send_signal(how)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def run(argv: list[str], env: dict[str, str]) -> int:
    """Run the command in the foreground; signals go to it, and it decides what they mean."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a script's background job ignores it, and so would what tests start
    child = subprocess.Popen(argv, env=env)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda got, _: child.send_signal(got) if got != signal.SIGINT else None)
    code = child.wait()
    return code if code >= 0 else 128 - code


def end_what_is_left(mark: str) -> None:
    """Wait until all processes with `mark` in their environment have ended; kill those that don't."""
    begun, told = time.monotonic(), False
    while (left := processes_with(mark)) and time.monotonic() - begun < 2 * GRACE_S:
        if not told:
            say(f"{len(left)} processes that the command started still run: waiting for their end")
            told = True
        if time.monotonic() - begun > GRACE_S:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def processes_with(mark: str) -> list[int]:
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def is_made(*script: str) -> bool:
    return subprocess.run(["bash", *script], cwd=ROOT, stdout=subprocess.DEVNULL, check=False).returncode == 0


def ahead(engines: Engines) -> int:
    """Make what takes minutes where it is missing. What fails is told; whoever needs it tries again."""
    backends = os.environ.get("ATROPOS_BACKENDS", "docker,nomad")
    if "nomad" in backends and not is_made("scripts/nomad.sh", "--find"):
        say("building Nomad")
        engines.build_nomad_meanwhile()
    if ("nomad" in backends or "docker" in backends) and not is_made("docker/sandbox/build.sh", "--kept"):
        try:
            engines.start_docker()
        except (Unavailable, OSError, subprocess.SubprocessError) as error:
            say(f"no image: {error}")
            return 1
    if engines.building is not None and engines.building.wait():
        say((engines.folder / "nomad-build.log").read_text(errors="replace").strip())
        return 1
    return 0


def main() -> int:
    if sys.argv[1:] == ["--ahead"]:
        return guarded(ahead)
    return guarded(run_with_engines)


def guarded(work: Callable[[Engines], int]) -> int:
    """Do something with engines; whatever ends it, what was started is ended."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda got, _: sys.exit(128 + got))
    engines = Engines()
    try:
        return work(engines)
    except KeyboardInterrupt:
        return 130
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        engines.stop()


def run_with_engines(engines: Engines) -> int:
    backends = [name for name in sys.argv[1].replace(" ", ",").split(",") if name]
    for name in backends:
        if name not in {"local", "docker", "nomad"}:
            sys.exit(f"engines: no backend is called {name!r}: local, docker, nomad")
    if "nomad" in backends:
        engines.build_nomad_meanwhile()
    for start, users in ((engines.start_docker, {"docker", "nomad"}), (engines.start_nomad, {"nomad"})):
        if not users & set(backends):
            continue
        try:
            start()
        except (Unavailable, OSError, subprocess.SubprocessError) as error:
            left_out = [name for name in backends if name in users]
            say(f"LEFT OUT {', '.join(left_out)}: {error}")
            if os.environ.get("ATROPOS_REQUIRE_BACKENDS") == "1":
                return 1
            backends = [name for name in backends if name not in users]
            engines.end_build()
            if not backends:
                return 1
    status = run(sys.argv[2:], engines.env | {"ATROPOS_BACKENDS": ",".join(backends), MARK: str(engines.folder)})
    end_what_is_left(f"{MARK}={engines.folder}")
    return status


if __name__ == "__main__":
    sys.exit(main())
