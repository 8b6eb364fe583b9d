"""A machine with cgroup v2 alone, and the tests of limits in it: `cgroup2.py [--kernel old] [PYTEST ARGUMENTS]`.

A Debian cloud kernel boots under qemu (by emulation where the host gives no KVM) on a root file system of Debian
packages. Both are made once and kept in ~/.cache/atropos; the kernel's package is unpacked, never installed. The
working tree goes in as a tar, pytest runs on it, what it prints comes out here, and its exit status is this program's.
`--kernel old` boots Linux 6.1, whose tmpfs has no user xattrs: there, start must refuse by name, or keep volumes on
disk.

Needs root (debootstrap) and apt for qemu-system-x86, debootstrap and e2fsprogs where they are missing.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(
    os.environ.get("ATROPOS_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atropos"
)
MIRROR = os.environ.get("ATROPOS_DEBIAN_MIRROR", "http://deb.debian.org/debian")
PROGRAMS = {"qemu-system-x86_64": "qemu-system-x86", "debootstrap": "debootstrap", "mke2fs": "e2fsprogs"}
PACKAGES = "bubblewrap busybox-static e2fsprogs gcc git libc6-dev libseccomp2 make procps python3 uidmap xz-utils"
KERNELS = {"new": "trixie", "old": "bookworm"}  # 6.12 and 6.1
MODULES = (
    "virtio",
    "virtio_ring",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "virtio_blk",
    "overlay",
    "loop",
)
ROOM_MIB = 2048
"""What the root file system has free: volumes on disk take their whole size."""
PTH = "/repo\n/repo/.cgroup2-site\n"
TEST_PACKAGES = ("pytest", "pytest-asyncio", "pytest-timeout", "hypothesis")
TESTS = (
    "tests/limits tests/unit/sandbox tests/truths/test_truth_03* tests/truths/test_truth_06* "
    "tests/truths/test_truth_08* tests/conformance/test_slots.py"
)
OLD_TESTS = "tests/limits/test_old_kernel.py"
SLOWNESS = os.environ.get("ATROPOS_SLOWNESS", "10")
"""How much longer than on a machine of its own anything may take: emulation is 10 to 20 times as slow."""
BOOT_S, RUN_S = 120, 7200
STARTED = time.monotonic()


def say(text: str) -> None:
    print(f"cgroup2 {time.monotonic() - STARTED:6.1f} s: {text}", file=sys.stderr, flush=True)


def quietly(*argv: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Run a command; what it printed is shown only when it fails."""
    done = subprocess.run(
        [str(part) for part in argv], cwd=cwd, env=env, capture_output=True, text=True, check=False, errors="replace"
    )
    if done.returncode:
        sys.exit(f"cgroup2: {shlex.join(map(str, argv))} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def install() -> None:
    missing = sorted({package for program, package in PROGRAMS.items() if not shutil.which(program)})
    if not missing:
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        sys.exit(f"cgroup2: install {', '.join(missing)} first")
    say(f"installing {' '.join(missing)}")
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    quietly("apt-get", "update", env=env)
    quietly("apt-get", "install", "-y", "--no-install-recommends", *missing, env=env)


# ------------------------------------------------------------------------------------------------- what is made once


def machine() -> Path:
    """The folder with `root.img` and a kernel of each kind; made where this content has none yet."""
    content = hashlib.sha256(f"{PACKAGES}{MODULES}{KERNELS}{PTH}{ROOM_MIB}".encode()).hexdigest()[:16]
    target = CACHE / f"cgroup2-{content}"
    if target.exists():
        return target
    if os.geteuid() != 0:
        sys.exit("cgroup2: making the root file system needs root (debootstrap); run it as root once")
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="cgroup2-", dir=CACHE) as name:
        part = Path(name)
        root = part / "root"
        say(f"making a Debian root file system from {MIRROR} (about two minutes)")
        # in namespaces of their own, what it mounts and starts ends with it
        alone = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
        options = ("--variant=minbase", f"--include={PACKAGES.replace(' ', ',')}")
        quietly(*alone, "debootstrap", *options, "trixie", root, MIRROR)
        for kind, suite in KERNELS.items():
            say(f"unpacking {suite}'s cloud kernel")
            kernel(root, part, kind, suite)
        quietly("chroot", root, "python3", "-m", "venv", "--without-pip", "/opt/venv")
        (site,) = (root / "opt/venv/lib").glob("python3.*/site-packages")
        (site / "working-tree.pth").write_text(PTH)
        (part / "python").write_text(site.parent.name.removeprefix("python"))
        for waste in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale"):
            shutil.rmtree(root / waste, ignore_errors=True)
        say("packing it")
        size = int(quietly("du", "-sm", root).split()[0]) + ROOM_MIB
        quietly("mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-d", root, part / "root.img", f"{size}m")
        shutil.rmtree(root)
        with contextlib.suppress(OSError):  # somebody else was quicker
            part.rename(target)
            part.mkdir()  # for TemporaryDirectory to remove
    for old in CACHE.glob("cgroup2-*"):
        if old != target and time.time() - old.stat().st_mtime > 7200:
            shutil.rmtree(old, ignore_errors=True)
    return target


def kernel(root: Path, part: Path, kind: str, suite: str) -> None:
    """vmlinuz and an initial RAM disk, out of the package that the suite's meta package names."""
    (root / "etc/apt/sources.list").write_text(f"deb {MIRROR} {suite} main\n")
    quietly("chroot", root, "apt-get", "update")
    shown = quietly("chroot", root, "apt-cache", "show", "linux-image-cloud-amd64")
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


def ramdisk(made: Path, kind: str, folder: Path) -> Path:
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
        pack = [made / "busybox", "cpio", "-o", "-H", "newc"]
        subprocess.run(pack, input=names.encode(), cwd=top, stdout=out, stderr=subprocess.DEVNULL, check=True)
    return target


INIT = """#!/bin/busybox sh
/bin/busybox mount -t devtmpfs dev /dev
for module in MODULES; do /bin/busybox insmod /$module.ko; done
for i in 1 2 3 4 5 6 7 8 9 10; do [ -b /dev/vda ] && [ -b /dev/vdb ] && break; /bin/busybox sleep 1; done
/bin/busybox mount -t ext4 /dev/vda /new || exec /bin/busybox poweroff -f
/bin/busybox mkdir -p /new/repo
exec /bin/busybox switch_root /new /bin/sh -c '
  mount -t devtmpfs dev /dev && tar -C /repo -xf /dev/vdb && exec sh /repo/.cgroup2-run'
"""


# ------------------------------------------------------------------------------------------------------------- a run

RUN = """
export PATH=/opt/venv/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 TERM=dumb
export ATROPOS_SLOWNESS={slowness} COLUMNS=118 ATROPOS_BACKENDS=local
exec </dev/null >/dev/ttyS0 2>&1
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir -p /dev/pts /dev/shm; mount -t devpts -o mode=620,ptmxmode=666 pts /dev/pts; mount -t tmpfs shm /dev/shm
for at in /run /tmp; do mount -t tmpfs -o mode=1777 tmp $at; done; chmod 755 /run
hostname cgroup2; busybox ip link set lo up
cd /repo
echo "cgroup2: Linux $(uname -r), cgroup v2 with $(cat /sys/fs/cgroup/cgroup.controllers), $(python --version)," \\
  "bubblewrap $(bwrap --version | cut -d' ' -f2)"
echo up >/dev/ttyS1
{command}
code=$?
echo "status $code" >/dev/ttyS1
sync; sleep 0.2
busybox poweroff -f
"""


def packages(made: Path, folder: Path) -> Path:
    """What the lock file names, for the machine's Python: what atropos needs at run time, and pytest."""
    uv = ["bash", ROOT / "scripts/uv.sh"]
    export = [*uv, "export", "--frozen", "--no-hashes", "--no-emit-project", "--no-header", "--no-annotate", "--quiet"]
    (folder / "versions").write_text(quietly(*export, cwd=ROOT))
    runtime = quietly(*export, "--no-dev", "--prune", "atroposlib", cwd=ROOT)
    (folder / "wanted").write_text("\n".join((runtime, *TEST_PACKAGES)))
    quietly(*uv, "pip", "install", "--quiet", "--target", folder / "site",
            "--python-version", (made / "python").read_text(), "--python-platform", "x86_64-manylinux_2_28",
            "--only-binary", ":all:", "--no-binary", "pyseccomp",
            "-r", folder / "wanted", "-c", folder / "versions")  # fmt: skip
    return folder / "site"


def tree(made: Path, folder: Path, command: str) -> Path:
    """The working tree, the packages and what to run, as a disk that holds a tar."""
    listed = quietly("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    (folder / "run").write_text(RUN.format(slowness=SLOWNESS, command=command))
    target = folder / "tree.tar"
    with tarfile.open(target, "w") as archive:
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).exists():
                archive.add(ROOT / name, name, recursive=False)
        archive.add(folder / "run", ".cgroup2-run")
        archive.add(packages(made, folder), ".cgroup2-site")
    os.truncate(target, (target.stat().st_size + 65535) // 65536 * 65536)
    return target


def accelerator() -> list[str]:
    """Emulation unless ATROPOS_VM_ACCEL=kvm: a /dev/kvm inside a virtual machine is often there and doesn't work."""
    chosen = os.environ.get("ATROPOS_VM_ACCEL", "tcg")
    # More than one thread of emulation crashes this kernel now and then, and so does the emulated cmpxchg16b.
    return (
        ["-accel", "tcg,thread=single", "-cpu", "qemu64,-cx16"]
        if chosen == "tcg"
        else ["-accel", chosen, "-cpu", "host"]
    )


def boot(made: Path, kind: str, disk: Path, folder: Path) -> int | None:
    """Run the machine to its end; the status of the command in it, None where it didn't come that far."""
    told = folder / "told"
    told.touch()
    argv = [
        "nice", "-n", "5", "qemu-system-x86_64", *accelerator(), "-smp", "1", "-m", "3072",
        "-no-reboot", "-nodefaults", "-display", "none",
        "-kernel", str(made / f"vmlinuz-{kind}"), "-initrd", str(folder / "initrd"),
        "-append", "console=ttyS0 quiet loglevel=1 panic=1 no_timer_check random.trust_cpu=on",
        "-drive", f"file={made}/root.img,format=raw,if=virtio,snapshot=on",
        "-drive", f"file={disk},format=raw,if=virtio,readonly=on",
        "-serial", "stdio", "-serial", f"file:{told}",
    ]  # fmt: skip
    with ended(
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
            if waited > RUN_S or (waited > BOOT_S and not told.stat().st_size):
                say(f"the machine has not come up in {BOOT_S} s" if waited < RUN_S else f"it has run for {RUN_S} s")
                break
            time.sleep(0.05)
    said = told.read_text(errors="replace")
    if not said:
        return None
    found = re.search(r"status (\d+)", said)
    return int(found[1]) if found else 1


@contextlib.contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """However the block ends, so does the process."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description="the tests of limits on a machine with cgroup v2")
    parser.add_argument("--kernel", choices=sorted(KERNELS), default="new", help="new: Linux 6.12; old: Linux 6.1")
    parser.add_argument("--command", help="a shell command to run in the machine instead of pytest")
    options, arguments = parser.parse_known_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda got, _: sys.exit(128 + got))
    install()
    made = machine()
    tests = shlex.join(arguments)
    if not any(argument.startswith("tests") for argument in arguments):
        tests = f"{OLD_TESTS if options.kernel == 'old' else TESTS} {tests}"
    command = options.command or f"python -u -m pytest -v -p no:cacheprovider -o timeout=1800 {tests}"
    with tempfile.TemporaryDirectory(prefix="atropos-cgroup2.", dir="/var/tmp") as name:
        folder = Path(name)
        disk = tree(made, folder, command)
        ramdisk(made, options.kernel, folder)
        for attempt in range(4):
            say(f"booting ({options.kernel} kernel): {command}")
            status = boot(made, options.kernel, disk, folder)
            if status is not None:
                return status
            say(f"the emulated machine died before it was up (attempt {attempt + 1})")
    return 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
