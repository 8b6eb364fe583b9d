"""One sandbox server on another host: its connection, its start, its forwarded port and its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import shlex
from collections.abc import Generator

import asyncssh
from asyncssh.constants import OPEN_ADMINISTRATIVELY_PROHIBITED

from atropos.aio import outlive
from atropos.config import ServerConfig
from atropos.errors import BackendUnavailable, ConfigError
from atropos.slots.backends.local.server_process import last_line
from atropos.slots.backends.spec import refused
from atropos.slots.config import server_json

KEEPALIVE_S, KEEPALIVES = 5.0, 3
"""Seconds between keepalive requests, and how many without an answer end the connection."""
GONE_S = 5.0
"""How long the far end may take to end a server and its folder."""
BANNER_LINES = 100
"""Lines that the host's login shell may print before the server's own."""
NO_PYTHON = (126, 127)
"""A shell's exit codes when it can't start a program."""
MAX_PORT = 65535
_PLACE = re.compile(r"(?:(?P<user>[^@\s]+)@)?(?P<host>\[[^\]\s]+\]|[^:\[\]@\s]+)(?::(?P<port>[0-9]{1,5}))?")


def place(text: str) -> dict[str, object]:
    """`[user@]host[:port]` as arguments of asyncssh; the rest comes from ssh's configuration.

    Raises:
        ConfigError: it has another form.
    """
    match = _PLACE.fullmatch(text)
    if match is None or int(match["port"] or 0) > MAX_PORT:
        raise ConfigError(f"ssh_hosts: {text!r} is not of the form [user@]host[:port]")
    arguments: dict[str, object] = {"host": match["host"].strip("[]")}
    if match["user"]:
        arguments["username"] = match["user"]
    if match["port"]:
        arguments["port"] = int(match["port"])
    return arguments


@contextlib.contextmanager
def _failures(host: str) -> Generator[None]:
    """Raise errors of ssh as ours."""
    try:
        yield
    except asyncssh.HostKeyNotVerifiable as error:
        raise ConfigError(
            f"ssh_hosts: the key that {host} shows is not known ({error.reason}): compare it with the host's, "
            "then add it to known_hosts, as `ssh` does when it asks"
        ) from error
    except asyncssh.PermissionDenied as error:
        raise ConfigError(f"ssh_hosts: {host} refuses the login ({error.reason})") from error
    except asyncssh.ChannelOpenError as error:
        if error.code == OPEN_ADMINISTRATIVELY_PROHIBITED:
            raise ConfigError(
                f"ssh_hosts: {host} refuses to forward ports ({error.reason}): its sshd needs AllowTcpForwarding"
            ) from error
        raise BackendUnavailable(f"{host}: {error.reason}") from error
    except (asyncssh.KeyImportError, asyncssh.ConfigParseError) as error:
        raise ConfigError(f"ssh_config: {error}") from error
    except (asyncssh.Error, OSError, UnicodeError) as error:  # UnicodeError: no name of a host, as `a..b`
        raise BackendUnavailable(f"{host} can't be reached by ssh: {error}") from error


class SshServer:
    """One run of `far_end` on a host.

    Args:
        host: `[user@]host[:port]`.
        python: the host's Python.
        ssh_config: a file like ~/.ssh/config; None: that one.
        config: the server's.
    """

    def __init__(self, host: str, python: str, ssh_config: str | None, config: ServerConfig) -> None:
        self.id = f"{host}-{secrets.token_hex(6)}"
        self.place = host
        self.url = ""
        self._host = host
        self._command = shlex.join([python, "-P", "-m", "atropos.slots.backends.ssh.far_end", self.id])
        self._python = python
        self._ssh_config = ssh_config
        self._config = config
        self._connection: asyncssh.SSHClientConnection | None = None
        self._process: asyncssh.SSHClientProcess[bytes] | None = None

    async def ready(self, timeout_s: float) -> None:
        """Connect, start the server, wait until it listens, and forward its port."""
        try:
            async with asyncio.timeout(timeout_s):
                with _failures(self._host):
                    await self._start()
        except TimeoutError:
            raise BackendUnavailable(f"{self._host}: no sandbox server was ready within {timeout_s:g} s") from None

    async def _start(self) -> None:
        options: dict[str, object] = {
            **place(self._host),
            "config": () if self._ssh_config is None else [self._ssh_config],
        }
        # TCP alone would notice a host that was switched off only after minutes, or never while nothing is sent.
        options |= {"keepalive_interval": KEEPALIVE_S, "keepalive_count_max": KEEPALIVES}
        try:
            known = asyncssh.SSHClientConnectionOptions(**options).known_hosts
        except OSError as error:
            raise ConfigError(f"ssh_config: {error}") from error
        if known is None:
            options["known_hosts"] = b""  # `UserKnownHostsFile none` means no key is known, not that each is trusted
        self._connection = await asyncssh.connect(**options)
        self._process = await self._connection.create_process(self._command, encoding=None)
        self._process.stdin.write(server_json(self._config) + b"\n")
        # The server chooses a free one: several of them may be on one host.
        port = await self._listening(self._process)
        _, probe = await self._connection.open_connection(
            "127.0.0.1", port
        )  # to be refused now, not at the first lease
        probe.close()
        # Loopback on both sides: the server's port is reachable from no network.
        listener = await self._connection.forward_local_port("127.0.0.1", 0, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{listener.get_port()}"

    async def _listening(self, process: asyncssh.SSHClientProcess[bytes]) -> int:
        """The server's port on its host, from its ready line."""
        for _ in range(BANNER_LINES):
            line = await process.stdout.readline()
            if not line:
                raise await self.ended()
            with contextlib.suppress(ValueError, KeyError, TypeError):
                return int(json.loads(line)["port"])
        raise BackendUnavailable(f"{self._host}: no ready line in the first {BANNER_LINES} lines")

    async def ended(self) -> Exception:
        """Wait until the server has ended, or the connection is lost. Returns why: one of the errors of `ready`."""
        assert self._process is not None
        last = last_line(())
        with contextlib.suppress(asyncssh.Error, OSError):
            last = last_line((await self._process.stderr.read()).decode(errors="replace").split("\n"))
        await self._process.wait_closed()
        code = self._process.exit_status
        # A mistake in a setting, which no retry cures.
        if code in NO_PYTHON or "No module named" in last:
            return ConfigError(f"ssh_python: {self._python!r} on {self._host}: {last}")
        # No exit status at all: sshd sends one whenever the command has ended.
        if code is None and self._process.exit_signal is None:
            return BackendUnavailable(f"{self._host}: the connection was lost")
        return refused(code, f"{self._host}: {last}") or BackendUnavailable(f"{self._host}: {last}")

    async def stop(self, grace_s: float) -> None:
        """Ask it to end, and kill it after `grace_s`; returns when it or the connection is gone."""
        try:
            if self._process is not None:
                with contextlib.suppress(TimeoutError, asyncssh.Error, OSError):
                    self._process.stdin.write(b"end\n")
                    async with asyncio.timeout(grace_s):
                        await self._process.wait_closed()
        finally:
            await outlive(self._gone())  # also where a shutdown's last deadline has ended the wait above

    async def _gone(self) -> None:
        if self._process is not None:
            with contextlib.suppress(TimeoutError, asyncssh.Error, OSError):
                # The far end kills the server and removes its folder when its input ends.
                self._process.stdin.write_eof()
                async with asyncio.timeout(GONE_S):
                    await self._process.wait_closed()
        if self._connection is not None:
            self._connection.abort()

    async def tidy(self) -> None:
        """The far end has removed everything."""
