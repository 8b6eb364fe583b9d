"""PID 1 of the sandbox container: hand the configuration over, start the server, reap, pass signals on.

The server needs root and a few capabilities for its first moments alone (its root phase). This process is none of
them: once the server's process exists it drops every capability for good, and only waits.

Environment:
    ATROPOS_CONFIG: the server's settings as JSON, without the token; or the path of a file that holds them.
    ATROPOS_TOKEN_FILE: where the bearer token is. Never an environment variable: those are shown by `docker inspect`.
    ATROPOS_HOST, ATROPOS_PORT: where to listen; they win over ATROPOS_CONFIG (a scheduler picks ports last).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 24, 38
CAPABILITY_VERSION_3 = 0x20080522
BAD_CONFIG = 2
"""Exit code of a wrong configuration, as the server itself uses it."""


def fail(message: str) -> None:
    """Say what is wrong on one line and end; the engine keeps it as the container's last words."""
    print(f"atropos-sandbox: {message}", file=sys.stderr, flush=True)
    os._exit(BAD_CONFIG)


def read_config() -> bytes:
    """The server's configuration with its token, as JSON."""
    text = os.environ.pop("ATROPOS_CONFIG", "") or "{}"
    try:
        if text.lstrip()[:1] != "{":
            with open(text, encoding="utf-8") as file:
                text = file.read()
        config = json.loads(text)
    except (OSError, ValueError) as error:
        fail(f"ATROPOS_CONFIG is neither a JSON object nor the path of one: {error}")
    path = os.environ.pop("ATROPOS_TOKEN_FILE", "")
    try:
        with open(path, encoding="utf-8") as file:
            config["token"] = file.read().strip()
    except OSError as error:
        fail(f"ATROPOS_TOKEN_FILE {path!r} cannot be read: {error.strerror}")
    if not config["token"]:
        fail(f"ATROPOS_TOKEN_FILE {path!r} is empty")
    config["host"] = os.environ.get("ATROPOS_HOST") or config.get("host", "0.0.0.0")
    port = os.environ.get("ATROPOS_PORT")
    try:
        config["port"] = int(port) if port else config.get("port", 8787)
    except ValueError:
        fail(f"ATROPOS_PORT {port!r} is not a number")
    return json.dumps(config).encode()


def serve() -> None:
    """Become the server; its configuration is an anonymous file on its standard input."""
    config = os.memfd_create("config", 0)
    os.write(config, read_config())
    os.lseek(config, 0, os.SEEK_SET)
    os.dup2(config, 0)
    os.execv("/usr/bin/python3", ["/usr/bin/python3", "-u", "-m", "atropos.sandbox", "--config", "-"])  # noqa: S606 (this is an init)


def drop_privileges() -> None:
    """Give every capability up, bounding set first, and all ways of getting one back.

    Ending the server still works: a process may signal what runs in a user namespace that its own uid made.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    if libc.capset(header, (ctypes.c_uint32 * 6)()) != 0:
        fail("capabilities could not be dropped")


def main() -> None:
    """Start the server, then wait for it and for whatever is left to this process."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (*FORWARDED, signal.SIGCHLD))
    server = os.fork()
    if server == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*FORWARDED, signal.SIGCHLD))
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        serve()
    drop_privileges()
    while True:
        received = signal.sigwait((*FORWARDED, signal.SIGCHLD))
        if received != signal.SIGCHLD:
            os.kill(server, received)
            continue
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == server:
                code = os.waitstatus_to_exitcode(status)
                os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
