#!/usr/bin/env bash
# inspect-ai 0.3.285: an edit with the `text_editor` tool, as it is put into sandboxes, writes the whole file with spaces for each tab and
# a bare newline for each CRLF, whichever line it changes. An agent that mends one line of a Makefile breaks all of it, and its patch of a
# Go file touches every line. No error says so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q --no-deps inspect-ai==0.3.285
mkdir tools
tar xzf venv/lib/python3*/site-packages/inspect_ai/binaries/inspect-sandbox-tools-amd64-v35 -C tools # what goes into a sandbox
printf 'check:\n\techo linted\n\techo testd\n' >Makefile
printf 'a\r\nb\r\n' >dos.txt
replace() { # FILE OLD NEW, as the tool asks for it
  printf '{"jsonrpc": "2.0", "id": 1, "method": "text_editor", "params": {"command": "str_replace", "path": "%s", "old_str": "%s", "new_str": "%s"}}' \
    "$PWD/$1" "$2" "$3" | tools/inspect-sandbox-tools exec >answer
  grep -q 'has been edited' answer
}
made=$(make -n | tr '\n' ' ')
replace Makefile testd tested
replace dos.txt b c
found="$made-> $(make -n 2>&1 | grep -o 'missing separator')
$(cat -A Makefile dos.txt)"
wanted='echo linted echo testd -> missing separator
check:$
        echo linted$
        echo tested$
a$
c$'
echo "inspect-ai 0.3.285:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
