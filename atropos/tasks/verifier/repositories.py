"""Repositories in the agent's folders: a verifier's git runs no hook, and no program that their settings name.

git takes filters, converters, drivers, helpers and more from a repository's own settings, some of them under names of
the agent's choice, so that no variable turns them off. They are taken out of the files where the tests run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from atropos.slots import Slot
from atropos.tasks.builder.transfer import exec_plain
from atropos.tasks.errors import VerifierFailed

_HOOKS, _WORK_TREE = r"core\.hookspath", r"core\.worktree"
_PROGRAMS = {
    _HOOKS: r"\bhooks?\b",
    r"core\.fsmonitor": r"fsmonitor",
    r"core\.(editor|pager)|sequence\.editor|pager\..*|interactive\.difffilter": (
        r"\bcore\.(editor|pager)|sequence\.editor"
    ),
    r"core\.(sshcommand|gitproxy|askpass|alternaterefscommand)|protocol\..*": r"sshcommand|gitproxy|askpass|protocol\.",
    r"remote\..*\.(uploadpack|receivepack|vcs)|uploadpack\..*hook": r"uploadpack|receivepack",
    r"diff\.external|diff\..*\.(command|textconv)|(difftool|mergetool)\..*": r"\b(diff|difftool|mergetool)\.|textconv",
    r"merge\..*\.driver": r"\bmerge[.=]",
    r"filter\..*": r"\bfilter[.=]|\blfs\b",
    r"(user|commit|tag|gpg|log)\.(.*\.)?(program|gpgsign|showsignature|defaultkeycommand)": (
        r"\bgpg|\bsign(ed|ing|ature)\b"
    ),
    r"credential\..*": r"credential",
    r"include(if\..*)?\.path": r"\bincludeif\b|include\.path",
    r"submodule\..*\.update": r"submodule\.\S{,100}update",
    r"url\..*\.(push)?insteadof": r"insteadof",
    _WORK_TREE: r"\bwork-?_?tree",
    r"(tar|trailer|browser|man|sendemail|gc|imap)\..*(command|cmd|path|hook|tunnel)": (
        r"\b(tar|trailer|browser|man|sendemail|gc)\.\w"
    ),
}
"""Settings by which git runs programs, reads further settings, or reads and writes elsewhere than its caller says; and
what shows that a task is about these."""
_TAKE_OUT = r"""
command -v git >/dev/null || exit 0
export GIT_CONFIG_NOSYSTEM=1 HOME=/nonexistent PATTERN HOOKS FOLDERS LINKS CLONES
FOLDERS=$(for folder; do (cd -- "$folder" && pwd -P); done)
find -L "$@" -type f \( -name config -o -name config.worktree \) -exec sh -c '
  stays() {
    tree=$(git config -f "$1" core.worktree) && [ -n "$tree" ] || return
    at=$(cd -P -- "${1%/*}" && cd -P -- "$tree" && pwd -P) || return
    printf "%s\n" "$FOLDERS" | while IFS= read -r top; do case "$at/" in "$top"/*) echo yes; esac; done | grep -q yes
  }
  leads() {
    {
      { echo HEAD; git --git-dir "$1" for-each-ref --count 50 --sort -creatordate --format "%(objectname)"; } |
        while read -r tip; do git --git-dir "$1" ls-tree -r --full-tree "$tip"; done
      git --git-dir "$1" ls-files -s | sed "s/^120000 \([0-9a-f]*\) ./120000 blob \1/"
    } | grep "^120000 " | sort -u | head -n 1000 | while read -r mode kind blob path; do
      # 120000 is the mode of a link, and the blob is what it names.
      target=$(git --git-dir "$1" cat-file blob "$blob")
      up=$(printf "/%s/" "$target" | tr / "\n" | grep -cx "\.\.")
      case $target in /*) ;; *) [ "$up" -gt "$(printf %s "$path" | tr -cd / | wc -c)" ] || continue ;; esac
      echo yes
    done | grep -q yes
  }
  renew() {
    [ -d "$1" ] && [ "$(du -sk -- "$1" | cut -f 1)" -le 65536 ] || return
    if cp -a -- "$1" "$1.new"; then rm -rf -- "$1" && mv -- "$1.new" "$1"; else rm -rf -- "$1.new"; fi
  }
  for file; do
    # By what git itself takes for a repository: the folder may have any name.
    [ -d "${file%/*}/objects" ] && [ -d "${file%/*}/refs" ] || [ -e "${file%/*}/HEAD" ] || continue
    chmod u+r "$file"
    [ "$HOOKS" = wanted ] || rm -rf -- "${file%/*}/hooks" 2>&1
    git config -f "$file" --name-only --list 2>/dev/null | grep -ixE "$PATTERN" | sort -u | while IFS= read -r key; do
      [ "$key" = core.worktree ] && stays "$file" && continue
      # With a lock that somebody has left, git would change nothing.
      rm -rf -- "$file.lock"
      git config -f "$file" --unset-all "$key" 2>&1 || echo "$file stays"
    done
    [ ! "$LINKS" ] || ! leads "${file%/*}" || echo LEADS
    [ ! "$CLONES" ] || renew "${file%/*}/objects"
  done
' sh {} + 2>/dev/null
"""
"""For sh, with folders; prints what failed. Hooks go with the setting for their folder, since a server that a push
starts doesn't get the client's variables. A work tree in the folders stays: submodules have one. The change of mode
has a view keep each file as it is now.

Where LINKS asks for it, it says LEADS for each repository of which a newest branch or tag, or what is to be committed,
has a link that leads out of it. For CLONES, objects become files of the machine's own: git refuses the hard link that
it makes of one from a layer below, since that is another file.
"""


def named_programs(text: str) -> str:
    """A pattern of settings that name programs, without those that a task's texts speak of."""
    return "|".join(keys for keys, word in _PROGRAMS.items() if not re.search(word, text, re.IGNORECASE))


async def take_out(slot: Slot, folders: Sequence[str], pattern: str, *, links: bool, clones: bool) -> bool:
    """Take settings out of all repositories in folders; for a view or a slot of the verifier's own.

    Args:
        slot: where the tests will run.
        folders: what the agent wrote.
        pattern: of the settings.
        links: whether links in repositories are looked at.
        clones: whether repositories may be cloned there; large ones aren't made ready for that.

    Returns:
        Whether one of these links leads out of its repository: git would make it anew.

    Raises:
        VerifierFailed: a repository can't be changed.
    """
    names = " ".join(map(shlex.quote, folders))
    hooks = "" if _HOOKS in pattern else "wanted"
    variables = f"HOOKS={hooks} LINKS={links or ''} CLONES={clones or ''} PATTERN={shlex.quote(pattern)}"
    done = await exec_plain(slot, f"set -- {names}; {variables}; {_TAKE_OUT}")
    # Everything else that it prints is a setting or hook that stays.
    failed = [line for line in done.output.splitlines() if line != "LEADS"]
    if done.timed_out or failed:
        raise VerifierFailed(f"settings of a repository can't be taken out: {done.output[-300:].strip()}")
    return bool(done.output)
