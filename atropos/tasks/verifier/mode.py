"""Where a task's tests run, and why.

A task that says nothing is verified in a view: its folders and servers on a clean machine. Where its solution changes
the machine itself (packages, users, files of the system), a view would not show that, so the tests run in the agent's
slot.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from atropos.tasks.format.task import Task
from atropos.tasks.verifier.texts import solution_texts, test_texts

Mode = Literal["view", "shared", "separate"]
_MACHINE = re.compile(
    r"\b(?:apt-get|apt|apk|dnf|yum|zypper|pip[\d.]*|npm|gem|conda|mamba|uv pip|cargo)\s+(?:-\S+\s+){,20}"
    r"(?:install|add|i)\b"
    r"|\b(?:make|go|pipx|luarocks|R CMD|uv tool|dotnet tool)\s+(?:-\S+\s+){,20}(?:install|INSTALL)\b"
    r"|\b(?:pacman\s+-S|dpkg\s+-i|cpanm?\s)"
    r"|\b(?:useradd|adduser|groupadd|usermod|userdel|chpasswd|chsh|visudo|systemctl|update-rc\.d|update-alternatives"
    r"|ldconfig|crontab|locale-gen|dpkg-reconfigure|update-ca-certificates|hostnamectl|timedatectl|sysctl"
    r"|a2en(?:mod|site)|ssh-keygen)\b"
    r"|(?:^|[;&|]|\bsudo)\s*service\s+[\w.@-]+\s+(?:re)?start\b"
    r"|\bgit\s+config\s+(?:-\S+\s+)*--(?:global|system)\b|\b(?:npm|pip|yarn)\s+config\s+set\b"
    r"|(?<![\w.$}/-])(?:/(?:etc|usr|var|opt|root|home|tmp|run|bin|sbin|lib\w*|media)/[\w.-]+[\w./-]*|~/|\$\{?HOME\b"
    r"|/(?:etc|usr|var|opt|root|tmp)(?![\w-])/?)|\bcd\s+~",
    re.MULTILINE,
)
_LIVE = re.compile(r"\bmkfifo\b|\binotify\w*|\bfswatch\b|\bincron\w*|\bchokidar\b|\bwatchdog\.(?:observers|events)\b")
"""Of solutions: programs that wait for what tests write to a file, which reaches none from a view."""
_LEFT = re.compile(
    r"(?<![&|>])&[ \t]*(?:\)|$)|\b(?:nohup|setsid|disown|crond?|crontab|atd|celery|supervisord|systemctl)\b"
    r"|\bservice\s+[\w.@-]+\s+(?:re)?start\b|/etc/init\.d/[\w.@-]+\s+(?:re)?start\b",
    re.MULTILINE,
)
"""Of solutions: programs that go on when it has ended, and of which some may listen on no socket."""
_SYSTEM = {"/", "/usr", "/usr/local", "/etc", "/bin", "/sbin", "/lib", "/lib64", "/opt", "/var"}
"""Folders of which a verifier's own programs and settings are a part."""
_PROGRAM = re.compile(r"/(?:usr/)?(?:local/)?s?bin/[\w.-]+$")
"""A program of the system, which is only run."""
_UNSEEN = {
    re.compile(r"\bAF_UNIX\b|--unix-socket\b|\bunix:/|[\w-]\.sock\b"): "Unix sockets don't answer in a view",
    re.compile(
        r"(?:^|[;&|(`!\"']|\b(?:if|then|do|else|while|until|sudo)\b)[ \t]*"
        r"((?:pgrep|pidof|lsof|fuser|screen[ \t]+-ls|ps[\"', \t]{1,9}-?[aAe]\w{,9})\b)"
        r"|\b(psutil\.(?:process_iter|pids|pid_exists)"
        r"|tmux\s+(?:has-session|ls|list-\w+|capture-pane|send-keys))\b"
        r"|((?:/[\w.-]{,99}|[\"'][\w.-]{,99})\.pid)\b",
        re.MULTILINE,
    ): "a view shows no processes of the agent's",
    re.compile(r"\bst_nlink\b|\bstat\s+(?:-\w+\s+|--format=?)?[\"']?%h|\bfind\b[^\n;&|]*\s-links\s"): (
        "a view may have each file under two names"
    ),
}
"""What tests have that look for what a view doesn't show, and what that is."""


@dataclass(frozen=True)
class Choice:
    """Where tests run, and why there."""

    mode: Mode
    reason: str


def waits_for_files(task: Task) -> str:
    """What shows that a solution leaves programs which wait for files, and not at a socket; empty: nothing does."""
    matches = ((name, _LIVE.search(text)) for name, text in solution_texts(task))
    return next((f"{name} has `{match[0]}`" for name, match in matches if match), "")


def leaves_programs(task: Task) -> bool:
    """Whether a solution leaves programs running."""
    return any(pattern.search(text) for _, text in solution_texts(task) for pattern in (_LIVE, _LEFT))


def choose(task: Task, wanted: Literal["task"] | Mode = "task") -> Choice:
    """Where a task's tests run; `wanted`: what the operator says.

    After a view nobody comes back to the agent's slot, so steps are verified there; as are tasks with
    services or volumes.
    """
    verifier = task.config.verifier
    in_steps = bool(task.steps) or task.step is not None
    mode = verifier.environment_mode if wanted == "task" else wanted
    # A group's members share networks and folders, which a view's sandbox is no part of (decision 29).
    composed = bool(task.beside) or (task.service is not None and bool(task.service.volumes or task.service.tmpfs))
    # A view that is asked for and impossible is no error: the rules below find the next best.
    if mode is not None and not (mode == "view" and (in_steps or composed)):
        return Choice(mode, "environment_mode says so" if wanted == "task" else "the operator says so")
    if mode is None and verifier.environment is not None:
        return Choice("separate", "[verifier.environment] is set")
    if composed:
        return Choice("shared", "its compose file has services or volumes, which a view doesn't show")
    if in_steps:
        return Choice("shared", "the task has several steps")
    # A view would show the agent's whole system, its programs among it.
    if task.recipe.workdir in _SYSTEM:
        return Choice("shared", f"its working folder is {task.recipe.workdir}")
    shown = (task.recipe.workdir, *(artifact.source for artifact in task.artifacts))
    if live := waits_for_files(task):
        return Choice("shared", f"{live}, and its programs don't see what a view writes")
    for name, text in solution_texts(task):
        for match in _MACHINE.finditer(text):
            word = match[0]
            inside = any(word == folder or word.startswith(f"{folder.rstrip('/')}/") for folder in shown)
            # A path in the folders shown is the task's own work, and running a program changes nothing.
            if not inside and not _PROGRAM.match(word):
                return Choice("shared", f"{name} has `{word[:60]}`, which a view may not show")
    for name, text in test_texts(task):
        for pattern, why in _UNSEEN.items():
            if match := pattern.search(text):
                return Choice("shared", f"{name} has `{match[match.lastindex or 0].strip()}`, and {why}")
    return Choice("view", "nothing in its solution changes the machine itself")
