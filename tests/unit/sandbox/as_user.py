"""Run a command as an ordinary user with this very Python, wherever it is installed: `python -m ...as_user CMD ARGS`.

Root's Python often lies below a closed folder (/root). A private mount namespace opens just the paths that are needed,
and has a home for this command alone.
"""

import os
import sys

from atropos.sandbox.boot import folders
from atropos.sandbox.linux import syscalls

USER = int(os.environ.get("ATROPOS_TEST_USER", "65533"))
HOME = "/media"


def main() -> None:
    if os.geteuid() == 0:
        syscalls.unshare(syscalls.CLONE_NEWNS)
        syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
        folders.expose(folders.needed_paths([]))
        syscalls.mount("home", HOME, "tmpfs", data=f"mode=700,uid={USER},gid={USER}")
        os.setgroups([])
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)
        os.environ["HOME"] = HOME
    environment = {name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"}
    os.execvpe(sys.argv[1], sys.argv[1:], environment)


if __name__ == "__main__":
    main()
