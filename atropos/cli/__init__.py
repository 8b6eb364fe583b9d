"""The `atropos` command: each sub-command is a module of its own, imported when it is used.

Exit codes: 0 done; 1 the thing asked for failed; 2 wrong usage or configuration; 3 this host can't isolate; 70 an
infrastructure fault (a `SandboxError`); 130 Ctrl-C, 143 SIGTERM; `exec` passes the command's own code on (124 when it
timed out).
"""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line; Ctrl-C ends it from the start, while most of it is still to be loaded.

    At once then, as nothing is held yet: a KeyboardInterrupt in the middle of an import may be lost.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from atropos.cli.app import main as run

    run()
