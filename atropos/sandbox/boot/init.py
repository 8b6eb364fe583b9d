"""The container's init: a server that would be PID 1 runs in a child; PID 1 reaps orphans and forwards signals.

The fork follows the root phase, so that init is as unprivileged as the server, and may signal it.
"""

from __future__ import annotations

import os
import signal

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def fork_from_init() -> None:
    """As PID 1, return in a child, and exit as init with the child's exit code. Otherwise, return at once.

    The container's entry point (docker/sandbox/hold.c) has blocked the signals that end it.
    """
    watched = (*FORWARDED, signal.SIGCHLD)
    if os.getpid() != 1:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
        return
    # Blocked for sigwait, and before the fork: a signal in between stays pending and is not lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    server = os.fork()
    if server == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
        return
    while True:
        # The kernel ignores signals to PID 1 that have no handler (pid_namespaces(7)): without this, none would end it.
        received = signal.sigwait(watched)
        if received != signal.SIGCHLD:
            # The server is not reaped until below, so that its number is still its own.
            os.kill(server, received)
            continue
        while True:
            # In a loop: several ends may be one SIGCHLD.
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == server:
                code = os.waitstatus_to_exitcode(status)
                # 128 and the signal's number, as shells say it: engines show the exit code.
                os._exit(code if code >= 0 else 128 - code)
