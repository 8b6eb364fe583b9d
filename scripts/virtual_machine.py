"""An emulated machine of Debian's, and a command on the working tree in it.

A kernel of Debian's boots under qemu on a root file system of Debian packages. Both are made once and kept in
~/.cache/atropos; the kernel's package is unpacked, never installed. The working tree goes in as a tar, the command runs
on it, what it prints comes out here, and its exit status is that of `run`.

Needs root (debootstrap) and apt for qemu, debootstrap, e2fsprogs and cpio where they are missing. The packages of
another architecture are configured by qemu's emulation of programs, for which binfmt_misc has an entry meanwhile.
"""

from __future__ import annotations

import contextlib
import hashlib
import lzma
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from debian import ALONE, CACHE, MIRROR, ROOT, made_once, quietly

MODULES = (
    "virtio",
    "virtio_ring",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "virtio_blk",
    "crc16",
    "crc32c_generic",
    "mbcache",
    "jbd2",
    "ext4",
    "overlay",
    "loop",
    "veth",
)
ROOM_MIB = 2048
"""What the root file system has free: volumes on disk take their whole size."""
PTH = "/repo\n/repo/.machine-site\n"
TEST_PACKAGES = ("pytest", "pytest-asyncio", "pytest-timeout", "hypothesis")
STARTED = time.monotonic()


@dataclass(frozen=True)
class Hardware:
    """An architecture as qemu emulates it.

    Attributes:
        name: as `uname -m` has it.
        debian: as Debian has it.
        emulated: qemu's arguments without the machine's own processor.
        console: the device of the first serial line.
        packages: of the host's Debian, by the program that each has.
    """

    name: str
    debian: str
    emulated: tuple[str, ...]
    console: str
    packages: dict[str, str]

    @property
    def foreign(self) -> bool:
        return self.name != os.uname().machine

    @property
    def arguments(self) -> tuple[str, ...]:
        """Emulation unless ATROPOS_VM_ACCEL=kvm: a /dev/kvm inside a virtual machine is often there, and broken."""
        chosen = os.environ.get("ATROPOS_VM_ACCEL", "tcg")
        return self.emulated if chosen == "tcg" or self.foreign else ("-accel", chosen, "-cpu", "host")


X86_64 = Hardware(
    "x86_64",
    "amd64",
    # More than one thread of emulation crashes this kernel now and then, and so does the emulated cmpxchg16b.
    ("-accel", "tcg,thread=single", "-cpu", "qemu64,-cx16"),
    "ttyS0",
    {"qemu-system-x86_64": "qemu-system-x86"},
)
AARCH64 = Hardware(
    "aarch64",
    "arm64",
    ("-machine", "virt,gic-version=3", "-accel", "tcg,thread=single", "-cpu", "neoverse-n1"),
    "ttyAMA0",
    {"qemu-system-aarch64": "qemu-system-arm", "qemu-aarch64-static": "qemu-user-static"},
)


@dataclass(frozen=True)
class Machine:
    """A machine.

    Attributes:
        name: its host name, and the first word of what is said of it.
        packages: what its Debian has, separated by spaces.
        kernels: of each kind, the Debian release and its package that depends on the newest one.
        boot_s, run_s: how long it may take to come up, and run.
    """

    name: str
    hardware: Hardware
    packages: str
    kernels: dict[str, tuple[str, str]]
    boot_s: float = 120
    run_s: float = 7200

    def run(self, command: str, kernel: str, slowness: str = "10") -> int:
        """Run a shell command on the working tree; its exit status.

        Args:
            kernel: a kind of kernel.
            slowness: what deadlines of tests are multiplied by, unless ATROPOS_SLOWNESS says otherwise.
        """
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda got, _: sys.exit(128 + got))
        self._install()
        made = self._made()
        with tempfile.TemporaryDirectory(prefix=f"atropos-{self.name}.", dir="/var/tmp") as name:
            folder = Path(name)
            script = RUN.format(
                slowness=os.environ.get("ATROPOS_SLOWNESS", slowness),
                command=command,
                name=self.name,
                console=self.hardware.console,
            )
            disk = self._tree(made, folder, script)
            _ramdisk(made, kernel, folder)
            for attempt in range(4):
                self.say(f"booting ({kernel} kernel): {command}")
                status = self._boot(made, kernel, disk, folder)
                if status is not None:
                    return status
                self.say(f"the emulated machine died before it was up (attempt {attempt + 1})")
        return 1

    def say(self, text: str) -> None:
        """Say how far it is, on stderr."""
        print(f"{self.name} {time.monotonic() - STARTED:6.1f} s: {text}", file=sys.stderr, flush=True)

    # --------------------------------------------------------------------------------------------- what is made once

    def _install(self) -> None:
        programs = {**self.hardware.packages, "cpio": "cpio", "debootstrap": "debootstrap", "mke2fs": "e2fsprogs"}
        missing = sorted({package for program, package in programs.items() if not shutil.which(program)})
        if not missing:
            return
        if os.geteuid() != 0 or not shutil.which("apt-get"):
            sys.exit(f"{self.name}: install {', '.join(missing)} first")
        self.say(f"installing {' '.join(missing)}")
        env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        quietly("apt-get", "update", env=env)
        quietly("apt-get", "install", "-y", "--no-install-recommends", *missing, env=env)

    def _made(self) -> Path:
        """The folder with `root.img` and a kernel of each kind; made where this content has none yet."""
        made_of = f"{self.packages}{MODULES}{self.kernels}{PTH}{ROOM_MIB}{self.hardware.debian}"
        target = CACHE / f"{self.name}-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}"
        if not target.exists() and os.geteuid() != 0:
            sys.exit(f"{self.name}: making the root file system needs root (debootstrap); run it as root once")
        made_once(target, self._make)
        return target

    def _make(self, part: Path) -> None:
        root = part / "root"
        self.say(f"making a Debian root file system from {MIRROR} (minutes)")
        with _programs_of(self.hardware):
            self._debian(root, part)
        self.say("packing it")
        size = int(quietly("du", "-sm", root).split()[0]) + ROOM_MIB
        quietly("mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-d", root, part / "root.img", f"{size}m")
        shutil.rmtree(root)

    def _debian(self, root: Path, part: Path) -> None:
        """The root file system, and beside it the kernels, busybox and the version of its Python."""
        options = (
            f"--arch={self.hardware.debian}",
            "--variant=minbase",
            f"--include={self.packages.replace(' ', ',')}",
        )
        quietly(*ALONE, "debootstrap", *options, "trixie", root, MIRROR)
        for kind, (suite, package) in self.kernels.items():
            self.say(f"unpacking {suite}'s {package}")
            self._kernel(root, part, kind, suite, package)
        quietly("chroot", root, "python3", "-m", "venv", "--without-pip", "/opt/venv")
        (site,) = (root / "opt/venv/lib").glob("python3.*/site-packages")
        (site / "working-tree.pth").write_text(PTH)
        (part / "python").write_text(site.parent.name.removeprefix("python"))
        for waste in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale"):
            shutil.rmtree(root / waste, ignore_errors=True)

    def _kernel(self, root: Path, part: Path, kind: str, suite: str, newest: str) -> None:
        """vmlinuz and modules for the initial RAM disk, out of the package that `newest` names."""
        (root / "etc/apt/sources.list").write_text(f"deb {MIRROR} {suite} main\n")
        quietly("chroot", root, "apt-get", "update")
        shown = quietly("chroot", root, "apt-cache", "show", newest)
        package = re.search(r"^Depends: (linux-image-[^ ]+)", shown, re.MULTILINE)
        assert package, shown
        quietly("chroot", root, "sh", "-c", f"cd /tmp && apt-get -o APT::Sandbox::User=root download {package[1]}")
        (deb,) = (root / "tmp").glob("linux-image-*.deb")
        unpacked = part / "kernel"
        quietly("dpkg-deb", "-x", deb, unpacked)
        deb.unlink()
        shutil.copy(next((unpacked / "boot").glob("vmlinuz-*")), part / f"vmlinuz-{kind}")
        modules = part / f"modules-{kind}"
        modules.mkdir()
        for path in unpacked.rglob("*.ko*"):
            name = path.name.partition(".")[0]
            if name in MODULES:  # what isn't there is built in
                data = path.read_bytes()
                (modules / f"{name}.ko").write_bytes(lzma.decompress(data) if path.suffix == ".xz" else data)
        shutil.copy(root / "usr/bin/busybox", part)
        shutil.rmtree(unpacked)

    # --------------------------------------------------------------------------------------------------------- a run

    def _tree(self, made: Path, folder: Path, script: str) -> Path:
        """The working tree, the packages and what to run, as a disk that holds a tar."""
        listed = quietly("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
        (folder / "run").write_text(script)
        target = folder / "tree.tar"
        with tarfile.open(target, "w") as archive:
            for name in filter(None, listed.split("\0")):
                if (ROOT / name).exists():
                    archive.add(ROOT / name, name, recursive=False)
            archive.add(folder / "run", ".machine-run")
            archive.add(self._site(made, folder), ".machine-site")
        os.truncate(target, (target.stat().st_size + 65535) // 65536 * 65536)
        return target

    def _site(self, made: Path, folder: Path) -> Path:
        """From the lock file, for the machine's Python: what atropos and its servers need at run time, and pytest."""
        uv = ["bash", ROOT / "scripts/uv.sh"]
        export = [
            *uv,
            "export",
            "--frozen",
            "--no-hashes",
            "--no-emit-project",
            "--no-header",
            "--no-annotate",
            "--quiet",
        ]
        (folder / "versions").write_text(quietly(*export, cwd=ROOT))
        runtime = quietly(*export, "--no-dev", "--extra", "server", "--prune", "atroposlib", cwd=ROOT)
        (folder / "wanted").write_text("\n".join((runtime, *TEST_PACKAGES)))
        quietly(*uv, "pip", "install", "--quiet", "--target", folder / "site",
                "--python-version", (made / "python").read_text(),
                "--python-platform", f"{self.hardware.name}-manylinux_2_28",
                "--only-binary", ":all:", "--no-binary", "pyseccomp",
                "-r", folder / "wanted", "-c", folder / "versions")  # fmt: skip
        return folder / "site"

    def _boot(self, made: Path, kind: str, disk: Path, folder: Path) -> int | None:
        """Run the machine to its end; the status of the command in it, None where it didn't come that far."""
        told = folder / "told"
        told.write_bytes(bytes(65536))
        argv = [
            "nice", "-n", "5", f"qemu-system-{self.hardware.name}", *self.hardware.arguments, "-smp", "1", "-m", "3072",
            "-no-reboot", "-nodefaults", "-display", "none",
            "-kernel", str(made / f"vmlinuz-{kind}"), "-initrd", str(folder / "initrd"),
            "-append", f"console={self.hardware.console} quiet loglevel=1 panic=1 no_timer_check random.trust_cpu=on",
            "-drive", f"file={made}/root.img,format=raw,if=virtio,snapshot=on",
            "-drive", f"file={disk},format=raw,if=virtio,readonly=on",
            "-drive", f"file={told},format=raw,if=virtio",
            "-serial", "stdio",
        ]  # fmt: skip
        with _ended(
            subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True)
        ) as qemu:
            assert qemu.stdout is not None
            os.set_blocking(qemu.stdout.fileno(), False)
            with contextlib.suppress(OSError):  # where sessions are scheduled as groups, this is what `nice` stands for
                Path(f"/proc/{qemu.pid}/autogroup").write_text("5")
            begun = time.monotonic()
            while True:
                alive = qemu.poll() is None
                sys.stdout.buffer.write((qemu.stdout.read() or b"").replace(b"\r", b""))
                sys.stdout.flush()
                if not alive:
                    break
                waited = time.monotonic() - begun
                if waited > self.run_s or (waited > self.boot_s and not _first_line(told)):
                    late = f"has not come up in {self.boot_s} s" if waited < self.run_s else f"ran for {self.run_s} s"
                    self.say(f"the machine {late}")
                    break
                time.sleep(0.05)
        said = _first_line(told)
        if not said:
            return None
        found = re.match(r"status (\d+)", said)
        return int(found[1]) if found else 1


INIT = """#!/bin/busybox sh
/bin/busybox mount -t devtmpfs dev /dev
for module in MODULES; do /bin/busybox insmod /$module.ko; done
for i in 1 2 3 4 5 6 7 8 9 10; do
  [ -b /dev/vda ] && [ -b /dev/vdb ] && [ -b /dev/vdc ] && break
  /bin/busybox sleep 1
done
/bin/busybox mount -t ext4 /dev/vda /new || exec /bin/busybox poweroff -f
/bin/busybox mkdir -p /new/repo
exec /bin/busybox switch_root /new /bin/sh -c '
  mount -t devtmpfs dev /dev && tar -C /repo -xf /dev/vdb && exec sh /repo/.machine-run'
"""
RUN = """
export PATH=/opt/venv/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 TERM=dumb
export ATROPOS_SLOWNESS={slowness} COLUMNS=118 ATROPOS_BACKENDS=local
exec </dev/null >/dev/{console} 2>&1
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir -p /dev/pts /dev/shm; mount -t devpts -o mode=620,ptmxmode=666 pts /dev/pts; mount -t tmpfs shm /dev/shm
for at in /run /tmp; do mount -t tmpfs -o mode=1777 tmp $at; done; chmod 755 /run
hostname {name}; busybox ip link set lo up
cd /repo
echo "{name}: Linux $(uname -rm), cgroup v2 with $(cat /sys/fs/cgroup/cgroup.controllers), $(python --version)," \\
  "bubblewrap $(bwrap --version | cut -d' ' -f2)"
tell() {{ printf '%s\\n' "$1" >/dev/vdc; sync; }}
tell up
{command}
code=$?
tell "status $code"
sleep 0.2
busybox poweroff -f
"""


def pytest(arguments: Sequence[str], tests: str, timeout_s: int) -> str:
    """The command of pytest with these arguments, on these tests if they name none."""
    given = shlex.join(arguments)
    if not any(argument.startswith("tests") for argument in arguments):
        given = f"{tests} {given}"
    return f"python -u -m pytest -v -p no:cacheprovider -o timeout={timeout_s} {given}"


@contextlib.contextmanager
def _programs_of(hardware: Hardware) -> Generator[None]:
    """Context in which this machine can run the programs of another one: an entry of binfmt_misc, where it has none."""
    name = f"qemu-{hardware.name}"
    with tempfile.TemporaryDirectory() as at, contextlib.ExitStack() as undo:
        if hardware.foreign:
            quietly("mount", "-t", "binfmt_misc", "binfmt_misc", at)
            undo.callback(quietly, "umount", at)
            if not Path(at, name).exists():
                # the head of an ELF file for this architecture; F: the emulator is opened now, so that roots need none
                head = r"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
                mask = r"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
                Path(at, "register").write_text(f":{name}:M::{head}:{mask}:{shutil.which(f'{name}-static')}:F")
                undo.callback(Path(at, name).write_text, "-1")
        yield


def _ramdisk(made: Path, kind: str, folder: Path) -> Path:
    """busybox, the modules that the disk needs, and a script that goes on from the disk."""
    top = folder / "ramdisk"
    for name in ("bin", "dev", "new"):
        (top / name).mkdir(parents=True)
    shutil.copy(made / "busybox", top / "bin")
    order = [name for name in MODULES if (made / f"modules-{kind}/{name}.ko").exists()]
    for name in order:
        shutil.copy(made / f"modules-{kind}/{name}.ko", top)
    (top / "init").write_text(INIT.replace("MODULES", " ".join(order)))
    (top / "init").chmod(0o755)
    names = "\n".join(str(path.relative_to(top)) for path in sorted(top.rglob("*")))
    target = folder / "initrd"
    with target.open("wb") as out:
        pack = ["cpio", "--quiet", "-o", "-H", "newc"]
        subprocess.run(pack, input=names.encode(), cwd=top, stdout=out, check=True)
    return target


def _first_line(told: Path) -> str:
    """What the machine wrote last."""
    return told.read_bytes().partition(b"\n")[0].decode(errors="replace").strip("\0")


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Generator[subprocess.Popen[bytes]]:
    """However the block ends, so does the process."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
