"""What an agent put elsewhere and its work needs: a view shows it where the agent's work is.

Links in its folders to other files of its own become these files. Python packages that it installed are found by its
own code, and by nothing else: hard links of them lie in a folder of their own, where `verifier_site` looks, last, for
what code of the agent's imports. Tests don't find them, nor do installed packages: tests that install pytest where
there is none must not get the agent's. For the same reason programs that an agent installed are not shown.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from atropos.slot_python import SLOT_PYTHON
from atropos.slots import Slot
from atropos.slots.slot.results import ExecResult
from atropos.tasks.builder.transfer import exec_plain

_log = logging.getLogger(__name__)
PACKAGES = "/atropos-packages"
"""Where packages are linked to, in a folder for each version of Python."""
MAX_PACKAGE_FILES, MAX_LIST_CHARS = 50_000, 4 * 1024 * 1024
"""Most files of packages, and most that is read of a package's own list of them."""
MAX_COPY_BYTES, MAX_COPY_FILES = 64 * 1024 * 1024, 10_000
"""Most that is put in the place of one link."""
_LINKS = r"""
import os, stat, sys
count, most, most_files = map(int, sys.argv[1:4])
folders, others = sys.argv[4:4 + count], sys.argv[4 + count:]
def below(path, tops):
    return any(path == top or path.startswith(top.rstrip("/") + "/") for top in tops)
def files(path):  # by their names in a folder; None: they are too many, or there are pipes or sockets
    by_name, size = {}, 0
    for at, _, names in [("", [], [""])] if os.path.isfile(path) else os.walk(path):
        for source in (os.path.join(at, name) if at else path for name in names):
            if os.path.isfile(source):
                by_name[source[len(path) + 1:]] = source
                size += os.path.getsize(source)
            elif not os.path.islink(source):
                return None
        if size > most or len(by_name) > most_files:
            return None
    return by_name
def copy(source, target):
    with open(source, "rb") as read, open(target, "wb") as write:
        # Bounded by `files`, which has counted the bytes.
        write.write(read.read())
    os.chmod(target, os.stat(source).st_mode & 0o777)
def replace(link, end, by_name, put):
    os.unlink(link)
    if os.path.isdir(end):
        os.mkdir(link)
    for name, source in by_name.items():
        target = os.path.join(link, name) if name else link
        os.makedirs(os.path.dirname(target), exist_ok=True)
        put(source, target)
def may_be_replaced(end):
    return not below(end, [*folders, "/proc", "/sys"]) and (os.path.isfile(end) or os.path.isdir(end))
names = (os.path.join(at, name) for top in folders for at, *both in os.walk(top) for name in sum(both, []))
every = {link: os.path.realpath(link) for link in names if os.path.islink(link)}
ends = {link: end for link, end in every.items() if may_be_replaced(end)}
"""
"""For the Python that every slot has, with the number of folders, the most bytes and files, folders and `others`.
`every` has the links in these folders, `ends` those that lead out of them."""
_BRING = r"""
began = os.stat("/proc").st_ctime  # when it was mounted, by the clock that gives files their times
def put(source, target):
    try:
        # A hard link: the agent's program that writes there goes on writing to the same file.
        os.link(source, target)
    except OSError:  # another file system
        copy(source, target)
for link, end in ends.items():
    # Its own files alone: what is older is the image's, and in the view anyway. ctime, as programs can set mtime.
    if os.stat(end).st_ctime >= began and not any(below(each, [end]) for each in (*folders, "/proc")):
        by_name = files(end)
        if by_name is not None:
            replace(link, end, by_name, put)
if not others:
    sys.exit()
into, remaining, most_chars, *tops = others
remaining, most_chars = int(remaining), int(most_chars)
def listed(*path):
    try:
        return os.listdir(os.path.join(*path))
    except OSError:
        return []
def modules(info):  # the top-level names of a package that was installed since this machine started
    try:
        record = os.path.join(info, "RECORD")
        status = os.lstat(record)
        # The agent may have put a pipe there, which would block.
        if not stat.S_ISREG(status.st_mode) or status.st_ctime < began:
            return set()
        lines = open(record, errors="replace").read(most_chars).splitlines()
        names = {line.replace(",", "/").split("/")[0] for line in lines}
        return names - {"", "..", "__pycache__"} | {os.path.basename(info)}
    except OSError:
        return set()
def link(source, target):
    global remaining
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.isdir(source) and not os.path.islink(source):
        os.makedirs(target, exist_ok=True)
        for name in listed(source):
            link(os.path.join(source, name), os.path.join(target, name))
    elif remaining > 0 and not os.path.lexists(target):
        remaining -= 1
        os.link(source, target, follow_symlinks=False)
tops += [os.path.join(home, ".local") for home in ["/root", *(os.path.join("/home", name) for name in listed("/home"))]]
for top in tops:
    for version in (name for name in listed(top, "lib") if name.startswith("python3.")):
        for site in (os.path.join(top, "lib", version, kind) for kind in ("site-packages", "dist-packages")):
            # What pip and others have installed (PEP 376): RECORD lists its files.
            for info in (name for name in listed(site) if name.endswith(".dist-info")):
                for name in modules(os.path.join(site, info)):
                    if os.path.lexists(os.path.join(site, name)):
                        link(os.path.join(site, name), os.path.join(into, version, name))
if remaining <= 0:
    sys.exit("too many files of packages")
"""


_LOOK = r"""
# No `ls` or `ps`: the shell alone is sure to be there, and starts nothing that would count.
programs=0; for each in /proc/[0-9]*; do programs=$((programs + 1)); done; [ $programs -le 2 ] || echo others
count=$1; shift
while [ "$count" -gt 0 ]; do
  holds=
  for each in "$1"/* "$1"/.[!.]* "$1"/..?*; do [ ! -e "$each" ] && [ ! -L "$each" ] || { holds=yes; break; }; done
  [ "$holds" ] || [ -L "$1" ] || [ ! -d "$1" ] || echo "empty:$count"
  first=$(find "$1" -type l -print -quit) && [ -z "$first" ] || exit 1
  count=$((count - 1)); shift
done
[ $# -gt 0 ] || exit 0
sites=$(for top in "$@" /root/.local /home/*/.local; do
  for site in "$top"/lib/python3.*/site-packages "$top"/lib/python3.*/dist-packages; do
    [ -d "$site" ] && printf '%s\n' "$site"
  done
done)
IFS='
'
set -f -- $sites
[ $# -gt 0 ] || exit 0
first=$(find "$@" -maxdepth 1 -name '*.dist-info' -cnewer /proc -print -quit) && [ -z "$first" ]
"""
"""Succeeds where there is nothing to bring, as mostly: no link in the folders and no package that is younger than this
machine. In a fifth of the time that a Python takes; programs of the agent's by these names can deprive it alone. It
says whether other programs run than PID 1 and itself, and which folders are empty, as how many are left to look at."""


class Looked(NamedTuple):
    """What is seen of an agent's slot, by its own word, who gains nothing by a lie.

    Attributes:
        company: whether programs of its run there.
        empty: those of the folders that are there and hold nothing; those after a link are not looked at.
    """

    company: bool
    empty: tuple[str, ...]


async def bring(slot: Slot, folders: Sequence[str], programs: Sequence[str] | None = None) -> Looked:
    """Bring it to an agent's folders in its own slot, before a view is opened or artifacts are carried.

    Args:
        slot: where the agent worked.
        folders: what will be shown.
        programs: folders that may be virtual environments of the image's; None: packages are of no use.
    """
    # Where Debian's Python and pip put packages, and the image's environments.
    tops = () if programs is None else ("/usr/local", "/usr", *programs)
    look = ("sh", "-c", _LOOK, "sh", str(len(folders)), *folders, *tops)
    done = await exec_plain(slot, look)
    words = done.output.split()
    empty = (path for left, path in enumerate(reversed(folders), 1) if f"empty:{left}" in words)
    looked = Looked("others" in words, tuple(empty))
    if done.exit_code == 0:
        return looked
    packages = (PACKAGES, str(MAX_PACKAGE_FILES), str(MAX_LIST_CHARS), *tops) if tops else ()
    done = await with_links(slot, _BRING, folders, packages)
    if done.exit_code != 0:
        _log.warning("what the agent has elsewhere is not all shown: %s", done.output[-300:].strip())
    return looked


async def with_links(slot: Slot, script: str, folders: Sequence[str], others: Sequence[str]) -> ExecResult:
    """Run a script that knows the links in folders."""
    bounds = (str(len(folders)), str(MAX_COPY_BYTES), str(MAX_COPY_FILES))
    return await exec_plain(slot, (*SLOT_PYTHON, "-c", _LINKS + script, *bounds, *folders, *others))
