"""The `atropos` command: each sub-command is a module of its own, imported when it is used.

Exit codes: 0 done; 1 the thing asked for failed; 2 wrong usage or configuration; 3 this host can't isolate;
70 an infrastructure fault (a `SandboxError`); 130 Ctrl-C, 143 SIGTERM; `exec` passes the command's own code on (124 when it timed out).
"""

from atropos.cli.app import command_line, main

__all__ = ["command_line", "main"]
