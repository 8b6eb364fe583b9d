#!/usr/bin/env bash
# libtmux 0.62.0: `send_keys()` types no semicolon that ends the keys, with `literal=True` either, since tmux takes it for the end of its
# own command: `select 1;` comes without it, and psql or mysql wait for the rest. Of `\;` the semicolon alone is typed, so that the shell
# takes it for its own: the `find … -exec … {} \;` that an agent sends has no end.
set -euo pipefail
folder=$(mktemp -d)
trap 'tmux -S "$folder/tmux.sock" kill-server 2>/dev/null || true; rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q libtmux==0.62.0
cat >keys.py <<'PYTHON'
import time
from pathlib import Path
import libtmux

file = Path("typed")
file.touch()
server = libtmux.Server(socket_path="tmux.sock")
pane = server.new_session(window_command="cat >typed").active_pane
for keys in "select 1;", r"find . -exec ls {} \;", "select 1; ":
    pane.send_keys(keys)
pane.send_keys("select 2;", literal=True)
pane.send_keys("select 3")
deadline = time.monotonic() + 60
while "3" not in (typed := file.read_text()) and time.monotonic() < deadline:
    time.sleep(0.1)
print(typed.replace(" \n", "_\n"), end="")
PYTHON
found=$(venv/bin/python keys.py)
wanted="select 1
find . -exec ls {} ;
select 1;_
select 2
select 3"
echo "libtmux 0.62.0, $(tmux -V):"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
