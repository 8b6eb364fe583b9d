#!/usr/bin/env bash
# pyte 0.8.2 has no alternate screen: what `vim`, `less` or `man` drew stays after it has ended, over what stood there before, and the
# next prompt lies in the middle of it. A terminal gives the former screen back; an agent that sees pyte's sees a dead program's.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q pyte==0.8.2
found=$(venv/bin/python -c '
import pyte

screen = pyte.Screen(20, 4)
stream = pyte.Stream(screen)
stream.feed("$ make\r\ndone\r\n$ vim\r\n")
stream.feed("\x1b[?1049h\x1b[2J\x1b[Hone line\r\n~\r\n~\x1b[?1049l")  # as vim, started and left
stream.feed("$ ")
print([line.rstrip() for line in screen.display])')
echo "pyte 0.8.2: $found"
[ "$found" = "['one line', '~', '~$', '']" ]
