"""A real sshd on loopback, for one user: the one that the tests run as."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from examples.serve.processes import free_port
from tests.waiting import SLOWNESS

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
"""None: openssh-server isn't installed."""


@dataclass(frozen=True)
class Sshd:
    """One that runs, and what its clients need.

    Attributes:
        port: on 127.0.0.1.
        pid: of the process that listens; each connection has children of it.
        config: a client's configuration file, in which `sandboxes` and 127.0.0.1 are this one.
        known_hosts: the file with its key, which the configuration names.
    """

    port: int
    pid: int
    config: Path
    known_hosts: Path

    def settings(self, hosts: int = 1) -> dict[str, object]:
        """Fields of `SlotPoolConfig`: as many hosts, which are all this one."""
        return {
            "backend": "ssh",
            "ssh_hosts": ["sandboxes"] * hosts,
            "ssh_config": str(self.config),
            "ssh_python": sys.executable,
        }


def make_key(path: Path) -> str:
    """Make a key pair; answers the public one."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
    return path.with_suffix(".pub").read_text()


@contextlib.contextmanager
def sshd(folder: Path, *options: str) -> Iterator[Sshd]:
    """Run one with further `options` of sshd_config, until the block's end."""
    assert SSHD is not None
    host_key = make_key(folder / "host")
    (folder / "authorized_keys").write_text(make_key(folder / "user"))
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    port = free_port()
    lines = [
        f"Port {port}",
        "ListenAddress 127.0.0.1",
        f"HostKey {folder / 'host'}",
        f"AuthorizedKeysFile {folder / 'authorized_keys'}",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "PermitRootLogin prohibit-password",
        "StrictModes no",
        "UsePAM no",
        "PidFile none",
        *options,
    ]
    (folder / "sshd_config").write_text("\n".join(lines) + "\n")
    known = folder / "known_hosts"
    known.write_text(f"[127.0.0.1]:{port} {host_key}")
    config = folder / "config"
    config.write_text(
        f"Host sandboxes 127.0.0.1\n  HostName 127.0.0.1\n  Port {port}\n  User {getpass.getuser()}\n"
        f"  IdentityFile {folder / 'user'}\n  UserKnownHostsFile {known}\n"
    )
    log = folder / "sshd.log"
    process = subprocess.Popen([SSHD, "-D", "-f", folder / "sshd_config", "-E", log], start_new_session=True)
    try:
        deadline = time.monotonic() + 60 * SLOWNESS
        while not log.exists() or "Server listening on" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.exists() and log.read_text()
            time.sleep(0.02)
        yield Sshd(port, process.pid, config, known)
    finally:
        process.kill()
        process.wait()
