"""Ends the processes that an agent left running before its work is judged, except servers.

A task may ask for a server, and its tests then talk to it. So by default processes that listen on a socket stay, with
their children; everything else ends. A hostile agent can listen as well: `environment_mode = "separate"` is for that.
"""

from __future__ import annotations

import logging

from atropos.slots import Slot
from atropos.tasks.format.recipe import PATH
from atropos.tasks.format.task import Task

_log = logging.getLogger(__name__)

_SCRIPT = r"""
kill -STOP -1 2>/dev/null  # nothing runs, forks or starts to listen while it is looked at
listening=' ' tree= kept=' '
for each in tcp:0A tcp6:0A udp:07 udp6:07; do
  if [ -r "/proc/net/${each%:*}" ]; then
    while read -r _ _ _ state _ _ _ _ _ inode _; do
      if [ "$state" = "${each#*:}" ]; then listening="$listening$inode "; fi
    done < "/proc/net/${each%:*}"
  fi
done
while read -r _ _ _ flags _ _ inode _; do
  case $flags in ???[13579BDFbdf]????) listening="$listening$inode " ;; esac
done < /proc/net/unix
for each in /proc/[0-9]*; do
  pid=${each#/proc/} stat=
  while read -r line || [ "$line" ]; do stat=$line; done < "$each/stat"
  set -- ${stat##*) }
  case $1 in Z | X | '') continue ;; esac
  tree="$tree $pid:$2"
  files=$(ls -l "$each/fd" 2>/dev/null)
  if [ "$pid" != 1 ] && [ "$pid" != $$ ]; then
    for inode in $listening; do
      case $files in *"socket:[$inode]"*) kept="$kept$pid " && break ;; esac
    done
  fi
done
more=1
while [ "$more" ]; do
  more=
  for each in $tree; do
    case $kept in *" ${each%:*} "*) continue ;; *" ${each#*:} "*) kept="$kept${each%:*} " more=1 ;; esac
  done
done
ended=
for each in $tree; do
  case "$kept 1 $$ " in *" ${each%:*} "*) ;; *) ended="$ended ${each%:*}" ;; esac
done
for each in $ended; do kill -KILL "$each" 2>/dev/null; done
for each in $kept; do kill -CONT "$each" 2>/dev/null; done
set -- $ended
ends=$#
set -- $kept
echo "$ends $#"
"""
"""For any image's shell and `ls`: few have Python."""


async def end_processes(slot: Slot, task: Task) -> None:
    """End what the task doesn't need for its verification, and say how much that was.

    Raises:
        SandboxError: the infrastructure failed.
    """
    keep = task.config.verifier.keep_processes
    if keep is True:
        return
    if keep == "services":
        done = await slot.exec(_SCRIPT, workdir="/", env={"PATH": PATH}, clean_env=True, timeout_s=30)
        counts = done.output.split()
        if done.exit_code == 0 and len(counts) == 2 and counts[0].isdecimal() and counts[1].isdecimal():
            _report(task, int(counts[0]), f"{counts[1]} that listen stay")
            return
        _log.warning(
            "%s: services can't be distinguished from other processes: %s", task.name, done.output[-200:].strip()
        )
    _report(task, await slot.quiesce(), "none stays")


def _report(task: Task, ended: int, rest: str) -> None:
    if ended:
        _log.info("%s: %d processes of the agent were ended before verification; %s", task.name, ended, rest)
