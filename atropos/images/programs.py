"""The programs that an image store runs: skopeo for registries, and others, each bounded and never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import isal

import atropos
from atropos.config import ImageStoreSettings
from atropos.errors import ImageUnavailable
from atropos.images.manifests import MAX_JSON_BYTES

POLL_S = 0.2
SAID_BYTES = 4096
PAUSES_S = (1.0, 3.0, 9.0)
"""Pauses before a registry that answered with 5xx, or broke off, is asked again, which skopeo doesn't do."""
_MOMENTARY = re.compile(
    r"(?:HTTP status:|status code from registry) 5\d\d\b|\bEOF\b|connection reset by peer|transport connection broken"
)

_PARSING = re.compile(r'^Error parsing image name "[^"]*": ')
"""What skopeo says first of a registry that it can't reach, though it has understood the name."""


class Skopeo:
    """skopeo with a store's settings: its mirrors and its credentials."""

    def __init__(self, settings: ImageStoreSettings, folder: Path) -> None:
        self._settings = settings
        self._folder = folder

    async def run(
        self,
        arguments: list[str],
        name: str,
        work: Path,
        report: Callable[[], None] = lambda: None,
        largest: int | None = None,
    ) -> str:
        """Run skopeo to its end; its output.

        Args:
            arguments: of skopeo.
            name: the image's, for errors.
            work: its folder for temporary files, which nobody else uses.
            report: called every `POLL_S` while it runs.
            largest: bytes of the largest file that it may write.

        Raises:
            ImageUnavailable: it is not installed, failed, or took too long.
        """
        program = shutil.which("skopeo")
        if program is None:
            raise ImageUnavailable(
                f"image {name}: pulling: skopeo is not installed on the sandbox server's machine (apt-get install "
                "skopeo)"
            )
        settings = self._settings
        registries = work / "registries.conf"
        registries.write_text(_registries(settings), encoding="utf-8")
        options = ["--insecure-policy", "--override-os", "linux"]
        options += ["--registries-conf", str(registries), "--tmpdir", str(work)]
        if settings.auth_file:
            arguments = [arguments[0], "--authfile", os.path.abspath(settings.auth_file), *arguments[1:]]
        pauses = iter(PAUSES_S)
        while True:
            try:
                return await run(
                    [program, *options, *arguments],
                    f"image {name}: pulling",
                    folder=self._folder,
                    deadline_s=settings.pull_timeout_s,
                    report=report,
                    largest=largest,
                    environment=_own_folders(work),
                    cwd=work,
                )
            except ImageUnavailable as error:
                pause_s = next(pauses, None)
                if pause_s is None or not _MOMENTARY.search(str(error)):
                    raise
            await asyncio.sleep(pause_s)


def _own_folders(instead: Path) -> dict[str, str]:
    """The environment with `instead` for the user's folders that aren't this process's own.

    A server that root started is no longer root when it pulls, and skopeo fails where it may not look for settings, of
    which some folders in an open home may be closed.
    """
    names = ("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR")
    anothers = {name for name in names if name in os.environ and _is_anothers(os.environ[name])}
    return {**os.environ, **dict.fromkeys(anothers, str(instead))}


def _is_anothers(folder: str) -> bool:
    try:
        return os.stat(folder).st_uid != os.geteuid()
    except OSError as error:
        return not isinstance(error, FileNotFoundError)


async def run_module(
    module: ModuleType,
    what: str,
    *arguments: object,
    folder: Path,
    deadline_s: float,
    stdin: IO[bytes] | None = None,
) -> Any:
    """Run one of the programs that read what strangers sent; its result."""
    command = module_command(module, *arguments)
    output = await run(command, what, folder=folder, deadline_s=deadline_s, stdin=stdin)
    return json.loads(output.splitlines()[-1])


def module_command(module: ModuleType, *arguments: object) -> list[str]:
    """How one of these programs is started: it sees this package and isal's, and no other site-packages."""
    paths = dict.fromkeys(
        os.path.dirname(os.path.dirname(os.path.abspath(str(each.__file__)))) for each in (atropos, isal)
    )
    code = f"import sys; sys.path[:0] = {[*paths]}; from {module.__name__} import main; sys.exit(main())"
    return [sys.executable, "-I", "-S", "-c", code, *map(str, arguments)]


async def run(
    program: list[str],
    what: str,
    *,
    folder: Path,
    deadline_s: float,
    report: Callable[[], None] = lambda: None,
    largest: int | None = None,
    environment: dict[str, str] | None = None,
    cwd: Path | None = None,
    stdin: IO[bytes] | None = None,
) -> str:
    """Run a program to its end; its output.

    Args:
        program: with its arguments.
        what: what it does, for errors.
        folder: what it writes to.
        deadline_s: longest it may take, in seconds.
        report: called every `POLL_S` while it runs.
        largest: bytes of the largest file that it may write.
        environment: this process's by default.
        cwd: the folder that it runs in; this process's by default.
        stdin: what it reads; nothing by default.

    Raises:
        ImageUnavailable: it failed or took too long; with its last words.
    """
    process = await _start(program, largest, environment, cwd, stdin)
    assert process.stdout is not None
    assert process.stderr is not None
    outputs = asyncio.gather(_head(process.stdout), _tail(process.stderr))
    try:
        async with asyncio.timeout(deadline_s):
            while not (await asyncio.wait([outputs], timeout=POLL_S))[0]:
                report()
            code = await process.wait()
    except TimeoutError:
        raise ImageUnavailable(f"{what}: not done within {deadline_s:g} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.shield(process.wait())
        outputs.cancel()
    output, errors = outputs.result()
    if code == errno.ENOSPC or "no space left on device" in errors:
        raise ImageUnavailable(f"{what}: the disk of {folder} is full")
    if code != 0:
        raise ImageUnavailable(f"{what}: {_last_words(errors) or f'exit code {code}'}")
    return output.decode(errors="replace")


async def _start(
    program: list[str],
    largest: int | None,
    environment: dict[str, str] | None,
    cwd: Path | None,
    stdin: IO[bytes] | None,
) -> asyncio.subprocess.Process:
    bound = [] if largest is None else ["prlimit", f"--fsize={largest}"]
    return await asyncio.create_subprocess_exec(
        *("setpriv", "--pdeathsig", "KILL"),  # nothing writes on after a server that was killed
        *bound,
        *program,
        stdin=asyncio.subprocess.DEVNULL if stdin is None else stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        env=environment,
        cwd=cwd,
    )


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that others see whole or not at all."""
    part = path.with_name(f"{path.name}.{os.getpid()}-{time.monotonic_ns()}")
    part.write_bytes(data)
    part.replace(path)


def _registries(settings: ImageStoreSettings) -> str:
    """containers-registries.conf(5): mirrors, and hosts that are spoken to without TLS."""
    hosts = dict.fromkeys((*settings.mirrors, *settings.insecure_registries))
    text = ['unqualified-search-registries = ["docker.io"]', 'short-name-mode = "disabled"']
    for host in hosts:
        insecure = "true" if host in settings.insecure_registries else "false"
        text += ["[[registry]]", f"location = {json.dumps(host)}", f"insecure = {insecure}"]
        mirror = settings.mirrors.get(host)
        if mirror is not None:
            plain = "true" if mirror.split("/")[0] in settings.insecure_registries else "false"
            text += ["[[registry.mirror]]", f"location = {json.dumps(mirror)}", f"insecure = {plain}"]
    return "\n".join((*text, ""))


async def _head(stream: asyncio.StreamReader) -> bytes:
    """The first `MAX_JSON_BYTES`; the rest is read, too, since a program waits until it is."""
    head = bytearray()
    while chunk := await stream.read(1 << 16):
        head += chunk[: MAX_JSON_BYTES - len(head)]
    return bytes(head)


async def _tail(stream: asyncio.StreamReader) -> str:
    tail = b""
    while chunk := await stream.read(SAID_BYTES):
        tail = (tail + chunk)[-SAID_BYTES:]
    return tail.decode(errors="replace")


def _last_words(text: str) -> str:
    """A program's last line, without the log prefix of Go programs."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    _, separator, message = last.partition('msg="')
    words = message.removesuffix('"').replace('\\"', '"') if separator else last
    return _PARSING.sub("", words)[:1000]
